"""The errors that a user of FiveTune can meet, each with the exit code of its kind.

    FiveTuneError                 1   (never raised itself)
    |-- ConfigError               2   a setting is wrong
    |   `-- UnknownPlugin         2   a task, metric, optimizer ... of that name does not exist
    |-- DataError                 3   a data file or record is wrong
    |-- EnvironmentProblem        4   disk, rights, hub, device, a missing package
    |   |-- ModelError            4   a model folder cannot be loaded, or loads into something else than it was
    |   `-- RunDirError           4   the run directory is foreign, in use, or damaged
    |-- NumericError              5   a loss or gradient is not finite
    |-- Incomplete                6   finished, but something that was asked for is missing
    |-- Interrupted         128 + n   stopped by signal n, after saving
    `-- ToldElsewhere       of it     another process of the run has told its error

Every message has the form *where: what is wrong, with which value. What is allowed. What to do.*
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FiveTuneError(Exception):
    """Root of all errors that FiveTune raises for its users."""

    exit_code = 1


class ConfigError(FiveTuneError):
    exit_code = 2


class UnknownPlugin(ConfigError):
    """A plugin name that does not exist; the message names the nearest ones."""


class DataError(FiveTuneError):
    exit_code = 3


class EnvironmentProblem(FiveTuneError):
    exit_code = 4


class ModelError(EnvironmentProblem):
    pass


class RunDirError(EnvironmentProblem):
    pass


class NumericError(FiveTuneError):
    exit_code = 5


class Incomplete(FiveTuneError):
    exit_code = 6


class Interrupted(FiveTuneError):
    """Stopped by a signal after the state was saved.

    Args:
        signum: number of the signal; the exit code is 128 + signum.
    """

    def __init__(self, message: str, *, signum: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


class ToldElsewhere(FiveTuneError):
    """Without words: another process of the run has told the user.

    Args:
        exit_code: of the error that it told.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Say which names are allowed, the nearest one first if there is one.

    >>> nearest("lrr", ["lr", "weight_decay"])
    'Did you mean lr? Allowed: lr, weight_decay.'
    >>> nearest("zzz", ["lr", "weight_decay"])
    'Allowed: lr, weight_decay.'
    """
    options = sorted(allowed)
    cutoff = 0.6 if len(name) > 2 else 0.5  # `rl` for `lr`
    close = get_close_matches(name, options, n=2, cutoff=cutoff)
    hint = f"Did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}Allowed: {', '.join(options) or 'none'}."
