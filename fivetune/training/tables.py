"""Tables in memory as the data of a run: files next to the run directory, named by their content.

In: settings with DataFrames, data sets of `datasets` or lists of records. Out: settings with the files' paths, so that
resuming, fingerprints and evaluations work as with any other file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fivetune.config import RunConfig, load_config
from fivetune.data.readers.tables import FOLDER, replace_tables, save_table
from fivetune.types import JsonTable

PLACEHOLDER = "table.jsonl"

TableFiles = dict[Path, str]
"""The name of the setting by the path of the file that was written of its table."""


def load_config_of_tables(
    recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, object] | None
) -> tuple[RunConfig, TableFiles]:
    """Load the config of a recipe whose data may be tables, which are written when all settings are checked.

    Raises the errors of `load_config` and `save_table`.
    """
    given: list[str] = []

    def note(table: object, name: str) -> str:
        given.append(name)
        return PLACEHOLDER

    # Checked with names in place of the tables: a wrong setting leaves no file behind, and run.dir says where to write.
    settings = replace_tables(recipe, note) if isinstance(recipe, Mapping) else recipe
    config = load_config(settings, replace_tables(overrides or {}, note))
    if not given:
        return config, {}
    files: TableFiles = {}
    if isinstance(recipe, Mapping):
        settings, files = write_tables(recipe, config.run.dir)
    changes, others = write_tables(overrides or {}, config.run.dir)
    return load_config(settings, changes), files | others


def write_tables(settings: Mapping[str, Any], run: str | Path) -> tuple[JsonTable, TableFiles]:
    """Write the tables among settings into the folder that all runs next to `run` share; returns the settings with
    their paths, and the files. Raises the errors of `save_table`.
    """
    files: TableFiles = {}

    def write(table: object, name: str) -> str:
        path = save_table(table, Path(run).parent / FOLDER, name)
        files[path] = name
        return str(path)

    return replace_tables(settings, write), files
