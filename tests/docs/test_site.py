"""The documentation as a site: every page is in the navigation, the build is strict and needs no network."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from docs_kit import ROOT

SITE = ROOT / "docs" / ".site"
NAV = yaml.safe_load((SITE / "nav.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def build() -> ModuleType:
    pytest.importorskip("latex2mathml")
    spec = importlib.util.spec_from_file_location("site_build", SITE / "build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_page_is_in_the_navigation_once(build):
    pages = [str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")]
    roots = {page.removesuffix(".md") for page in build.ROOT_PAGES.values()} - {"index"}
    listed = [page for section in NAV.values() for page in section]
    assert len(listed) == len(set(listed))
    assert {*pages, *roots} - {*listed} == set(), "add the pages to docs/.site/nav.yaml"
    assert {*listed} - {*pages, *roots} == set(), "take the pages out of docs/.site/nav.yaml"


def test_links_and_formulas_are_converted(build):
    text = "[a](../README.md#x) [b](../../CONTRIBUTING.md) [c](search.md#y) [d](pages/p.html) $x_1$ `$y$`\n"
    text += "```\n[a](../README.md)\n```"
    found = build.convert_page(text)
    assert "[a](index.md#x) [b](../contributing.md) [c](finders.md#y)" in found
    assert '<a href="pages/p.html">d</a>' in found and "<msub>" in found
    assert "`$y$`" in found and "```\n[a](../README.md)\n```" in found


class Resources(HTMLParser):
    """What a page loads: scripts, styles, images, fonts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag in ("script", "img", "iframe", "source") or (tag == "link" and named.get("rel") != "canonical"):
            self.found += [url for url in (named.get("src"), named.get("href")) if url]


def run_build(site: Path, script: Path = SITE / "build.py") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(script), str(site)], capture_output=True, text=True, check=False)


@pytest.mark.release
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_outside(tmp_path):
    pytest.importorskip("furo")
    done = run_build(tmp_path / "site")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 35 and (tmp_path / "site" / "migrating" / "t5x.html").is_file()
    for page in pages:
        if page.parent.name == "pages":
            continue  # pages of compare have a test of their own
        reader = Resources()
        reader.feed(page.read_text(encoding="utf-8"))
        assert [url for url in reader.found if re.match(r"(https?:)?//", url)] == [], page
        inner = re.findall(r'href="([^"#]+\.html)(?:#[^"]*)?"', page.read_text(encoding="utf-8"))
        assert [link for link in inner if "://" not in link and not (page.parent / link).is_file()] == [], page
    for style in (tmp_path / "site" / "_static").rglob("*.css"):
        assert not re.search(r"(@import|url\()[^;)]*https?://", style.read_text(encoding="utf-8")), style


@pytest.mark.release
def test_a_broken_link_fails_the_build(build, tmp_path):
    pytest.importorskip("furo")
    import shutil

    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in (*build.ROOT_PAGES, "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    with (tmp_path / "docs" / "faq.md").open("a", encoding="utf-8") as file:
        file.write("\n[lost](method.md#no-such-heading)\n")
    done = run_build(tmp_path / "site", tmp_path / "docs" / ".site" / "build.py")
    assert done.returncode != 0 and "no-such-heading" in done.stderr
