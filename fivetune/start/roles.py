"""Which column is what: the names by which data sets call questions, labels, ids ..., and the choice among columns.

In: a RawTable and the columns that the user named. Out: role -> column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from fivetune.data.source_files import quote_value
from fivetune.errors import ConfigError, DataError, suggest_names
from fivetune.start.columns import Column, RawTable, describe_column

ROLES: Mapping[str, tuple[str, ...]] = {
    "question": ("question", "query", "frage", "pregunta", "domanda", "question_text", "question_stem", "problem", "q"),
    "context": (
        *("context", "passage", "paragraph", "kontext", "contexto", "contexte", "document", "text", "article"),
        *("snippet", "evidence", "abstract"),
    ),
    "answer": (
        *(
            "answers",
            "answer",
            "antwort",
            "antworten",
            "respuesta",
            "respuestas",
            "reponse",
            "exact_answer",
            "solution",
        ),
        *("answer_text", "answerkey", "response", "reply", "a"),
    ),
    "choices": ("choices", "options", "candidates", "alternatives", "endings"),
    "label": (
        *("label", "labels", "class", "category", "kategorie", "categoria", "y", "target", "intent", "sentiment"),
        *("topic", "rating", "stars", "score", "tag", "type", "status", "priority", "gold", "klasse", "etikett"),
    ),
    "text": (
        *("text", "body", "content", "message", "sentence", "subject", "title", "description", "review", "comment"),
        *("nachricht", "betreff", "texto", "tweet", "post", "utterance"),
    ),
    "inputs": (
        *("inputs", "input", "source", "src", "prompt", "instruction", "article", "document", "dialogue", "text"),
        *("long", "original"),
    ),
    "targets": (
        *("targets", "target", "output", "outputs", "summary", "highlights", "abstract", "headline", "title"),
        *("translation", "tgt", "completion", "response", "reply", "answer", "reference", "short", "corrected"),
    ),
    "id": ("id", "nr", "no", "uid", "uuid", "guid", "key", "index", "unnamed_0", "row", "nummer", "ticket_id"),
    "group": (
        *("group", "group_id", "user", "user_id", "author", "author_id", "customer", "customer_id", "kunde"),
        *("document_id", "doc_id", "article_id", "thread_id", "conversation_id", "session_id", "patient_id"),
    ),
}
"""Role -> usual names, the clearest first, as `_normalize_name` writes them."""

SUMMARIES = frozenset(("summary", "highlights", "abstract", "headline", "title", "zusammenfassung", "resumen"))
LANGUAGES: Mapping[str, str] = {
    "en": "English", "english": "English", "de": "German", "german": "German", "deutsch": "German", "fr": "French",
    "french": "French", "es": "Spanish", "spanish": "Spanish", "ro": "Romanian", "it": "Italian", "pt": "Portuguese",
    "nl": "Dutch", "pl": "Polish", "ru": "Russian", "zh": "Chinese", "ja": "Japanese", "ar": "Arabic", "cs": "Czech",
    "tr": "Turkish", "uk": "Ukrainian", "sv": "Swedish", "hi": "Hindi", "vi": "Vietnamese", "ko": "Korean",
}  # fmt: skip
"""Names of columns that hold one language of a translation -> the language, as T5's prefixes write it."""

Given = Mapping[str, str]


def check_header(table: RawTable) -> None:
    """Raise DataError if the first line seems to be a record: a name is a number, a date, a sentence, or a value of its
    column, unless another column has a usual name (`spam,message` with the values spam and ham).
    """
    values = [name for name, column in table.columns.items() if name in column.values]
    usual = {name for names in ROLES.values() for name in names}
    if any(normalize_name(name) in usual for name in table.columns if name not in values):
        values = []
    for name in table.columns:
        is_value = describe_column(name, [name]).kind in ("number", "date") or len(name.split()) > 12
        if name in values or is_value:
            raise DataError(
                f"{table.source}: the first line has {quote_value(name)} where the name of a column is expected, so it "
                "seems to be a record. Write a first line with the names of the columns, such as text,label."
            )


def check_given(given: Given, table: RawTable) -> None:
    """Raise ConfigError for a role or a column that does not exist; those of `text` may be several, one a line."""
    for role, names in given.items():
        if role not in ROLES:
            raise ConfigError(f"--column {role}={names}: there is no {role!r}. {suggest_names(role, ROLES)}")
        for name in split_names(role, names):
            if name not in table.columns and (role, name) != ("group", NO_GROUP):
                raise ConfigError(
                    f"--column {role}={names}: {table.source} has no column {name!r}. "
                    f"{suggest_names(name, table.columns)}"
                )


def parse_columns(words: Sequence[str]) -> dict[str, str]:
    """Parse --column ROLE=NAME; several of `text` or `inputs` are joined. Raises ConfigError for another form.

    >>> parse_columns(["text=Subject", "text=Body", "label=Queue"])
    {'text': 'Subject\\nBody', 'label': 'Queue'}
    """
    given: dict[str, str] = {}
    for word in words:
        role, sign, name = word.partition("=")
        if not sign or not role or not name:
            raise ConfigError(f"--column {word}: is not ROLE=NAME. Roles: {', '.join(ROLES)}. Write --column label=Y.")
        joins = role in given and role in ("text", "inputs")
        given[role] = f"{given[role]}\n{name}" if joins else name
    return given


def split_names(role: str, names: str) -> list[str]:
    """Return the columns of a role: only `text` and `inputs` may have several, one a line.

    >>> split_names("text", "subject\\nbody"), split_names("label", "a,b")
    (['subject', 'body'], ['a,b'])
    """
    return names.split("\n") if role in ("text", "inputs") else [names]


def normalize_name(name: str) -> str:
    """Write the name of a column as ROLES does.

    >>> normalize_name(" Question-Text "), normalize_name("answerKey")
    ('question_text', 'answerkey')
    """
    return re.sub(r"\W+", "_", name.strip().casefold()).strip("_")


def find_role(
    role: str, table: RawTable, given: Given, taken: Sequence[str] = (), *, fits: Callable[[Column], bool] | None = None
) -> str | None:
    """Find the column of a role: the one given, else the one with the clearest name that is not `taken`."""
    if role in given:
        return given[role]
    used = {*taken, *(name for other, names in given.items() for name in split_names(other, names))}
    named = {normalize_name(name): name for name in reversed(list(table.columns))}
    for usual in ROLES[role]:
        name = named.get(usual)
        if name is not None and name not in used and (fits is None or fits(table.columns[name])):
            return name
    return None


def is_id(name: str, column: Column) -> bool:
    """Whether a column numbers the records: by its name, or by values that all differ and are no text."""
    plain = normalize_name(name)
    return ((plain in ROLES["id"] or plain.endswith("_id")) and column.mean_words <= 1.2) or (
        column.kind == "number" and column.has_names
    )


def find_group(table: RawTable, given: Given, taken: Sequence[str]) -> str | None:
    """Find the column whose values must not be divided: one with a usual name, of which several records share values.

    A question's title names the article that its context is from.
    """

    def is_shared(column: Column) -> bool:
        return MIN_GROUPS <= column.num_distinct <= 0.9 * column.num_filled

    if given.get("group") == NO_GROUP:
        return None
    if found := find_role("group", table, given, taken, fits=is_shared):
        return found
    numbered = [name for name in table.columns if re.search("_(id|nr|no)$", normalize_name(name))]
    title = ["title"] if {"question", "context"} <= table.columns.keys() and "title" in table.columns else []
    usable = (name for name in (*numbered, *title) if name not in taken and is_shared(table.columns[name]))
    return next(usable, None)


NO_GROUP = "none"
MIN_GROUPS = 20  # fewer cannot be divided into three sets of the wanted sizes
