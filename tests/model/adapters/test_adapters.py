"""Every adapter: the contract of model/adapters, on a tiny T5; peft computes the same from what FiveTune saved."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import T5ForConditionalGeneration

import fivetune.data.corpus
from fivetune import plugins
from fivetune.data.store.batch import PaddedBatch
from fivetune.errors import ConfigError, FiveTuneEnvironmentError
from fivetune.model.adapter import (
    attach_adapter,
    attach_exported,
    compute_base_checksum,
    find_adapter,
    iter_merged,
    merge_linear,
    save_adapter,
)
from fivetune.model.adapters import AdapterOptions, VirtualTokenOptions
from fivetune.model.forward import compute_padded_losses, shift_right
from fivetune.model.load import count_parameters, describe_parameters, load_model_and_tokenizer
from fivetune.model.save import save_model
from fivetune.model.saved_adapter import read_base, refuse_other_base
from fivetune.model.tokenizer import suppress_output
from fivetune.rundir.checksums import find_damage, read_owner
from fivetune.training.setup import load_configured_model
from reliability.warm import WarmProcess

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it

NANO = Path(fivetune.data.corpus.__file__).parent / "t5-nano"
ADAPTERS = [name for name in plugins.list_plugins("adapters") if name != "saved"]
BATCH = PaddedBatch(
    input_ids=torch.tensor([[5, 6, 7, 8, 1], [9, 10, 1, 0, 0]]),
    attention_mask=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    labels=torch.tensor([[11, 12, 1], [13, 1, -100]]),
)


def build_options(name: str, **options: Any) -> AdapterOptions:
    return plugins.load_plugin("adapters", name)(**options)


def attach(folder: Path, options: AdapterOptions) -> Any:
    """A loaded model with an adapter, no dropout."""
    loaded = load_model_and_tokenizer(str(folder), dropout=0.0)
    attach_adapter(loaded.model, options, base=str(folder))
    return loaded


def train_briefly(model: Any, *, num_steps: int = 3) -> None:
    optimizer = torch.optim.SGD((weight for weight in model.parameters() if weight.requires_grad), lr=0.1)
    for _ in range(num_steps):
        compute_padded_losses(model, BATCH).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def compute_logits(model: nn.Module) -> Tensor:
    decoder = shift_right(BATCH.labels, start_id=0, pad_id=0)
    model.eval()
    return model(
        input_ids=BATCH.input_ids, attention_mask=BATCH.attention_mask, decoder_input_ids=decoder, use_cache=False
    ).logits


def compute_losses_by_peft(base: Path, folder: Path) -> Tensor:
    import peft  # late, as it takes seconds: every worker of xdist imports this file

    with suppress_output():
        model = peft.PeftModel.from_pretrained(T5ForConditionalGeneration.from_pretrained(base), folder)
    logits, labels = compute_logits(model), BATCH.labels
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


@pytest.fixture(params=ADAPTERS)
def trained(request, model_folder) -> Iterator[tuple[AdapterOptions, Any]]:
    """Every adapter with default options on the tiny T5, after three steps."""
    torch.manual_seed(1)
    options = build_options(request.param)
    loaded = attach(model_folder, options)
    train_briefly(loaded.model)
    yield options, loaded


def test_only_the_adapter_is_trained_and_the_base_stays(trained, model_folder):
    options, loaded = trained
    attached = find_adapter(loaded.model)
    assert attached
    names = {name for name, weight in loaded.model.named_parameters() if weight.requires_grad}
    assert names == attached.names and names
    assert attached.is_virtual == options.is_virtual == isinstance(options, VirtualTokenOptions)
    assert all(weight.grad is None for name, weight in loaded.model.named_parameters() if name not in names)
    base = T5ForConditionalGeneration.from_pretrained(model_folder).state_dict()
    found = {name.replace(".base_layer.", "."): weight for name, weight in loaded.model.named_parameters()}
    kept = [name for name in base if name in found and found[name].shape == base[name].shape]
    assert len(kept) > 10 and all(torch.equal(found[name], base[name]) for name in kept)


# peft 0.21.2 gives the prefix by the name of transformers before 5.24.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_saved_model_or_adapter_computes_the_same(trained, model_folder, tmp_path):
    options, loaded = trained
    expected = compute_padded_losses(loaded.model.eval(), BATCH).detach()
    before = compute_padded_losses(load_model_and_tokenizer(str(model_folder)).model.eval(), BATCH).detach()
    assert (expected - before).abs().max() > 0.01
    merged = iter_merged(loaded.model, loaded.model.named_parameters())
    save_model(loaded.model, loaded.tokenizer, tmp_path / "model", weights=merged)
    save_adapter(loaded.model, tmp_path / "adapter")
    assert torch.equal(compute_padded_losses(loaded.model, BATCH), expected)  # merging has changed nothing
    exported = load_model_and_tokenizer(str(tmp_path / "model"))
    attach_exported(exported.model, tmp_path / "model")
    torch.testing.assert_close(compute_padded_losses(exported.model.eval(), BATCH), expected, rtol=1e-5, atol=1e-5)
    assert (find_adapter(exported.model) is not None) == options.is_virtual
    if options.base_bits == 32:  # peft adds the pair to the base in 32 bits
        by_peft = compute_losses_by_peft(model_folder, tmp_path / "adapter")
        torch.testing.assert_close(by_peft, expected, rtol=1e-5, atol=1e-5)
    saved = build_options("saved", path=str(tmp_path / "adapter"))
    again = attach(model_folder, saved)
    assert saved.is_virtual == options.is_virtual
    assert torch.equal(compute_padded_losses(again.model.eval(), BATCH), expected)  # qlora: beside 4 bits again
    save_adapter(again.model, tmp_path / "third")
    assert [read_base(tmp_path / name).bits for name in ("adapter", "third")] == [options.base_bits] * 2


def test_a_saved_adapter_has_checksums_and_an_earlier_one_stays_on_a_full_disk(model_folder, tmp_path, monkeypatch):
    model, folder = attach(model_folder, build_options("lora", r=2)).model, tmp_path / "adapter"
    save_adapter(model, folder, run_id="a1")
    assert find_damage(folder) is None and read_owner(folder) == "a1"

    def refuse(*args: Any, **options: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("fivetune.model.adapter.save_file", refuse)
    with pytest.raises(FiveTuneEnvironmentError, match=r"adapter: the adapter cannot be written: .*Free disk space"):
        save_adapter(model, folder)
    assert find_damage(folder) is None and list(tmp_path.iterdir()) == [folder]


def test_a_new_adapter_leaves_the_model_as_it_is(model_folder):
    before = compute_logits(load_model_and_tokenizer(str(model_folder)).model)
    for name in ("lora", "rslora", "dora", "ia3"):
        after = compute_logits(attach(model_folder, build_options(name)).model)
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def test_merged_and_unmerged_by_peft(model_folder, tmp_path):
    import peft

    loaded = attach(model_folder, build_options("lora", r=4))
    train_briefly(loaded.model)
    save_adapter(loaded.model, tmp_path / "adapter")
    with suppress_output():
        model = peft.PeftModel.from_pretrained(
            T5ForConditionalGeneration.from_pretrained(model_folder), tmp_path / "adapter"
        )
    apart = compute_logits(model)
    model.merge_adapter()
    torch.testing.assert_close(compute_logits(model), apart, rtol=1e-5, atol=1e-5)
    model.unmerge_adapter()
    torch.testing.assert_close(compute_logits(model), apart, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"), [("IA3Config", {"feedforward_modules": []}), ("LoraConfig", {"use_dora": True})]
)
def test_a_bias_is_merged_as_it_is_computed(name: str, options: dict[str, Any]):
    """Bart's matrices have one; IA3 scales it, DoRA does not."""
    import peft

    config = getattr(peft, name)(target_modules=["k"], **options)
    layer: Any = peft.inject_adapter_in_model(config, nn.ModuleDict({"k": nn.Linear(4, 3)})).k
    for weight in layer.parameters():
        nn.init.normal_(weight)
    x = torch.randn(5, 4)
    torch.testing.assert_close(merge_linear(layer)(x), layer(x))


def test_an_adapter_of_peft_is_continued(model_folder, tmp_path):
    import peft

    base = T5ForConditionalGeneration.from_pretrained(model_folder)
    config = peft.LoraConfig(r=2, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM", init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    model.save_pretrained(tmp_path / "theirs")
    saved = build_options("saved", path=str(tmp_path / "theirs"))
    ours = attach(model_folder, saved).model
    torch.testing.assert_close(compute_logits(ours), compute_logits(model), rtol=1e-5, atol=1e-5)
    assert any(weight.requires_grad for weight in ours.parameters())


def test_the_scale_of_rslora_falls_with_the_root_of_the_rank(model_folder):
    scales = {}
    for name in ("lora", "rslora"):
        model = attach(model_folder, build_options(name, r=4, alpha=8)).model
        scales[name] = model.encoder.block[0].layer[0].SelfAttention.q.scaling["default"]
    assert scales == {"lora": 2, "rslora": 4}


def test_targets_are_chosen_by_patterns(model_folder):
    def list_adapted(*patterns: str, name: str = "lora") -> set[str]:
        attached = find_adapter(attach(model_folder, build_options(name, target_modules=patterns)).model)
        assert attached
        return {name.partition(".lora_")[0].partition(".ia3_")[0] for name in attached.names}

    assert {name.rpartition(".")[2] for name in list_adapted()} == {"q", "k", "v", "o", "wi", "wo"}
    assert {name.rpartition(".")[2] for name in list_adapted(name="ia3")} == {"k", "v", "wo"}
    assert list_adapted("decoder.block.1.*.*.EncDecAttention.q") == {"decoder.block.1.layer.1.EncDecAttention.q"}
    assert len(list_adapted("encoder.block.0-1")) == 2 * 6
    config = find_adapter(attach(model_folder, build_options("lora", target_modules=("q", "v"))).model)
    assert config and config.config.target_modules == {"q", "v"}  # as peft's own files name them
    with pytest.raises(ConfigError, match=r"model.adapter.target_modules: 'qq' matches no matrix .* Did you mean q\b"):
        list_adapted("qq")


def test_a_base_in_4_bits_is_near_the_given_one():
    model = attach(NANO, build_options("qlora")).model
    attached, query = find_adapter(model), model.encoder.block[0].layer[0].SelfAttention.q
    assert attached
    share = float(attached.note.partition("(NF4), ")[2].partition(" %")[0])
    assert 8 < share < 10  # of normally distributed weights in blocks of 64
    assert query.base_layer.weight.numel() * 4 == 128 * 128 / 2  # bytes
    count = count_parameters(load_model_and_tokenizer(str(NANO)).model) + count_parameters(model, trained=True)
    assert describe_parameters(model).startswith(f"{count:,} parameters, ")


def test_a_base_in_4_bits_is_computed_on_the_device_of_the_run(model_folder, tmp_path, monkeypatch):
    """A machine with a GPU, here a claimed one, also runs `device: cpu`."""
    setup = kit.ready(tmp_path, model_folder, model__adapter="qlora", device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    again = load_configured_model(setup.config, setup.learner.compute.device).model
    assert {weight.device.type for weight in again.parameters()} == {"cpu"}


@pytest.mark.slow
def test_bitsandbytes_is_imported_without_a_word():
    """With AVX-512 it logs that a kernel of the package `kernels` is not there, which FiveTune does not use."""
    with WarmProcess(import_all) as process:
        done = process.wait()
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def import_all() -> None:
    import fivetune.model.adapter
    import fivetune.training.optimizers._adamw_8bit

    fivetune.model.adapter.import_peft()
    import bitsandbytes.nn  # noqa: F401


def test_an_adapter_of_changed_weights_is_refused(model_folder, tmp_path):
    """The folder has its name, but another run has written other weights into it."""
    import peft

    base = shutil.copytree(model_folder, tmp_path / "base")
    loaded = attach(base, build_options("lora", r=2))
    save_adapter(loaded.model, tmp_path / "adapter")
    saved = build_options("saved", path=str(tmp_path / "adapter"))
    attach(base, saved)
    weights = load_file(base / "model.safetensors")
    weights["shared.weight"][0] += 1e-6
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    expected = rf"adapter: was trained on a base with weights [0-9a-f]{{16}}, and {base} has weights [0-9a-f]{{16}}: it"
    with pytest.raises(ConfigError, match=expected):
        attach(base, saved)
    with suppress_output():  # peft's own adapters record no checksum
        theirs = peft.PeftModel.from_pretrained(T5ForConditionalGeneration.from_pretrained(base), tmp_path / "adapter")
        theirs.save_pretrained(tmp_path / "theirs")
    attach(base, build_options("saved", path=str(tmp_path / "theirs")))


def test_an_adapter_that_does_not_fit_is_refused(model_folder, tmp_path):
    import peft

    loaded = attach(model_folder, build_options("lora", r=2))
    save_adapter(loaded.model, tmp_path / "adapter")
    saved = build_options("saved", path=str(tmp_path / "adapter"))
    other = load_model_and_tokenizer(str(model_folder)).model
    with pytest.raises(ConfigError, match=rf"was trained on {model_folder}, and model.path is flan-t5-base\."):
        attach_adapter(other, saved, base="flan-t5-base")
    described = peft.PeftConfig.from_pretrained(str(tmp_path / "adapter"))
    described.base_model_name_or_path = "runs/one/model"
    with pytest.raises(ConfigError, match=r"was trained on runs/one/model, and model.path is runs/other/model"):
        refuse_other_base(described, "adapter", "runs/other/model")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds no adapter_model.safetensors. Save the adapter again"):
        attach_adapter(other, saved, base=str(model_folder))
    with pytest.raises(
        ConfigError, match=r"model.adapter.path: .* holds no adapter_config.json. Give adapter/ of a run"
    ):
        attach_adapter(other, build_options("saved", path=str(tmp_path)), base=str(model_folder))


def save_by_peft(base: Path, folder: Path, kind: str, **options: Any) -> AdapterOptions:
    """The options of an adapter that peft made and saved, with random weights."""
    import peft

    with suppress_output():
        model = T5ForConditionalGeneration.from_pretrained(base)
        torch.manual_seed(2)
        peft.get_peft_model(model, getattr(peft, kind)(**options)).save_pretrained(folder)
    return build_options("saved", path=str(folder))


def test_peft_s_default_prompt_is_continued(model_folder, tmp_path):
    """It has vectors of the decoder too, which peft's forward never reads."""
    options = {"task_type": "SEQ_2_SEQ_LM", "num_virtual_tokens": 3}
    saved = save_by_peft(model_folder, tmp_path / "theirs", "PromptTuningConfig", **options)
    assert load_file(tmp_path / "theirs/adapter_model.safetensors")["prompt_embeddings"].shape[0] == 6
    losses = compute_padded_losses(attach(model_folder, saved).model.eval(), BATCH)
    expected = compute_losses_by_peft(model_folder, tmp_path / "theirs")
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings:UserWarning", "ignore:Setting .save_embedding")
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("LoHaConfig", {"target_modules": ["q"]}, "is of peft's method LOHA, which is not supported. Supported: LORA"),
        (
            "LoraConfig",
            {"modules_to_save": ["lm_head"]},
            r"holds whole modules beside the adapter \(modules_to_save: lm_head",
        ),
        ("LoraConfig", {"target_modules": ["q", "shared"]}, "adapts shared, and only matrices of attention"),
        (
            "LoraConfig",
            {"trainable_token_indices": {"shared": [1]}},
            "uses peft's option trainable_token_indices, which is not",
        ),
    ],
)
def test_what_is_not_supported_of_peft_is_named(model_folder, tmp_path, kind, options, message):
    saved = save_by_peft(model_folder, tmp_path / "theirs", kind, **{"r": 2, "target_modules": ["q"], **options})
    with pytest.raises(ConfigError, match=rf"^model.adapter.path: .*theirs: {message}"):
        attach(model_folder, saved)


def test_a_damaged_description_of_the_base_is_named(model_folder, tmp_path):
    save_adapter(attach(model_folder, build_options("lora", r=2)).model, tmp_path / "adapter")
    (tmp_path / "adapter" / "base.json").write_text("{")
    with pytest.raises(ConfigError, match=r"adapter.base.json: damaged. Copy the adapter's folder again"):
        attach(model_folder, build_options("saved", path=str(tmp_path / "adapter")))


def test_a_rank_above_those_of_a_matrix_is_refused(model_folder):
    with pytest.raises(ConfigError, match=r"model.adapter.r: 5000 exceeds the highest rank of encoder.* \(\d+ x \d+\)"):
        attach(model_folder, build_options("lora", r=5000))


def test_the_checksum_of_a_base_has_names_and_shapes():
    def build(rows: int, name: str = "wi") -> str:
        weight = torch.nn.Parameter(torch.arange(6.0).view(rows, -1))
        return compute_base_checksum(torch.nn.ParameterDict({name: weight}))

    assert build(2) == build(2)
    assert len({build(2), build(3), build(2, "wo")}) == 3
