"""Errors travel between ranks by pickle."""

from __future__ import annotations

import pickle

import pytest

from fivetune.errors import FiveTuneError, InterruptedRunError, MissingLabelError, NumericError, RecordError


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
