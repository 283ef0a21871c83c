"""Build the documentation as a site: `python docs/.site/build.py SITE`, or `make site`. No network is needed.

In: docs/, the pages of the repository's root, nav.yaml. Out: HTML in SITE. Any warning of Sphinx, such as a link to a
page or heading that does not exist, is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import yaml
from latex2mathml.converter import convert

HERE = Path(__file__).parent
DOCS = HERE.parent
ROOT = DOCS.parent
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "SECURITY.md": "security.md",
}
"""Page of the repository's root -> page of the site."""
RENAMED = {"search.md": "finders.md"}
"""Page of docs/ -> page of the site, whose own search is search.html."""
STATIC = ("LICENSE", "docs/recipe.schema.json", "docs/pages", "docs/notebooks")


def prepare_sources(folder: Path) -> None:
    """Write the pages of the site, with links and formulas as Sphinx reads them, and the table of contents."""
    for page in sorted(DOCS.rglob("*.md")):
        name = str(page.relative_to(DOCS))
        target = folder / RENAMED.get(name, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(convert_page(page.read_text(encoding="utf-8")), encoding="utf-8")
    for image in (*DOCS.rglob("*.png"), *DOCS.rglob("*.svg")):
        target = folder / image.relative_to(DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, target)
    for name, page in ROOT_PAGES.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text(encoding="utf-8"))
        (folder / page).write_text(convert_page(text), encoding="utf-8")
    with (folder / "index.md").open("a", encoding="utf-8") as file:
        file.write(format_contents(yaml.safe_load((HERE / "nav.yaml").read_text(encoding="utf-8"))))


def convert_page(text: str) -> str:
    """Rewrite links to pages of the root and to files, and convert formulas, outside code blocks."""
    parts = re.split(r"(^```.*?^```)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _convert_text(part) for part in parts)


def _convert_text(text: str) -> str:
    for name, page in ROOT_PAGES.items():
        text = re.sub(
            rf"\]\(((?:\.\./)*){re.escape(name)}(?=[)#])", lambda m, to=page: f"]({_drop_level(m[1])}{to}", text
        )
    for name, page in RENAMED.items():
        text = re.sub(rf"\]\(((?:\.\./)*){re.escape(name)}(?=[)#])", rf"](\1{page}", text)
    text = re.sub(
        r"\]\((?:\.\./)*((?:(?:pages|notebooks)/[\w.-]+)|recipe\.schema\.json|LICENSE)\)", r"](path:/\1)", text
    )
    text = re.sub(r"\[([^\]]*)\]\(path:/([^)]*)\)", r'<a href="\2">\1</a>', text)
    text = re.sub(r"\$\$(.+?)\$\$", lambda match: convert(match[1].strip(), display="block"), text, flags=re.DOTALL)
    return re.sub(r"(?<![\w$`])\$([^\s$`](?:[^$`\n]*[^\s$`\\])?)\$(?![\w$])", lambda match: convert(match[1]), text)


def _drop_level(levels: str) -> str:
    """The way up to the root of the site, which is docs/ of the repository.

    >>> _drop_level("../../"), _drop_level("")
    ('../', '')
    """
    return levels.removesuffix("../")


def format_contents(nav: dict[str, list[str]]) -> str:
    """Format the table of contents.

    >>> print(format_contents({"Start": ["quickstart"]}))
    <BLANKLINE>
    ```{toctree}
    :hidden:
    :caption: Start
    <BLANKLINE>
    quickstart
    ```
    <BLANKLINE>
    """
    blocks = [
        "\n```{toctree}\n:hidden:\n:caption: "
        + heading
        + "\n\n"
        + "\n".join(_rename_page(page) for page in pages)
        + "\n```\n"
        for heading, pages in nav.items()
    ]
    return "".join(blocks)


def _rename_page(page: str) -> str:
    return RENAMED.get(f"{page}.md", f"{page}.md").removesuffix(".md")


def build_site(site: Path) -> int:
    """Build the site; returns Sphinx's exit code."""
    from sphinx.cmd.build import main

    with tempfile.TemporaryDirectory() as folder:
        prepare_sources(Path(folder))
        code = main(["-q", "-W", "--keep-going", "-b", "html", "-c", str(HERE), folder, str(site)])
    if code == 0:
        for name in STATIC:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, site / source.name, **({"dirs_exist_ok": True} if source.is_dir() else {}))
        shutil.rmtree(site / ".doctrees", ignore_errors=True)
    return code


if __name__ == "__main__":
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")
    sys.exit(build_site(Path(sys.argv[1])))
