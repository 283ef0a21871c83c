"""Loading: what is in the file is what is in memory, for every family, or nothing is loaded."""

from __future__ import annotations

import json
import shutil

import kit
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from fivetune.errors import FiveTuneEnvironmentError, ModelError
from fivetune.model.family import infer_output_scale
from fivetune.model.load import count_parameters, load_model_and_tokenizer
from fivetune.model.save import save_model
from fivetune.model.tokenizer import list_sentinel_ids, load_tokenizer

FAMILIES = list(kit.FAMILIES)
UNTIED = ["v1_1", "mt5", "umt5"]
PROBE = {"input_ids": torch.tensor([[3, 5, 7, 1]]), "decoder_input_ids": torch.tensor([[0, 5, 3]])}


@torch.no_grad()
def _logits(model) -> torch.Tensor:
    return model.eval()(**PROBE).logits


@pytest.fixture
def copy_of(tmp_path, family_folders):
    return lambda family: shutil.copytree(family_folders[family], tmp_path / family)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_reloaded_model_is_equal(tmp_path, family_folders, family):
    first = load_model_and_tokenizer(str(family_folders[family]))
    save_model(first.model, first.tokenizer, tmp_path / "again")
    again = load_model_and_tokenizer(str(tmp_path / "again"))
    assert torch.equal(_logits(first.model), _logits(again.model))
    assert again.tokenizer("Ann has a red hat.").input_ids == first.tokenizer("Ann has a red hat.").input_ids
    assert again.warnings == []
    assert next(again.model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_folder_loads_with_transformers_alone(family_folders, family):
    """What `model/` of a run promises; umT5's scaling is transformers' own business (see selfcheck.py)."""
    folder = family_folders[family]
    tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    assert tied is (family == "t5")
    theirs = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert (theirs.lm_head.weight is theirs.shared.weight) is tied
    if family != "umt5":
        assert torch.equal(_logits(theirs), _logits(load_model_and_tokenizer(str(folder)).model))


@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_scaled_by_the_rule_of_the_family(family_folders, family):
    """By hand: T5 1.0 multiplies the decoder's output with d_model^-1/2, the others do not."""
    model = load_model_and_tokenizer(str(family_folders[family])).model
    weights = load_file(family_folders[family] / "model.safetensors")
    head = weights.get("lm_head.weight", weights["shared.weight"])
    with torch.no_grad():
        output = model(**PROBE, output_hidden_states=True)
    hidden = output.decoder_hidden_states[-1] * (32**-0.5 if family == "t5" else 1.0)
    assert torch.allclose(output.logits, hidden @ head.T, atol=1e-5)


def test_published_umt5_folder_is_not_scaled(copy_of):
    """google/umt5-*: tie_word_embeddings false, a head of its own; transformers 5.23 would scale it."""
    folder = kit.changed_config(copy_of("umt5"), tie_word_embeddings=False)
    model = load_model_and_tokenizer(str(folder)).model
    with torch.no_grad():
        output = model(**PROBE, output_hidden_states=True)
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.allclose(output.logits, output.decoder_hidden_states[-1] @ head.T, atol=1e-5)
    assert not torch.equal(head, model.shared.weight)


@pytest.mark.parametrize("family", UNTIED)
def test_dropped_head_is_refused(copy_of, family):
    folder = kit.changed_weights(copy_of(family), drop=("lm_head.weight",))
    with pytest.raises(
        ModelError, match=r"config.json declares an output head of its own, but the file holds no lm_head"
    ):
        load_model_and_tokenizer(str(folder))


def test_head_of_its_own_under_a_t5_config_is_refused(copy_of):
    folder = kit.changed_weights(copy_of("t5"), lm_head__weight=torch.randn(384, 32))
    for flag in (True, None):  # absent means tied in T5 1.0
        kit.changed_config(folder, tie_word_embeddings=flag)
        with pytest.raises(ModelError, match=r"lm_head.weight"):
            load_model_and_tokenizer(str(folder))


def test_head_equal_to_the_embedding_is_tied(copy_of):
    """Some published T5 files hold the tied matrix several times over."""
    folder = copy_of("t5")
    before = _logits(load_model_and_tokenizer(str(folder)).model)
    shared = load_file(folder / "model.safetensors")["shared.weight"]
    kit.changed_weights(folder, lm_head__weight=shared, encoder__embed_tokens__weight=shared.clone())
    assert torch.equal(_logits(load_model_and_tokenizer(str(folder)).model), before)


def test_a_head_of_its_own_may_equal_the_embedding(copy_of):
    folder = kit.changed_config(copy_of("t5"), tie_word_embeddings=False)
    shared = load_file(folder / "model.safetensors")["shared.weight"]
    kit.changed_weights(folder, lm_head__weight=shared.clone())
    with pytest.raises(ModelError, match=r"is scaled \(scale_decoder_outputs\), which only tied models do"):
        load_model_and_tokenizer(str(folder))
    kit.changed_config(folder, scale_decoder_outputs=False)
    model = load_model_and_tokenizer(str(folder)).model
    assert torch.equal(model.lm_head.weight, model.shared.weight)
    assert model.lm_head.weight is not model.shared.weight
    with pytest.raises(ModelError, match=r"the file holds no lm_head.weight"):
        load_model_and_tokenizer(str(kit.changed_weights(folder, drop=("lm_head.weight",))))


@pytest.mark.parametrize("name", ["eos_token_id", "pad_token_id"])
def test_a_tokenizer_with_other_ids_is_refused(copy_of, name):
    folder = kit.changed_config(copy_of("t5"), **{name: 7})
    said = {"eos_token_id": 1, "pad_token_id": 0}[name]
    with pytest.raises(ModelError, match=rf"{name} is 7 in config.json, {said} in the tokenizer"):
        load_model_and_tokenizer(str(folder))


@pytest.mark.parametrize("name", ["decoder.block.1.layer.0.SelfAttention.q.weight", "encoder.final_layer_norm.weight"])
def test_missing_tensor_is_named(copy_of, name):
    folder = kit.changed_weights(copy_of("t5"), drop=(name,))
    with pytest.raises(ModelError, match=rf"tensor {name} is not in the file \(1 missing\). Get the model again."):
        load_model_and_tokenizer(str(folder))


def test_missing_embedding_is_named(copy_of):
    folder = kit.changed_weights(copy_of("t5"), drop=("shared.weight",))
    with pytest.raises(ModelError, match=r"tensor shared.weight is not in the file"):
        load_model_and_tokenizer(str(folder))


def test_extra_tensor_is_named(copy_of):
    folder = kit.changed_weights(copy_of("t5"), adapter__weight=torch.zeros(2, 2))
    with pytest.raises(ModelError, match=r"the model has no tensor adapter.weight of the file"):
        load_model_and_tokenizer(str(folder))


def test_leftover_of_old_t5_files_is_no_error(copy_of):
    name = "decoder__block__0__layer__1__EncDecAttention__relative_attention_bias__weight"
    folder = kit.changed_weights(copy_of("t5"), **{name: torch.zeros(32, 4)})
    assert load_model_and_tokenizer(str(folder)).warnings == []


def test_weights_of_another_shape(copy_of):
    folder = kit.changed_config(copy_of("t5"), d_ff=64)
    with pytest.raises(
        ModelError, match=r"fit config.json: .*block.0.*wi.* is \[\d+, 32\] in the file, and \[64, 32\]"
    ):
        load_model_and_tokenizer(str(folder))


def test_a_config_of_more_layers_than_weights_is_refused_before_they_are_built(copy_of):
    folder = kit.changed_config(copy_of("t5"), num_layers=10_000_000)
    with pytest.raises(ModelError, match=r"config.json has num_layers 10,000,000, the files hold \d+ tensors"):
        load_model_and_tokenizer(str(folder))


@pytest.mark.parametrize("sizes", [{"d_model": 2**62}, {"d_kv": -1}, {"num_heads": 0}, {"d_ff": 0}])
def test_a_config_of_which_no_model_can_be_built(copy_of, sizes):
    with pytest.raises(ModelError, match=r"the weights do not fit config.json: "):
        load_model_and_tokenizer(str(kit.changed_config(copy_of("t5"), **sizes)))


def test_too_little_memory_is_said_as_memory(copy_of, monkeypatch):
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("unable to mmap 3682544 bytes from file <model.safetensors>: Cannot allocate memory (12)")

    monkeypatch.setattr("transformers.AutoModelForSeq2SeqLM.from_pretrained", refuse)
    with pytest.raises(FiveTuneEnvironmentError, match=r"too little memory to load weights of [\d.]+ KiB"):
        load_model_and_tokenizer(str(copy_of("t5")))


@pytest.mark.parametrize("kind", [["t5"], {}, 5, None])
def test_a_model_type_that_is_no_name(copy_of, kind):
    with pytest.raises(ModelError, match=r"config.json: .*model_type.* Allowed: t5, mt5, umt5,"):
        load_model_and_tokenizer(str(kit.changed_config(copy_of("t5"), model_type=kind)))


@pytest.mark.parametrize("kind", ["bert", "gemma2"])
def test_foreign_family_is_refused(copy_of, kind):
    folder = kit.changed_config(copy_of("t5"), model_type=kind)
    with pytest.raises(ModelError, match=rf"model_type {kind!r} is not of the T5 family. .*Allowed: t5, mt5, umt5,"):
        load_model_and_tokenizer(str(folder))


def test_config_that_transformers_refuses(copy_of):
    folder = kit.changed_config(copy_of("t5"), num_layers="two")
    with pytest.raises(ModelError, match=r"config.json is refused: .*num_layers"):
        load_model_and_tokenizer(str(folder))


def test_ids_that_no_piece_has(copy_of):
    """The first step of the training ended with an internal error."""
    folder = kit.changed_config(copy_of("t5"), decoder_start_token_id=-1)
    with pytest.raises(ModelError, match=r"decoder_start_token_id is -1 in config.json. Allowed is 0 to \d+"):
        load_model_and_tokenizer(str(folder))
    kit.changed_config(folder, pad_token_id=None, decoder_start_token_id=0)
    assert load_model_and_tokenizer(str(folder)).model.config.pad_token_id == 0


def test_missing_tokenizer(copy_of, tokenizer_folder):
    folder = copy_of("t5")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(
        ModelError, match=r"has no tokenizer. Give model.tokenizer \(a folder, a hub name, or t5-nano\)."
    ):
        load_model_and_tokenizer(str(folder))
    assert load_model_and_tokenizer(str(folder), tokenizer=str(tokenizer_folder)).tokenizer.eos_token_id == 1


def test_damaged_tokenizer(copy_of):
    folder = copy_of("t5")
    (folder / "tokenizer.json").write_text('{"version": "1.0", ')
    with pytest.raises(
        ModelError, match=r"the tokenizer cannot be loaded: tokenizer.json is damaged: .*Copy the file again."
    ):
        load_model_and_tokenizer(str(folder))


def test_missing_decoder_start_is_the_pad_id(copy_of):
    folder = copy_of("t5")
    before = _logits(load_model_and_tokenizer(str(folder)).model)
    kit.changed_config(folder, decoder_start_token_id=None)
    (folder / "generation_config.json").unlink()
    model = load_model_and_tokenizer(str(folder)).model
    assert model.config.decoder_start_token_id == model.generation_config.decoder_start_token_id == 0
    assert torch.equal(_logits(model), before)


@pytest.mark.parametrize("family", ["t5", "v1_1"])
def test_vocabulary_grows_to_a_multiple_of_128(copy_of, family):
    folder = copy_of(family)
    before = _logits(load_model_and_tokenizer(str(folder)).model)
    words = AutoTokenizer.from_pretrained(folder)
    words.add_tokens([f"<new{i}>" for i in range(200)])
    words.save_pretrained(folder)
    needed = max(words.get_vocab().values()) + 1
    grown = load_model_and_tokenizer(str(folder))
    rows = grown.model.shared.weight.shape[0]
    assert rows % 128 == 0 and needed <= rows < needed + 128 and rows == grown.model.config.vocab_size
    assert grown.model.lm_head.weight.shape[0] == rows
    said = f"{needed} pieces, the embedding 384 rows: grown to {rows}; the new rows are untrained."
    assert grown.warnings == [f"{folder}: the tokenizer has {said}"]
    assert torch.allclose(_logits(grown.model)[..., :384], before, atol=1e-6)
    save_model(grown.model, grown.tokenizer, folder.with_name("grown"))
    assert torch.equal(_logits(load_model_and_tokenizer(str(folder.with_name("grown"))).model), _logits(grown.model))


def test_vocabulary_never_shrinks(family_folders):
    loaded = load_model_and_tokenizer(str(family_folders["t5"]))
    assert len(loaded.tokenizer) < 384 == loaded.model.shared.weight.shape[0]


def test_random_start_is_seeded_and_untied_where_the_config_says(tmp_path, tokenizer_folder):
    def built(family: str, seed: int):
        return load_model_and_tokenizer(
            str(kit.make_model(tmp_path / f"{family}{seed}", tokenizer_folder, family=family, seed=seed))
        ).model

    assert torch.equal(_logits(built("t5", 3)), _logits(built("t5", 3)))
    assert not torch.equal(_logits(built("t5", 3)), _logits(built("t5", 4)))
    untied = built("v1_1", 3)
    assert count_parameters(untied) == sum(p.numel() for p in untied.parameters())
    assert not torch.equal(untied.lm_head.weight, untied.shared.weight)


def test_dropout_of_the_recipe_wins(family_folders):
    assert load_model_and_tokenizer(str(family_folders["t5"]), dropout=0.25).model.config.dropout_rate == 0.25
    model = load_model_and_tokenizer(str(family_folders["t5"]), dropout=0.25).model
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.25}


def test_sentinels_of_the_tokenizer(family_folders):
    words = load_model_and_tokenizer(str(family_folders["t5"])).tokenizer
    assert len(list_sentinel_ids(words)) == 100
    assert words.convert_tokens_to_ids("<extra_id_0>") in list_sentinel_ids(words)


def test_scaling_rule():
    assert infer_output_scale({"model_type": "umt5"}, untied=True, where="") is False
    assert infer_output_scale({"model_type": "mt5"}, untied=True, where="") is False
    with pytest.raises(ModelError, match=r'Set "tie_word_embeddings": false in config.json if this is a v1.1'):
        infer_output_scale({"model_type": "t5"}, untied=True, where="folder")


@pytest.mark.skipif(not kit.SHARED.is_dir(), reason=kit.NEEDS_SHARED)
def test_real_tokenizer_reproduces_reference_ids(tmp_path):
    folder = kit.SHARED / "data/tokenizers/t5-small"
    words = load_tokenizer(str(folder), tmp_path)
    cases = json.loads((folder / "reference_encodings.json").read_text())["cases"]
    assert len(cases) == 18
    for case in cases:
        ids = words(case["input"]).input_ids
        assert ids == case["encoded"]["input_ids"], case["input"]
        assert words.decode(ids, skip_special_tokens=True) == case["decoded_without_special"]


@pytest.mark.skipif(not kit.SHARED.is_dir(), reason=kit.NEEDS_SHARED)
def test_real_config_builds_a_small_model(tmp_path):
    folder = kit.SHARED / "data/tokenizers/t5-small"
    settings = {**json.loads((folder / "config.json").read_text()), **kit.SHAPE}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    loaded = load_model_and_tokenizer(str(tmp_path / "config.json"), tokenizer=str(folder), init="random")
    assert loaded.model.shared.weight.shape == (32128, 32)
    assert len(loaded.tokenizer) == 32100
    assert loaded.warnings == []


@pytest.mark.skipif(not kit.SHARED.is_dir(), reason=kit.NEEDS_SHARED)
def test_real_published_folder_loads(tokenizer_folder):
    """Real bytes; its 32 rows are grown for the tokenizer that it is given."""
    folder = kit.SHARED / "data/models/dummy-t5-chronos"
    with pytest.raises(ModelError, match=r"dummy-t5-chronos: has no tokenizer"):
        load_model_and_tokenizer(str(folder))
    loaded = load_model_and_tokenizer(str(folder), tokenizer=str(tokenizer_folder))
    assert count_parameters(loaded.model) > 20_000
    assert "the embedding 32 rows: grown to " in loaded.warnings[0]
    weights = load_file(folder / "model.safetensors")
    assert torch.equal(loaded.model.shared.weight[:32], weights["shared.weight"].float())


def test_weights_that_are_not_finite_are_named(copy_of):
    folder = copy_of("t5")
    name = "encoder.final_layer_norm.weight"
    kit.changed_weights(folder, **{name.replace(".", "__"): torch.full((32,), torch.nan)})
    with pytest.raises(ModelError, match=rf"tensor {name} of the file holds values that are not finite. Get the model"):
        load_model_and_tokenizer(str(folder))
