"""A first capture in a process of its own: one that fails may leave the process without random numbers or memory.

In: a model's config, precision and bucket, as JSON on the standard input. Out: nothing, or the reason on the last line
of the standard error. An operation that is not allowed in a capture invalidates it: torch before 2.13 then keeps its
generator in the state of a capture, and every later dropout fails; any version keeps the allocator's pool open.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import torch

from fivetune.errors import format_error
from fivetune.model.cuda.buckets import Bucket, Buckets
from fivetune.model.cuda.kernel_trial import run_elsewhere
from fivetune.model.cuda.static_step import GraphRecorder, make_graph_recorder, refuse_broken_generator
from fivetune.training.compute_config import ComputeConfig
from fivetune.types import JsonTable

LONGEST_SECONDS = 300.0  # of a trial that compiles all kernels; a capture that hangs is one that fails
NUM_BLOCKS = 1  # of each stack: every kind of kernel occurs in one
COMMAND = (sys.executable, "-m", "fivetune.training.autotune.capture_trial")


def try_capture(config: JsonTable, bucket: Bucket, *, device: str, precision: str, fused: bool) -> str:
    """Capture forward and backward of a model with one block per stack, in another process.

    Returns: the reason why that failed; empty if it did not.
    """
    request = {
        "config": {**config, "num_layers": NUM_BLOCKS, "num_decoder_layers": NUM_BLOCKS},
        "bucket": astuple(bucket),
        "device": device,
        "precision": precision,
        "fused": fused,
    }
    _, failure = run_elsewhere(COMMAND, request, longest_seconds=LONGEST_SECONDS)
    return f"a first capture, in a process of its own, failed: {failure}" if failure else ""


def run_request(request: Mapping[str, Any], recorder: GraphRecorder) -> None:
    """Build the model of a request, record a graph, replay it and draw a random number.

    Raises RuntimeError with the reason of a failed recording, and any error of what follows.
    """
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    from fivetune.model.cuda.graphed import GraphedUpdate, attach_flat_gradients

    device = request["device"]
    precision = request["precision"]
    bucket = Bucket(*request["bucket"])
    config = AutoConfig.for_model(**request["config"])
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).to(device)
    graphs = GraphedUpdate(
        model,
        attach_flat_gradients(model),
        Buckets(bucket.num_sequences, bucket.longest_input, bucket.longest_target, (bucket,)),
        device=device,
        autocast=ComputeConfig(device, precision).make_autocast,
        fused=request["fused"],
    )
    graphs.record(recorder)
    if graphs.steps.failure:
        raise RuntimeError(graphs.steps.failure)
    # A recording can succeed whose replay fails, or whose random numbers are gone.
    for state in graphs.steps.states.values():
        assert state.replay is not None
        state.replay()
    refuse_broken_generator(device)


def main() -> int:
    """Run the request on the standard input; print why it failed."""
    try:
        run_request(json.load(sys.stdin), make_graph_recorder())
    except Exception as error:  # of any class: drivers and kernels raise many
        sys.stderr.write(f"{format_error(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
