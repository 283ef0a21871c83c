"""Find the marks that divide the texts of a column alike: `### Human:` and `### Assistant:`, `[INST]`, ` ||| `.

In: texts. Out: the marks in their order, with the names of the parts behind them. A mark is known by its form, in any
script, and by its being in nearly all texts; what it says is known by the words of SPEAKERS and of roles.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fivetune.start.columns import MIN_WORDS, WITHOUT_BLANKS, count_words
from fivetune.start.roles import USUAL, is_column_name, rate_name
from fivetune.start.survey import ASIDE

MIN_SHARE = 0.95  # of the texts that have all marks, in order
MAX_PARTS = 5
MAX_FRAMES = 3  # different beginnings of texts up to which they are a frame, such as "Below is an instruction ..."
FEW = 0.1  # different last parts per text up to which they are few
FOOTER = 6  # mean words from which on few last parts are text that many pages end in
MAX_TIMES = 4  # that a separator is in each text
LETTERS = r"""[^\s_▁:：#*|｜<>\[\](){}.,;!?/"'“”]*"""  # also signs of vowels, which are no letters to `re`
WORD = rf"[^\W\d_]{LETTERS}"
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
        marks: in their order.
        at_starts: the marks that are at the beginning of a line wherever they divide.
        are_separators: whether they are, and say nothing of what follows.
        names: of the text before the first mark and behind each; "" for a part that says nothing.
    """

    marks: Sequence[str]
    at_starts: frozenset[str]
    are_separators: bool = False
    names: Sequence[str] = ()

    @cached_property
    def _forms(self) -> list[re.Pattern[str]]:
        return [re.compile(self._build_form(mark)) for mark in self.marks]

    def _build_form(self, mark: str) -> str:
        """Build the form of a mark where it divides a text, which may hold the same letters elsewhere."""
        form = re.escape(mark)
        if self.are_separators:
            return rf"(?<=\s){form}(?=\s)" if APART.fullmatch(f" {mark} ", 1, len(mark) + 1) else form
        if not mark[0].isalpha() or WITHOUT_BLANKS.match(mark):
            return form
        return rf"(?m:^)[ \t]*{form}" if mark in self.at_starts else rf"(?<![^\W\d_]){form}"

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
            following = [match.start() for form in {*self._forms} if (match := form.search(text, end, start))]
            stop = min(following, default=start)
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
    least = MIN_SHARE * len(texts)
    kept = {mark: sorted(found) for mark, found in places.items() if len(found) >= least}
    kept = {mark: found for mark, found in kept.items() if not any(_is_end(mark, one) for one in kept)}
    ordered = sorted(kept, key=lambda mark: kept[mark][len(kept[mark]) // 2])
    at_starts = frozenset(mark for mark in ordered if starts[mark] >= least)
    separated = (Marks(marks, frozenset(), are_separators=True) for marks in _list_separators(texts))
    for found in (Marks(ordered, at_starts), *separated):
        if found.marks and (named := _name_parts(found, texts)):
            return named
    return None


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


def _is_end(mark: str, other: str) -> bool:
    return mark != other and other.endswith(mark)


def _list_separators(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the separators that nearly all texts have equally often, those of most signs first."""
    counts = [Counter(SEPARATOR.findall(text)) for text in texts]
    for mark in sorted(counts[0], key=len, reverse=True) if counts else ():
        times = counts[0][mark]
        if times <= MAX_TIMES and sum(one[mark] == times for one in counts) >= MIN_SHARE * len(texts):
            yield [mark] * times


def _name_parts(found: Marks, texts: Sequence[str]) -> Marks | None:
    """Name the parts that differ from text to text; None for fewer than two, or for texts that lack marks."""
    divided = [one[0] for one in map(found.split, texts) if one]
    if len(divided) < MIN_SHARE * len(texts):
        return None
    columns = [*zip(*divided, strict=True)]
    filled = [sum(map(bool, column)) >= MIN_SHARE * len(column) and len({*column}) > 1 for column in columns]
    filled[0] &= len({*columns[0]}) > MAX_FRAMES or sum(filled) <= 2
    places = [place for place, is_filled in enumerate(filled) if is_filled]
    num_words = [sum(map(count_words, column)) for column in columns]
    if not 1 < len(places) <= MAX_PARTS or max(num_words[place] for place in places) < MIN_WORDS * len(divided):
        return None
    last = _name_mark(found.marks[places[-1] - 1])
    is_learned = max(rate_name(role, last) for role in ("targets", "answer")) >= USUAL
    if not is_learned and not found.are_separators and _is_footer(columns[places[-1]]):
        return None
    words = ["" if found.are_separators else _name_mark(mark) for mark in ("", *found.marks)]
    if "question" in words:
        words = ["answer" if word == "a" else word for word in words]
    own = ["" if len(words[place]) < 2 or _is_aside(words[place]) else words[place] for place in places]
    if len({*filter(None, own)}) < len([*filter(None, own)]):  # a speaker twice: the parts are no question and answer
        return None
    if not words[places[0]] and any(own):
        own[0] = "text" if places[0] == 0 else own[0]
    names = [""] * len(columns)
    for number, (place, word) in enumerate(zip(places, own, strict=True), 1):
        names[place] = word or f"part{number}"
    return replace(found, names=names)


def _is_footer(parts: Sequence[str]) -> bool:
    """Whether parts are few and long: the text that pages end in, rather than labels or answers."""
    times = Counter(parts)
    return len(times) <= max(MAX_FRAMES, FEW * len(parts)) and sum(map(count_words, times)) > FOOTER * len(times)


def _is_aside(word: str) -> bool:
    """Whether a column of this name would be neither read nor learned, such as `speaker_1`."""
    return any(rate_name(role, word) >= USUAL for role in ASIDE)


def _name_mark(mark: str) -> str:
    """Name what follows a mark by its words.

    >>> [_name_mark(mark) for mark in ("<|im_start|>user", "<|user|>", "[/INST]", "### Input:", "A:", "回答：", "</s>")]
    ['prompt', 'prompt', 'response', 'input', 'a', '回答', '']
    """
    if mark.casefold() in SPEAKERS:
        return SPEAKERS[mark.casefold()]
    words = re.findall(rf"[^\W_]{LETTERS}", re.sub(TOKEN, " ", mark))
    is_token = not words
    words = words or re.findall(rf"[^\W_]{LETTERS}", re.sub("<?</.*", "", mark))
    name = "_".join(words).casefold()
    known = SPEAKERS.get(name, SPEAKERS.get(words[-1].casefold() if words else ""))
    if known is not None or (is_token and not is_column_name(name)):
        return known or ""
    return name
