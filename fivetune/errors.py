"""The errors that FiveTune reports to its users, each with the exit code of its kind.

    FiveTuneError                     1   (never raised itself)
    |-- ConfigError                   2   a setting is wrong
    |   `-- UnknownPluginError        2   a task, metric, optimizer ... of that name does not exist
    |-- DataError                     3   a data file is wrong
    |   `-- RecordError               3   one record is wrong
    |       `-- MissingLabelError     3   one record has no label
    |-- FiveTuneEnvironmentError      4   disk, permissions, hub, device, a missing package
    |   |-- ModelError                4   a model folder cannot be loaded, or is not the model that it claims to be
    |   `-- RunDirError               4   the run directory is foreign, in use, or damaged
    |-- NumericError                  5   a loss or gradient is not finite
    |-- IncompleteError               6   finished, but a requested result is missing
    |-- InterruptedRunError     128 + n   stopped by signal n, after saving
    `-- ReportedByOtherRankError          raised silently, with the exit code of the error that another rank printed

Every message has the form *where: what is wrong, with which value. What is allowed. What to do.*
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from fivetune.redaction import name_invisible, redact_secrets

P = ParamSpec("P")
R = TypeVar("R")
OUT_OF_MEMORY = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "resource_exhausted",
    "status_alloc_failed",  # for workspaces
)
"""Texts of CUDA and MPS, of the CPU (two), of the system (a file that is mapped), of XLA, and of cuBLAS and cuDNN."""
BROKEN_CONTEXT = ("illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address")
"""Texts of CUDA after which every later call of the process fails."""


class FiveTuneError(Exception):
    """Root of all errors that FiveTune raises for its users. Its text hides secrets and names invisible characters."""

    exit_code = 1

    def __str__(self) -> str:
        return name_invisible(redact_secrets(super().__str__()))

    def _render_traceback_(self) -> list[str]:
        """Return what IPython and notebooks show instead of a traceback: the message says where and what to do."""
        return [f"{type(self).__name__}: {self}"]

    def __reduce__(self) -> tuple[object, ...]:
        """Errors travel between ranks; pickle would call `__init__` of a subclass with the message alone."""
        return _restore_error, (type(self), self.args, vars(self))


def _restore_error(kind: type[FiveTuneError], args: tuple[object, ...], fields: dict[str, object]) -> FiveTuneError:
    error = kind.__new__(kind, *args)
    vars(error).update(fields)
    return error


def describe_failure(error: BaseException) -> str:
    """Describe an error in a line: the text of a FiveTuneError; of another one, which is a fault, its type too.

    >>> describe_failure(DataError("a.csv: the file is empty."))
    'a.csv: the file is empty.'
    >>> describe_failure(ValueError("zip() argument 2 is longer than argument 1"))
    'internal error: ValueError: zip() argument 2 is longer than argument 1.'
    """
    if isinstance(error, FiveTuneError):
        return str(error)
    if isinstance(error, MemoryError):
        return "memory ran out."
    words = ": ".join(filter(None, [type(error).__name__, name_invisible(redact_secrets(str(error)))]))
    return f"internal error: {words}."


def format_error(error: BaseException) -> str:
    """Format an error of any class, as libraries raise them: its class, and the first line of its text.

    >>> format_error(RuntimeError("no kernel for this device\\n  at line 3")), format_error(ValueError())
    ('RuntimeError: no kernel for this device', 'ValueError: no message')
    """
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def name_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function that Python code calls: its errors name arguments and calls in place of flags and commands."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except InterruptedRunError:  # has both the command and the call
            raise
        except FiveTuneError as error:
            if error.args:
                error.args = (as_python(str(error.args[0])), *error.args[1:])
            raise

    return call


def as_python(message: str) -> str:
    """Write flags and commands of a message as arguments and calls; another command stays as it is.

    >>> as_python("runs/a: holds a run already. Add --resume to continue it, --overwrite to move it aside")
    'runs/a: holds a run already. Add resume=True to continue it, overwrite=True to move it aside'
    >>> as_python("Resume with: fivetune train runs/a --resume")
    "Resume with: fivetune.train('runs/a', resume=True)"
    >>> as_python("A first try: --model.path t5-nano, which is small")
    "A first try: {'model.path': 't5-nano'}, which is small"
    >>> as_python("--max-batch 0: must be above 0."), as_python("Use --format hf.")
    ('max_batch 0: must be above 0.', "Use format='hf'.")
    >>> as_python("Train it with: fivetune train a.yaml --quiet. Add --overwrite to write it again.")
    'Train it with: fivetune train a.yaml --quiet. Add overwrite=True to write it again.'
    >>> as_python("It is trained with: fivetune train a.yaml. Give --output.")
    "It is trained with: fivetune.train('a.yaml'). Give output."
    """
    message = re.sub(r"fivetune train (\S+) --resume", r"fivetune.train('\1', resume=True)", message)
    message = re.sub(r"fivetune train ([^\s']+)(?=[.,;:] |\.?$)", r"fivetune.train('\1')", message, flags=re.MULTILINE)
    parts: list[str] = []
    for part in re.split(r"(fivetune [a-z].*?(?=[.,;:] |\.?$))", message, flags=re.MULTILINE):
        if not part.startswith("fivetune "):
            part = re.sub(r"(?<![\w/])--(resume|overwrite|raw)\b", r"\1=True", part)
            part = re.sub(r"(?<![\w/])--(format|missing) (\w+)", r"\1='\2'", part)
            part = re.sub(r"--([a-z]+\.[\w.]+) (-?[\d.]+(?:e-?\d+)?|true|false|null)(?![\w/])", r"{'\1': \2}", part)
            part = re.sub(r"--([a-z]+\.[\w.]+) ([\w/.-]*[\w/-])", r"{'\1': '\2'}", part)
            part = re.sub(r"(?<![\w/-])--[a-z][\w-]*", _as_argument, part)
        parts.append(part)
    return "".join(parts)


def _as_argument(flag: re.Match[str]) -> str:
    return flag[0][2:].replace("-", "_")


class ConfigError(FiveTuneError):
    exit_code = 2


class UnknownPluginError(ConfigError):
    """A plugin name that does not exist; the message names the nearest ones."""


class DataError(FiveTuneError):
    exit_code = 3


class RecordError(DataError):
    """One record cannot be used; the caller decides whether it is skipped.

    Args:
        where: file and line (or record number): `train.jsonl:17`.
        reason: fault and value, allowed values, advice.
        skippable: False for a cause that all records share: skipping would leave no record.
    """

    def __init__(self, where: str, reason: str, *, skippable: bool = True) -> None:
        super().__init__(f"{where}: {reason}")
        self.where, self.reason, self.skippable = where, reason, skippable


class AbsentColumnError(RecordError):
    """One record has no column of a name that its inputs or its answer need."""


class MissingLabelError(RecordError):
    """One record has no label: training and evaluation exclude and count it."""


class FiveTuneEnvironmentError(FiveTuneError):
    exit_code = 4


class ModelError(FiveTuneEnvironmentError):
    pass


class RunDirError(FiveTuneEnvironmentError):
    pass


class NumericError(FiveTuneError):
    """A loss or gradient is not finite.

    Args:
        step: the optimizer step; None outside a run.
    """

    exit_code = 5

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class IncompleteError(FiveTuneError):
    exit_code = 6


class PromiseError(IncompleteError):
    """An evaluation cannot keep the promise about errors that was asked for.

    Args:
        record: the EvalRecord, which the run keeps.
    """

    def __init__(self, message: str, *, record: Any) -> None:
        super().__init__(message)
        self.record = record


class InterruptedRunError(FiveTuneError):
    """Stopped by a signal after the state was saved.

    Args:
        signum: number of the signal; the exit code is 128 + signum.
        can_resume: whether `fivetune.train` continues the run; the message has the command that does.
        reason: the message without that command, for status.json.
    """

    def __init__(self, message: str, *, signum: int, can_resume: bool = False, reason: str = "") -> None:
        super().__init__(message)
        self.exit_code = 128 + signum
        self.can_resume = can_resume
        self.reason = reason or message


class ReportedByOtherRankError(FiveTuneError):
    """Raised silently: another rank has already printed this error.

    Args:
        exit_code: of the error that was printed.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


def suggest_names(name: str, allowed: Iterable[str], *, listing: str = "") -> str:
    """Return a sentence with the allowed names, after the nearest one if any is similar.

    Args:
        listing: the command that lists the names, which stands in place of many of them.

    >>> suggest_names("lrr", ["lr", "weight_decay"])
    'Did you mean lr? Allowed: lr, weight_decay.'
    >>> suggest_names("zzz", ["lr", "weight_decay"])
    'Allowed: lr, weight_decay.'
    >>> suggest_names("squad_v3", ["squad_v2", "gsm8k"], listing="fivetune list recipes")
    'Did you mean squad_v2? All names: fivetune list recipes.'
    """
    options = sorted(allowed)
    close = get_close_matches(name, options, n=2)
    if not close and len(name) <= 4:
        close = get_close_matches(name, options, n=2, cutoff=0.5)  # `rl` for `lr`, `itit` for `init`
    hint = f"Did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}All names: {listing}." if listing else f"{hint}Allowed: {', '.join(options) or 'none'}."


def format_size(num_bytes: float) -> str:
    """Format a size in the largest binary unit in which it is at least 1.

    >>> format_size(512), format_size(21_000_000), format_size(3 * 2**30)
    ('512 B', '20.0 MiB', '3.0 GiB')
    """
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} TiB"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device: RuntimeErrors are recognised by their text.

    >>> is_out_of_memory(RuntimeError("CUDA out of memory.")), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    if isinstance(error, RuntimeError):
        return any(words in str(error).lower() for words in OUT_OF_MEMORY)
    return isinstance(error, MemoryError)


def refuse_stripped_python() -> None:
    """Raise FiveTuneEnvironmentError if Python runs without docstrings, which transformers reads."""
    if sys.flags.optimize > 1:
        raise FiveTuneEnvironmentError(
            "python -OO (PYTHONOPTIMIZE=2): removes docstrings, which transformers reads when it is imported. Run it "
            "again without -OO; -O is allowed."
        )


def refuse_broken_context(error: BaseException, remedy: str) -> None:
    """Raise FiveTuneEnvironmentError if a kernel has broken the CUDA context: every later call of the process fails.

    Args:
        remedy: what to change so that the kernel does not run.
    """
    words = str(error).strip().splitlines()
    if isinstance(error, RuntimeError) and any(each in str(error).lower() for each in BROKEN_CONTEXT):
        raise FiveTuneEnvironmentError(
            f"device: a kernel has failed and left the device unusable for this process: {words[0]}. "
            f"Start again with {remedy}; CUDA_LAUNCH_BLOCKING=1 names the kernel."
        ) from error


@contextmanager
def translate_oom_errors() -> Iterator[None]:
    """Turn a failed allocation on any device into a FiveTuneEnvironmentError that names the settings to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise FiveTuneEnvironmentError(
            f"device: out of memory: {(str(error) or 'no details').splitlines()[0]} "
            "Lower train.batch_size (keep train.global_batch_size: the result stays the same), "
            "data.max_input_tokens, or eval.batch_size if it happened in an evaluation."
        ) from None
