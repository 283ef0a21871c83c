"""How this FiveTune was installed, and what installs the packages of one of its extras.

In: the metadata of the installed distribution. Out: a command. FiveTune is on no package index, so no command names it
there: the name could be another's.
"""

from __future__ import annotations

import json
import re
import shlex
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fivetune.errors import FiveTuneEnvironmentError

PACKAGE = "fivetune"
CHECKOUT = Path(__file__).resolve().parents[1]


def list_extras() -> dict[str, list[str]]:
    """The requirements of each extra, without their markers; none where FiveTune is not installed as a package.

    >>> [one for one in list_extras().get("serve", ["uvicorn>=0.40"]) if one.startswith("uvicorn")]
    ['uvicorn>=0.40']
    """
    found: dict[str, list[str]] = {}
    try:
        lines = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:  # a checkout that is only on PYTHONPATH
        return found
    for line in lines:
        requirement, _, marker = line.partition(";")
        if extra := re.search(r"extra == ['\"]([\w-]+)", marker):
            found.setdefault(extra[1], []).append(requirement.strip())
    return found


def name_install(extra: str) -> str:
    """The command that installs an extra: of the checkout or the wheel that FiveTune is from, else its requirements."""
    source = _find_source()
    if source is not None:
        is_checkout = source.is_dir()
        return shlex.join(["pip", "install", *(["-e"] if is_checkout else []), f"{source}[{extra}]"])
    return shlex.join(["pip", "install", *list_extras().get(extra, [extra])])


def require_package(where: str, package: str, extra: str, advice: str = "") -> None:
    """Raise FiveTuneEnvironmentError, with the command that installs its extra, if a package is not installed.

    Args:
        where: what needs the package. advice: what else can be done.
    """
    if find_spec(package) is None:
        raise FiveTuneEnvironmentError(
            f"{where}: the package {package} is not installed. Install it: {name_install(extra)}{advice}"
        )


def _find_source() -> Path | None:
    """The checkout or the wheel file that FiveTune was installed from; None for another source, or one that is gone."""
    try:
        text = metadata.distribution(PACKAGE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return CHECKOUT if (CHECKOUT / "pyproject.toml").is_file() else None
    table = json.loads(text or "{}")
    url = urlsplit(table.get("url", ""))
    if url.scheme != "file":
        return None
    path = Path(unquote(url.path))
    is_usable = path.is_file() if "archive_info" in table else table.get("dir_info", {}).get("editable", False)
    return path if is_usable and path.exists() else None
