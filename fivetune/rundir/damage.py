"""What is damaged in a run directory, a sentence for each file or line.

In: the place of the damage, and its reason. Out: a list of sentences, which reports and terminals show.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class Damage(list[str]):
    """The sentences on damage, in the order in which the files were read; what is damaged counts as missing.

    >>> damage = Damage()
    >>> damage.add(Path("runs/tickets/data.json"), "damaged: it is not UTF-8.")
    >>> damage
    ['runs/tickets/data.json: damaged: it is not UTF-8.']
    """

    def add(self, place: Path | str, reason: str) -> None:
        self.append(f"{place}: {reason}")

    def add_lines(self, sentences: Sequence[str]) -> None:
        """Add the first of the sentences on damaged lines, with their number: a file may have a million of them."""
        if len(sentences) > 1:
            self.append(f"{sentences[0]} Damaged lines in all: {len(sentences):,}.")
        else:
            self.extend(sentences)
