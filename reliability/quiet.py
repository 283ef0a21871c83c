"""Imported first by the server of warm processes: keeps its imports silent."""

import logging
import signal

# bitsandbytes, of the peer, warns of a kernel that it lacks.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
# A Ctrl-C of the campaign would show where in the imports it came; trials have a handler of their own.
signal.signal(signal.SIGINT, signal.SIG_IGN)
