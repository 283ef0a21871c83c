"""What is read of a source is what was hashed: its files must stay as they are until all data was used.

In: the paths of a source. Out: a SourceGuard with the fingerprint of the data, or DataError for a file that changes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from fivetune.data.readers.records import list_source_files
from fivetune.errors import DataError, FiveTuneEnvironmentError, FiveTuneError


class ChangedSourceError(DataError):
    """Raised for a source that is not what it was when it was hashed."""


@dataclass(frozen=True, slots=True)
class SourceGuard:
    """The files of a source as they were before they were hashed.

    Args:
        settings: settings that decide the data too; hashed before the files.
        fingerprint: hash of the settings and of the content of all files, in order.
    """

    paths: tuple[str, ...]
    settings: str
    files: dict[Path, tuple[int, int, int]]
    fingerprint: str

    @classmethod
    def take(cls, paths: Iterable[str], settings: str) -> SourceGuard:
        """Hash the files of a source as they are now. Raises as `list_source_files`."""
        own = tuple(paths)
        try:
            files = {file: _read_state(file) for file in _list_files(own)}
            return cls(own, settings, files, _compute_hash(settings, _list_files(own)))
        except OSError as error:
            where = error.filename or ", ".join(own)
            raise FiveTuneEnvironmentError(f"{where}: cannot be read: {error.strerror}. Check its rights.") from None

    def refuse_change(self, verb: str = "read", *, whole: bool = False) -> None:
        """Raise DataError for a file that was written, replaced, added or removed since.

        A state that is the same does not prove the content where a file system counts time in seconds, or a program
        sets it: `whole` reads the files again.
        """
        try:
            now = {file: _read_state(file) for file in _list_files(self.paths)}
            changed = sorted(file for file in {*self.files, *now} if self.files.get(file) != now.get(file))
            if not changed and whole and _compute_hash(self.settings, _list_files(self.paths)) != self.fingerprint:
                changed = [*now]
        except (OSError, FiveTuneError):  # a file that is gone, or not readable any more
            changed = [*self.files]
        if changed:
            raise ChangedSourceError(
                f"{changed[0]}: changed while it was {verb}; nothing of it is kept. Wait for the program that writes "
                "it, or copy the file; then run the same command again."
            )

    @contextmanager
    def explain_errors(self, verb: str = "read") -> Generator[None]:
        """Name the change of a source in place of the errors that it causes inside the block."""
        try:
            yield
        except (FiveTuneError, ValueError):
            self.refuse_change(verb)
            raise


def _list_files(paths: Iterable[str]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        files += list_source_files(path)
    return files


def _read_state(file: Path) -> tuple[int, int, int]:
    """Return size, time of the last write in ns and inode: writing or replacing a file changes at least one of them."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def _compute_hash(settings: str, files: Iterable[Path]) -> str:
    digest = blake2b(settings.encode(), digest_size=16)
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
