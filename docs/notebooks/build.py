"""Build the notebooks: python docs/notebooks/build.py [NAME ...]

In: NAME.py beside this file, whose cells begin with `# %%`; those with `# %% [markdown]` are commented text. Out:
NAME.ipynb with the outputs of a run in an empty folder.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SECONDS = 600  # that a cell may take


def read_cells(source: str) -> list[tuple[str, str]]:
    """Read the cells of a source, each as (markdown or code, text).

    >>> read_cells("# %% [markdown]\\n# # Title\\n# %%\\nprint(1)\\n")
    [('markdown', '# Title'), ('code', 'print(1)')]
    """
    cells: list[tuple[str, str]] = []
    for head, body in re.findall(r"^# %%(.*)\n((?:(?!# %%).*\n?)*)", source, re.MULTILINE):
        is_text = "[markdown]" in head
        text = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if is_text else body
        cells.append(("markdown" if is_text else "code", text.strip()))
    return cells


def make_notebook(name: str) -> Any:
    """Make the notebook of NAME.py, without outputs."""
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    kinds = {"markdown": new_markdown_cell, "code": new_code_cell}
    cells = read_cells((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    made = [kinds[kind](text, id=f"cell-{number}") for number, (kind, text) in enumerate(cells)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=made, metadata={"kernelspec": kernel})


def execute(notebook: Any, folder: Path) -> None:
    """Run all cells in a folder; their outputs are in the notebook. Raises CellExecutionError."""
    from nbclient import NotebookClient

    metadata = dict(notebook.metadata)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=SECONDS, resources=resources, record_timing=False).execute()
    notebook.metadata = metadata  # without the version of Python


def list_names() -> list[str]:
    """List the names of the notebooks."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.name != Path(__file__).name)


def main(names: list[str]) -> None:
    import nbformat

    for name in names or list_names():
        notebook = make_notebook(name)
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        print(FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    main(sys.argv[1:])
