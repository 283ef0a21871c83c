"""Errors travel between ranks by pickle; their text is plain."""

from __future__ import annotations

import pickle

import pytest

from fivetune.cli import main
from fivetune.errors import (
    DataError,
    FiveTuneEnvironmentError,
    FiveTuneError,
    InterruptedRunError,
    MissingLabelError,
    NumericError,
    RecordError,
    is_out_of_memory,
    refuse_broken_context,
)


@pytest.mark.parametrize(
    "error",
    [
        RecordError("a.jsonl:3", "no question", skippable=False),
        MissingLabelError("a.jsonl:4", "no label"),
        InterruptedRunError("stopped by SIGTERM", signum=15),
        NumericError("step 3: loss nan", step=3),
    ],
)
def test_errors_keep_their_facts(error: FiveTuneError):
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(copy) is type(error) and str(copy) == str(error)
    assert vars(copy) == vars(error) and copy.exit_code == error.exit_code


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "NCCL error in: ProcessGroupNCCL.cpp, unhandled cuda error: Cuda failure 2 'out of memory'",
    ],
)
def test_libraries_that_get_no_memory_are_out_of_memory(words):
    assert is_out_of_memory(RuntimeError(words))


def test_a_kernel_that_breaks_the_device_ends_the_process():
    broken = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")
    with pytest.raises(FiveTuneEnvironmentError) as raised:
        refuse_broken_context(broken, "--train.capture off")
    assert str(raised.value) == (
        "device: a kernel has failed and left the device unusable for this process: CUDA error: an illegal memory "
        "access was encountered. Start again with --train.capture off; CUDA_LAUNCH_BLOCKING=1 names the kernel."
    )
    refuse_broken_context(RuntimeError("no kernel image"), "--train.capture off")


def test_the_text_of_an_error_moves_no_terminal(capsys):
    assert str(DataError("a\x1b[2Jb\u202ec.json: is missing")) == "a[U+001B][2Jb[U+202E]c.json: is missing"
    assert main(["train", "x\x1b]0;y\x07.yaml"]) == 2
    assert "x[U+001B]]0;y[U+0007].yaml" in capsys.readouterr().err
