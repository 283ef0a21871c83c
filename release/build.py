"""Build a release: wheel, source distribution, the wheel's bill of materials, and their checksums.

python -m release.build dist

The same sources give the same bytes: dates in the archives are those of SOURCE_DATE_EPOCH, or a fixed one.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKSUMS = "SHA256SUMS"


def build_release(folder: Path, root: Path = ROOT) -> list[Path]:
    """Write the release of `root` into `folder` and return its files; the last one is the list of checksums.

    Archives of an earlier build there are replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("fivetune-*.whl"), *folder.glob("fivetune-*.tar.gz"), *folder.glob("fivetune-*.cdx.json")):
        old.unlink()
    _run(root, "hatchling", "build", "--directory", str(folder.resolve()))
    [wheel] = folder.glob("fivetune-*.whl")
    bill = folder / f"{'-'.join(wheel.name.split('-')[:2])}.cdx.json"
    _run(
        root,
        *("cyclonedx_py", "requirements", "release/runtime.txt", "--pyproject", "pyproject.toml"),
        *("--mc-type", "application", "--output-reproducible", "--of", "JSON", "-o", str(bill.resolve())),
    )
    files = [wheel, *folder.glob("fivetune-*.tar.gz"), bill]
    sums = folder / CHECKSUMS
    sums.write_text("".join(f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}\n" for one in files))
    return [*files, sums]


def _run(root: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", *words], cwd=root, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m release.build", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the release is written; an earlier one there is replaced")
    for path in build_release(parser.parse_args().folder):
        print(path)
