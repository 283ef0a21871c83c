"""Chats in a table: lists of messages with roles, and the turns of dialogues.

In: a Survey. Out: Readings of the first exchange of each chat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    """Yield the first exchange of lists of messages, {"role": ..., "content": ...} or {"from": ..., "value": ...}, or
    of texts."""
    for name, column in survey.columns.items():
        member = _find_text_of_turns(survey, name) if has_word(name, DIALOGUES) else None
        if member is not None:
            reason = f"{name} holds the turns of dialogues; the first answer is learned, and what follows is not read"
            roles = {"inputs": [f"{name}.0{member}"], "targets": [f"{name}.1{member}"]}
            others = describe_outputs(survey.list_outputs([name]))
            evidence = [Evidence(CERTAIN, "lists of turns")]
            yield Reading("chat", "jsonl", roles, reason, evidence=evidence, doubts=others)
        for role, content, *speakers in CHATS if column.kind == "list" else ():
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
    turns = [turn for chat in survey.read_lists(name)[:SAMPLE] for turn in chat]
    if turns and all(isinstance(turn, list) and len(cast("list[object]", turn)) == 2 for turn in turns):
        return ".1"
    objects = [turn for turn in turns if isinstance(turn, Mapping)]
    if not objects or not {*objects[0]}.isdisjoint(role for role, *_ in CHATS):
        return None
    return next((f".{one}" for one in TURN_TEXTS if all(isinstance(turn.get(one), str) for turn in objects)), None)


def _read_messages(survey: Survey, name: str, role: str, content: str, speakers: Sequence[str]) -> Iterator[Reading]:
    """Yield the readings of a column of chats.

    Args:
        role, content: the members of a message with its speaker and its text.
        speakers: system, user and assistant as `role` names them.
    """
    chats = survey.read_lists(name)
    spoken = [[turn.get(role) for turn in chat if isinstance(turn, Mapping)] for chat in chats]
    if not any(content in turn for chat in chats for turn in chat if isinstance(turn, Mapping)):
        return
    form = speakers if spoken[0][:1] == speakers[:1] else speakers[1:]  # with or without a system
    num_other = sum(roles[: len(form)] != form for roles in spoken)
    paths = [f"{name}.{place}.{content}" for place in range(len(form))]
    if num_other > 0.5 * len(chats):
        # what is asked alone, beside a column of answers
        answers = survey.list_columns("targets", "answer", minimum=USUAL)
        for target in answers if all(roles == form[:-1] for roles in spoken) else ():
            reason = f"{name} holds messages by {join_names(form[:-1])}, and {target} the answer"
            roles = {"inputs": paths[:-1], "targets": [target]}
            others = describe_outputs([one for one in answers if one != target])
            evidence = [Evidence(CERTAIN, "messages that end with a question")]
            yield Reading("chat", "jsonl", roles, reason, evidence=evidence, doubts=others)
        return
    reason = f"{name} holds messages by {join_names(form)}; the first answer is learned"
    num_long = sum(len(roles) > len(form) for roles in spoken)
    further = f"{num_long:,} of {len(chats):,} chats go on after the first answer, which is not read"
    warnings = [further] if num_long else []
    counts = Counter(str(one) for roles in spoken for one in roles if one not in speakers)
    shown = ", ".join(f"{one} ({number:,})" for one, number in counts.most_common(5))
    doubts: list[str] = []
    if num_other:  # a call of a tool would be learned as the answer
        others = f"{num_other:,} of {len(chats):,} chats do not begin with {join_names(form)}"
        doubts.append(f"{others}, and their first turns are read as if they did{f': {shown}' if shown else ''}")
    elif shown:
        warnings.append(f"turns of others are not read: {shown}")
    warnings += [f"{one} is not read" for one in survey.columns if one in ("tools", "functions")]
    outputs = survey.list_outputs([name])
    doubts += describe_outputs(outputs)
    evidence = [Evidence(CERTAIN, "lists of messages")]
    for target in (paths[-1], *outputs):
        roles = {"inputs": paths[:-1], "targets": [target]}
        yield Reading("chat", "jsonl", roles, reason, warnings=warnings, evidence=evidence, doubts=doubts)
