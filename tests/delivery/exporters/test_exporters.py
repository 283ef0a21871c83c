"""Exports: another engine gives the answers of `generate`, the folder proves itself, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
from decoding_kit import lively, question_store
from family_kit import CONFIGS, make_family_model

import fivetune
from fivetune import rundir
from fivetune.cli import main
from fivetune.delivery.exporters import _proof, load_format
from fivetune.delivery.exporters._ctranslate2 import Engine, convert_model
from fivetune.delivery.exporters._export import export as export_run
from fivetune.delivery.exporters._proof import choose_verdict, find_reasons, time_calls
from fivetune.errors import ConfigError, ModelError, RunDirError
from fivetune.model.decode import Decoding, Sampling, generate
from fivetune.model.family import compute_output_scale
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.save import save_model
from fivetune.rundir.checksums import compute_sha256
from fivetune.rundir.export_file import EXPORT
from fivetune.training.answers.loading import load_run_model

pytest.importorskip("ctranslate2")

LABELS = ((7, 1), (9, 1), (7, 12, 1), (7, 12, 30, 1), (1,), (40, 41, 1))
SEARCHES: list[dict[str, Any]] = [
    {},
    {"min_new_tokens": 4},
    {"suppressed_ids": (1, 7, 9, 20)},
    {"max_new_tokens": 2},
    {"no_repeat_ngram_size": 2},
    {"phrase_ids": (7, 12, 1)},
    {"num_beams": 3, "num_candidates": 2, "length_penalty": 0.0},
    {"label_ids": LABELS},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    fivetune.train(kit.recipe(folder, model_folder), quiet=True, preflight=False)
    return folder / "run"


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_proof, "BATCH_SIZES", (2,))


def export(run: Path, name: str = "ctranslate2", **options: Any) -> tuple[Path, dict[str, Any]]:
    given = {key: options.pop(key) for key in ("output", "overwrite", "examples") if key in options}
    found = export_run(run, name, options, **{"overwrite": True, **given})
    return found.folder, found.facts


def answers(search: Any, model: Any, store: Any, **settings: Any) -> list[Any]:
    decoding = Decoding(**{"max_new_tokens": 12, "batch_size": 4, **settings})
    found = search(model, store, range(len(store)), decoding, device="cpu", autocast=nullcontext)
    return sorted(found, key=lambda one: one.row)


def save_lively(folder: Path, target: Path) -> Any:
    """Save a model whose answers differ in length, with a head of its own."""
    model = lively(folder)
    model.lm_head.weight.data *= compute_output_scale(model.config)
    model.config.scale_decoder_outputs = model.config.tie_word_embeddings = False
    save_model(model, load_model_and_tokenizer(str(folder)).tokenizer, target)
    return load_model_and_tokenizer(str(target)).model.eval()


# --- the engine ---


@pytest.mark.parametrize("family", kit.FAMILIES)
def test_ctranslate2_gives_the_answers_and_scores_of_generate(family_folders, tmp_path: Path, family: str) -> None:
    store = question_store(tmp_path, family_folders[family], num_questions=9)
    model = save_lively(family_folders[family], tmp_path / "model")
    convert_model(tmp_path / "model", tmp_path / "converted", None)
    engine = Engine(tmp_path / "converted", device="cpu", num_threads=1)
    for settings in SEARCHES:
        found = [answers(each, model, store, **settings) for each in (engine, generate)]
        for one, own in zip(*found, strict=True):
            for name in ("row", "token_ids", "hit_cap", "num_scored_tokens", "left_label_set"):
                assert getattr(one, name) == getattr(own, name), (settings, name)
            for name in ("logprob", "target_loss", "phrase_loss", "label_logprobs"):
                assert getattr(one, name) == pytest.approx(getattr(own, name), abs=1e-3), (settings, name)
            assert len(one.candidates) == len(own.candidates)
            assert one.target_correct is None
    with pytest.raises(ConfigError, match=r"^eval\.temperature 0\.5: .* draws no answers by a seed"):
        answers(engine, model, store, sampling=Sampling(0.5))


def test_ctranslate2_gives_the_answers_of_t5gemma(tmp_path: Path) -> None:
    sides: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sides[side] = {**CONFIGS["t5gemma"][1][side], "sliding_window": 4096, "final_logit_softcapping": None}
    folder = make_family_model(tmp_path / "model", "t5gemma", **sides)
    store = question_store(tmp_path, folder, num_questions=9)
    convert_model(folder, tmp_path / "converted", None)
    engine = Engine(tmp_path / "converted", device="cpu", num_threads=1)
    model = load_model_and_tokenizer(str(folder)).model.eval()
    for settings in ({}, {"num_beams": 3, "num_candidates": 2, "length_penalty": 0.0}, {"label_ids": LABELS}):
        for one, own in zip(*(answers(each, model, store, **settings) for each in (engine, generate)), strict=True):
            assert (one.token_ids, one.hit_cap) == (own.token_ids, own.hit_cap)
            for name in ("logprob", "target_loss", "label_logprobs"):
                # The cap of attention scores is not converted: 50 tanh(x / 50).
                assert getattr(one, name) == pytest.approx(getattr(own, name), abs=0.02), (settings, name)


def test_a_tied_model_keeps_the_scale_of_its_output(model_folder: Path, tmp_path: Path) -> None:
    store, model = (
        question_store(tmp_path, model_folder, num_questions=5),
        load_model_and_tokenizer(str(model_folder)).model,
    )
    convert_model(model_folder, tmp_path / "fp32", None)
    convert_model(model_folder, tmp_path / "int8", "int8")
    exact, rounded = (Engine(tmp_path / name, device="cpu", num_threads=1) for name in ("fp32", "int8"))
    losses = [[one.target_loss for one in answers(each, model, store)] for each in (generate, exact, rounded)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    # Without VNNI a processor adds 8-bit products in 16 bits, which saturate: 2.4 %. A lost scale is a factor of 5.
    assert losses[2] == pytest.approx(losses[0], rel=0.1) and losses[2] != losses[1]
    assert rounded.compute_type == "int8_float32"


def test_every_id_of_the_vocabulary_has_a_name_of_its_own(model_folder: Path, tmp_path: Path) -> None:
    convert_model(model_folder, tmp_path / "converted", None)
    names = json.loads((tmp_path / "converted" / "shared_vocabulary.json").read_text())
    words = load_model_and_tokenizer(str(model_folder)).tokenizer
    assert len(set(names)) == len(names) == 384
    assert [names[number] for number in range(len(words))] == words.convert_ids_to_tokens(list(range(len(words))))


# --- the export ---


def test_an_export_answers_and_scores_as_its_run_and_lists_its_files(run: Path, capsys) -> None:
    words = ["export", str(run), "--format", "ctranslate2", "--overwrite", "--json"]
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    found = json.loads(printed[-1])
    folder = run / "export" / "ctranslate2"
    assert found["output"] == str(folder) and any("same predictions of 12" in line for line in printed)
    listed = json.loads((folder / EXPORT).read_text())
    assert listed["source"] == {
        "run": str(run),
        "run_id": rundir.read_machine(run).run_id,
        "step": fivetune.open_run(run).step,
    }
    assert listed["proof"]["identical_predictions"] == 1 and listed["proof"]["difference"]["score"] == 0
    assert [one["batch_size"] for one in listed["proof"]["speed"]] == [2]
    assert set(listed["versions"]) == {"fivetune", "torch", "ctranslate2", "transformers"}
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {EXPORT, rundir.LOCK}
    assert set(listed["files"]) == files and "ctranslate2/model.bin" in files
    assert all(listed["files"][name]["sha256"] == compute_sha256(folder / name) for name in files)
    own, other = fivetune.evaluate(run), fivetune.evaluate(folder)
    assert own.scores == other.scores and other.loss == pytest.approx(own.loss, rel=1e-4)
    assert "teacher_forced_exact" in own.rates and "teacher_forced_exact" not in other.rates
    assert (folder / "predictions").is_dir() and len(rundir.read_evals(folder)) == 1


def test_predictions_of_an_export_are_those_of_the_run(run: Path, tmp_path: Path) -> None:
    folder, _ = export(run)
    for name, source in (("own", run), ("other", folder)):
        target = tmp_path / f"{name}.jsonl"
        assert main(["predict", str(source), "--input", str(run.parent / "dev.json"), "--output", str(target)]) == 0
    own, other = (
        [json.loads(line) for line in (tmp_path / f"{n}.jsonl").read_text().splitlines()] for n in ("own", "other")
    )
    assert [(one["id"], one["prediction"]) for one in own] == [(one["id"], one["prediction"]) for one in other]
    assert [one["no_answer_score"] for one in own] == pytest.approx([one["no_answer_score"] for one in other], rel=1e-3)


def test_an_hf_export_loads_by_plain_transformers(run: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    folder, found = export(run, "hf")
    assert found["proof"]["identical_predictions"] == 1 and found["proof"]["speed"] == []
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "model")
    words = AutoTokenizer.from_pretrained(folder / "model")
    ids = words("question: What has Ann? context: Ann has a red hat.", return_tensors="pt").input_ids
    text = words.decode(model.generate(ids)[0], skip_special_tokens=True)
    assert (
        text.strip()
        == fivetune.open_run(folder).predict(["question: What has Ann? context: Ann has a red hat."])[0].prediction
    )
    assert "model/model.safetensors" in found["files"]


def test_a_run_without_evaluation_data_is_exported_without_proof(run: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("export"))
    config = fivetune.load_config(tmp_path / "run" / "config.yaml").as_dict()
    config["data"]["eval"] = []
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(config))
    assert main(["export", str(tmp_path / "run"), "--format", "ctranslate2"]) == 0
    assert "verdict  not proved: predictions, score and speed are not compared: data.eval: no data" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("name", ["convert", "prove"])
def test_an_export_that_fails_leaves_nothing_and_a_killed_one_is_replaced(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    target = tmp_path / "out"
    (tmp_path / ".out.partial" / "ctranslate2").mkdir(parents=True)  # of a killed process
    (tmp_path / ".out.partial" / "half").write_text("")

    def fail(*args: Any, **settings: Any) -> None:
        assert not (tmp_path / ".out.partial" / "half").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        place = "_ctranslate2.convert_model" if name == "convert" else "_export.compare_export"
        patched.setattr(f"fivetune.delivery.exporters.{place}", fail)
        with pytest.raises(KeyboardInterrupt):
            export(run, output=target)
    assert list(tmp_path.iterdir()) == []
    assert export(run, output=target, examples=3)[1]["proof"]["examples"] == 3
    assert [one.name for one in tmp_path.iterdir()] == ["out"] and load_run_model(target)


# --- what is refused ---


def test_a_damaged_export_is_refused(run: Path, tmp_path: Path) -> None:
    folder, _ = export(run, output=tmp_path / "out")
    weights = folder / "ctranslate2" / "model.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(RunDirError, match=r"ctranslate2/model\.bin is damaged \(its sha256 differs\)\. Export the run"):
        load_run_model(folder)
    weights.unlink()
    with pytest.raises(RunDirError, match=r"ctranslate2/model\.bin is missing\. Export the run again with --overwrite"):
        load_run_model(folder)
    listed = json.loads((folder / EXPORT).read_text())
    for text, message in (
        ("{", "damaged. Export the run again"),
        (json.dumps({**listed, "files": {"a": None}}), "damaged. Export the run again"),
        (json.dumps({**listed, "format_version": 2}), "written in format 2, this version reads up to 1. Upgrade"),
        (json.dumps({**listed, "files": {}, "options": {"bits": 3}}), "options {'bits': 3} of format ctranslate2 are"),
    ):
        (folder / EXPORT).write_text(text)
        with pytest.raises(RunDirError) as caught:
            load_run_model(folder)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "hf", "--quantization", "int8"], "--quantization int8: --format hf has no such option"),
        (
            ["--format", "ctranslate2", "--quantization", "int7"],
            "--quantization int7: --format ctranslate2 has no such",
        ),
        (["--format", "onnx"], "--format onnx: is not offered: no kept exporter supports transformers 5"),
        (["--format", "gguf"], "--format gguf: is not offered: it is unproved"),
        (["--format", "hff"], "exporters: there is no 'hff'. Did you mean hf?"),
        (["--format", "hf", "--examples", "0"], "--examples 0: is not a number of questions. Allowed: 1 or more"),
    ],
)
def test_wrong_options_are_refused(run: Path, capsys, words: list[str], message: str) -> None:
    assert main(["export", str(run), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_is_replaced_only_if_it_is_an_export_and_that_is_wanted(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"other: exists and is no export\. Give another folder"):
        export(run, output=tmp_path / "other")
    folder, _ = export(run, "hf", output=tmp_path / "out")
    with pytest.raises(ConfigError, match=r"out: exists\. Add --overwrite to replace it, or give another folder"):
        export(run, "hf", output=folder, overwrite=False)
    with pytest.raises(ConfigError, match=r"out: is an export already\. Give the run directory"):
        export(folder)


def test_settings_that_an_export_does_not_have_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = export(run)
    with pytest.raises(
        ConfigError, match=r"--train\.precision: has no effect here: the precision of an export of form"
    ):
        load_run_model(folder, {"train.precision": "bf16"})
    monkeypatch.setattr("fivetune.training.compute.choose_compute", lambda *_: fivetune_compute("mps"))
    with pytest.raises(
        ConfigError, match=r"device mps: an export of format ctranslate2 has no such device\. Allowed: cpu,"
    ):
        load_run_model(folder)


def fivetune_compute(device: str) -> Any:
    from fivetune.training.compute_config import ComputeConfig

    return ComputeConfig(device, "fp32")


def test_a_mixture_with_labels_and_an_adapter_is_exported(tmp_path: Path, model_folder: Path) -> None:
    """Labels are chosen among, texts are searched, and the score of the proof is the mean of both."""
    rows = [{"id": i, "text": f"Ann has a {('red', 'blue')[i % 2]} hat", "kind": "ab"[i % 2]} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"train": str(tmp_path / "rows.jsonl"), "eval": str(tmp_path / "rows.jsonl")}
    labels = {"name": "classification", "inputs": "{text}", "label": "kind"}
    texts = {"name": "jsonl", "inputs": "repeat: {text}", "targets": "{text}"}
    recipe = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(model_folder), "adapter": {"name": "lora"}},
        "task": {"name": "mixture", "parts": {"sort": {"task": labels, **files}, "say": {"task": texts, **files}}},
        "train": {"num_steps": 2, "batch_size": 4, "precision": "fp32"},
    }
    run = fivetune.train(recipe, quiet=True, preflight=False)
    folder, listed = export(tmp_path / "run")
    assert (listed["proof"]["examples"], listed["proof"]["metric"]) == (16, "mean")
    assert listed["proof"]["identical_predictions"] == 1
    own, other = run.evaluate(), fivetune.evaluate(folder)
    assert own.scores == other.scores and {"sort_accuracy", "say_exact_match"} <= own.scores.keys()


def test_models_that_a_format_does_not_have_are_refused() -> None:
    explain = load_format("ctranslate2", {}).explain_unsupported
    t5 = {"model_type": "t5", "dense_act_fn": "relu"}
    assert explain(t5, "generate") == "" == load_format("hf", {}).explain_unsupported(t5, "extractive")
    assert explain(t5, "extractive") == "it has no extractive head (task.head extractive)"
    assert explain({"model_type": "longt5"}, "generate") == (
        "model_type longt5 is not converted. Allowed: t5, mt5, umt5, t5gemma"
    )
    gemma = CONFIGS["t5gemma"][1]
    assert explain(gemma, "generate") == "encoder.sliding_window 6 is not converted. Allowed: at least 4096"
    side = {**gemma["decoder"], "sliding_window": 4096}
    assert explain({**gemma, "encoder": side, "decoder": side}, "generate") == ""
    wide = {**side, "query_pre_attn_scalar": 16}
    assert explain({**gemma, "encoder": side, "decoder": wide}, "generate").startswith("decoder.query_pre_attn_scalar")
    assert "later tokens" in explain(CONFIGS["t5gemma2"][1], "generate")
    assert explain({**t5, "dense_act_fn": "tanh"}, "generate").startswith(
        "activation tanh is not converted. Allowed: re"
    )


def test_virtual_tokens_are_refused(tmp_path: Path, model_folder: Path) -> None:
    recipe = kit.recipe(tmp_path, model_folder, train__num_steps=1)
    recipe["model"]["adapter"] = {"name": "prompt"}
    fivetune.train(recipe, quiet=True, preflight=False)
    with pytest.raises(
        ModelError, match=r"--format hf: the run trained virtual tokens \(prompt or prefix\), which no for"
    ):
        export(tmp_path / "run", "hf")


def test_without_ctranslate2_the_command_to_install_it_is_named(run: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    assert main(["export", str(run), "--format", "ctranslate2", "--output", str(run.parent / "none")]) == 4
    assert "is not installed. Install it: pip install " in " ".join(capsys.readouterr().err.split())
    assert not (run.parent / "none").exists()


# --- the proof ---


def test_a_lower_score_or_a_slower_engine_is_not_to_be_used() -> None:
    def build(low: float, high: float, *rates: tuple[float, float]) -> dict[str, Any]:
        speed = [
            {"batch_size": 2**i, "original": {"examples_per_second": a}, "export": {"examples_per_second": b}}
            for i, (a, b) in enumerate(rates)
        ]
        return {"metric": "f1", "difference": {"score": (low + high) / 2, "interval": [low, high]}, "speed": speed}

    assert find_reasons(build(-2, 0.5, (1, 2), (2, 1))) == []
    assert find_reasons(build(-2, -1)) == ["f1 differs by -1.50 (95 % interval -2.00 to -1.00)"]
    assert find_reasons(build(1, 2)) == [] and find_reasons(build(1, 2), higher_is_better=False)
    assert find_reasons(build(0, 0, (2, 1), (3, 2))) == ["slower than the original at batches of 1, 2"]


@pytest.mark.parametrize(("same", "verdict"), [(1.0, "use"), (0.4, "not proved")])
def test_other_predictions_without_a_score_prove_nothing(same: float, verdict: str) -> None:
    proof = {"examples": 5, "identical_predictions": same, "metric": "f1", "speed": []}
    assert choose_verdict(proof)["verdict"] == verdict
    compared = {**proof, "difference": {"score": 0.5, "interval": [-1.0, 2.0]}}
    assert choose_verdict(compared) == {"verdict": "use", "reasons": []}


def test_calls_are_interleaved_and_end_after_their_seconds(cpu_clock) -> None:
    order: list[str] = []
    calls = [[lambda i=i, n=n: (order.append(f"{n}{i}"), cpu_clock(i + 1)) for n in "ab"] for i in range(9)]
    seconds = time_calls(calls, max_seconds=10)
    assert order[:6] == ["a0", "b0", "a0", "b0", "b1", "a1"]
    assert [round(one) for one in seconds[0]] == [1, 2, 3, 4, 5] == [round(one) for one in seconds[1]]


# --- real questions ---


@pytest.mark.release
@pytest.mark.skipif(not (kit.SHARED / "data" / "tokenizers" / "t5-small").is_dir(), reason=kit.NEEDS_SHARED)
def test_greedy_answers_in_fp32_to_real_questions_are_identical(tmp_path: Path) -> None:
    from fivetune.data.examples import Source
    from fivetune.data.store.encode import LengthLimits
    from fivetune.data.store.token_store import load_or_build_store
    from fivetune.tasks.squad_v2 import SQuADV2

    place = kit.SHARED / "data" / "tokenizers" / "t5-small"
    config = {**json.loads((place / "config.json").read_text()), "num_layers": 2, "num_decoder_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    loaded = load_model_and_tokenizer(str(tmp_path / "config.json"), tokenizer=str(place), init="random")
    save_model(loaded.model, loaded.tokenizer, tmp_path / "random")
    model = save_lively(tmp_path / "random", tmp_path / "model")
    convert_model(tmp_path / "model", tmp_path / "converted", None)
    paths = (str(kit.SHARED / "data" / "squad_v2" / "dev-v2.0.json.gz"),)
    source = Source(paths=paths, task=SQuADV2(), limits=LengthLimits(512, 128, "truncate"), max_examples=500)
    store = load_or_build_store(source, loaded.tokenizer, cache=tmp_path)
    engine = Engine(tmp_path / "converted", device="cpu", num_threads=torch.get_num_threads())
    settings = {"batch_size": 32, "score_targets": False}
    found = [[one.token_ids for one in answers(each, model, store, **settings)] for each in (generate, engine)]
    assert len(found[0]) == 500 and found[0] == found[1]
    assert len({tuple(ids) for ids in found[0]}) > 50
