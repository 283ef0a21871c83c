"""Every family: load self-check, training steps, generation and saving, on small models with published settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import family_kit
import kit
import pytest
import torch
from decoding_kit import question_store
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

import fivetune
from fivetune.cli import main
from fivetune.config import load_config
from fivetune.data.store.batch import collate, pad
from fivetune.errors import ConfigError, ModelError
from fivetune.machine.telemetry.devices import find_bf16_units
from fivetune.model.decode import Decoding, generate
from fivetune.model.family import FAMILIES, explain_unsupported_parts
from fivetune.model.flat import explain_unsupported_model
from fivetune.model.flops import count_train_flops
from fivetune.model.forward import compute_padded_losses, shift_right
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.module_flops import ModelFlops
from fivetune.model.save import save_model
from fivetune.model.tokenizer import load_tokenizer
from fivetune.training.setup import set_up

NAMES = list(family_kit.CONFIGS)
GEMMAS = ["t5gemma", "t5gemma2"]
PADDED = ["t5gemma", "t5gemma2", "longt5-tglobal", "bart"]
"""Those that `PaddedDecoder` decodes; the beam search of the others is in tests/decode."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("families")
    return lambda name: root / name if (root / name).exists() else family_kit.make_family_model(root / name, name)


def set_up_model(folder: Path, model: Path, name: str, **overrides: Any) -> Any:
    foreign = {"model__any_seq2seq": True} if name in family_kit.FOREIGN else {}
    return set_up(load_config(kit.recipe(folder, model, **{**foreign, **overrides})))


@pytest.mark.parametrize("name", NAMES)
def test_steps_train_and_the_saved_model_is_that_of_transformers(
    tmp_path: Path, folder_of: Callable[[str], Path], name: str
) -> None:
    setup = set_up_model(tmp_path, folder_of(name), name)
    learner = setup.learner
    losses = []
    for _ in range(3):
        batch = setup.data.stream.build_micro_batches(0)[0]
        nats, _ = learner.forward.compute_losses(learner.model, batch, device="cpu")
        losses.append(nats.sum().item())
        nats.sum().backward()
        learner.optimizer.step()
        learner.optimizer.zero_grad()
    assert losses[-1] < losses[0]
    save_model(learner.model, setup.loaded.tokenizer, tmp_path / "saved")
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved").eval()
    probe = pad(batch, pad_id=learner.model.config.pad_token_id)
    start = shift_right(
        probe.labels, start_id=learner.model.config.decoder_start_token_id, pad_id=theirs.config.pad_token_id
    )
    with torch.no_grad():
        expected = theirs(probe.input_ids, attention_mask=probe.attention_mask, decoder_input_ids=start).logits
        output = learner.model.eval()(probe.input_ids, attention_mask=probe.attention_mask, decoder_input_ids=start)
    assert torch.equal(output.logits, expected)
    again = load_model_and_tokenizer(str(tmp_path / "saved"), any_seq2seq=name in family_kit.FOREIGN)
    text = "Ann has a red hat."
    assert again.tokenizer(text).input_ids == setup.loaded.tokenizer(text).input_ids


@pytest.mark.parametrize(
    "name, num_beams, size",
    [*((name, 1, 0) for name in NAMES), *((name, beams, 2) for name in PADDED for beams in (1, 3))],
)
def test_answers_are_those_of_transformers(
    tmp_path: Path, folder_of: Callable[[str], Path], name: str, num_beams: int, size: int
) -> None:
    """A head of its own with a tempting end token makes answers of different lengths, so that rows leave the batch."""
    foreign = name in family_kit.FOREIGN
    model: Any = load_model_and_tokenizer(str(folder_of(name)), any_seq2seq=foreign).model
    store = question_store(tmp_path, folder_of(name), num_questions=5, any_seq2seq=foreign)
    end = model.config.eos_token_id
    torch.manual_seed(3)
    head = torch.randn_like(model.get_output_embeddings().weight)
    head[end] *= 2
    model.get_output_embeddings().weight = torch.nn.Parameter(head)
    decoding = Decoding(8, batch_size=3, num_beams=num_beams, no_repeat_ngram_size=size)
    found = list(generate(model, store, range(5), decoding, device="cpu", autocast=nullcontext))
    for one in found:
        inputs = torch.tensor([store.inputs[one.row].tolist()])
        theirs = model.generate(input_ids=inputs, **decoding.as_generation_config())[0, 1:].tolist()
        assert one.token_ids == (theirs[: theirs.index(end)] if end in theirs else theirs)
        with torch.no_grad():
            nats = compute_padded_losses(model, pad(collate(store, [one.row]), pad_id=model.config.pad_token_id))
        assert one.target_loss == pytest.approx(nats.sum().item(), rel=1e-4)
    assert len({tuple(one.token_ids) for one in found}) > 1


@pytest.mark.parametrize("name", GEMMAS)
def test_the_labels_of_gemma_end_once_and_are_shifted_once(
    tmp_path: Path, folder_of: Callable[[str], Path], name: str
) -> None:
    """Its tokenizer adds no end token (transformers #39656), and a collator must not shift before the model does
    (#40901): the loss equals that of transformers with labels made by hand.
    """
    setup = set_up_model(tmp_path, folder_of(name), name, model__dropout=None)
    model, words, store = setup.learner.model.eval(), setup.loaded.tokenizer, setup.data.stream.store
    assert words("Ann").input_ids[-1] != words.eos_token_id
    rows = [row for row in range(len(store)) if store.read_example(row).targets][:3]
    losses = []
    for row in rows:
        example, input_ids = store.read_example(row), store.inputs[row].tolist()
        by_hand = [*words(example.targets, add_special_tokens=False).input_ids, words.eos_token_id]
        assert store.labels[row].tolist() == by_hand
        assert input_ids == words(example.inputs).input_ids  # as the model card's example encodes a text
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([input_ids]), labels=torch.tensor([by_hand])).loss
        losses.append(theirs.item() * len(by_hand))
    batch = pad(collate(store, rows), pad_id=0)
    with torch.no_grad():
        nats = compute_padded_losses(model, batch)
    assert nats.sum(1).tolist() == pytest.approx(losses, rel=1e-5)
    starts = shift_right(batch.labels, start_id=model.config.decoder_start_token_id, pad_id=0)
    assert starts[:, 0].tolist() == [words.bos_token_id] * 3


@pytest.mark.parametrize("name", GEMMAS)
def test_a_damaged_file_of_gemma_is_refused(tmp_path: Path, folder_of: Callable[[str], Path], name: str) -> None:
    folder = shutil.copytree(folder_of(name), tmp_path / "copy")
    norm = "model.decoder.norm.weight"
    kit.changed_weights(folder, drop=(norm,))
    with pytest.raises(ModelError, match=rf"tensor {norm} is not in the file \(1 missing\)"):
        load_model_and_tokenizer(str(folder))
    kit.changed_weights(folder, model__decoder__norm__weight=torch.zeros(32), model__decoder__other=torch.zeros(2))
    with pytest.raises(ModelError, match=r"the model has no tensor model\.decoder\.other of the file"):
        load_model_and_tokenizer(str(folder))


def test_a_head_of_its_own_of_gemma_stays_its_own(tmp_path: Path, folder_of: Callable[[str], Path]) -> None:
    folder = shutil.copytree(folder_of("t5gemma"), tmp_path / "copy")
    head = torch.randn(384, 32)
    kit.changed_weights(folder, lm_head__out_proj__weight=head)
    loaded = load_model_and_tokenizer(str(folder))
    save_model(loaded.model, loaded.tokenizer, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False
    for model in (loaded.model, AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")):
        assert torch.equal(model.get_output_embeddings().weight, head)


def test_published_names_of_gemma_2_are_those_of_its_class(tmp_path: Path, folder_of: Callable[[str], Path]) -> None:
    """Published files name the text encoder without text_model, which transformers renames while it loads them."""
    folder = shutil.copytree(folder_of("t5gemma2"), tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    assert any(".encoder.text_model." in name for name in weights)
    renamed = {name.replace(".encoder.text_model.", ".encoder."): tensor for name, tensor in weights.items()}
    kit.changed_weights(folder, drop=tuple(weights), **renamed)
    load_model_and_tokenizer(str(folder))


def test_images_are_not_trained(tmp_path: Path, folder_of: Callable[[str], Path]) -> None:
    model = load_model_and_tokenizer(str(folder_of("t5gemma2"))).model
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen and all("vision_tower" in name or "multi_modal_projector" in name for name in frozen)
    whole = load_file(folder_of("t5gemma2") / "model.safetensors")
    assert frozen <= whole.keys()


@pytest.mark.parametrize("name", ["t5gemma2", "bart"])
def test_a_run_answers_as_it_was_evaluated(tmp_path: Path, folder_of: Callable[[str], Path], name: str) -> None:
    foreign = {"model__any_seq2seq": True} if name in family_kit.FOREIGN else {}
    run = fivetune.train(kit.recipe(tmp_path, folder_of(name), train__num_steps=2, eval__every_steps=2, **foreign))
    opened = fivetune.open_run(tmp_path / "run")
    evaluated = run.read_predictions(next(one for one in run.evals if one.step == opened.step))
    assert len(evaluated) == 12
    answered = opened.predict_file(tmp_path / "dev.json")
    assert {row.prediction.id: row.prediction.prediction for row in answered} == {
        one.id: one.prediction for one in evaluated
    }


def test_a_run_of_gemma_resumes_exactly(tmp_path: Path, folder_of: Callable[[str], Path]) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    settings = [kit.recipe(path, folder_of("t5gemma")) for path in (whole, parted) if not path.mkdir()]
    run = fivetune.train(settings[0])
    assert run.evals[-1].scores["f1"] >= 0 and run.machine.forward.kind == "flat"
    assert "too small" in run.machine.precision_why or not find_bf16_units()  # else timing chooses, in each run anew
    fivetune.train(settings[1], overrides={"train.num_steps": 3})
    fivetune.train(settings[1] | {"train": {**settings[1]["train"], "num_steps": 6}}, resume=True)
    assert kit.weights_of(whole / "run") == kit.weights_of(parted / "run")


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("bart", {"train__forward": "flat"}, r"train.forward: flat cannot run this model: it is a BartFor"),
        ("t5gemma", {"task__head": "extractive"}, r"model_type 't5gemma' has no span head. Set task.head: generate"),
        ("longt5-local", {"train__forward": "flat"}, r"flat cannot run this model: it is a LongT5For"),
    ],
)
def test_what_a_family_does_not_support_is_named(
    tmp_path: Path, folder_of: Callable[[str], Path], name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, ModelError), match=message):
        set_up_model(tmp_path, folder_of(name), name, **settings)


def test_strategies_and_devices_of_a_family() -> None:
    gemma, t5 = FAMILIES["t5gemma"], FAMILIES["t5"]
    explain = partial(explain_unsupported_parts, strategy="fsdp", sharded=True, device="cpu")
    assert explain(gemma) == (
        "strategy.name fsdp: it divides T5's blocks, and model_type 't5gemma' has others. Use single or ddp."
    )
    assert explain(gemma, sharded=False) == explain(t5) == ""
    assert explain(gemma, sharded=False, device="tpu").startswith("device tpu: model_type 't5gemma'")


@pytest.mark.parametrize("name", ["codet5", "t5gemma", "longt5-local", "longt5-tglobal"])
def test_operations_are_those_of_the_modules(folder_of: Callable[[str], Path], name: str) -> None:
    """A T5 is counted from its settings and from its modules alike; windows make long inputs linear."""
    model = load_model_and_tokenizer(str(folder_of(name))).model
    flops = ModelFlops(model)
    counted = flops.count([40, 9], [7, 3])
    if name == "codet5":
        expected = count_train_flops(model.config, [40, 9], [7, 3])
        assert (counted.encoder, counted.decoder) == pytest.approx((expected.encoder, expected.decoder))
        return
    short, long = (flops.count([n], [4]).encoder / n for n in (1_000, 2_000))
    assert long < 1.01 * short if name == "longt5-local" else long > 1.5 * short


def test_a_folder_with_vocab_json_and_merges_loads(tmp_path: Path, folder_of: Callable[[str], Path]) -> None:
    """CodeT5 is published without tokenizer.json."""
    folder = folder_of("codet5")
    words = json.loads((folder / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(words["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, words["merges"])]))
    names = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "pad_token": "<pad>"}
    settings = {"tokenizer_class": "RobertaTokenizer", "unk_token": "<unk>", **names}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    text = "Ann has a red hat."
    assert load_tokenizer(None, tmp_path)(text).input_ids == load_tokenizer(None, folder)(text).input_ids


def test_the_page_of_models_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "models", "--manual"]) == 0
    page = capsys.readouterr().out
    assert page == (Path(fivetune.__file__).parents[1] / "docs" / "models.md").read_text()
    assert main(["list", "tasks", "--manual"]) == 2


@pytest.mark.parametrize("name", ["t5gemma", "t5gemma2", "longt5-local", "ul2"])
def test_the_families_agree_with_their_models(folder_of: Callable[[str], Path], name: str) -> None:
    model = load_model_and_tokenizer(str(folder_of(name))).model
    family = FAMILIES[model.config.model_type]
    assert type(model).__name__ == family.generation_class
    assert family.flat == (explain_unsupported_model(model) == "")
    assert family.t5_blocks == (family.flat and explain_unsupported_model(model, "cuda:0") == "")
    assert family.t5_tables == hasattr(model, "shared")
