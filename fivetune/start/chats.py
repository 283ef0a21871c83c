"""Chats in a table: lists of messages with roles, and the turns of dialogues.

In: a Survey. Out: Readings of the exchange of each chat; of longer ones with roles, of the last answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from fivetune.start.roles import DIALOGUES, USUAL, has_word
from fivetune.start.survey import CERTAIN, SAMPLE, Evidence, Reading, Survey, describe_outputs, join_names

CHATS = (
    ("role", "content", "system", "user", "assistant"),
    ("role", "text", "system", "user", "assistant"),
    ("from", "value", "system", "human", "gpt"),
)
TURN_TEXTS = ("text", "content", "utterance", "value", "message")


def read_chat(survey: Survey) -> Iterator[Reading]:
    """Yield the exchange of lists of messages, {"role": ..., "content": ...} or {"from": ..., "value": ...}, or
    of texts."""
    for name, column in survey.columns.items():
        member = _find_text_of_turns(survey, name) if has_word(name, DIALOGUES) else None
        if member is not None:
            reason = f"{name} holds the turns of dialogues; the first answer is learned, and what follows is not read"
            others = describe_outputs(survey.list_outputs([name]))
            yield _build(reason, [f"{name}.0{member}"], f"{name}.1{member}", "lists of turns", others)
        if column.kind == "list":
            for role, content, *speakers in CHATS:
                yield from _read_messages(survey, name, role, content, speakers)


def _find_text_of_turns(survey: Survey, name: str) -> str | None:
    """Find the member of turns without a role that holds their text, with a dot before: the second one of pairs with a
    speaker; "" for turns that are texts, None for others.
    """
    column = survey.columns[name]
    if column.is_list_of_texts:
        return ""
    if column.kind != "list":
        return None
    turns: list[object] = []
    for chat in survey.read_lists(name)[:SAMPLE]:
        turns += chat
    if turns and all(isinstance(turn, list) and len(cast("list[object]", turn)) == 2 for turn in turns):
        return ".1"
    objects = [turn for turn in turns if isinstance(turn, Mapping)]
    # messages with a role are read as such
    if not objects or any(role in objects[0] for role, *_ in CHATS):
        return None
    for member in TURN_TEXTS:
        if all(isinstance(turn.get(member), str) for turn in objects):
            return f".{member}"
    return None


def _read_messages(survey: Survey, name: str, role: str, content: str, speakers: Sequence[str]) -> Iterator[Reading]:
    """Yield the readings of a column of chats.

    Args:
        role, content: members of a message with its speaker and its text.
        speakers: system, user and assistant as `role` names them.
    """
    spoken: list[list[object]] = []  # the speakers of each chat
    has_content = False
    for chat in survey.read_lists(name):
        turns = [turn for turn in chat if isinstance(turn, Mapping)]
        spoken.append([turn.get(role) for turn in turns])
        has_content = has_content or any(content in turn for turn in turns)
    if not has_content:
        return
    form = speakers if spoken[0][:1] == speakers[:1] else speakers[1:]  # with or without a system
    paths = [f"{name}.{place}.{content}" for place in range(len(form))]
    num_other = sum(roles[: len(form)] != form for roles in spoken)
    strange = Counter(str(one) for roles in spoken for one in roles if one not in speakers)
    has_answers = not strange and any(roles[-1:] == speakers[-1:] for roles in spoken)
    if num_other > 0.5 * len(spoken) and not has_answers:
        # what is asked alone, beside a column of answers
        if any(roles != form[:-1] for roles in spoken):
            return
        answers = survey.list_columns("targets", "answer", minimum=USUAL)
        for target in answers:
            reason = f"{name} holds messages by {join_names(form[:-1])}, and {target} the answer"
            others = describe_outputs([one for one in answers if one != target])
            yield _build(reason, paths[:-1], target, "messages that end with a question", others)
        return
    reason = f"{name} holds messages by {join_names(form)}; the answer is learned"
    warnings: list[str] = []
    doubts: list[str] = []
    shown = ", ".join(f"{one} ({number:,})" for one, number in strange.most_common(5))
    is_longer = any(roles != form for roles in spoken)
    if is_longer and has_answers:
        paths = [f"{name}.chat", f"{name}.answer"]
        reason = f"{name} holds messages by {join_names(speakers)}; the last answer is learned from all before it"
    elif is_longer:
        reason = (
            f"{name} holds messages by {join_names(form)}; the first answer is learned, and what follows is not read"
        )
    if num_other and shown:  # a call of a tool would be learned as the answer
        others = f"{num_other:,} of {len(spoken):,} chats do not begin with {join_names(form)}"
        doubts.append(f"{others}, and their first turns are read as if they did: {shown}")
    elif shown:
        warnings.append(f"turns of others are not read: {shown}")
    warnings += [f"{one} is not read" for one in survey.columns if one in ("tools", "functions")]
    outputs = survey.list_outputs([name])
    doubts += describe_outputs(outputs)
    for target in (paths[-1], *outputs):
        found = _build(reason, paths[:-1], target, "lists of messages", doubts)
        yield replace(found, warnings=warnings)


def _build(reason: str, inputs: Sequence[str], target: str, form: str, doubts: Sequence[str]) -> Reading:
    """Build the reading of an exchange, which is certain by the form of its column."""
    roles = {"inputs": inputs, "targets": [target]}
    return Reading("chat", "jsonl", roles, reason, evidence=[Evidence(CERTAIN, form)], doubts=doubts)
