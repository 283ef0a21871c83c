"""Distillation: targets and predictions of a teacher, equal to hand-written ones, resumed exactly; what is refused."""

from __future__ import annotations

import itertools
import json
import shutil
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import family_kit
import kit
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import start_ranks

from fivetune.config import load_config
from fivetune.data.store import distilled
from fivetune.data.store.batch import collate, pad
from fivetune.data.store.token_store import DamagedStoreError
from fivetune.distributed.world import World
from fivetune.errors import ConfigError, InterruptedRunError, ModelError
from fivetune.fleet.estimation.recipe import build_workload
from fivetune.model import objective
from fivetune.model.backend import Forward
from fivetune.model.decode.records import Decoding
from fivetune.model.forward import shift_right
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.teacher import Teacher
from fivetune.training import distill
from fivetune.training.run import train
from fivetune.training.setup import set_up
from fivetune.training.step.plain import PlainEngine


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory, model_folder) -> Path:
    """A run that has learnt the task."""
    folder = tmp_path_factory.mktemp("teacher")
    train(
        kit.recipe(folder, model_folder, optimizer__lr=1e-2, train__num_steps=40, eval__every_steps=40), preflight=False
    )
    return folder / "run"


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory, tokenizer_folder) -> Path:
    """Another width, more rows of the table, a head of its own."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    return kit.make_model(folder, tokenizer_folder, family="v1_1", seed=3, d_model=48, vocab_size=400)


def distilling(folder: Path, model: Path, teacher: Path, **options: Any) -> dict[str, Any]:
    section = {"teacher": str(teacher), **{name: options.pop(name) for name in list(options) if name in SECTION}}
    return kit.recipe(folder, model, distill=section, **options)


SECTION = ("kind", "alpha", "temperature", "num_beams")


# --- logits ---


def compute_by_hand(student: Any, teacher: Any, batch: Any, alpha: float, heat: float) -> torch.Tensor:
    """(1 - alpha) CE + alpha T^2 KL(teacher || student), summed over the labels, by transformers and autograd."""
    padded = pad(batch, pad_id=0)
    starts = shift_right(padded.labels, start_id=0, pad_id=0)
    inputs = {"input_ids": padded.input_ids, "attention_mask": padded.attention_mask, "decoder_input_ids": starts}
    scored = padded.labels != -100
    mine, theirs = student(**inputs).logits[scored], teacher(**inputs).logits[scored].detach()[:, :384]
    soft = F.kl_div(F.log_softmax(mine / heat, -1), F.softmax(theirs / heat, -1), reduction="sum")
    return (1 - alpha) * F.cross_entropy(mine, padded.labels[scored], reduction="sum") + alpha * heat**2 * soft


def collect_gradients(model: torch.nn.Module) -> torch.Tensor:
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("kind", "chunk", "alpha", "heat"),
    [
        *itertools.product(["flat", "padded"], [2**24, 1_000], [0.3], [2.0]),
        ("flat", 1_000, 1.0, 1.0),
        kit.release("flat", 2**24, 1.0, 1.0),
        kit.release("padded", 2**24, 1.0, 1.0),
        kit.release("padded", 1_000, 1.0, 1.0),
    ],
)
def test_the_gradient_is_that_of_the_divergence(
    tmp_path, model_folder, wide_model, monkeypatch, kind, chunk, alpha, heat
):
    for module in ("objective", "loss"):
        monkeypatch.setattr(f"fivetune.model.{module}.MAX_CHUNK_LOGITS", chunk)
    monkeypatch.setattr("fivetune.model.loss.MAX_SAVED_LOGITS", chunk)
    student = load_model_and_tokenizer(str(model_folder), dropout=0.0).model.train()
    wide = load_model_and_tokenizer(str(wide_model)).model.eval().requires_grad_(False)
    setup = kit.ready(tmp_path, model_folder)
    batch = collate(setup.data.stream.store, [0, 5, 2, 7])
    compute_by_hand(student, wide, batch, alpha, heat).backward()
    expected = collect_gradients(student)
    for is_flat in (True, False):
        forward = Forward(kind, "", teacher=Teacher(wide, alpha, heat, is_flat))
        losses, _ = forward.compute_losses(student, batch, device="cpu")
        losses.sum().backward()
        assert ((collect_gradients(student) - expected).norm() / expected.norm()).item() < 1e-5
        plain, _ = Forward(kind, "").compute_losses(student, batch, device="cpu")
        torch.testing.assert_close(losses, plain)  # the values remain the negative log-likelihood
    assert all(parameter.grad is None for parameter in wide.parameters())


def test_padded_soft_targets_are_computed_in_chunks(monkeypatch):
    monkeypatch.setattr(objective, "MAX_CHUNK_LOGITS", 20)
    seen: list[int] = []
    whole = objective.SoftTargets.compute_gradient

    def watch(self: Any, logits: torch.Tensor, start: int) -> torch.Tensor:
        seen.append(len(logits))
        return whole(self, logits, start)

    monkeypatch.setattr(objective.SoftTargets, "compute_gradient", watch)
    soft = objective.SoftTargets(torch.randn(5, 3), torch.randn(10, 3), None, 0.5, 2.0)
    logits = torch.randn(1, 6, 10, requires_grad=True)
    labels = torch.tensor([[1, 2, 3, -100, 4, 5]])
    objective.compute_token_losses(logits, labels, objective.Objective(soft=soft)).sum().backward()
    assert seen == [2, 2, 1] and logits.grad is not None and not logits.grad[0, 3].any()


def test_a_student_learns_the_predictions_of_its_teacher(tmp_path, model_folder, teacher_run):
    """With alpha 1 only the teacher teaches: its divergence from the student falls, and the answers become its own."""
    options: dict[str, Any] = {"optimizer__lr": 1e-2, "train__num_steps": 30, "eval__every_steps": 30}
    recipe = distilling(tmp_path, model_folder, teacher_run, kind="logits", alpha=1.0, **options)
    run = train(recipe, preflight=False)
    assert run.steps[-1].loss < 0.5 * run.steps[0].loss
    assert "teacher" in (tmp_path / "run" / "log.txt").read_text()
    student = load_model_and_tokenizer(str(tmp_path / "run" / "model")).model  # holds no weight of the teacher
    assert sum(p.numel() for p in student.parameters()) == sum(
        p.numel() for p in load_model_and_tokenizer(str(model_folder)).model.parameters()
    )


@pytest.mark.parametrize("kind", ["logits", "sequence"])
def test_an_interrupted_distillation_is_resumed_exactly(tmp_path, model_folder, teacher_run, monkeypatch, kind):
    for name in ("whole", "parted"):
        (tmp_path / name).mkdir()
    options: dict[str, Any] = {"kind": kind, "checkpoint": {"every_steps": 2}, "eval__every_steps": 6}
    train(distilling(tmp_path / "whole", model_folder, teacher_run, **options))
    recipe = distilling(tmp_path / "parted", model_folder, teacher_run, **options)
    step = PlainEngine.step

    def stop(self: PlainEngine, learner: Any, inputs: Any) -> Any:
        if inputs.number == 4:
            raise InterruptedRunError("stopped", signum=15)
        return step(self, learner, inputs)

    monkeypatch.setattr(PlainEngine, "step", stop)
    with pytest.raises(InterruptedRunError):
        train(recipe)
    monkeypatch.setattr(PlainEngine, "step", step)
    monkeypatch.setattr(distill, "generate", None)  # the answers are cached
    train(recipe, resume=True)
    assert kit.weights_of(tmp_path / "whole" / "run") == kit.weights_of(tmp_path / "parted" / "run")


def test_the_memory_of_the_teacher_is_counted(tmp_path, model_folder, wide_model):
    options: dict[str, Any] = {"data__max_input_tokens": 64, "data__max_target_tokens": 8, "train__num_steps": 1}
    recipe = distilling(tmp_path, model_folder, wide_model, kind="logits", **options)
    step = train(recipe).steps[0]
    line = next(row for row in (tmp_path / "run" / "log.txt").read_text().splitlines() if "teacher" in row)
    assert f"teacher {wide_model} (logits, alpha 0.5, temperature 2)" in line
    plain, work = (build_workload(load_config(recipe, {"distill.teacher": t, "distill.kind": k}), None) for t, k in (
        (None, "sequence"), (str(wide_model), "logits")
    ))  # fmt: skip
    assert plain.teacher is None and work.teacher is not None and work.teacher.d_model == 48
    alone = train(kit.recipe(tmp_path, model_folder, run={"dir": str(tmp_path / "alone"), "seed": 1}, **options)).steps[
        0
    ]
    assert (step.encoder_flops or 0) > (alone.encoder_flops or 0)


# --- sequence ---


def test_the_teacher_s_answers_are_the_targets(tmp_path, model_folder, teacher_run):
    recipe = distilling(tmp_path, model_folder, teacher_run)
    setup = set_up(load_config(recipe))
    store, plain = setup.data.stream.store, kit.ready(tmp_path, model_folder).data.stream.store
    teacher = load_model_and_tokenizer(str(teacher_run / "model")).model.eval()
    for row in range(len(store)):
        ids = torch.tensor(np.asarray(plain.inputs[row], np.int64))[None]
        answer = teacher.generate(ids, max_new_tokens=8, do_sample=False)[0, 1:].tolist()
        assert store.labels[row].tolist() == answer[: answer.index(1) + 1] if 1 in answer else [*answer[:7], 1]
        assert np.array_equal(store.inputs[row], plain.inputs[row])
    assert store.fingerprint != plain.fingerprint
    assert store.summary["num_target_tokens"] == store.labels.lengths.sum()
    assert setup.data.evaluator is not None and setup.data.evaluator.store.read_example(1).references  # gold answers


def test_answers_are_generated_once_and_continued(tmp_path, model_folder, teacher_run, monkeypatch):
    monkeypatch.setattr(distilled, "ROWS_PER_PART", 10)
    config = load_config(distilling(tmp_path, model_folder, teacher_run))
    first = set_up(config).data.stream.store
    asked: list[list[int]] = []
    whole = distill.generate

    def watch(model: Any, store: Any, rows: list[int], *args: Any, **named: Any) -> Any:
        asked.append(rows)
        return whole(model, store, rows, *args, **named)

    monkeypatch.setattr(distill, "generate", watch)
    again = set_up(config).data.stream.store
    assert asked == [] and again.fingerprint == first.fingerprint
    [folder] = (tmp_path / "cache").glob("distilled-*")
    parts = sorted(folder.glob("*.safetensors"))
    assert len(parts) == 3
    parts[1].unlink()
    third = set_up(config).data.stream.store
    assert asked == [[*range(10, 20)]]
    assert all(np.array_equal(first.labels[row], third.labels[row]) for row in range(24))
    content = bytearray(parts[0].read_bytes())
    content[-30] ^= 2
    parts[0].write_bytes(content)
    set_up(config)
    assert asked[1:] == [[*range(10)]]
    extra = folder / "part-00003.safetensors"
    extra.write_bytes(b"{}")
    with pytest.raises(DamagedStoreError, match=r"damaged targets of a teacher: .*Delete that folder"):
        set_up(config)
    extra.unlink()
    other = load_config(distilling(tmp_path, model_folder, teacher_run, num_beams=2))
    assert set_up(other).data.stream.store.fingerprint != first.fingerprint


def test_each_example_is_answered_by_one_rank(monkeypatch):
    asked: list[list[int]] = []
    monkeypatch.setattr(distill, "generate", lambda model, store, rows, *_, **__: asked.append(rows) or [])
    parts, compute = [range(4), range(7, 13)], SimpleNamespace(device="cpu", make_autocast=None)
    for rank in range(3):
        distill._answer_share(None, None, parts, None, compute, World(rank, 3), print)  # type: ignore[arg-type]
    assert sorted(chain(*asked)) == [*chain(*parts)] and [len(rows) for rows in asked] == [4, 3, 3]


def answer_as_rank(folder: Path, recipe: dict[str, Any]) -> None:
    """Write the rows that this rank's teacher answered, and the targets of all."""
    asked: list[int] = []
    whole = distill.generate

    def watch(model: Any, store: Any, rows: list[int], *args: Any, **named: Any) -> Any:
        asked.extend(rows)
        return whole(model, store, rows, *args, **named)

    distill.generate, distilled.ROWS_PER_PART = watch, 5
    with World.from_environment().connect(cuda=False, timeout_minutes=2) as world:
        store = set_up(load_config(recipe), world=world).data.stream.store
        seen = {"asked": asked, "labels": [store.labels[row].tolist() for row in range(len(store))]}
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(seen))


@pytest.mark.release
def test_ranks_share_the_answers(tmp_path, model_folder, teacher_run, monkeypatch):
    """Each example is answered once, with the targets and the cache of one process."""
    recipe = distilling(tmp_path, model_folder, teacher_run)
    recipe |= {"launch": {"nproc": 2}, "strategy": "ddp"}
    ended = start_ranks(answer_as_rank, tmp_path, recipe)
    assert [rank.returncode for rank in ended] == [0, 0], ended[0].stderr
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert sorted(first["asked"] + second["asked"]) == [*range(24)] and len(first["asked"]) == 12
    monkeypatch.setattr(distill, "generate", None)  # the answers are cached
    store = set_up(load_config({**recipe, "launch": {}, "strategy": "single"})).data.stream.store
    assert first["labels"] == second["labels"] == [store.labels[row].tolist() for row in range(len(store))]


def test_labels_are_those_that_the_teacher_finds_most_probable(tmp_path, model_folder):
    rows = [{"id": f"t{i}", "text": f"Ann has a {word}", "label": label} for i, (word, label) in enumerate(
        [("hat", "lost"), ("coat", "late")] * 6
    )]  # fmt: skip
    (tmp_path / "tickets.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(tmp_path / "tickets.jsonl"), "cache_dir": str(tmp_path / "cache")}
    task = {"name": "classification", "inputs": "{text}"}
    setup = set_up(load_config(distilling(tmp_path, model_folder, model_folder, task=task, data=data)))
    store = setup.data.stream.store
    allowed = {tuple(setup.loaded.tokenizer(label).input_ids) for label in ("lost", "late")}
    assert {tuple(store.labels[row].tolist()) for row in range(len(store))} <= allowed


def test_a_student_learns_the_answers_of_its_teacher(tmp_path, model_folder, teacher_run):
    options: dict[str, Any] = {"optimizer__lr": 1e-2, "train__num_steps": 30, "eval__every_steps": 30}
    run = train(distilling(tmp_path, model_folder, teacher_run, **options), preflight=False)
    assert run.steps[-1].loss < 0.3 * run.steps[0].loss
    assert "targets by teacher" in (tmp_path / "run" / "log.txt").read_text()


# --- what is refused ---


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path, model_folder):
    other = family_kit.make_family_model(tmp_path / "other", "codet5")
    for kind in ("sequence", "logits"):
        with pytest.raises(
            ModelError, match=rf"^distill.teacher: {other} has another vocabulary than {model_folder}: "
        ):
            set_up(load_config(distilling(tmp_path, model_folder, other, kind=kind)))


def test_a_missing_teacher_and_an_unfinished_run_are_named(tmp_path, model_folder, teacher_run):
    with pytest.raises(ModelError, match=r"^distill.teacher: .*nowhere: no such model folder"):
        set_up(load_config(distilling(tmp_path, model_folder, tmp_path / "nowhere")))
    shutil.copytree(teacher_run, tmp_path / "unfinished", ignore=shutil.ignore_patterns("model"), symlinks=True)
    with pytest.raises(ModelError, match=r"unfinished: the run has no model/. Let it finish"):
        set_up(load_config(distilling(tmp_path, model_folder, tmp_path / "unfinished")))


def test_a_teacher_of_virtual_tokens_is_refused(tmp_path, model_folder, teacher_run):
    shutil.copytree(teacher_run, tmp_path / "virtual", symlinks=True)
    adapter = tmp_path / "virtual" / "adapter" / "adapter_config.json"
    adapter.parent.mkdir()
    adapter.write_text('{"peft_type": "PROMPT_TUNING"}')
    expected = "teacher: .*model is the unchanged base of a run that trained virtual tokens, .* Use a teacher"
    for name in ("virtual", "virtual/model"):
        with pytest.raises(ModelError, match=expected):
            set_up(load_config(distilling(tmp_path, model_folder, tmp_path / name)))


def test_another_teacher_is_other_data_for_a_resume(tmp_path, model_folder, teacher_run):
    recipe = distilling(tmp_path, model_folder, teacher_run)
    train(recipe, preflight=False)
    with pytest.raises(ConfigError, match=r"started with other settings: distill.teacher was "):
        train({**recipe, "distill": {"teacher": str(model_folder)}}, resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distill": {"kind": "logits"}}, "kind logits has no effect without distill.teacher. Add it"),
        ({"distill": {"teacher": "t", "alpha": 0.1}}, "alpha 0.1 is an option of kind logits, not of sequence"),
        ({"distill": {"teacher": "t", "kind": "logits", "num_beams": 4}}, "num_beams 4 is an option of kind sequence"),
        ({"distill": {"teacher": "t"}, "data__window_shards": 2}, "distill.kind sequence: the teacher answers all"),
        ({"distill": {"teacher": "t"}, "task__head": "extractive"}, "distill.teacher: answers of an extractive model"),
        ({"distill": {"teacher": "t"}, "device": "tpu"}, "distill.teacher t is not supported with device tpu"),
        ({"distill": {"teacher": "t", "kind": "logits"}, "loss": {"r_drop": 1}}, "loss.r_drop computes every example"),
        (
            {"distill": {"teacher": "t", "kind": "logits"}, "strategy": "fsdp", "launch": {"nproc": 2}},
            "distill.kind logits: strategy.name fsdp divides the model, the teacher is whole. Use single or ddp",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_distillation_does_not_support_is_named(tmp_path, model_folder, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_config(kit.recipe(tmp_path, model_folder, **changes))


def test_errors_of_loading_the_teacher_name_its_setting(tmp_path, model_folder, teacher_run):
    """They advise nothing that belongs to the model."""
    bare, foreign, damaged = (tmp_path / name for name in ("bare", "foreign", "damaged"))
    shutil.copytree(teacher_run / "model", bare, ignore=shutil.ignore_patterns("tokenizer*", "manifest.json"))
    for folder in (foreign, damaged):
        shutil.copytree(teacher_run / "model", folder, ignore=shutil.ignore_patterns("manifest.json"))
    (foreign / "config.json").write_text('{"model_type": "bart"}')
    (damaged / "model.safetensors").write_bytes(b"1234567890")
    for folder, kind, reason in (
        (bare, "sequence", "has no tokenizer. Copy that of the model into the folder"),
        (
            foreign,
            "logits",
            "model_type 'bart' is not of the T5 family. Allowed: t5, mt5, umt5, longt5, t5gemma, t5gemma2. ",
        ),
        (damaged, "logits", "damaged: its header cannot be read"),
        (damaged, "sequence", "damaged: its header cannot be read"),
    ):
        with pytest.raises(ModelError, match=rf"^distill.teacher: {folder}.*: {reason}"):
            set_up(load_config(distilling(tmp_path, model_folder, folder, kind=kind)))


def test_a_teacher_with_the_same_pieces_in_another_order_is_refused(tmp_path, model_folder):
    """Its vocabulary has the same size, and its targets would be other words."""
    teacher = Path(shutil.copytree(model_folder, tmp_path / "teacher"))
    (teacher / "manifest.json").unlink(missing_ok=True)
    table = json.loads((teacher / "tokenizer.json").read_text())
    pieces = table["model"]["vocab"]
    pieces[20], pieces[21] = pieces[21], pieces[20]
    (teacher / "tokenizer.json").write_text(json.dumps(table))
    config = load_config(distilling(tmp_path, model_folder, teacher))
    with pytest.raises(ModelError, match=r"has another vocabulary than .*: 2 of "):
        distill.refuse_other_teacher(config, load_model_and_tokenizer(str(model_folder)).tokenizer)


def test_answers_of_a_teacher_that_was_trained_again_are_other_ones(tmp_path, model_folder):
    teacher = Path(shutil.copytree(model_folder, tmp_path / "teacher"))
    store, compute = SimpleNamespace(fingerprint="data"), SimpleNamespace(precision="fp32")

    def key() -> str:
        return distill._compute_key(teacher, store, Decoding(8), compute)

    before = key()
    assert key() == before
    weights = teacher / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert key() != before
