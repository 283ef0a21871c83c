"""The command that installs an extra never names FiveTune on an index: another's package could have the name."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path

import pytest

from fivetune import installation
from fivetune.installation import list_extras, name_install

ROOT = Path(__file__).parents[1]
REQUIRES = ["torch>=2", "uvicorn>=0.40; extra == 'serve'", 'starlette>=1.0 ; extra == "serve"']


class Distribution:
    """What `importlib.metadata` knows of an installed package."""

    def __init__(self, url: dict[str, object] | None) -> None:
        self.url = url

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return json.dumps(self.url) if self.url else None


def install(monkeypatch: pytest.MonkeyPatch, url: dict[str, object] | None) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution(url))
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES)


def test_a_checkout_is_installed_again_with_the_extra(monkeypatch, tmp_path):
    install(monkeypatch, {"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    assert name_install("serve") == f"pip install -e '{tmp_path}[serve]'"


def test_a_wheel_that_is_still_there_is_installed_with_the_extra(monkeypatch, tmp_path):
    wheel = tmp_path / "my wheels" / "fivetune-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    install(monkeypatch, {"url": wheel.as_uri(), "archive_info": {}})
    assert name_install("serve") == "pip install 'uvicorn>=0.40' 'starlette>=1.0'"  # it is gone
    wheel.touch()
    assert name_install("serve") == f"pip install '{wheel}[serve]'"


@pytest.mark.parametrize(
    "url", [None, {"url": "https://x.org/fivetune.whl", "archive_info": {}}, {"url": "file:///x", "dir_info": {}}]
)
def test_otherwise_the_requirements_are_named(monkeypatch, url):
    install(monkeypatch, url)
    assert name_install("serve") == "pip install 'uvicorn>=0.40' 'starlette>=1.0'"
    assert list_extras() == {"serve": ["uvicorn>=0.40", "starlette>=1.0"]}


def test_a_checkout_on_the_path_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(installation, "PACKAGE", "not-a-package-of-this-environment")
    monkeypatch.setattr(installation, "CHECKOUT", tmp_path)
    assert name_install("serve") == "pip install serve"  # no metadata at all
    (tmp_path / "pyproject.toml").touch()
    assert name_install("serve") == f"pip install -e '{tmp_path}[serve]'"


def test_no_text_installs_the_name_from_an_index():
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("fivetune/**/*.py"), *ROOT.glob("deploy/**/*")]
    wrong = [
        str(page)
        for page in pages
        if page.is_file() and page.name not in ("LOG.md",)
        if re.search(r"pip install[^\n]*['\" ]fivetune(\[|['\" \n])", page.read_text(encoding="utf-8", errors="ignore"))
    ]
    assert wrong == []
