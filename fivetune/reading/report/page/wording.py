"""Formatting of values for pages: numbers with units, "n/a" for unknown values, names for invisible characters."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fivetune.errors import format_size
from fivetune.redaction import HIDDEN, is_secret_name, name_invisible, redact_secrets
from fivetune.rundir import progress
from fivetune.types import JsonValue
from fivetune.values import as_finite_number

UNKNOWN = "n/a"


def format_plain(value: JsonValue) -> str:
    """Format any value as text: null and "" become n/a, lists are joined."""
    if value is None or value == "":
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(format_plain, value)) or "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def format_decimal(value: Any, digits: int = 2) -> str:
    """Format a number with a fixed count of decimals: 1234.5 -> 1,234.50."""
    known = as_finite_number(value)
    return UNKNOWN if known is None else f"{known:,.{digits}f}".replace("-", "\u2212")


def format_count(value: Any) -> str:
    """Format a count: 12345 -> 12,345."""
    return format_decimal(value, 0)


def format_significant(value: Any) -> str:
    """Format a number of any size with three significant digits: 0.000123 -> 1.23e-04, 12345 -> 12,345."""
    known = as_finite_number(value)
    if known is None:
        return UNKNOWN
    if known == 0:
        return "0"
    if not 1e-3 <= abs(known) < 1e7:
        return f"{known:.2e}".replace("-", "\u2212", 1) if known < 0 else f"{known:.2e}"
    return format_decimal(known, max(0, 2 - math.floor(math.log10(abs(known)))))


def format_signed(value: Any, digits: int = 2) -> str:
    """Format a difference with its sign: 3.5 -> +3.50."""
    known = as_finite_number(value)
    return UNKNOWN if known is None else f"{known:+,.{digits}f}".replace("-", "\u2212")


def format_percent(fraction: Any, digits: int = 1) -> str:
    """Format a share (0-1) in per cent: 0.125 -> 12.5 %."""
    known = as_finite_number(fraction)
    return UNKNOWN if known is None else f"{format_decimal(100 * known, digits)} %"


def format_duration(seconds: Any) -> str:
    """Format a duration in at most two units; n/a if unknown."""
    known = as_finite_number(seconds)
    return UNKNOWN if known is None else progress.format_time_span(known)


def format_bytes(num_bytes: Any) -> str:
    """Format a size in binary units: 3221225472 -> 3.0 GiB."""
    known = as_finite_number(num_bytes)
    return UNKNOWN if known is None else format_size(known)


def format_large_count(value: Any) -> str:
    """Format a large count in thousands, millions or billions: 3145728 -> 3.15 M."""
    known = as_finite_number(value)
    if known is None:
        return UNKNOWN
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if known >= limit:
            return f"{format_significant(known / (1e3 if unit == 'k' else limit))} {unit}"
    return format_count(known)


def format_plural(num: Any, noun: str) -> str:
    """Format a count with its noun: (1, "record") -> 1 record; (2, "record") -> 2 records."""
    return f"{format_count(num)} {noun}{'' if as_finite_number(num) == 1 else 's'}"


def merge_repeats(texts: Iterable[str]) -> list[str]:
    """Merge equal texts to one with their number.

    >>> merge_repeats(["a", "b", "a"])
    ['a (2 times)', 'b']
    """
    return [text if num == 1 else f"{text} ({num} times)" for text, num in Counter(texts).items()]


def escape_hidden(text: str) -> str:
    r"""Name invisible characters and directional controls: "a\u202eb" -> "a[U+202E]b".

    Secrets are hidden here too, because every text of a page passes through this function.
    """
    return redact_secrets(name_invisible(text.replace("\r\n", "\n")))


def shorten_home(text: str) -> str:
    """Write the home folder as ~, so that a shared page does not name the user."""
    home = str(Path.home())
    return re.sub(rf"{re.escape(home)}(?=/|$)", "~", text) if home != "/" else text


def format_setting(key: str, value: Any) -> str:
    """Format the value of a dotted setting; (hidden) under the name of a secret."""
    if value is None:
        return "null"
    return HIDDEN if is_secret_name(key) else shorten_home(redact_secrets(format_plain(value)))


def format_flags(change: Mapping[str, Any]) -> str:
    """Format a change as flags of `fivetune train`.

    >>> format_flags({"strategy.name": "ddp", "report.sinks": []})
    '--strategy.name ddp --report.sinks []'
    """
    flags: list[str] = []
    for key, value in change.items():
        flags.append(f"--{key} {value if isinstance(value, str) else json.dumps(value)}")
    return " ".join(flags)
