"""Pages in headless Chromium."""

from __future__ import annotations

from typing import TypeVar

import pytest

from fivetune.reading.report.page.parts import Page
from reliability.chromium import CHROMIUM
from reliability.chromium import Tab as Tab
from reliability.chromium import open_tab as open_tab
from reliability.chromium import visit as visit

Kind = TypeVar("Kind")


def part(page: Page, section: str, kind: type[Kind], at: int = 0) -> Kind:
    """The at-th part of a kind in a section."""
    found = next(s for s in page.sections if s.title == section)
    return [p for p in found.parts if isinstance(p, kind)][at]


browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium binary on this machine (Debian: apt install chromium)"
)
