"""The first line of a run's config.yaml: a checksum of the lines below it, which shows damage and edits.

    # checksum 1c291ca3 of the lines below
    run:
      dir: runs/tickets

In: the text of the settings, or a run directory. Out: the text with its checksum, or a sentence if they differ.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from fivetune.rundir.files import read_regular
from fivetune.rundir.layout import CONFIG

_FIRST_LINE = re.compile(rb"# checksum ([0-9a-f]{8}) of the lines below\n")


def stamp_config(text: str) -> str:
    """Put the checksum of a text before it.

    >>> stamp_config("device: cpu\\n")
    '# checksum 56a0f287 of the lines below\\ndevice: cpu\\n'
    """
    checksum = zlib.crc32(text.encode(errors="surrogatepass"))  # who writes the text refuses surrogates
    return f"# checksum {checksum:08x} of the lines below\n{text}"


def find_config_change(folder: Path) -> str:
    """Describe that config.yaml differs from what the run wrote; "" if not, or if it has no checksum.

    A config.yaml without checksum is of an earlier version, or of a published run. One of another run has its own: that
    it differs from what a finished run wrote is seen by checksums.json (`record_checksums.describe_change`).
    """
    path = folder / CONFIG
    try:
        content = read_regular(path)
    except OSError:
        return ""  # whoever reads the settings reports it
    first = _FIRST_LINE.match(content)
    if first is None or int(first[1], 16) == zlib.crc32(content[first.end() :]):
        return ""
    return f"{path}: differs from what the run wrote (its checksum differs). Unless you edited it, restore the file."
