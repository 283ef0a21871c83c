"""Find the encoding of a text that is not UTF-8: of those that read the whole file, the one with the likeliest letters.

In: the lines of a file that hold bytes beyond ASCII. Out: encodings, the likeliest first, and whether one reads all.
A library would be used if it were sure of short files: charset-normalizer takes twelve lines of Shift-JIS for Korean.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import IO

import numpy as np

MAX_SAMPLE = 100_000  # bytes of the lines that are judged
BLOCK_BYTES = 2**20

HANZI = "的一是不了在有人我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里这好很"
HANZI_TRADITIONAL = (
    "的一是不了在有人我他這個們中來上大為和國地到以說時要就出會可也你對生能而子那得於著下自之年過發後作裡好很"
)
HANGUL = "이다는에을의가지고하로를은도서한기사나어리자아시있그스수요대정보것게인해들으라"
KANA = "のにはをたがでてとしれさいるもなかことらりすまうっくけきんだよあれどおえ"
CYRILLIC = "оеаинтсрвлкм"
# encoding -> the frequent letters of each language that is written in it, without the letters of ASCII
LETTERS: Mapping[str, Sequence[str]] = {
    "cp1252": (
        "éèàêçâîôûëïùœ",  # French
        "äöüß",
        "áéíóúñü",
        "áâãàçéêíóôõú",  # Portuguese
        "àèéìòù",
        "àèéíïòóúüç",  # Catalan
        "åäöæøé",  # Nordic
        "áéðíóúýþæö",  # Icelandic
    ),
    "cp1250": ("áčďéěíňóřšťúůýžľĺŕôä", "ąćęłńóśźż", "áéíóöőúüű", "ăâîşţ", "čćđšž"),
    "cp1254": ("çğıöşüâi",),
    "cp1257": ("ąčęėįšųūž", "āčēģīķļņšūž", "äõöüšž"),
    "cp1251": (CYRILLIC, "іїєаоинтвре", "ђјљњћџаоеинтсрв"),
    "koi8-r": (CYRILLIC,),
    "cp866": (CYRILLIC,),
    "iso8859-5": (CYRILLIC,),
    "cp1253": ("αοιετσνηυρπςάίό",),
    "cp1255": ("יוהלאמרתבשנם",),
    "cp1256": ("اليمنوترهبدع",),
    "cp874": ("านรอกเงมยลวดท่้ัี",),
    "cp850": ("éèàêçâîôûëïù", "äöüß", "áéíóúñü", "áâãàçéêíóôõú", "àèéìòù", "åäöæøé"),
    "cp852": ("áčďéěíňóřšťúůýžľĺŕôä", "ąćęłńóśźż", "áéíóöőúüű"),
    "cp857": ("çğıöşüâi",),
    "mac-roman": ("éèàêçâîôûëïùœ", "äöüß", "áéíóúñü"),
    "gb18030": (HANZI,),
    "cp950": (HANZI_TRADITIONAL,),
    "cp932": (KANA,),
    "euc-jp": (KANA,),
    "cp949": (HANGUL,),
}
WIDE = {"gb18030": "gb2312", "cp950": "cp950", "cp932": "cp932", "euc-jp": "euc-jp", "cp949": "euc-kr"}
COMMON = {  # first bytes of the frequent half of the characters, in the encoding of WIDE
    "gb18030": range(0xB0, 0xD8),
    "cp950": range(0xA4, 0xC7),
    "cp932": range(0x88, 0x98),
    "euc-jp": range(0xB0, 0xD0),
    "cp949": range(0xB0, 0xC9),
}
ONLY_IN_PYTHON = re.compile("[\\x80\uf8f0-\uf8f3]")
PRIORS = {"cp1252": 0.8, "cp1250": 0.5, "cp1251": 0.5, "cp1254": 0.4, "gb18030": 0.5, "cp932": 0.5, "cp949": 0.5}
PRIOR_WEIGHT = 2  # characters
MARGIN = 0.15  # points below the best encoding up to which another one may be right
# largest share of whole UTF-8 characters in texts of other encodings: 0.23 was seen of 8 bits, 0.31 of wide ones
MAX_UTF8, MAX_UTF8_WIDE = 0.25, 0.4
CUT = b"\xc2\xc3"  # first bytes of most letters that UTF-8 adds to ASCII
TYPOGRAPHY = "‘’“”„–—…«»•°§€£´·¿¡\u00a0，。！？、：；（）「」『』《》・ー～【】％＋"
SINGLE = "àáâéèêìíòóôùúýåäöøæõã"  # letters of Latin script that are words
SENTENCE_ENDS = "?!.:)"  # a letter never follows them without a blank; commas and semicolons separate cells
FREQUENT, PLAUSIBLE, RARE, DOUBTFUL, WRONG = 1.0, 0.7, 0.3, -0.5, -3.0  # points of a character


def rank_encodings(lines: Iterable[bytes], present: bytes) -> list[tuple[str, float]]:
    """Return the encodings that read some lines, with the mean points of their characters, the best first.

    Args:
        present: each byte that occurs in the file, once.

    >>> rank_encodings(["Это очень хороший фильм".encode("koi8-r")], b"")[0][0]
    'koi8-r'
    """
    sample = b"".join(lines)
    points: dict[str, float] = {}
    for encoding in LETTERS:
        try:
            if encoding not in WIDE:
                present.decode(encoding)
            text = sample.decode(encoding)
        except UnicodeDecodeError:
            continue
        points[encoding] = max(_measure(text, letters, encoding) for letters in LETTERS[encoding])
    return sorted(points.items(), key=lambda item: -item[1])


def is_damaged_utf8(lines: Sequence[bytes], encodings: Sequence[str]) -> bool:
    """Whether lines are UTF-8 with damaged bytes, rather than one of the encodings that read them: more of their
    characters beyond ASCII are whole ones of UTF-8 than chance makes.

    >>> is_damaged_utf8(["38 °C".encode(), b"80\\x9390 %"], ["cp1252"]), is_damaged_utf8([b"caf\\xe9"], ["cp1252"])
    (True, False)
    """
    text = b"\n".join(lines).decode(errors="surrogateescape")
    num_beyond = sum(not character.isascii() for character in text)
    num_bytes = sum("\udc80" <= character <= "\udcff" for character in text)
    most = MAX_UTF8_WIDE if any(name in WIDE for name in encodings) else MAX_UTF8
    return num_beyond - num_bytes > most * num_beyond


def are_damaged_bytes_of(encoding: str, lines: Sequence[bytes]) -> bool:
    """Whether each damaged byte of lines of UTF-8 stands alone, and is a character of an encoding rather than what is
    left of one of UTF-8.

    >>> are_damaged_bytes_of("cp1252", [b"to\\xa0get"]), are_damaged_bytes_of("cp1252", [b"f\\xc3r"])
    (True, False)
    """
    text = b"\n".join(lines).decode(errors="surrogateescape")
    runs = [run.encode(errors="surrogateescape") for run in re.findall("[\udc80-\udcff]+", text)]
    return all(len(run) == 1 and run not in CUT and run.decode(encoding, "ignore") for run in runs)


def can_read_all(file: IO[bytes], encoding: str) -> bool:
    """Return whether an encoding decodes a file from its position on, also by iconv, which reads fewer bytes of cp932
    than Python.
    """
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        while block := file.read(BLOCK_BYTES):
            text = decoder.decode(block)
            if encoding == "cp932" and ONLY_IN_PYTHON.search(text):
                return False
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def sample_lines(file: IO[bytes]) -> tuple[list[bytes], bytes]:
    """Return lines with bytes beyond ASCII, MAX_SAMPLE in all, and each byte that occurs in the file, once."""
    counts = np.zeros(256, np.int64)
    lines: list[bytes] = []
    num_taken = 0
    while block := file.read(BLOCK_BYTES):
        block += file.readline(BLOCK_BYTES)
        counts += np.bincount(np.frombuffer(block, np.uint8), minlength=256)
        if num_taken < MAX_SAMPLE and not block.isascii():
            for line in block.splitlines(keepends=True):
                if num_taken < MAX_SAMPLE and not line.isascii():
                    lines.append(line)
                    num_taken += len(line)
    return lines, bytes(np.flatnonzero(counts).tolist())


def _measure(text: str, letters: str, encoding: str) -> float:
    """Return the mean points of the characters beyond ASCII; of a few, usual encodings are likelier."""
    total = num = 0
    for before, character, after in zip(f" {text}", text, f"{text[1:]} ", strict=False):
        if not character.isascii():
            num += 1
            total += _rate(before, character, after, letters, encoding)
    return (total + PRIOR_WEIGHT * PRIORS.get(encoding, RARE)) / (num + PRIOR_WEIGHT)


def _rate(before: str, character: str, after: str, letters: str, encoding: str) -> float:
    if character in TYPOGRAPHY:
        return FREQUENT if _is_in_place(before, character, after) else PLAUSIBLE
    category = unicodedata.category(character)
    if category in ("Cc", "Co", "Cn"):
        return WRONG
    if encoding in WIDE:
        return _rate_wide(character, letters, encoding)
    if category[0] not in "LM" or before.isdigit() or (before.islower() and character.isupper()):
        return DOUBTFUL
    if unicodedata.name(letters[0]).startswith("LATIN"):
        if before in SENTENCE_ENDS:
            return DOUBTFUL
        if character.lower() not in letters:
            return 0.0
        if not before.isalpha() and not after.isalpha() and character not in SINGLE:
            return RARE
        return FREQUENT if before.isascii() or not before.isalpha() else RARE  # rarely are two accents in a row
    neighbours = [one for one in (before, after) if one.isalpha() or not one.isascii()]
    if not neighbours or any(map(str.isascii, neighbours)):
        return DOUBTFUL
    return FREQUENT if character.lower() in letters else RARE


def _is_in_place(before: str, character: str, after: str) -> bool:
    """Whether a sign stands as in texts of word processors: `don’t`, `“so”`, ` – `, `£5`, `20°`."""
    if character == "’":
        return before.isalpha() and before.isascii() and (after.isalpha() or not after.isalnum())
    if character in "“‘«¿¡":
        return not before.isalnum() and not after.isspace()
    if character in "”…»":
        return not before.isspace() and not after.isalnum()
    if character in "–—":
        return (before.isspace() and after.isspace()) or (before.isalnum() and after.isalnum())
    if character in "£€§":
        return not before.isalnum() and (after.isdigit() or after.isspace())
    if character == "°":
        return before.isdigit() or before.isspace()
    return character == "\u00a0" and not (before.isalpha() and after.isalpha())


def _rate_wide(character: str, letters: str, encoding: str) -> float:
    if character in letters:
        return 2 * FREQUENT
    is_kana = "\u3041" <= character <= "\u30fe"
    if is_kana:
        return FREQUENT if letters == KANA else DOUBTFUL
    try:
        first = character.encode(WIDE[encoding])[0]
    except UnicodeEncodeError:
        return DOUBTFUL
    return PLAUSIBLE if first in COMMON[encoding] else DOUBTFUL
