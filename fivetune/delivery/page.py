"""Pages of a server: HTML with its script and style inlined, and the policy that admits these alone.

In: a folder with page.html, page.css and page.js. Out: the page, and its content security policy.
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path


@cache
def render_page(folder: Path) -> tuple[str, str]:
    """Render the page of a folder; also returns its content security policy."""
    style = (folder / "page.css").read_text(encoding="utf-8")
    script = (folder / "page.js").read_text(encoding="utf-8")
    page = (folder / "page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.replace("{style}", style).replace("{script}", script), policy


def _hash(text: str) -> str:
    digest = sha256(text.encode()).digest()
    return f"'sha256-{b64encode(digest).decode()}'"
