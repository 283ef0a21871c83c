"""Conversion to CTranslate2, and answers computed by it.

In: a model folder; later rows of a store. Out: a folder of CTranslate2; one GeneratedAnswer per row.
Scores of given sequences are log-probabilities over the whole vocabulary: unlike FiveTune's own, they do not exclude
suppressed tokens. Whether each token of a target is the argmax is unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fivetune.data.store.token_store import TokenStore
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.errors import ConfigError
from fivetune.installation import require_package
from fivetune.model.decode import Decoding, GeneratedAnswer, OnToken, group_by_length
from fivetune.model.family import compute_output_scale
from fivetune.types import OnNote, ignore_note

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.model.modules import T5Model
    from fivetune.types import Autocast

VOCABULARY = "shared_vocabulary.json"


def import_ctranslate2() -> Any:
    """Import CTranslate2. Raises FiveTuneEnvironmentError if it is not installed."""
    require_package("format ctranslate2", "ctranslate2", "export")
    import ctranslate2  # since 4.8 without torch, which only its converters need

    return ctranslate2


def convert_model(source: Path, target: Path, quantization: str | None) -> None:
    """Convert a model folder. Raises FiveTuneEnvironmentError if CTranslate2 is not installed."""
    from fivetune.model.load import load_model_and_tokenizer
    from fivetune.model.tokenizer import suppress_output

    import_ctranslate2()
    from ctranslate2.converters import TransformersConverter

    loaded = load_model_and_tokenizer(str(source))
    model: Any = loaded.model
    words = _Words(loaded.tokenizer, int(model.config.vocab_size), int(model.config.decoder_start_token_id))

    class Converter(TransformersConverter):
        """Takes the model that FiveTune has compared with its files, and its scale of the decoder's output."""

        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            return model

        def load_tokenizer(self, *args: Any, **kwargs: Any) -> Any:
            return words

        def _load(self) -> Any:
            spec: Any = super()._load()
            spec.decoder.scale_outputs = compute_output_scale(model.config)
            return spec

    with suppress_output():
        Converter(str(source)).convert(str(target), quantization=quantization)


class _Words:
    """The vocabulary of a converted model: a name of its own for every row of the embedding.

    Args:
        num_rows: rows of the embedding.
        start_id: first decoder input, which the converter of T5Gemma calls bos_token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_rows: int, start_id: int) -> None:
        names: dict[str, int] = {}
        pieces = {number: piece for piece, number in tokenizer.get_vocab().items()}
        for number in range(num_rows):
            piece = pieces.get(number)
            if piece is None or piece in names:
                piece = f"<unused_{number}>"
            names[piece] = number
        self._names = names
        self._pieces = list(names)
        self.pad_token = tokenizer.pad_token
        self.eos_token = tokenizer.eos_token
        self.unk_token = tokenizer.unk_token or tokenizer.pad_token
        self.bos_token = self._pieces[start_id]

    def get_vocab(self) -> dict[str, int]:
        return self._names

    def convert_ids_to_tokens(self, number: int) -> str:
        return self._pieces[number]


class Engine:
    """A converted model, loaded for answers: `generate` with CTranslate2 in place of torch.

    Args:
        folder: of CTranslate2's files.
        device: cpu, cuda or cuda:N.
        num_threads: of a CPU.
    """

    def __init__(self, folder: Path, *, device: str, num_threads: int) -> None:
        kind, _, index = device.partition(":")
        self._pieces: list[str] = json.loads((folder / VOCABULARY).read_bytes())
        self._ids = {piece: number for number, piece in enumerate(self._pieces)}
        self._translator = import_ctranslate2().Translator(
            str(folder), device=kind, device_index=int(index or 0), intra_threads=num_threads
        )

    @property
    def compute_type(self) -> str:
        """The type that the device computes in, which may differ from the type of the weights."""
        return str(self._translator.compute_type)

    def __call__(
        self,
        model: T5Model,
        store: TokenStore,
        rows: Sequence[int],
        decoding: Decoding,
        *,
        device: str,
        autocast: Autocast,
        world: World = SINGLE_PROCESS,
        tokenizer: PreTrainedTokenizerBase | None = None,
        on_token: OnToken | None = None,
        on_note: OnNote = ignore_note,
    ) -> Iterator[GeneratedAnswer]:
        """Yield the answers for `rows` of a store, batch by batch, longest inputs first."""
        if decoding.sampling and decoding.sampling.seed is not None:
            raise ConfigError(
                f"eval.temperature {decoding.sampling.temperature:g}: an export of format ctranslate2 draws no "
                "answers by a seed. Allowed is 0. Leave it out, or answer with the run itself."
            )
        chosen = np.asarray(rows, dtype=np.int64)
        end_id = model.config.eos_token_id
        answer = self._choose_labels if decoding.label_ids else self._search
        for positions in group_by_length(store.inputs.lengths[chosen], decoding.batch_size):
            batch = chosen[positions].tolist()
            texts: list[list[str]] = []
            asked: list[list[Sequence[int]]] = []
            for row in batch:
                texts.append(self._to_pieces(store.inputs[row].tolist()))
                target = store.labels[row].tolist() if decoding.score_targets else []
                asked.append([target, decoding.phrase_ids, *decoding.label_ids])
            given = self._score_given(texts, asked, decoding.batch_size)
            yield from answer(batch, texts, given, decoding, end_id)

    def _search(
        self, rows: list[int], texts: list[list[str]], given: list[list[float]], decoding: Decoding, end_id: int
    ) -> Iterator[GeneratedAnswer]:
        """Yield answers of greedy or beam search."""
        for row, scores, found in zip(rows, given, self._translate(texts, decoding, end_id), strict=True):
            best, hit_cap, logprob = found[0]
            candidates: tuple[tuple[list[int], float], ...] = ()
            if len(found) > 1 or decoding.num_beams > 1:
                candidates = tuple((ids, p) for ids, _, p in found)
            yield GeneratedAnswer(
                row=row,
                token_ids=best,
                hit_cap=hit_cap,
                logprob=logprob,
                num_scored_tokens=len(best) + (not hit_cap),
                target_loss=-scores[0],
                phrase_loss=-scores[1] if decoding.phrase_ids else None,
                candidates=candidates,
            )

    def _choose_labels(
        self, rows: list[int], texts: list[list[str]], given: list[list[float]], decoding: Decoding, end_id: int
    ) -> Iterator[GeneratedAnswer]:
        """Yield the most probable label of every row."""
        longest = max(map(len, decoding.label_ids))
        greedy = replace(decoding, max_new_tokens=longest, num_beams=1, num_candidates=1)
        for row, scores, found in zip(rows, given, self._translate(texts, greedy, end_id), strict=True):
            written, hit_cap, _ = found[0]
            logprobs = tuple(scores[2:])
            ids = decoding.label_ids[logprobs.index(max(logprobs))]
            yield GeneratedAnswer(
                row=row,
                token_ids=list(ids[:-1]),
                hit_cap=False,
                logprob=max(logprobs),
                num_scored_tokens=len(ids),
                target_loss=-scores[0],
                phrase_loss=-scores[1] if decoding.phrase_ids else None,
                label_logprobs=logprobs,
                left_label_set=hit_cap or (*written, end_id) not in decoding.label_ids,
            )

    def _translate(
        self, texts: list[list[str]], decoding: Decoding, end_id: int
    ) -> list[list[tuple[list[int], bool, float]]]:
        """Search; returns the hypotheses of each text: ids without the end token, whether that is missing, log p."""
        penalty = decoding.length_penalty if decoding.num_beams > 1 else 0.0
        drawing: dict[str, float] = {}
        if decoding.sampling:
            drawing["sampling_topk"] = decoding.sampling.top_k
            drawing["sampling_topp"] = decoding.sampling.top_p
            drawing["sampling_temperature"] = decoding.sampling.temperature
        found = self._translator.translate_batch(
            texts,
            beam_size=decoding.num_beams,
            num_hypotheses=decoding.num_candidates,
            length_penalty=penalty,
            repetition_penalty=decoding.repetition_penalty,
            no_repeat_ngram_size=decoding.no_repeat_ngram_size,
            suppress_sequences=[[self._pieces[number]] for number in decoding.suppressed_ids] or None,
            max_input_length=0,
            max_decoding_length=decoding.max_new_tokens,
            min_decoding_length=decoding.min_new_tokens,
            return_end_token=True,
            return_scores=True,
            **drawing,
        )
        results: list[list[tuple[list[int], bool, float]]] = []
        for one in found:
            hypotheses: list[tuple[list[int], bool, float]] = []
            for pieces, score in zip(one.hypotheses, one.scores, strict=True):
                ids = [self._ids[piece] for piece in pieces]
                hit_cap = ids[-1:] != [end_id]
                # the engine divides log p by the length to the power of the penalty
                logprob = score * max(len(ids), 1) ** penalty
                hypotheses.append((ids if hit_cap else ids[:-1], hit_cap, logprob))
            results.append(hypotheses)
        return results

    def _score_given(
        self, texts: list[list[str]], given: list[list[Sequence[int]]], batch_size: int
    ) -> list[list[float]]:
        """Compute log p of the given sequences of each text, which end with the end token; 0 for an empty one."""
        results: list[list[float]] = []
        places: list[tuple[int, int]] = []  # of the sequences that are not empty
        sources: list[list[str]] = []
        targets: list[list[str]] = []
        for i, own in enumerate(given):
            results.append([0.0] * len(own))
            for j, ids in enumerate(own):
                if ids:
                    places.append((i, j))
                    sources.append(texts[i])
                    targets.append(self._to_pieces(ids[:-1]))  # the engine adds the end token
        if places:
            found = self._translator.score_batch(sources, targets, max_batch_size=batch_size, max_input_length=0)
            for (i, j), one in zip(places, found, strict=True):
                results[i][j] = float(sum(one.log_probs))
        return results

    def _to_pieces(self, ids: Sequence[int]) -> list[str]:
        return [self._pieces[number] for number in ids]
