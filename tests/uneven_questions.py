"""A SQuAD file of uneven contexts."""

from __future__ import annotations

import json
from pathlib import Path

from kit import WORDS


def questions(path: Path, *, num: int, offset: int = 0) -> str:
    """A SQuAD 2.0 file whose contexts have one to twelve sentences; every third question is unanswerable."""
    paragraphs = []
    for i in range(offset, offset + num):
        facts = [
            f"{WORDS[4 + j % 5]} has a {WORDS[(i + j) % 4]} {WORDS[9 + (i + j) % 5]}." for j in range(1 + i * 7 % 12)
        ]
        answer = f"{WORDS[i % 4]} {WORDS[9 + i % 5]}"
        golds = [] if i % 3 == 0 else [{"text": answer, "answer_start": facts[0].index(answer)}]
        asked = {"id": f"q{i}", "question": "What has Ann?", "answers": golds, "is_impossible": not golds}
        paragraphs.append({"context": " ".join(facts), "qas": [asked]})
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "Things", "paragraphs": paragraphs}]}))
    return str(path)
