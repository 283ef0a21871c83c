"""Pages of servers: each holds all that it needs, and nothing that its policy would refuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fivetune.delivery.board.app import PAGE as BOARD
from fivetune.delivery.page import render_page
from fivetune.delivery.serving.demo import PAGE as DEMO

ADDRESS = r"https?://"
SVG = r"(?!www\.w3\.org/2000/svg)"  # except this name, which no browser asks for


@pytest.mark.parametrize(("folder", "address"), [(BOARD, ADDRESS + SVG), (DEMO, ADDRESS)])
def test_a_page_holds_all_that_it_needs(folder: Path, address: str) -> None:
    page, policy = render_page(folder)
    assert not re.search(rf"{address}|@import|url\(|<script [^>]*src|<link rel=\"style", page)
    assert "'unsafe" not in policy and "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert not re.search(r"innerHTML|document\.write|eval\(| style=| on\w+=", page)
    ids = set(re.findall(r'id="([\w-]+)"', page))
    used = set(re.findall(r'find\("([\w-]+)"\)', page)) | set(re.findall(r'(?:for|labelledby)="([\w-]+)"', page))
    assert used - {"field-0"} <= ids  # the script makes the fields
