"""Imported first by the server of warm processes: bitsandbytes, of the peer, warns of a kernel that it lacks."""

import logging

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
