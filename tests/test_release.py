"""What a release promises: locked versions, known licences, equal bytes of equal sources, a bill of materials."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
import tomllib
from email.message import Message
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from release.build import CHECKSUMS, ROOT, build_release
from release.licences import UNKNOWN, list_dependencies, read_licence

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, BUILDS = PYPROJECT["project"], PYPROJECT["build-system"]["requires"]
OPTIONAL = PROJECT["optional-dependencies"]
IMAGE = [*PROJECT["dependencies"], *OPTIONAL["serve"], *OPTIONAL["export"], *OPTIONAL["adapters"], *BUILDS]
COPYLEFT = re.compile(r"\b(A|L)?GPL\b")


def read_lock(name: str) -> dict[str, list[str]]:
    """Versions of a lock's packages, each of which must have hashes; one has several where platforms differ."""
    versions: dict[str, list[str]] = {}
    for entry in re.split(r"\n(?=\S)", (ROOT / "release" / name).read_text().strip()):
        found = re.match(r"([\w.-]+)(?:\[[\w,-]+\])?==([^\s;]+)", entry)
        assert found and re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry.partition("\n")[0]
        versions.setdefault(canonicalize_name(found[1]), []).append(found[2])
    return versions


@pytest.mark.parametrize(
    ("lock", "lines"),
    [
        ("lock.txt", PROJECT["dependencies"] + OPTIONAL["test"]),
        ("runtime.txt", PROJECT["dependencies"]),
        ("image.txt", IMAGE),
    ],
)
def test_the_lock_has_a_hashed_version_of_each_dependency_and_no_address(lock, lines):
    assert "://" not in (ROOT / "release" / lock).read_text()
    locked = read_lock(lock)
    for wanted in map(Requirement, lines):
        versions = locked.get(canonicalize_name(wanted.name), [])
        assert versions and all(wanted.specifier.contains(one, prereleases=True) for one in versions), (
            f"{wanted}: {lock} has {versions}; run `make lock`"
        )


def test_every_installed_dependency_has_a_known_licence():
    known = {one.name: one for one in list_dependencies()}
    page = (ROOT / "docs" / "licences.md").read_text()
    for one in known.values():
        if one.licence != UNKNOWN:  # an extra that is not installed
            assert one.extras != ("core",) or not COPYLEFT.search(one.licence), f"{one.name}: {one.licence}"
    declared = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    for name in {canonicalize_name(Requirement(line).name) for line in declared}:
        row = re.search(rf"^\| {name} \| (.+?) \|", page, re.M)
        assert row and row[1] != UNKNOWN, f"{name}: its licence is not in docs/licences.md; run `make licences`"
    core = [one for one in known.values() if one.extras == ("core",)]
    assert len(core) > 30 and UNKNOWN not in {one.licence for one in core}


def test_the_image_has_the_versions_that_are_tested():
    assert read_lock("image.txt").items() <= read_lock("lock.txt").items()


@pytest.mark.parametrize("lock", ["lock.txt", "runtime.txt"])
def test_the_licence_of_each_locked_package_is_listed(lock):
    page = (ROOT / "docs" / "licences.md").read_text()
    linux = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    lines = re.findall(r"^(\S+==[^\\\n]+)", (ROOT / "release" / lock).read_text(), re.M)
    wanted = [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate(linux)]
    missing = [one.name for one in wanted if f"\n| {canonicalize_name(one.name)} |" not in page]
    assert len(wanted) > 60 and not missing


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ({"License-Expression": "MIT AND 0BSD", "License": "other"}, "MIT AND 0BSD"),
        ({"License": "Apache 2.0"}, "Apache-2.0"),
        ({"License": "MPL-2.0 AND MIT"}, "MPL-2.0 AND MIT"),
        ({"License": "Copyright\nAll rights", "Classifier": "License :: OSI Approved :: BSD License"}, "BSD-3-Clause"),
        ({"License": "Dual License"}, UNKNOWN),
        ({}, UNKNOWN),
    ],
)  # fmt: skip
def test_a_licence_is_read_from_expression_text_or_classifier(fields, licence):
    about = Message()
    for name, value in fields.items():
        about[name] = value
    package: Any = SimpleNamespace(metadata=about)
    assert read_licence(package) == licence


@pytest.mark.release
def test_two_builds_are_the_same_bytes_and_the_bill_lists_what_the_wheel_needs(tmp_path, monkeypatch):
    pytest.importorskip("cyclonedx_py", reason="the extra release is not installed")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1735689600")
    files = build_release(tmp_path / "first")
    with tarfile.open(next((tmp_path / "first").glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path / "sources", filter="data")
    [source] = (tmp_path / "sources").iterdir()
    for path in source.rglob("*"):
        path.touch()
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "fivetune-0.0.1-py3-none-any.whl").touch()  # of an earlier build
    again = build_release(tmp_path / "second", source)
    assert {one.name: one.read_bytes() for one in files} == {one.name: one.read_bytes() for one in again}
    assert {one.name for one in (tmp_path / "second").iterdir()} == {one.name for one in again}
    sums = dict(line.split("  ")[::-1] for line in (tmp_path / "first" / CHECKSUMS).read_text().splitlines())
    assert sums == {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in files[:-1]}
    [bill] = [json.loads(one.read_text()) for one in files if one.name.endswith(".cdx.json")]
    assert bill["bomFormat"] == "CycloneDX" and bill["metadata"]["component"]["name"] == "fivetune"
    assert {canonicalize_name(one["name"]) for one in bill["components"]} == set(read_lock("runtime.txt"))
