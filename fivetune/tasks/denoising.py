"""Span corruption: T5's pre-training on texts of one's own, without any label; then fine-tune from the run's model.

Source: the user's own texts. Licence: the file's. A record:

    {"id": "7", "text": "Thank you for inviting me to your party last week."}

Spans of words are replaced by sentinels, and the target holds what they replaced (Raffel et al. 2020, sections 3.1.4,
3.3): 15 % of the words in spans of 3 on average, other ones in each of `copies`. A long text is divided into examples
of `words` words. Scored is F1 of the words that are filled in (ROUGE-1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import ClassVar

from pydantic import Field

from fivetune.tasks import TaskOptions, Template, fill_from_record, get_record_id, is_blank, list_template_columns
from fivetune.types import ConversionResult, RawRecord, TextExample

MIN_WORDS = 2  # of which one is left to tell the place of the other
NUM_SENTINELS = 100  # of T5's vocabulary, of which the last ends the target

SENTINEL = re.compile(r"<extra_id_\d+>")


class Denoising(TaskOptions):
    """Pre-training on one's own texts: words replaced by sentinels are learned."""

    # every word counts: SQuAD's F1 drops articles, which are often all of a span
    metrics = ({"name": "rouge", "types": ["rouge1"], "words": "unicode"}, "exact_match")
    main_metric = "rouge1_f1"
    writes_sentinels: ClassVar[bool] = True

    inputs: Template = Field(default="{text}", description="template of the texts, over any columns")
    share: float = Field(default=0.15, gt=0, lt=1, description="share of the words that are replaced")
    span: float = Field(default=3, ge=1, description="mean number of words of a span")
    copies: int = Field(default=1, ge=1, description="examples of each text, with other spans")
    words: int = Field(default=256, ge=MIN_WORDS, description="most words of an example; longer texts are divided")
    seed: int = Field(default=0, ge=0, description="seed of the spans")

    def to_text(self, record: RawRecord, *, labelled: bool = True) -> ConversionResult:
        """Return the examples of a text; None for one of a single word, and for a blank one, as between paragraphs.

        To predict, a text with sentinels of its own stays as it is.
        """
        columns = list_template_columns(self.inputs)
        if labelled and all(name in record.fields and is_blank(record, name) for name in columns):
            return None
        text, _ = fill_from_record(record, self.inputs)
        own = get_record_id(record)
        if not labelled and SENTINEL.search(text):
            return TextExample(own, text, "", (), (0, len(text)))
        words = SENTINEL.sub(" ", text).split()
        examples: list[TextExample] = []
        for copy in range(self.copies):
            for start in range(0, len(words), self.words):
                part = words[start : start + self.words]
                if len(part) < MIN_WORDS:  # a rest
                    continue
                spans = draw_spans(Random(f"{self.seed} {copy} {start} {text}"), len(part), self.share, self.span)
                inputs, targets = corrupt_spans(part, spans)
                name = f"{own}/{len(examples) + 1}" if examples else own
                examples.append(TextExample(name, inputs, targets, (self.from_text(targets),), (0, len(inputs))))
        if len(examples) == 1:
            return examples[0]
        return tuple(examples) or None

    def from_text(self, text: str) -> str:
        """Return the words of a target without its sentinels.

        >>> Denoising().from_text("<extra_id_0> flag <extra_id_1> is red <extra_id_2>")
        'flag | is red'
        """
        return " | ".join(part.strip() for part in SENTINEL.split(text) if part.strip())


def draw_spans(rng: Random, num_words: int, share: float, mean: float) -> list[tuple[int, int]]:
    """Draw the spans [start, end) of words to replace, in ascending order.

    As in T5's `random_spans_noise_mask`, round(share n) words, 1 to n - 1, are divided into round(words / mean) spans,
    each division as likely as any other. The other words are the gaps between them, and, unlike there, before the first
    and behind the last, which may be empty: T5's last span always ends the text.

    >>> draw_spans(Random(1), 20, 0.15, 3), draw_spans(Random(1), 20, 0.5, 3)
    ([(4, 7)], [(1, 3), (4, 7), (14, 19)])
    """
    num_replaced = min(max(round(share * num_words), 1), num_words - 1)
    num_kept = num_words - num_replaced
    num_spans = min(max(round(num_replaced / mean), 1), num_kept, NUM_SENTINELS - 1)
    spans: list[tuple[int, int]] = []
    gaps = _divide(rng, num_kept + 2, num_spans + 1)
    place = -1  # of the first gap, which may be empty, one is no word
    for gap, length in zip(gaps, _divide(rng, num_replaced, num_spans), strict=False):
        spans.append((place + gap, place + gap + length))
        place += gap + length
    return spans


def _divide(rng: Random, total: int, num_parts: int) -> list[int]:
    """Divide a number into parts of 1 or more."""
    cuts = [0, *sorted(rng.sample(range(1, total), num_parts - 1)), total]
    return [last - first for first, last in pairwise(cuts)]


def corrupt_spans(words: Sequence[str], spans: Sequence[tuple[int, int]]) -> tuple[str, str]:
    """Replace each span of words by a sentinel; the targets hold the replaced words (Raffel et al. 2020, figure 2).

    Spans are (start, end) in ascending order and do not touch.

    >>> corrupt_spans("the flag of Velka is red".split(), [(1, 2), (4, 6)])
    ('the <extra_id_0> of Velka <extra_id_1>', '<extra_id_0> flag <extra_id_1> is red <extra_id_2>')
    """
    inputs: list[str] = []
    targets: list[str] = []
    position = 0
    for index, (start, end) in enumerate(spans):
        inputs += [*words[position:start], f"<extra_id_{index}>"]
        targets += [f"<extra_id_{index}>", *words[start:end]]
        position = end
    inputs += words[position:]
    targets.append(f"<extra_id_{len(spans)}>")
    return " ".join(inputs), " ".join(targets)


SAMPLE = (
    RawRecord({"id": "7", "text": "Thank you for inviting me to your party last week."}, where="texts.jsonl:7"),
    TextExample(
        id="7",
        inputs="<extra_id_0> for inviting me to your party last week.",
        targets="<extra_id_0> Thank you <extra_id_1>",
        references=("Thank you",),
        clippable=(0, 53),
    ),
)
