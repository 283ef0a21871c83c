"""Find the marks that divide the texts of a column alike: `### Human:` and `### Assistant:`, `[INST]`, ` ||| `.

In: texts. Out: the marks in their order, with the names of the parts behind them. A mark is known by its form, in any
script, and by its being in nearly all texts; what it says is known by the words of SPEAKERS and of roles.py.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fivetune.start.columns import MIN_WORDS, WITHOUT_BLANKS, count_words
from fivetune.start.roles import USUAL, is_column_name, rate_name
from fivetune.start.survey import ASIDE

MIN_SHARE = 0.95  # share of texts that have all marks, in order
MAX_PARTS = 5
MAX_FRAMES = 3  # different beginnings of texts up to which they are a frame, such as "Below is an instruction ..."
FEW = 0.1  # different last parts per text up to which they are few
FOOTER = 6  # mean words from which on few last parts are text that many pages end in
MAX_TIMES = 4  # that a separator is in each text
LETTERS = r"""[^\s_▁:：#*|｜<>\[\](){}.,;!?/"'“”]*"""  # also signs of vowels, which are no letters to `re`
WORD = rf"[^\W\d_]{LETTERS}"
NAME = re.compile(rf"[^\W_]{LETTERS}")
WORDS = rf"{WORD}(?:[ ][^\W_]{LETTERS}){{0,3}}"
TOKEN = r"<[|｜]?/?[\w ▁]{1,30}[|｜]?>"  # <s>, <|im_start|>, </user>
MARK = re.compile(
    rf"<\|\w+\|>\w+<\|\w+\|>|<\|?\w+\|?>\w+(?=\s*\n)|<</?\w+>>|{TOKEN}:?|\[/?\|?{WORD}\|?\]:?"  # of models
    rf"|(?m:^)[ \t]*[#*\[(<{{]*[ ]?{WORDS}[\])>}}*]*[ ]?[:：][*]*"  # at the beginning of a line
    rf"|\#{{2,}}[ ]?{WORDS}(?:[:：]|(?=\s*\n))|\#{{2,}}[ ]?{WORD}|(?<=[\s>\]]){WORD}[:：]|TL;?DR:?"
)
APART = re.compile(r"(?<=\s)(?:::+|[^\w\s.,;:!?…'\"“”„()\[\]।؟、。]{1,4}|vs\.?|versus)(?=\s)")
SEPARATOR = re.compile(rf"{APART.pattern}|[|#~^@$+*=]{{2,}}|\[SEP\]|<sep>|\t")
COLON = re.compile(r"[^\W\d_]{1,6}[:：]")

_SPEAKERS = {
    "prompt": (
        "user human person prompter client customer usuario usuário utilisateur benutzer nutzer kunde utente gebruiker "
        "użytkownik uživatel kullanıcı пользователь человек користувач کاربر مستخدم المستخدم 用户 用戶 人类 ユーザー "
        "사용자 उपयोगकर्ता người_dùng pengguna instruct [inst] <</sys>>"
    ),
    "response": (
        "assistant gpt bot chatbot ai model agent assistent asistente assistente asystent asistan ассистент помощник "
        "асистент бот دستیار مساعد المساعد 助手 助理 アシスタント 어시스턴트 सहायक trợ_lý asisten [/inst] 回复"
    ),
    "instruction": "指令 指示",
    "question": "q 问 問 सवाल",
    "answer": "答",
    "summary": "tl_dr",
    "": "sep",
}
SPEAKERS: Mapping[str, str] = {word: role for role, words in _SPEAKERS.items() for word in words.split()}
"""What the marks of dialogues call a speaker -> the name of the column with that part."""


@dataclass(frozen=True)
class Marks:
    """The marks that divide a text, and what is between them.

    Args:
        marks: marks in their order.
        at_starts: marks that are at the beginning of a line wherever they divide.
        are_separators: whether the marks say nothing of what follows.
        names: names of the text before the first mark and of each text behind one; "" for a part that says nothing.
    """

    marks: Sequence[str]
    at_starts: frozenset[str]
    are_separators: bool = False
    names: Sequence[str] = ()

    @cached_property
    def _forms(self) -> list[re.Pattern[str]]:
        """The forms of the marks where they divide a text, which may hold the same letters elsewhere."""
        forms: list[re.Pattern[str]] = []
        for mark in self.marks:
            form = re.escape(mark)
            if self.are_separators:
                if APART.fullmatch(f" {mark} ", 1, len(mark) + 1):
                    form = rf"(?<=\s){form}(?=\s)"
            elif mark[0].isalpha() and not WITHOUT_BLANKS.match(mark):
                form = (r"(?m:^)[ \t]*" if mark in self.at_starts else r"(?<![^\W\d_])") + form
            forms.append(re.compile(form))
        return forms

    def split(self, text: str) -> tuple[list[str], bool] | None:
        """Divide a text; None if it lacks a mark.

        Returns: the parts, each up to the next mark, and whether more marks of parts follow.
        """
        starts, ends = [0], [0]
        for form in self._forms:
            match = form.search(text, ends[-1])
            if match is None:
                return None
            starts.append(match.start())
            ends.append(match.end())
        parts: list[str] = []
        for end, start in zip(ends, [*starts[1:], len(text)], strict=True):
            stop = start
            for form in self._forms:  # a mark may be repeated before the next one
                if match := form.search(text, end, start):
                    stop = min(stop, match.start())
            parts.append(text[end:stop].strip())
        named = [form for form, name in zip(self._forms, self.names[1:], strict=False) if name]
        return parts, any(form.search(text, ends[-1]) for form in named)


def find_marks(texts: Sequence[str]) -> Marks | None:
    """Find the marks that nearly all texts have in the same order, with two to MAX_PARTS parts that differ.

    >>> found = find_marks([f"### Human: Sum of {i} and 1?### Assistant: It is {i + 1}.</s>" for i in range(20)])
    >>> found.marks, found.names
    (['### Human:', '### Assistant:', '</s>'], ['', 'prompt', 'response', ''])
    >>> found = find_marks([f"the text of {i} ||| summary {i}" for i in range(20)])
    >>> found.marks, found.names
    (['|||'], ['part1', 'part2'])
    """
    places: dict[str, list[int]] = {}
    starts: Counter[str] = Counter()
    for text in texts:
        for mark, (place, at_start) in _list_marks(text).items():
            places.setdefault(mark, []).append(place)
            starts[mark] += at_start
    # the marks of nearly all texts, without the ends of others, by their median places
    least = MIN_SHARE * len(texts)
    frequent = [mark for mark in places if len(places[mark]) >= least]
    medians: dict[str, int] = {}
    for mark in frequent:
        if not any(other.endswith(mark) for other in frequent if other != mark):
            medians[mark] = statistics.median_high(places[mark])
    at_starts = frozenset(mark for mark in medians if starts[mark] >= least)
    found = [Marks(sorted(medians, key=medians.__getitem__), at_starts)] if medians else []
    # else the separators that nearly all texts have equally often, those of most signs first
    counts = [Counter(SEPARATOR.findall(text)) for text in texts]
    for mark in sorted(counts[0], key=len, reverse=True) if counts else ():
        times = counts[0][mark]
        if times <= MAX_TIMES and sum(one[mark] == times for one in counts) >= least:
            found.append(Marks([mark] * times, frozenset(), are_separators=True))
    return next(filter(None, (_name_parts(one, texts) for one in found)), None)


def _list_marks(text: str) -> dict[str, tuple[int, bool]]:
    """List the marks of a text: where each is first, and whether at the beginning of a line."""
    found: dict[str, tuple[int, bool]] = {}
    for match in MARK.finditer(text):
        mark = match[0].strip()
        place = match.end() - len(mark)
        found.setdefault(mark, (place, not text[:place].rpartition("\n")[2].strip()))
    for match in COLON.finditer(text):  # without blanks, each end of the word before a colon may be the mark
        for place in range(match.start(), match.end() - 1):
            if WITHOUT_BLANKS.match(text, place):
                found.setdefault(text[place : match.end()], (place, False))
    return found


def _name_parts(found: Marks, texts: Sequence[str]) -> Marks | None:
    """Name the parts that differ from text to text; None for fewer than two, or for texts that lack marks."""
    divided = [one[0] for one in map(found.split, texts) if one]
    if len(divided) < MIN_SHARE * len(texts):
        return None
    columns = [*zip(*divided, strict=True)]
    places: list[int] = []
    for place, parts in enumerate(columns):
        if sum(map(bool, parts)) >= MIN_SHARE * len(parts) and len({*parts}) > 1:
            places.append(place)
    if len(places) > 2 and places[0] == 0 and len({*columns[0]}) <= MAX_FRAMES:
        places.pop(0)  # a frame
    num_words = max((sum(map(count_words, columns[place])) for place in places), default=0)
    if not 1 < len(places) <= MAX_PARTS or num_words < MIN_WORDS * len(divided):
        return None
    # few and long last parts are the text that pages end in, unless their mark says that they are learned
    last = _name_mark(found.marks[places[-1] - 1])
    is_learned = max(rate_name(role, last) for role in ("targets", "answer")) >= USUAL
    times = {*columns[places[-1]]}
    is_few = len(times) <= max(MAX_FRAMES, FEW * len(divided))
    is_footer = is_few and sum(map(count_words, times)) > FOOTER * len(times)
    if is_footer and not is_learned and not found.are_separators:
        return None
    # the parts are named after their marks, as far as such a column is read or learned, unlike `speaker_1`
    words = [""] * len(columns)
    if not found.are_separators:
        words = ["", *map(_name_mark, found.marks)]
    names = [""] * len(columns)
    for place in places:
        word = "answer" if words[place] == "a" and "question" in words else words[place]
        if len(word) > 1 and all(rate_name(role, word) < USUAL for role in ASIDE):
            names[place] = word
    named = [*filter(None, names)]
    if len({*named}) < len(named):  # a speaker twice: the parts are no question and answer
        return None
    if named and places[0] == 0:
        names[0] = "text"
    for number, place in enumerate(places, 1):
        names[place] = names[place] or f"part{number}"
    return replace(found, names=names)


def _name_mark(mark: str) -> str:
    """Name what follows a mark by its words.

    >>> [_name_mark(mark) for mark in ("<|im_start|>user", "<|user|>", "[/INST]", "### Input:", "A:", "回答：", "</s>")]
    ['prompt', 'prompt', 'response', 'input', 'a', '回答', '']
    """
    if mark.casefold() in SPEAKERS:
        return SPEAKERS[mark.casefold()]
    words = NAME.findall(re.sub(TOKEN, " ", mark))
    is_token = not words
    if is_token:
        words = NAME.findall(re.sub("<?</.*", "", mark))
    name = "_".join(words).casefold()
    for known in (name, name.rpartition("_")[2]):
        if known in SPEAKERS:
            return SPEAKERS[known]
    return "" if is_token and not is_column_name(name) else name
