"""Requests and answers in OpenAI's form: completions and chats, whole or in pieces.

In: the table of a request, Predictions and WrittenTokens. Out: Asked, the options of the search, tables of answers.
Form: https://github.com/openai/openai-openapi, as the client `openai` reads it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log
from typing import Any, cast

from fivetune.data.readers.json_text import describe_kind, describe_value
from fivetune.data.readers.source_files import quote_value
from fivetune.delivery.serving.body import check_inputs, read_number, refuse
from fivetune.errors import suggest_names
from fivetune.model.decode import Decoding, Sampling, cut_at_stop
from fivetune.rundir.records import Prediction
from fivetune.training.answers.listening import WrittenToken
from fivetune.types import JsonTable

MAX_ANSWERS = 8  # to a prompt; a search has so many beams
MAX_STOPS = 16
NUMBERS: dict[str, tuple[type[int] | type[float], float, float]] = {
    "temperature": (float, 0, 2),
    "top_k": (int, 0, 2**31),
    "top_p": (float, 0, 1),
    "n": (int, 1, MAX_ANSWERS),
    "best_of": (int, 1, MAX_ANSWERS),
    "seed": (int, -(2**63), 2**63 - 1),
    "max_tokens": (int, 1, 2**31),
    "max_completion_tokens": (int, 1, 2**31),
}
"""Options that are numbers, with their least and largest values."""
SEARCH_OPTIONS = ("temperature", "top_k", "top_p", "n", "seed", "max_tokens", "stop")
"""Options that /predict takes too."""
COMPLETION_NUMBERS = {"logprobs": (int, 0, 5)}
CHAT_NUMBERS = {"top_logprobs": (int, 0, 20)}
NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Options of which only values without effect are taken: clients send them unasked."""
EMPTY = ("[]", "{}", "''")  # values without effect that say nothing in an error
IGNORED = (
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "reasoning_effort", "verbosity",
    "safety_identifier", "prompt_cache_key",
)  # fmt: skip
"""Options that have no effect here."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request in OpenAI's form. None is what the request leaves to the run.

    Args:
        inputs: texts as the model reads them, or the record of a chat.
        num_answers: to each input.
        logprobs: number of the most probable answers that are shown beside the answer's tokens; None: no logprobs.
        stream: whether the answer is sent in pieces.
        shows_usage: whether the last piece has the usage.
    """

    inputs: Sequence[JsonTable | str]
    is_chat: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    num_answers: int = 1
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    stream: bool = False
    shows_usage: bool = False


def read_completion_request(table: JsonTable, *, max_records: int) -> Asked:
    """Read a request of /v1/completions. Raises RequestError 422 for what the server does not offer, 413 for too many
    prompts.
    """
    numbers = NUMBERS | COMPLETION_NUMBERS
    _refuse_unknown(table, {"prompt", *numbers}, "completions")
    prompt = table.get("prompt")
    found: list[Any] = [prompt]
    if isinstance(prompt, list):
        found = prompt
    if not all(isinstance(one, str) for one in found):
        shown = "missing" if prompt is None else describe_value(prompt)
        raise refuse(f"prompt: {shown}. Allowed is a text, or a list of texts.")
    asked = _read_options(table, numbers, check_inputs(found, "prompt", max_records=max_records))
    if table.get("best_of") not in (None, asked.num_answers):
        raise refuse(f"best_of: {table['best_of']} is not offered. Allowed is n, {asked.num_answers}. Leave it out.")
    return replace(asked, logprobs=cast("int | None", table.get("logprobs")))


def read_search_options(table: JsonTable, inputs: list[JsonTable | str]) -> Asked:
    """Read the SEARCH_OPTIONS beside a record or the list `inputs` of /predict. Raises RequestError 422 for others."""
    numbers = {name: limits for name, limits in NUMBERS.items() if name in SEARCH_OPTIONS}
    for name in table:
        if name not in SEARCH_OPTIONS:
            raise refuse(f"body: {name[:100]!r} beside the list 'inputs'. {suggest_names(name, SEARCH_OPTIONS)}")
    return _read_options(table, numbers, inputs)


def take_search_options(record: JsonTable, columns: Collection[str]) -> JsonTable:
    """Take the SEARCH_OPTIONS beside the columns of a record out of it; a name of a column that is read is none.

    >>> body = {"question": "Why?", "n": 2}
    >>> take_search_options(body, ["question"]), body
    ({'n': 2}, {'question': 'Why?'})
    """
    return {name: record.pop(name) for name in SEARCH_OPTIONS if name in record and name not in columns}


def read_chat_request(table: JsonTable, *, fields: Sequence[str]) -> Asked:
    """Read a request of /v1/chat/completions. Raises RequestError 422 for what the server does not offer.

    Args:
        fields: the columns that the run reads.
    """
    numbers = NUMBERS | CHAT_NUMBERS
    _refuse_unknown(table, {"messages", "logprobs", *numbers}, "chats")
    asked = _read_options(table, numbers, [read_messages(table.get("messages"), fields)])
    number = cast("int | None", table.get("top_logprobs"))
    if not _read_flag(table, "logprobs"):
        if number is not None:
            raise refuse(f'top_logprobs: {number} without logprobs. Send "logprobs": true too, or leave it out.')
        return replace(asked, is_chat=True)
    return replace(asked, is_chat=True, logprobs=number or 0)


def read_messages(given: Any, fields: Sequence[str]) -> JsonTable | str:
    """Read what a run answers in a chat: the last turn of the user, after the system's if the run reads both.

    Args:
        fields: the columns that the run reads. Of one, the turn is its value; members of a list of messages, such as
            messages.0.content, get the turns; else the turn is the whole input.

    >>> chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who came?"}]
    >>> read_messages(chat, ["question"]), read_messages(chat, ["question", "context"])
    ({'question': 'Who came?'}, 'Who came?')
    >>> read_messages(chat, ["messages.0.content", "messages.1.content"])
    {'messages.0.content': 'Be brief.', 'messages.1.content': 'Who came?'}
    """
    if not isinstance(given, list) or not given:
        shown = "an empty list" if given == [] else describe_value(given)
        if given is None:
            shown = "missing"
        raise refuse(f'messages: {shown}. Allowed is a list of {{"role": ..., "content": TEXT}}.')
    spoken: dict[str, str] = {}  # the last text of each role
    for number, one in enumerate(cast("list[Any]", given)):
        where = f"messages[{number}]"
        message = cast("JsonTable", one) if isinstance(one, dict) else {}
        role = message.get("role")
        if not isinstance(role, str):
            raise refuse(f'{where}: {describe_value(one)}. Allowed is {{"role": ..., "content": TEXT}}.')
        spoken[role] = _read_content(message.get("content"), where) if role in ("system", "developer", "user") else ""
    if "user" not in spoken:
        raise refuse('messages: no turn of the user. Add {"role": "user", "content": TEXT}.')
    turn = spoken["user"]
    roots = {name.partition(".")[0] for name in fields if "." in name}
    if len(fields) == 1:
        return {fields[0]: turn}
    if len(fields) == 2 and len(roots) == 1:
        system = spoken.get("system", spoken.get("developer", ""))
        return dict(zip(sorted(fields), (system, turn), strict=True))
    return turn


def _read_content(content: Any, where: str) -> str:
    """Read the text of a message: a text, or a list of parts of the type text."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in cast("list[Any]", content) if isinstance(content, list) else [None]:
        text = cast("JsonTable", part).get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise refuse(
                f"{where}.content: {describe_kind(content)}. Allowed is a text, or a list of parts of type text."
            )
        texts.append(text)
    return "\n".join(texts)


def _refuse_unknown(table: JsonTable, own: set[str], kind: str) -> None:
    """Raise RequestError for an option that does not exist, or that has a value with an effect that is not offered."""
    names = {"model", "stop", "stream", "stream_options", *own, *NEUTRAL, *IGNORED}
    for name, given in table.items():
        if name not in names:
            raise refuse(f"{name[:100]!r}: no option of {kind}. {suggest_names(name, names)}")
        if name in NEUTRAL and given is not None and not _is_among(given, NEUTRAL[name]):
            neutral = quote_value(NEUTRAL[name][0])
            allowed = "" if neutral in EMPTY else f"Allowed is {neutral}. "
            raise refuse(f"{name}: {quote_value(given)} is not offered. {allowed}Leave it out.")


def _read_options(
    table: JsonTable, numbers: Mapping[str, tuple[type[int] | type[float], float, float]], inputs: list[JsonTable | str]
) -> Asked:
    """Read the options that completions and chats have both."""
    found: dict[str, Any] = {}
    for name, (kind, least, most) in numbers.items():
        given = table.get(name)
        if given is not None:
            found[name] = read_number(name, given, kind, least, most)
    stop = table.get("stop") or []
    texts: list[Any] = [stop]
    if isinstance(stop, list):
        texts = stop
    if len(texts) > MAX_STOPS or not all(isinstance(one, str) and one for one in texts):
        raise refuse(f"stop: {describe_value(stop)}. Allowed is a text, or a list of up to {MAX_STOPS} texts.")
    usage = table.get("stream_options") or {}
    if not isinstance(usage, dict):
        raise refuse(f'stream_options: {describe_value(usage)}. Allowed is {{"include_usage": true}}.')
    return Asked(
        inputs,
        temperature=found.get("temperature"),
        top_k=found.get("top_k"),
        top_p=found.get("top_p"),
        seed=found.get("seed"),
        max_tokens=found.get("max_completion_tokens", found.get("max_tokens")),
        num_answers=found.get("n", 1),
        stop=tuple(texts),
        stream=_read_flag(table, "stream"),
        shows_usage=_read_flag(cast("JsonTable", usage), "include_usage"),
    )


def _read_flag(table: JsonTable, name: str) -> bool:
    given = table.get(name)
    if given is not None and not isinstance(given, bool):
        raise refuse(f"{name}: {describe_value(given)}. Allowed is true or false.")
    return bool(given)


def _is_among(given: Any, values: Sequence[object]) -> bool:
    """Whether a value is one of several; true and false are no numbers."""
    return any(given == one and isinstance(given, bool) == isinstance(one, bool) for one in values)


def list_option_schemas() -> JsonTable:
    """List the options that completions and chats share, as schemas of OpenAPI."""
    found: JsonTable = {}
    for name, (kind, least, most) in NUMBERS.items():
        found[name] = {"type": "integer" if kind is int else "number", "minimum": least, "maximum": most}
    text = {"type": "string", "minLength": 1}
    found["stop"] = {"anyOf": [text, {"type": "array", "items": text, "maxItems": MAX_STOPS}]}
    found["stream"] = {"type": "boolean"}
    return found


# --- the search ---


def choose_decoding(asked: Asked, own: Decoding, *, writes: bool, takes_seed: bool = True) -> Decoding:
    """Choose the options of the search for a request; requests with equal ones share batches.

    Args:
        own: options of the run, from which those that the request gives depart.
        writes: whether the run writes its answers; spans and labels are not drawn, and have no length of their own.
        takes_seed: whether the engine draws by a seed.

    Raises RequestError 422 for more answers than there are labels, and for a seed that the engine does not take.
    """
    number = asked.num_answers
    if own.label_ids:
        if number > len(own.label_ids):
            raise refuse(f"n: {number}. The task has {len(own.label_ids)} labels. Ask for as many at most.")
        return own
    if not writes:
        return _extend_search(own, number)
    cap = min(asked.max_tokens or own.max_new_tokens, own.max_new_tokens)
    if asked.seed is not None and not takes_seed:
        raise refuse(f"seed: {asked.seed}. An export of format ctranslate2 draws by no seed. Leave it out.")
    stop = tuple(dict.fromkeys([*own.stop, *asked.stop]))
    own = replace(own, max_new_tokens=cap, min_new_tokens=min(own.min_new_tokens, cap), stop=stop)
    heat = asked.temperature
    if heat is None:
        heat = own.sampling.temperature if own.sampling else 0.0
    top_p = asked.top_p
    if not heat or top_p == 0:  # the most probable answer
        return _extend_search(
            replace(own, sampling=None, num_candidates=min(own.num_candidates, own.num_beams)), number
        )
    # A request that says how to draw, and not from which seed, wants another answer each time.
    drawn = own.sampling or Sampling(seed=None)
    seed = drawn.seed
    if asked.seed is not None:
        seed = asked.seed % 2**63
    elif asked.temperature is not None:
        seed = None
    sampling = Sampling(
        temperature=heat,
        top_k=drawn.top_k if asked.top_k is None else asked.top_k,
        top_p=drawn.top_p if top_p is None else top_p,
        seed=seed,
    )
    return replace(own, sampling=sampling, num_beams=1, num_candidates=number)


def refuse_hidden_logprobs(asked: Asked, decoding: Decoding, *, writes: bool) -> None:
    """Raise RequestError 422 for the most probable others of a token that is written: they are not kept.

    Args:
        decoding: options of the search. writes: whether the run writes its answers.
    """
    if not writes or decoding.label_ids or decoding.num_beams > 1:
        return
    is_most_probable = not (decoding.sampling or decoding.no_repeat_ngram_size or decoding.repetition_penalty != 1)
    if (asked.logprobs or 0) > is_most_probable:
        name = "top_logprobs" if asked.is_chat else "logprobs"
        raise refuse(
            f"{name}: {asked.logprobs} is not offered: of a written token only its own log p is known. "
            f"Allowed is {'0 or 1' if is_most_probable else '0'}."
        )


def _extend_search(own: Decoding, number: int) -> Decoding:
    """Search for several answers with as many beams; for one as the run does."""
    if number == 1:
        return own
    return replace(own, num_beams=max(own.num_beams, number), num_candidates=max(own.num_candidates, number))


# --- answers ---


@dataclass(slots=True)
class _Choice:
    """An answer as far as it is written: its tokens, and how much of its text has been sent."""

    tokens: list[WrittenToken] = field(default_factory=list[WrittenToken])
    sent: str = ""
    num_logged: int = 0  # tokens of which the logprobs have been sent

    @property
    def text(self) -> str:
        return "".join(one.text for one in self.tokens)


class AnswerForm:
    """Builds the answer to a request in its form.

    Args:
        model: its name.
        stop: texts before which an answer ends.
        sends_tokens: whether the tokens make the text of the answer, so that it can be sent while it is written.
    """

    def __init__(self, asked: Asked, model: str, *, stop: Sequence[str], sends_tokens: bool) -> None:
        self._asked = asked
        self._stop = stop
        self._sends_tokens = sends_tokens
        self._choices = [_Choice() for _ in range(len(asked.inputs) * asked.num_answers)]
        kind = "text_completion"
        prefix = "cmpl"
        if asked.is_chat:
            kind = "chat.completion.chunk" if asked.stream else "chat.completion"
            prefix = "chatcmpl"
        self._head: JsonTable = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    @property
    def listens(self) -> bool:
        """Whether the answer is made from its tokens too."""
        asked = self._asked
        return asked.stream or asked.logprobs is not None or asked.num_answers > 1

    def build_whole(self, found: Sequence[Prediction]) -> JsonTable:
        """Build the answer in one piece."""
        choices: list[JsonTable] = []
        for index, text, one in self._list_answers(found):
            logprobs = self._build_logprobs(self._choices[index], text, one)
            body: JsonTable = {"text": text}
            if self._asked.is_chat:
                body = {"message": {"role": "assistant", "content": text, "refusal": None}}
            reason = self._find_end(self._choices[index], one)
            choices.append({"index": index, **body, "logprobs": logprobs, "finish_reason": reason})
        return {**self._head, "choices": choices, "usage": self._count_usage(found)}

    def add_token(self, token: WrittenToken) -> JsonTable | None:
        """Add a token that was written; returns the piece that can be sent now, None without one."""
        index = token.record * self._asked.num_answers + token.answer
        choice = self._choices[index]
        choice.tokens.append(token)
        if not (self._asked.stream and self._sends_tokens):
            return None
        text = keep_stop_back(choice.text, self._stop)
        if len(text) <= len(choice.sent):
            return None
        return self._build_piece(index, text, None)

    def build_rest(self, found: Sequence[Prediction]) -> Iterator[JsonTable]:
        """Build the pieces that remain when all answers are written."""
        for index, text, one in self._list_answers(found):
            choice = self._choices[index]
            if len(text) > len(choice.sent):
                yield self._build_piece(index, text, one)
            yield self._build_piece(index, choice.sent, one, reason=self._find_end(choice, one))
        if self._asked.shows_usage:
            yield {**self._head, "choices": [], "usage": self._count_usage(found)}

    def _list_answers(self, found: Sequence[Prediction]) -> Iterator[tuple[int, str, Prediction]]:
        """Yield index, text and Prediction of each answer. Raises RequestError 422 if a record has too few."""
        number = self._asked.num_answers
        for record, one in enumerate(found):
            texts = [one.prediction]
            if number > 1:
                others = [candidate.text for candidate in one.candidates]
                texts = others if others[:1] == texts else [*texts, *others]
            if len(texts) < number:
                raise refuse(f"n: {number}, and input {record} has {len(texts)} answers. Ask for as many at most.")
            for place, text in enumerate(texts[:number]):
                yield record * number + place, text, one

    def _find_end(self, choice: _Choice, one: Prediction) -> str:
        """Why an answer ends: stop or length."""
        hit_cap = one.hit_cap
        if self._asked.num_answers > 1:  # the Prediction knows it of the first answer alone
            is_cut = cut_at_stop(choice.text, self._stop) != choice.text
            hit_cap = bool(choice.tokens) and not choice.tokens[-1].is_end and not is_cut
        return "length" if hit_cap else "stop"

    def _build_piece(self, index: int, text: str, one: Prediction | None, *, reason: str | None = None) -> JsonTable:
        """Build a piece with what an answer has beyond what was sent of it."""
        choice = self._choices[index]
        new = text[len(choice.sent) :]
        is_first = not choice.sent
        choice.sent = text
        logprobs = self._build_logprobs(choice, new, one) if new else None
        body: JsonTable = {"text": new}
        if self._asked.is_chat:
            delta: JsonTable = {"role": "assistant"} if is_first else {}
            body = {"delta": delta | {"content": new} if new else delta}
        return {**self._head, "choices": [{"index": index, **body, "logprobs": logprobs, "finish_reason": reason}]}

    def _build_logprobs(self, choice: _Choice, text: str, one: Prediction | None) -> JsonTable | None:
        """Build the logprobs of the tokens that were not sent yet; without tokens, of the answer as one token."""
        number = self._asked.logprobs
        if number is None:
            return None
        parts = [(token.text, token.logprob) for token in choice.tokens[choice.num_logged :] if not token.is_end]
        choice.num_logged = len(choice.tokens)
        # Greedy search writes the most probable token: it is its own runner-up (refuse_hidden_logprobs).
        tops: list[dict[str, float]] = [{token: logprob} if number else {} for token, logprob in parts]
        if not parts and one is not None:
            parts = [(text, _take_log(one.confidence or 0.0))]
            tops = [{candidate.text: _take_log(candidate.score) for candidate in one.candidates[:number]}]
        if self._asked.is_chat:
            content: list[JsonTable] = []
            for part, top in zip(parts, tops, strict=True):
                shown = [_describe_token(*other) for other in top.items()]
                content.append({**_describe_token(*part), "top_logprobs": shown})
            return {"content": content, "refusal": None}
        offsets: list[int] = []
        place = len(choice.sent) - len(text) if choice.sent else 0
        for part, _ in parts:
            offsets.append(place)
            place += len(part)
        return {
            "tokens": [part for part, _ in parts],
            "token_logprobs": [logprob for _, logprob in parts],
            "top_logprobs": tops if number else None,
            "text_offset": offsets,
        }

    def _count_usage(self, found: Sequence[Prediction]) -> JsonTable:
        """Count tokens; of several answers that were not heard token by token, the tokens of the best one."""
        num_read, num_written = count_answer_tokens(found)
        num_heard = sum(len(choice.tokens) for choice in self._choices)
        if num_heard and self._asked.num_answers > 1:
            num_written = num_heard
        return {
            "prompt_tokens": num_read,
            "completion_tokens": num_written,
            "total_tokens": num_read + num_written,
        }


def count_answer_tokens(found: Sequence[Prediction]) -> tuple[int, int]:
    """Return the tokens that were read and written for answers."""
    num_read = num_written = 0
    for one in found:
        num_read += one.num_input_tokens or 0
        num_written += one.num_tokens or 0
    return num_read, num_written


def _take_log(probability: float) -> float:
    """Compute the logarithm of a probability; JSON has no number for the logarithm of 0."""
    return log(probability) if probability else -9999.0


def _describe_token(text: str, logprob: float) -> JsonTable:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def keep_stop_back(text: str, stop: Sequence[str]) -> str:
    """Cut a text that is being written before what may become one of the texts `stop`.

    >>> keep_stop_back("Rouen. Q", ["Q:"]), keep_stop_back("Rouen. Quite", ["Q:"])
    ('Rouen.', 'Rouen. Quite')
    """
    cut = cut_at_stop(text, stop)
    if cut != text:
        return cut
    for one in stop:
        for length in range(len(one) - 1, 0, -1):
            if text.endswith(one[:length]):
                cut = min(cut, text[:-length].rstrip(), key=len)
                break
    return cut
