"""The number of examples that are answered at once, chosen by the free memory and halved where it runs out.

In: an evaluator and questions. Out: their answers; what is answered when memory runs out is not answered again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import psutil
from numpy.typing import NDArray

from fivetune.errors import is_out_of_memory
from fivetune.training.answers.evaluator import Answered, Evaluator

if TYPE_CHECKING:
    from fivetune.model.modules import T5Model

MOST = {"cuda": 256}  # more examples at once fill a GPU no better
MOST_ELSEWHERE = 64
FREE_SHARE = 0.5  # of the free memory, which the estimate may fill: allocators and kernels need room


@dataclass(slots=True)
class AutoBatchSize:
    """Chooses batch sizes, and remembers the one at which memory sufficed after it had run out.

    Args:
        limit: the largest size; None before memory has run out.
    """

    limit: int | None = None

    def choose(self, evaluator: Evaluator, model: T5Model) -> int:
        """Choose a power of two whose batch of the longest inputs fits into FREE_SHARE of the free memory."""
        kind = evaluator.device.partition(":")[0]
        needed = estimate_example_bytes(
            model.config,
            num_input_tokens=int(evaluator.store.inputs.lengths.max()),
            max_new_tokens=evaluator.decoding.max_new_tokens,
            num_beams=evaluator.decoding.num_beams,
        )
        most = MOST.get(kind, MOST_ELSEWHERE)
        fitting = int(FREE_SHARE * measure_free_bytes(kind) / needed)
        largest = max(1, min(most, self.limit or most, fitting))
        return 1 << (largest.bit_length() - 1)  # a power of two: halves of it are sizes too


def estimate_example_bytes(config: object, *, num_input_tokens: int, max_new_tokens: int, num_beams: int) -> float:
    """Estimate the memory of answering one example, in bytes: keys and values of the decoder in fp32, and one layer of
    the encoder with its scores of attention (S x S per head).

    >>> from types import SimpleNamespace
    >>> t5_small = SimpleNamespace(d_model=512, d_kv=64, num_heads=8, d_ff=2048, num_layers=6, num_decoder_layers=6)
    >>> round(estimate_example_bytes(t5_small, num_input_tokens=512, max_new_tokens=32, num_beams=1) / 2**20)
    45
    """
    sizes = {name: int(getattr(config, name)) for name in ("d_model", "d_kv", "num_heads", "d_ff", "num_layers")}
    layers = int(getattr(config, "num_decoder_layers", None) or sizes["num_layers"])
    inner = sizes["num_heads"] * sizes["d_kv"]
    length = num_input_tokens
    # Keys and values of the inputs are shared by all beams, the answers' own are not.
    cache = 2 * layers * inner * (length + num_beams * max_new_tokens)
    # One layer at a time: hidden states, queries, keys, values and the feed-forward's activations, and the scores.
    activations = length * (4 * sizes["d_model"] + 4 * inner + 2 * sizes["d_ff"])
    scores = 2 * sizes["num_heads"] * length**2
    return 4.0 * (cache + activations + scores)


def measure_free_bytes(kind: str) -> float:
    """Measure the free memory of the device, in bytes: on a GPU also what torch keeps and does not use."""
    if kind == "cuda":
        import torch

        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return float(torch.cuda.mem_get_info()[0] + unused)
    return float(psutil.virtual_memory().available)


def predict_in_batches(
    evaluator: Evaluator,
    model: T5Model,
    questions: Sequence[int] | NDArray[np.int64],
    batch_size: AutoBatchSize | int | None,
) -> Iterator[Answered]:
    """Yield number and Prediction of each question as soon as it is answered.

    Args:
        batch_size: None: the evaluator's batch size. An AutoBatchSize halves the size where memory runs out, down to 1;
            with a number the error of the device is raised.
    """
    missing = np.asarray(questions)
    while len(missing):
        if isinstance(batch_size, AutoBatchSize):
            size = batch_size.choose(evaluator, model)
        else:
            size = batch_size or evaluator.decoding.batch_size
        answered: list[int] = []
        try:
            for question, prediction in replace_batch_size(evaluator, size).predict(model, questions=missing):
                answered.append(question)
                yield question, prediction
            return
        except (RuntimeError, MemoryError) as error:
            if not isinstance(batch_size, AutoBatchSize) or not is_out_of_memory(error) or size == 1:
                raise
            batch_size.limit = size // 2
        # Outside the handler, whose traceback keeps the tensors of the failed batch.
        if evaluator.device.startswith("cuda"):
            import torch

            torch.cuda.empty_cache()
        missing = np.setdiff1d(missing, answered)


def replace_batch_size(evaluator: Evaluator, size: int) -> Evaluator:
    """Return the evaluator with another number of examples per generation batch."""
    return replace(evaluator, decoding=replace(evaluator.decoding, batch_size=size))
