"""Find the records in a JSON document that holds them in lists within lists, and the command that writes them as lines.

In: a file. Out: the steps down to its records, found in a sample of each list, and a command for the shell. A document
that readers take as it is has no such command.
"""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Literal, NamedTuple, cast

from fivetune.data.readers.delimited import HEADER_WORDS
from fivetune.data.readers.json_text import JsonWindow
from fivetune.data.readers.source_files import HEAD_BYTES, SPLIT, format_output, open_bytes, quote_in_code
from fivetune.errors import DataError, FiveTuneEnvironmentError
from fivetune.types import JsonTable

RECORD_LISTS = ("data", "questions")  # keys of a document's list of records: SQuAD's, BioASQ's
NUM_SAMPLED = 20  # items of a list
NUM_KEYS = 200  # of an object
MAX_DEPTH = 6
MIN_WIDE = 8  # characters beyond ASCII from which on a text without blanks has several words
MIN_SHARE = 0.8  # of sampled records that hold a list
MAX_NAMES = 8  # that a message lists
SEVERAL = (  # JSON lines, or objects over several lines: within one, a comma stands between objects
    'd = json.loads("[" + re.sub(r"}}\\s*\\n\\s*{{", "}}, {{", {}.read().decode("utf-8-sig")) + "]"); '
)
SCALARS = "s = lambda r: {n: v for n, v in r.items() if not isinstance(v, (dict, list))}; "
WALK = (  # (keys, object with the scalars above it) of all lists within objects
    "w = lambda v, u={}, *k: [((*k, n), {**u, **s(v), **i}) for n, o in v.items() if isinstance(o, list) "
    "for i in o if isinstance(i, dict)] + "
    "[p for n, o in v.items() if isinstance(o, dict) for p in w(o, {**u, **s(v)}, *k, n)]; "
)
# names of lists: of objects that are parts of one record, of texts that are; of what a record is learned for
PARTS = re.compile(
    r"choices|options|answers|candidates|distractors|entities|spans|relations|triples|documents|docs|passages|contexts|"
    r"paragraphs|snippets|evidence"
)
LABELS = re.compile(r"choices|options|labels|tags|topics|categories|keywords", re.IGNORECASE)
WHOLE = re.compile(r"answer|label|(?:expected_)?output|response|completion|summary|target|gold", re.IGNORECASE)
TEXTS = re.compile(r"patterns|examples|utterances|texts|sentences|queries|samples|phrases", re.IGNORECASE)  # of a label


class Step(NamedTuple):
    """One step down to the records of a document.

    Args:
        kind: into a member of an object, to each item of a list or of an object with keys that are data, to each text
            of a list, along several lists of equal length, or to each record of all lists within objects.
        names: of the member, of the lists, or of the columns that the records of all lists have.
        left: further lists and objects that the step passes by.
        keeps: whether the records get the document's own texts and numbers too.
    """

    kind: Literal["member", "each", "items", "texts", "along", "walk"]
    names: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    keeps: bool = False


def describe_nested(path: Path, *, is_read: bool = True) -> str:
    """Return the error for a file whose records are in lists within lists or objects, with the command that joins them;
    "" for any other file.

    Args:
        is_read: whether the reader took the file; then a document on one line was read as a record.
    """
    steps: Sequence[Step] | None = None
    is_lines = is_line = False
    with suppress(DataError, FiveTuneEnvironmentError), open_bytes(path) as file:
        head = file.read(HEAD_BYTES).strip(b"\xef\xbb\xbf \t\r\n")
        is_line = is_read and b"\n" not in head and len(head) < HEAD_BYTES
        if head[:1] in (b"{", b"["):
            file.seek(0)
            value, is_lines = _sample_document(JsonWindow(file, path))
            steps = find_records(value)
    if not steps:
        return ""
    # Readers take a list, objects by id, and a list under a known name or over several lines.
    kinds = [step.kind for step in steps]
    if kinds in (["each"], ["items"]):
        return ""
    if kinds == ["member", "each"] and (not is_line or steps[0].names[0] in RECORD_LISTS):
        return ""
    places: list[str] = []
    left: dict[str, None] = {}  # an ordered set
    for step in steps:
        names = " with ".join(step.names) or "*"
        places.append("*.*" if step.kind == "walk" else names)
        left |= dict.fromkeys(map(repr, step.left))
    told = f" It leaves {', '.join([*left][:MAX_NAMES])} out." if left else ""
    into = format_output(path, "-records.jsonl")
    return (
        f"{path}: its records are nested: {'.'.join(places)}. Allowed is a list of records, or one on a line. Write "
        f"each on a line, with the values of what it is in: {format_join(path, steps, is_lines=is_lines)} > {into}, "
        f"and name that file.{told}"
    )


def _sample_document(window: JsonWindow) -> tuple[object, bool]:
    """Read the first items of each list of a document, or the first JSON lines; return also whether it has lines."""
    if window.peek() == "[":
        return [window.read_value() for _ in islice(window.iter_indices(), NUM_SAMPLED)], False
    table: JsonTable = {}
    for key in window.iter_keys():
        if window.peek() == "[":
            items = table[key] = []
            for _ in window.iter_indices():
                items.append(window.read_value())
                del items[NUM_SAMPLED:]
        else:
            table[key] = window.read_value()
        if len(table) == NUM_KEYS:
            return table, False
    lines: list[object] = [table]
    while window.peek() == "{" and len(lines) < NUM_SAMPLED:
        lines.append(window.read_value())
    return (lines, True) if len(lines) > 1 else (table, False)


def find_records(value: object, depth: int = 0) -> list[Step] | None:
    """Find the steps from a value to its records, None if it holds none.

    >>> pair = {"question": "Who is it?", "answer": "Ann."}
    >>> steps = find_records({"a": {"about": "It is Ann.", "qa": [pair]}, "b": {"about": "", "qa": [pair, pair]}})
    >>> [step.kind for step in steps], steps[1].names
    (['items', 'member', 'each'], ('qa',))
    """
    if depth > MAX_DEPTH:
        return None
    if isinstance(value, list):
        records = _keep_objects(value)
        return [Step("each"), *_find_inner(records)] if len(records) == len(value) > 0 else None
    if not isinstance(value, dict):
        return None
    members = cast("JsonTable", value)
    sets = [name for name in members if SPLIT.search(name)]
    if len(members) > 1 and not sets:
        tables = _keep_objects(members.values())
        if len(tables) == len(members) and _have_names_in_common(tables):
            # Objects by keys that are data, if they hold more than lists; else the records of all lists.
            values = chain.from_iterable(table.values() for table in tables)
            if not all(map(_is_nested, values)):
                return [Step("items"), *_find_inner(tables)]
        if steps := _find_walk([members]) or _join_members(members, depth):
            return steps
    # Of the members that lead to records a training set, else the longest with texts or with records further down.
    found: dict[str, list[Step]] = {}
    for name, one in members.items():
        steps = find_records(one, depth + 1)
        if steps:
            found[name] = steps
    if not found:
        return None

    def rank(name: str) -> tuple[bool, int]:
        one = members[name]
        return len(found[name]) > 1 or measure_running_texts([*one]) > 0, len(one)

    trained = [name for name in sets if name in found and "train" in name.casefold()]
    chosen = trained[0] if trained else max(found, key=rank)
    left = tuple(name for name, one in members.items() if name != chosen and _is_nested(one))
    keeps = any(isinstance(one, str) and _has_words(one) for one in members.values())
    return [Step("member", (chosen,), left, keeps), *found[chosen]]


def _find_walk(tables: Sequence[JsonTable], parts: str = "") -> list[Step]:
    """Find the steps to the records of several lists within objects, those that have names in common with the longest.

    Args:
        parts: pattern of the names of lists that are no records.
    """
    lists: dict[tuple[str, ...], list[JsonTable]] = {}
    for path, items in chain.from_iterable(map(_list_lists, tables)):
        if not re.fullmatch(parts, path[-1]):
            lists.setdefault(path, []).extend(items)
    longest = max(lists.values(), key=len, default=[])
    alike = [items for items in lists.values() if _have_names_in_common([longest[0], items[0]])]
    records = [*chain.from_iterable(alike)]
    # One list is enough within objects that hold nothing else, as the pages of an answer do.
    least = 2
    if parts and len(alike) == 1 and min(map(len, lists)) > 1 and not measure_running_texts(tables):
        least = 1
    if len(alike) < least or (parts and not _are_records(records)):
        return []
    common = {*longest[0]}.intersection(*records)
    return [Step("walk", tuple(name for name in longest[0] if name in common)), *_find_inner(records)]


def _list_lists(members: JsonTable, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[JsonTable]]]:
    """Yield (path, items) of the lists of objects within objects."""
    for name, value in members.items():
        if isinstance(value, dict) and len(path) < MAX_DEPTH:
            yield from _list_lists(cast("JsonTable", value), (*path, name))
        elif isinstance(value, list) and value and (records := _keep_objects(cast("list[object]", value))) == value:
            yield (*path, name), records


def _is_nested(value: object) -> bool:
    return isinstance(value, list | dict) and bool(value)


def _join_members(members: JsonTable, depth: int) -> list[Step] | None:
    """Find the steps to the records of an object whose keys are data: objects of records, or lists of texts."""
    tables = _keep_objects(members.values())
    if len(tables) == len(members):
        inner = [*chain.from_iterable(table.values() for table in tables)]
        is_whole = bool(inner) and len(_keep_objects(inner)) == len(inner)
        return [Step("items"), *(find_records(tables[0], depth + 1) or ())] if is_whole else None
    for name, value in members.items():
        if HEADER_WORDS.fullmatch(name) or TEXTS.fullmatch(name):  # columns
            return None
        if not isinstance(value, list) or not value:
            return None
        if not all(isinstance(item, str) for item in cast("list[object]", value)):
            return None
    return [Step("items"), Step("texts")]


def _keep_objects(values: Iterable[object]) -> list[JsonTable]:
    return [cast("JsonTable", value) for value in values if isinstance(value, dict)]


def _have_names_in_common(tables: Sequence[Mapping[str, object]]) -> bool:
    common = {*tables[0]}.intersection(*tables)
    return 2 * len(common) > max(map(len, tables)) > 0


def _find_inner(records: Sequence[JsonTable]) -> list[Step]:
    """Find the steps from records to the records that each of them holds; [] if it is one itself."""
    if len(records[0]) > 1 and any(map(WHOLE.fullmatch, records[0])):
        return []
    # The lists that most records have: their lengths and items, which are records, or plain values.
    sizes: dict[str, list[int]] = {}
    plain: dict[str, list[object]] = {}
    inner: dict[str, list[JsonTable]] = {}
    for name in records[0]:
        lists = [record[name] for record in records if isinstance(record.get(name), list)]
        if len(lists) < MIN_SHARE * len(records):
            continue
        items = [*chain.from_iterable(lists)]
        objects = _keep_objects(items)
        if items and not objects:
            plain[name] = items
            sizes[name] = [*map(len, lists)]
        elif items and len(objects) == len(items) and not _are_parts(name, objects) and _are_records(objects):
            inner[name] = objects
    if steps := _find_walk(records, PARTS.pattern):
        return steps
    nested: dict[str, None] = {}  # an ordered set
    for record in records:
        nested |= dict.fromkeys(name for name in record if _is_nested(record[name]))
    if inner:
        longest = max(inner, key=lambda one: len(inner[one]))
        left = tuple(one for one in nested if one != longest)
        return [Step("member", (longest,), left), Step("each"), *_find_inner(inner[longest])]
    # Several lists of equal lengths, one of them of texts.
    for name, items in plain.items():
        alike = tuple(one for one in plain if sizes[one] == sizes[name])
        is_text = _has_words(str(items[0])) and not LABELS.fullmatch(name)
        if is_text and len(alike) > 1 and max(sizes[name]) > 1:
            return [Step("along", alike, tuple(one for one in nested if one not in alike))]
    # One list of texts.
    for name, items in plain.items():
        if TEXTS.fullmatch(name) and isinstance(items[0], str):
            left = tuple(one for one in nested if one != name)
            return [Step("member", (name,), left), Step("texts")]
    return []


def _are_parts(name: str, items: Sequence[JsonTable]) -> bool:
    """Return whether a list holds parts of one record by its name.

    Passages that hold records are no parts, unless a reader takes them, as it does SQuAD's paragraphs.
    """
    if not PARTS.fullmatch(name):
        return False
    if name == "paragraphs" and any("qas" in item for item in items):
        return True
    kinds = [step.kind for step in _find_inner(items)[:2]]
    return kinds != ["member", "each"]


def _are_records(items: Sequence[JsonTable]) -> bool:
    """Return whether objects are records: most have a text of several words and another value, or hold records."""
    num_full = 0
    for item in items:
        if {*item} in ({"role", "content"}, {"from", "value"}):  # a turn of a chat is a part of a record
            return False
        texts = [value for value in item.values() if isinstance(value, str)]
        num_full += len(item) > 1 and any(map(_has_words, texts))
    return 2 * num_full > len(items) or bool(_find_inner(items))


def measure_running_texts(items: Sequence[object]) -> float:
    """Measure the mean length of the longest text of several words in each of the first objects or lists.

    >>> measure_running_texts([{"name": "Ann", "says": "It rains."}, ["a"]])
    4.5
    """
    chars: list[int] = []
    for item in items[:NUM_SAMPLED]:
        values = cast("JsonTable", item).values() if isinstance(item, dict) else item
        longest = 0
        for text in values if isinstance(values, Iterable) else ():
            if isinstance(text, str) and _has_words(text):
                longest = max(longest, len(text))
        chars.append(longest)
    return statistics.fmean(chars or [0])


def _has_words(text: str) -> bool:
    """Whether a text has several words; scripts such as Chinese and Japanese have no blanks between them."""
    return " " in text or (len(text) >= MIN_WIDE and not text.isascii())


def format_join(path: Path, steps: Sequence[Step], *, is_lines: bool = False) -> str:
    """Return the shell command that prints the records at the end of some steps, each with the values of what it is in;
    on standard error how many these are, and how many objects without one were passed.

    >>> format_join(Path("a.json"), [Step("member", ("qa",)), Step("each")]).partition("; r = ")[2][:52]
    '[a for a in d["qa"]]; [print(json.dumps(i)) for i in'
    """
    is_packed = path.name.endswith(".gz")
    source = quote_in_code(str(path))
    opened = f"gzip.open({source})" if is_packed else f'open({source}, "rb")'
    code = f"import {'gzip, ' * is_packed}json, {'re, ' * is_lines}sys; "
    code += SEVERAL.format(opened) if is_lines else f"d = json.load({opened}); "
    # The program, step by step: loops down to the records, and the fields that each record gets on the way.
    at = "d"  # the value that the last step led to
    fields: list[str] = []
    loops: list[str] = []
    told = ["len(r)", '"records"']
    has_walk = False
    for place, step in enumerate(steps):
        follows = steps[place + 1].kind if place + 1 < len(steps) else ""
        item, number = "abcdefgh"[len(loops)], str(len(loops) or "")
        names = [*map(quote_in_code, step.names)]
        # Within a record a list may be missing.
        form = "({}.get({}) or [])" if loops else "{}[{}]"
        lists = [form.format(at, name) for name in names]
        if step.kind == "member":
            if loops:
                told += ['"and"', f"sum(not {at}.get({names[0]}) {' '.join(loops)})", f'"objects without", {names[0]}']
            elif step.keeps:
                fields.append(f"**s({at})")
            at = lists[0]
            continue
        if step.kind == "along":
            loops.append(f"for {item} in zip({', '.join(lists)})")
            fields += [f"{name}: {item}[{index}]" for index, name in enumerate(names)]
        elif step.kind == "texts":
            loops.append(f"for {item} in {at}")
            fields.append(f'"text": {item}')
        elif step.kind == "items":
            loops.append(f"for k{number}, {item} in {at}.items()")
            key = "label" if follows == "texts" else f"key{number}"
            fields.append(f'"{key}": k{number}')
        elif step.kind == "walk":
            has_walk = True
            walk = f"for k, {item} in w({at})"
            is_record = f"{{{', '.join(names)}}} <= {{*{item}}}"
            told += ['"and"', " ".join([f"sum(not {is_record}", *loops, f"{walk})"]), '"others left out"']
            loops.append(f"{walk} if {is_record}")
            fields.append(f'**{{f"key{{i + {number or 0} or str()}}": n for i, n in enumerate(k)}}')
        else:
            loops.append(f"for {item} in {at}")
        # An object on the way gives its texts and numbers, a record itself.
        if step.kind in ("each", "items", "walk") and follows in ("", "member", "along", "walk"):
            fields.append(f"**s({item})" if follows else f"**{item}")
        at = item
    if has_walk or any(field.startswith("**s") for field in fields):
        code += SCALARS
    code += WALK * has_walk
    record = at if fields == [f"**{at}"] else f"{{{', '.join(fields)}}}"
    code += f"r = [{record} {' '.join(loops)}]; [print(json.dumps(i)) for i in r]; "
    code += f"print({', '.join(told)}, file=sys.stderr)"
    return f"python -c {shlex.quote(code)}"
