"""The facts about T5's variants: one table, no torch, in agreement with transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kit
import pytest
from flat_kit import make_model

from fivetune.errors import ModelError
from fivetune.model.family import FAMILIES, compute_output_scale, find_family, should_scale_output


@pytest.mark.parametrize("family", kit.FAMILIES)
def test_classes_and_scale_are_those_of_transformers(family: str) -> None:
    model = make_model(family)
    assert type(model).__name__ == FAMILIES[model.config.model_type].generation_class
    tied = model.lm_head.weight is model.shared.weight
    # transformers 5.23 forces umT5's flag, 5.24 has one of its own
    is_forced = family == "umt5" and not hasattr(model.config, "scale_decoder_outputs")
    assert should_scale_output(model.config) == (tied or is_forced)
    assert compute_output_scale(model.config) == (32**-0.5 if should_scale_output(model.config) else 1.0)


def test_other_models_are_refused_by_name() -> None:
    allowed = r"Allowed: t5, mt5, umt5, longt5, t5gemma, t5gemma2\."
    with pytest.raises(
        ModelError, match=rf"here: model_type 'bert' is not of the T5 family: it has no decoder.*{allowed}"
    ):
        find_family({"model_type": "bert"}, Path("here"), any_seq2seq=True)
    with pytest.raises(ModelError, match=rf"'t5_gemma' .* Did you mean t5gemma or t5gemma2\? {allowed}"):
        find_family({"model_type": "t5_gemma"}, Path("here"))


def test_other_sequence_to_sequence_models_need_the_setting() -> None:
    with pytest.raises(ModelError, match=r"model_type 'bart' .* model\.any_seq2seq: true .* at your own risk"):
        find_family({"model_type": "bart"}, Path("here"))
    found = find_family({"model_type": "bart"}, Path("here"), any_seq2seq=True)
    assert found.generation_class == "BartForConditionalGeneration"
    assert not (found.flat or found.on_tpu or found.span_class)


def test_the_facts_need_no_torch() -> None:
    code = "import sys, fivetune.model.family; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
