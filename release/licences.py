"""Licences of all packages that FiveTune installs, read from their installed metadata.

python -m release.licences > docs/licences.md
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "GNU General Public License (GPL)": "GPL-3.0-or-later",
    "GNU Library or Lesser General Public License (LGPL)": "LGPL-3.0-or-later",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Public Domain": "LicenseRef-Public-Domain",
    "Python Software Foundation License": "PSF-2.0",
}
"""SPDX identifiers of the classifiers of packages without a licence expression."""

TEXTS = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "mit license": "MIT",
}
"""SPDX identifiers of what packages without expression and classifier write."""

NVIDIA = "LicenseRef-NVIDIA-Proprietary"
OF_CUDA = {
    "cuda-bindings": "Apache-2.0",
    "cuda-pathfinder": "Apache-2.0",
    "cuda-toolkit": "none stated: it names the packages of the toolkit and holds no file",
    "nvidia-cublas": NVIDIA,
    "nvidia-cuda-cupti": NVIDIA,
    "nvidia-cuda-nvrtc": NVIDIA,
    "nvidia-cuda-runtime": NVIDIA,
    "nvidia-cudnn-cu13": NVIDIA,
    "nvidia-cufft": NVIDIA,
    "nvidia-cufile": NVIDIA,
    "nvidia-curand": NVIDIA,
    "nvidia-cusolver": NVIDIA,
    "nvidia-cusparse": NVIDIA,
    "nvidia-cusparselt-cu13": NVIDIA,
    "nvidia-nccl-cu13": NVIDIA,
    "nvidia-nvjitlink": NVIDIA,
    "nvidia-nvshmem-cu13": NVIDIA,
    "nvidia-nvtx": "Apache-2.0",
}
"""Licences in the wheels of the packages that the CUDA build of torch needs: the machine that writes the page has the
CPU build."""

UNKNOWN = "unknown"
HEAD = """# Licences

FiveTune is under the Apache License 2.0. These are the licences of the packages that it installs, by SPDX identifier,
as their metadata states them; a licence that is stated without a version has the usual one. `make licences` writes this
page. "core" comes with every installation, other words are extras. What a package needs in turn is listed where it was
installed; of `bench`, `gcs`, `wandb`, `mlflow` and `tpu` not all was. "CUDA" is what the CUDA build of torch brings on
Linux.

| package | licence | needed by |
|---|---|---|
"""


@dataclass(frozen=True)
class Dependency:
    """A package, its licence as an SPDX expression, and the extras that need it ("core": all installations)."""

    name: str
    licence: str
    extras: tuple[str, ...]


def list_dependencies(project: Path = PROJECT) -> list[Dependency]:
    """All packages that the project and its extras need, directly or through others.

    A package that is needed by others alone and not installed is left out; one that the project names is not.
    """
    table = tomllib.loads(project.read_text())["project"]
    groups = {"core": table["dependencies"], **table["optional-dependencies"]}
    needed: dict[str, set[str]] = {}
    for group, lines in groups.items():
        direct = [Requirement(line) for line in lines]
        for name in {canonicalize_name(one.name) for one in direct} | set(_close(direct)):
            needed.setdefault(name, set()).add(group)
    found = [
        Dependency(name, read_licence(_find(name)), ("core",) if "core" in users else tuple(sorted(users)))
        for name, users in needed.items()
        if name not in OF_CUDA
    ]
    cuda = [Dependency(name, licence, ("CUDA",)) for name, licence in OF_CUDA.items()]
    return sorted(found + cuda, key=lambda one: one.name)


def read_licence(package: Distribution | None) -> str:
    """SPDX expression of an installed package: its own, else that of its short text or classifiers."""
    if package is None:
        return UNKNOWN
    about = package.metadata
    if "License-Expression" in about:
        return about["License-Expression"]
    text = about["License"].strip() if "License" in about else ""
    if text.lower() in TEXTS:
        return TEXTS[text.lower()]
    if re.fullmatch(r"[A-Za-z0-9.+-]*[0-9-][A-Za-z0-9.+-]*( (AND|OR) [A-Za-z0-9.+-]+)*|MIT|ISC|0BSD", text):
        return text
    words = [line.split(" :: ")[-1] for line in about.get_all("Classifier") or [] if line.startswith("License :: ")]
    known = [CLASSIFIERS[word] for word in words if word in CLASSIFIERS]
    return " OR ".join(known) or UNKNOWN


def make_page() -> str:
    """docs/licences.md."""
    rows = [f"| {one.name} | {one.licence} | {', '.join(one.extras)} |" for one in list_dependencies()]
    return HEAD + "\n".join(rows) + "\n"


def _is_wanted(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _close(wanted: list[Requirement]) -> Iterator[str]:
    """Names of the installed packages among the wanted ones and all that they need, with the extras asked of them."""
    seen: set[tuple[str, str]] = set()
    wanted = [one for one in wanted if _is_wanted(one, "")]
    while wanted:
        one = wanted.pop()
        if (found := _find(one.name)) is None:
            continue
        for extra in ("", *one.extras):
            if (key := (canonicalize_name(one.name), extra)) in seen:
                continue
            seen.add(key)
            wanted += [each for each in map(Requirement, found.requires or []) if _is_wanted(each, extra)]
    yield from {name for name, _ in seen}


def _find(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(make_page(), end="")
