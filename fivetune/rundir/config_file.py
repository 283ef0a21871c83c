"""The first line of a run's config.yaml: a checksum of the lines below it, which shows damage and edits.

    # checksum 1c291ca3 of the lines below
    run:
      dir: runs/tickets

In: the text of the settings, or a run directory. Out: the text with its checksum, or a sentence if they differ.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path

from fivetune.rundir.layout import CHECKSUMS, CONFIG
from fivetune.rundir.record_checksums import describe_change
from fivetune.types import JsonValue

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

    A config.yaml without checksum is of an earlier version, or of a published run. One of another run has its own, but
    not that of a finished run's checksums.json.
    """
    path = folder / CONFIG
    try:
        content = path.read_bytes()
    except OSError:
        return ""  # whoever reads the settings reports it
    first = _FIRST_LINE.match(content)
    if first is None or int(first[1], 16) == zlib.crc32(content[first.end() :]):
        return _find_change_since_end(folder)
    return f"{path}: differs from what the run wrote (its checksum differs). Unless you edited it, restore the file."


def _find_change_since_end(folder: Path) -> str:
    try:
        listed: JsonValue = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""  # who reads the run reports it
    return describe_change(folder, CONFIG, listed) if isinstance(listed, dict) else ""
