"""The run directory: the only interface between training and analysis.

layout.py names its files, writer.py writes them, reader.py reads them back as the records of records.py.
"""

from __future__ import annotations

from fivetune.rundir.damage import Damage
from fivetune.rundir.files import fsync_folder, lock_file, replace_file, write_bytes, write_json, write_text
from fivetune.rundir.layout import (
    CHECKSUMS,
    CONFIG,
    DATA,
    EVALS,
    FORMAT_VERSION,
    LOCK,
    LOG,
    MACHINE,
    OWN_SPLITS,
    STATUS,
    STEPS,
    TELEMETRY,
    TELEMETRY_OF_RANK,
    TRACE,
    TRACE_FOLDER,
    build_sibling_path,
    find_model_folder,
)
from fivetune.rundir.reader import (
    read_data,
    read_evals,
    read_jsonl,
    read_machine,
    read_run,
    read_run_config,
    read_status,
    read_telemetry,
    refuse_foreign,
)
from fivetune.rundir.writer import (
    NullRunDir,
    RunDir,
    find_conflict,
    lock_folder,
)

__all__ = [
    "CHECKSUMS",
    "CONFIG",
    "DATA",
    "EVALS",
    "FORMAT_VERSION",
    "LOCK",
    "LOG",
    "MACHINE",
    "OWN_SPLITS",
    "STATUS",
    "STEPS",
    "TELEMETRY",
    "TELEMETRY_OF_RANK",
    "TRACE",
    "TRACE_FOLDER",
    "Damage",
    "NullRunDir",
    "RunDir",
    "build_sibling_path",
    "find_conflict",
    "find_model_folder",
    "fsync_folder",
    "lock_file",
    "lock_folder",
    "read_data",
    "read_evals",
    "read_jsonl",
    "read_machine",
    "read_run",
    "read_run_config",
    "read_status",
    "read_telemetry",
    "refuse_foreign",
    "replace_file",
    "write_bytes",
    "write_json",
    "write_text",
]
