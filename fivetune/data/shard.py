"""The records of a source that one of several jobs reads.

In: the place of each record. Out: the records of a job. The jobs together read each record once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from fivetune.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shard:
    """A job's records.

    Args:
        number: number of the job, from 0; `count`: how many jobs share the source.
        stretch: records that follow one another in the source and belong to one job; the jobs take stretches in turn.

    >>> [*Shard(1, 3).select("abcdefgh")], [*Shard(1, 3, stretch=2).select("abcdefgh")]
    (['b', 'e', 'h'], ['c', 'd'])
    """

    number: int = 0
    count: int = 1
    stretch: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse NUMBER/COUNT, the number from 1. Raises ConfigError.

        >>> Shard.parse("2/3"), str(Shard(1, 3))
        (Shard(number=1, count=3, stretch=1), '2/3')
        """
        found = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", text)
        if found is None or int(found[1]) > int(found[2]):
            raise ConfigError(f"--shard {text}: allowed is NUMBER/COUNT, such as 1/8 to 8/8. Correct it.")
        return cls(int(found[1]) - 1, int(found[2]))

    def __str__(self) -> str:
        return f"{self.number + 1}/{self.count}"

    @property
    def name(self) -> str:
        """Name of the job's files and folders.

        >>> Shard(1, 3).name
        '2-of-3'
        """
        return f"{self.number + 1}-of-{self.count}"

    def list_all(self) -> list[Shard]:
        """List the shards of all jobs."""
        return [replace(self, number=number) for number in range(self.count)]

    def select(self, items: Iterable[T]) -> Iterator[T]:
        """Select this job's items from all items of the source."""
        if self.count == 1:
            return iter(items)
        return (item for place, item in enumerate(items) if place // self.stretch % self.count == self.number)


WHOLE = Shard()
"""All records, for a single job."""
