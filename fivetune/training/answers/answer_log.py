"""The answers to a file's questions while they are computed: JSON lines in a folder, one file per rank.

In: numbers and Predictions of questions, in any order. Out: the numbers that are answered, also after a kill, and the
Prediction of a question by its id. Memory holds 32 bytes per question, the texts stay on the disk. Each line ends with
the CRC-32 of what stands before it.
"""

from __future__ import annotations

import json
import re
import zlib
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import IO

import numpy as np

from fivetune.errors import DataError, FiveTuneEnvironmentError
from fivetune.rundir.lines import JsonlFile, format_json_line
from fivetune.rundir.parse import parse_record
from fivetune.rundir.records import Prediction

FORMAT = 2  # of the lines
PATTERN = "answers-*.jsonl"
START = re.compile(rb'\{"question": (\d+), "id": ("(?:[^"\\]|\\.)*")[,}]')  # of a line of AnswerWriter
END = re.compile(rb', "crc32": (\d+)\}\n')
MAX_END = 24  # bytes that END matches
DAMAGED = "damaged. Delete the folder {folder}, and answer the file again."


class AnswerWriter:
    """Appends the answers of a rank; a partial last line of a killed process is removed first."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._path = folder / PATTERN.replace("*", str(rank))
        self._file = JsonlFile(self._path)

    def __enter__(self) -> AnswerWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def append(self, question: int, prediction: Prediction) -> None:
        """Append an answer. Raises FiveTuneEnvironmentError where it cannot be written."""
        try:
            line = {"question": question, **prediction.as_dict()}
            content = format_json_line(line).encode().removesuffix(b"}\n")
            self._file.append({**line, "crc32": zlib.crc32(content)})
        except OSError as error:
            raise FiveTuneEnvironmentError(
                f"{self._path}: cannot be written: {error.strerror}. The answers so far are kept: free space and run "
                "the same command again, or choose another --output."
            ) from None


class AnswerLog:
    """The answers in a folder, of all ranks, read in a `with` block; a partial last line is left out.

    `questions` holds their numbers, [n] int64. Raises DataError for a damaged line, at the latest in `find`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[IO[bytes]] = []
        self._opened = ExitStack()
        # One entry per answer, in the order of the hashes of ids: which file, and where its line begins.
        self._hashes = self._files_of = self._offsets = self.questions = np.empty(0, np.int64)

    def __enter__(self) -> AnswerLog:
        # Arrays of machine integers: a list would take several times the memory.
        hashes = array("Q")
        files = array("q")
        offsets = array("q")
        questions = array("q")
        with ExitStack() as stack:
            for path in sorted(self._folder.glob(PATTERN)):
                file = stack.enter_context(path.open("rb"))
                for offset, question, own in self._iter_places(file):
                    hashes.append(_hash(own))
                    files.append(len(self._files))
                    offsets.append(offset)
                    questions.append(question)
                self._files.append(file)
            self._opened = stack.pop_all()
        self.questions = np.asarray(questions, np.int64)
        order = np.argsort(np.asarray(hashes, np.uint64), kind="stable")
        self._hashes = np.asarray(hashes, np.uint64)[order]
        self._files_of = np.asarray(files)[order]
        self._offsets = np.asarray(offsets)[order]
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def find(self, own_id: str) -> Prediction:
        """Return the answer to a question. Raises DataError if there is none."""
        wanted = np.uint64(_hash(own_id))
        # Two ids may have one hash: the line says whose answer it is.
        for place in range(int(np.searchsorted(self._hashes, wanted)), len(self._hashes)):
            if self._hashes[place] != wanted:
                break
            file = self._files[int(self._files_of[place])]
            file.seek(int(self._offsets[place]))
            found = parse_record(Prediction, json.loads(self._check(file.readline(), file)))
            if found and found.id == own_id:
                return found
        raise DataError(f"{self._folder}: no answer to {own_id!r}: {DAMAGED.format(folder=self._folder)}")

    def _iter_places(self, file: IO[bytes]) -> Iterator[tuple[int, int, str]]:
        """Yield offset of the line, number and id of each answered question; the rest of the line is not parsed."""
        offset = 0
        for line in file:
            if not line.endswith(b"\n"):  # of a process that was killed while it wrote
                return
            start = START.match(self._check(line, file))
            if start is None:
                raise DataError(f"{file.name}: {DAMAGED.format(folder=self._folder)}")
            yield offset, int(start[1]), json.loads(start[2])
            offset += len(line)

    def _check(self, line: bytes, file: IO[bytes]) -> bytes:
        """Return the line. Raises DataError if it is not what was written."""
        end = END.search(line, max(0, len(line) - MAX_END))
        if end is None or end.end() != len(line) or zlib.crc32(line[: end.start()]) != int(end[1]):
            raise DataError(f"{file.name}: {DAMAGED.format(folder=self._folder)}")
        return line


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest())
