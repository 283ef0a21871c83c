"""Invent names from syllables; a name belongs permanently either to the training part or to the held-out part.

In: a seeded `random.Random` and the part. Out: names of persons, places and things, and numbers and dates.

A text is held out iff the 8-byte BLAKE2b digest of its casefolded UTF-8 form is a multiple of 5. A name is drawn for a
part only if its whole string and every invented word in it are in that part, so the parts share no name and no invented
word. Numbers, years, dates and the fixed words around an invented word ("Lake", "Dr", "Ltd") belong to neither part.
"""

import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

HELD_OUT_ONE_IN = 5
NUM_SYLLABLES = 260

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
FIXED_WORDS = frozenset(MONTHS) | frozenset(
    ["Dr", "Captain", "Professor", "Lake", "Port", "Mount", "Saint", "Old", "New", "Cape", "Ltd", "Inc", "Sons"]
)

_ONSETS = (*"bcdfghjklmnprstvwxz", "t", *("br", "ch", "dr", "fl", "gr", "kl", "pr", "qu", "sh", "st", "th", "tr"))
_VOWELS = tuple(3 * "aaaeeeiioou" + "áéíöüøå")
_CODAS = ("", "", "", "", "", *"llmnnnrrrsstkxñ", "nd")


def is_held_out(text: str) -> bool:
    """Return whether the hash rule assigns `text` to the held-out part; case is ignored.

    >>> is_held_out("Velka") == is_held_out("VELKA")
    True
    """
    digest = hashlib.blake2b(text.casefold().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def extract_invented_words(name: str) -> list[str]:
    """Return the invented words of a name, without initials and fixed words; hyphens and apostrophes separate words.

    >>> extract_invented_words("Dr J. Velka-Torun of Port O'Dresh")
    ['Velka', 'Torun', 'Dresh']
    """
    return [word for word in re.findall(r"[^\W\d_]{3,}", name) if word not in FIXED_WORDS]


def is_in_split(name: str, *, held_out: bool) -> bool:
    """Return whether the whole name and each invented word in it are in the requested part."""
    return all(is_held_out(text) == held_out for text in (name, *extract_invented_words(name)))


def _make_syllables() -> tuple[str, ...]:
    """Return the fixed set of syllables, few enough for each to be a piece of a vocabulary of 2,000 to 4,000."""
    rng = random.Random(2_605)
    syllables: dict[str, None] = {}
    while len(syllables) < NUM_SYLLABLES:
        syllable = rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        syllables[syllable] = None
    return tuple(syllables)


SYLLABLES = _make_syllables()


@dataclass(frozen=True, slots=True)
class NameGenerator:
    """Draws names of one part; deterministic in `rng`.

    >>> make = NameGenerator(random.Random(1), held_out=True)
    >>> is_in_split(make.draw_person(), held_out=True)
    True
    """

    rng: random.Random
    held_out: bool = False

    def draw_word(self) -> str:
        """Draw a capitalised invented word of two or three syllables, such as `Velkator`."""
        return self._draw_in_split(self._make_word)

    def draw_lower_word(self) -> str:
        """Draw an invented word in lower case, for made-up relations and filler."""
        return self.draw_word().lower()

    def draw_person(self) -> str:
        """Draw a person: `Velka Torun`, `J. Torun`, `V. K. Torun`, `Velka Mar-Torun`, `Velka O'Torun` or one word."""
        return self._draw_in_split(self._make_person)

    def draw_place(self) -> str:
        """Draw a place: one word, or one with a fixed word such as `Port Torun`, or a hyphenated pair."""
        return self._draw_in_split(self._make_place)

    def draw_thing(self) -> str:
        """Draw a ship, book, firm or other thing: one or two invented words."""
        return self._draw_in_split(self._make_thing)

    def draw_number(self) -> str:
        """Draw a whole number from 2 to 9,999, with a comma from 1,000 on."""
        return f"{self.rng.choice((self.rng.randint(2, 99), self.rng.randint(100, 9_999))):,}"

    def draw_year(self) -> str:
        """Draw a year from 1100 to 2099."""
        return str(self.rng.randint(1100, 2099))

    def draw_date(self) -> str:
        """Draw a date: `4 March 1871`."""
        return f"{self.rng.randint(1, 28)} {self.rng.choice(MONTHS)} {self.draw_year()}"

    def _draw_in_split(self, make: Callable[[], str]) -> str:
        """Draw until the name is in the part; its words are drawn from the part already, so few draws suffice."""
        while True:
            name = make()
            if is_in_split(name, held_out=self.held_out):
                return name

    def _make_word(self) -> str:
        num_syllables = 2 if self.rng.random() < 0.85 else 3
        word = "".join(self.rng.choice(SYLLABLES) for _ in range(num_syllables))
        return word[0].upper() + word[1:]

    def _draw_initial(self) -> str:
        return self.rng.choice("ABCDEFGHJKLMNOPRSTVWZ") + "."

    def _make_person(self) -> str:
        last = self.draw_word()
        shape = self.rng.random()
        if shape < 0.40:
            return last
        if shape < 0.75:
            return f"{self.draw_word()} {last}"
        if shape < 0.85:
            return f"{self._draw_initial()} {last}"
        if shape < 0.90:
            return f"{self._draw_initial()} {self._draw_initial()} {last}"
        if shape < 0.95:
            return f"{self.draw_word()}-{last}"
        return f"{self.rng.choice(('O', 'D'))}'{last}"

    def _make_place(self) -> str:
        shape = self.rng.random()
        if shape < 0.70:
            return self.draw_word()
        if shape < 0.92:
            return f"{self.rng.choice(('Lake', 'Port', 'Mount', 'Saint', 'Old', 'New', 'Cape'))} {self.draw_word()}"
        return f"{self.draw_word()}-{self.draw_word()}"

    def _make_thing(self) -> str:
        return self.draw_word() if self.rng.random() < 0.7 else f"{self.draw_word()} {self.draw_word()}"
