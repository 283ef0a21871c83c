"""How values are worded on a page: numbers with their units, unknown as "n/a", hidden characters made visible.

In: values as JSON gave them (anything may be missing or null). Out: text for people.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fivetune import progress
from fivetune.values import number

UNKNOWN = "n/a"

# Explicit directional controls and invisible characters: text that holds them does not look like what it is.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff\ud800-\udfff]"
)
_SECRET = re.compile(r"\b(hf_|sk-|ghp_|github_pat_|AKIA)[\w-]{8,}|(?<=://)[^/@\s:]+:[^/@\s]+(?=@)")
_SECRET_KEY = re.compile(r"(^|[._])(token|api_?key|key|secret|password)$", re.IGNORECASE)


def plain(value: Any) -> str:
    """Any value as text: null and "" become n/a, lists are joined."""
    if value is None or value == "":
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def fixed(value: Any, digits: int = 2) -> str:
    """A number with a fixed count of decimals: 1234.5 -> 1,234.50."""
    known = number(value)
    return UNKNOWN if known is None else f"{known:,.{digits}f}".replace("-", "\u2212")


def whole(value: Any) -> str:
    """A count: 12345 -> 12,345."""
    return fixed(value, 0)


def short(value: Any) -> str:
    """Three significant digits, for values of any size: 0.000123 -> 1.23e-04, 12345 -> 12,345."""
    known = number(value)
    if known is None:
        return UNKNOWN
    if known == 0:
        return "0"
    if not 1e-3 <= abs(known) < 1e7:
        return f"{known:.2e}".replace("-", "\u2212", 1) if known < 0 else f"{known:.2e}"
    return fixed(known, max(0, 2 - math.floor(math.log10(abs(known)))))


def change(value: Any, digits: int = 2) -> str:
    """A difference with its sign: 3.5 -> +3.50."""
    known = number(value)
    return UNKNOWN if known is None else f"{known:+,.{digits}f}".replace("-", "\u2212")


def percent(fraction: Any, digits: int = 1) -> str:
    """A share (0-1) in per cent: 0.125 -> 12.5 %."""
    known = number(fraction)
    return UNKNOWN if known is None else f"{fixed(100 * known, digits)} %"


def share(part: Any, total: Any) -> float | None:
    """part / total, or None where that means nothing."""
    top, bottom = number(part), number(total)
    return None if top is None or not bottom else top / bottom


def duration(seconds: Any) -> str:
    """A time span in at most two units, or n/a."""
    known = number(seconds)
    return UNKNOWN if known is None else progress.duration(known)


def size(num_bytes: Any) -> str:
    """Memory in binary units: 3221225472 -> 3.0 GiB."""
    known = number(num_bytes)
    if known is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB"):
        if known < 1024:
            return f"{known:.0f} B" if unit == "B" else f"{known:.1f} {unit}"
        known /= 1024
    return f"{known:.1f} TiB"


def amount(value: Any) -> str:
    """A large count in thousands, millions or billions: 3145728 -> 3.15 M."""
    known = number(value)
    if known is None:
        return UNKNOWN
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if known >= limit:
            return f"{short(known / (1e3 if unit == 'k' else limit))} {unit}"
    return whole(known)


def plural(num: Any, noun: str) -> str:
    """plural(1, "record") -> 1 record; plural(2, "record") -> 2 records."""
    return f"{whole(num)} {noun}{'' if number(num) == 1 else 's'}"


def grouped(texts: Iterable[str]) -> list[str]:
    """Equal texts once, with their number.

    >>> grouped(["a", "b", "a"])
    ['a (2 times)', 'b']
    """
    return [text if num == 1 else f"{text} ({num} times)" for text, num in Counter(texts).items()]


def visible(text: str) -> str:
    r"""Name the characters that a reader could not see, or that turn the line around: "a\u202eb" -> "a[U+202E]b"."""
    return _HIDDEN.sub(lambda m: f"[U+{ord(m.group()):04X}]", text.replace("\r\n", "\n"))


def discreet(text: str) -> str:
    """Hide access tokens and passwords in URLs, and shorten the home folder to ~."""
    text = _SECRET.sub("(hidden)", text)
    home = str(Path.home())
    return re.sub(rf"{re.escape(home)}(?=/|$)", "~", text) if home != "/" else text


def setting(key: str, value: Any) -> str:
    """The value of a dotted setting as text, or (hidden) when its name says that it is a secret."""
    if value is None:
        return "null"
    return "(hidden)" if _SECRET_KEY.search(key) else discreet(plain(value))
