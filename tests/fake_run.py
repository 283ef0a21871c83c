"""A made-up but realistic run: 300 steps, seven evaluations, predictions with hostile text, as JSON gives it back."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fivetune.rundir.parse import parse_record
from fivetune.rundir.plan import Plan
from fivetune.rundir.records import (
    BestEval,
    DataSummary,
    EvalRecord,
    MachineRecord,
    Prediction,
    Run,
    RunStatus,
    StepRecord,
    TelemetryRecord,
)

NUM_STEPS, EVERY = 300, 50
TABLES = {"machine": MachineRecord, "status": RunStatus, "data": DataSummary}
LINES = {"steps": StepRecord, "evals": EvalRecord, "telemetry": TelemetryRecord}
HOSTILE = "<script>document.title='owned'</script>"
NAMES = ("Ilse Varga", "Tomás Quiroga", "Wen Halloran", "Bjørk Ansel", "Okoro Maddox", "Priya Lindqvist", "Émile Sato")
PLACES = ("Port Ferrand", "Kesh", "Upper Tarn", "Oświęt", "Lake Mirren", "Santa Brea")
THINGS = ("the copper bell", "a 3-metre kite", "the east gate (1904)", "an oak ladder", "the grey ledger")


def fake_run(*, name: str = "quickstart", seed: int = 0, **changes: Any) -> Run:
    """A finished run; `changes` replace fields of the Run."""
    evals = [_eval(step) for step in range(0, NUM_STEPS + 1, EVERY)]
    fields: dict[str, Any] = {
        "config": _config(name, seed),
        "machine": _machine(),
        "status": _status(evals),
        "data": {"train": make_data(4000, 3), "eval": make_data(640, 1)},
        "plan": Plan(32, NUM_STEPS, EVERY, EVERY),
        "steps": _steps(seed),
        "evals": evals,
        "predictions": {f"eval-{record['step']}": list(_predictions(record["step"])) for record in evals},
    }
    return make_run(name, **{**fields, **changes})


def make_run(name: str = "empty", **tables: Any) -> Run:
    """A Run from the contents of its files (steps, evals, status ...), tables of JSON or records; the rest is empty."""
    return Run(name=name, **{key: _parse_file(key, content) for key, content in tables.items()})


def change_run(run: Run, **tables: Any) -> Run:
    """The run with other contents of its files, as `make_run` takes them."""
    return replace(run, **{key: _parse_file(key, content) for key, content in tables.items()})


def _parse_file(name: str, content: Any) -> Any:
    """A file's content as the reader gives it; records stay as they are."""
    if name in TABLES:
        return content if isinstance(content, TABLES[name]) else parse_record(TABLES[name], content) or TABLES[name]()
    if name in LINES:
        return _parse_lines(LINES[name], content)
    if name == "predictions":
        return {key: _parse_lines(Prediction, lines) for key, lines in content.items()}
    return content


def _parse_lines(kind: type, lines: Sequence[Any]) -> list[Any]:
    return [record for line in lines if (record := line if isinstance(line, kind) else parse_record(kind, line))]


def list_tables(records: Sequence[Any]) -> list[dict[str, Any]]:
    """Records as the lines of their file."""
    return [record.as_dict() for record in records]


def make_eval(step: int, scores: dict[str, float], **changes: Any) -> dict[str, Any]:
    """A line of evals.jsonl."""
    return {"step": step, "task": "squad_v2", "task_version": 1, "split": "eval", "num_examples": 640, "num_clipped": 0,
            "scores": scores, "loss": None, "rates": {}, "max_new_tokens": 18, "seconds": 4.8, **changes}  # fmt: skip


def make_step(step: int, **changes: Any) -> dict[str, Any]:
    """A line of steps.jsonl."""
    return {"step": step, "loss": 1.0, "lr": 1e-3, "effective_lr": None, "grad_norm": 1.0, "num_input_tokens": 700,
            "num_target_tokens": 40, "padding_fraction": 0.0, "step_seconds": 0.4, "data_seconds": 0.0,
            "peak_bytes": None, "mfu": None, "world_size": 1, "num_examples_seen": 64 * step, **changes}  # fmt: skip


def make_best(step: int, metric: str = "f1", score: float = 0.0) -> dict[str, Any]:
    """A status.json that names the best evaluation."""
    return {"best": {"step": step, "metric": metric, "score": score}}


def make_predictions(*lines: dict[str, Any]) -> list[Prediction]:
    """Lines of a predictions file as records."""
    return [record for line in lines if (record := parse_record(Prediction, line)) is not None]


def blind_run() -> Run:
    """The same without the context: it can only guess."""
    run = fake_run(name="context-blind", seed=1)
    evals = [
        replace(record, scores=_scores(4 + 2 * record.step / EVERY, 55 + 4 * record.step / EVERY))
        for record in run.evals
    ]
    best = BestEval(NUM_STEPS, "f1", evals[-1].scores["f1"])
    return fake_run(name="context-blind", evals=evals, predictions={}, status=replace(run.status, best=best))


def write_run(folder: Path, run: Run) -> Path:
    """Write a Run as its directory."""
    (folder / "predictions").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(run.config), encoding="utf-8")
    for name, table in (
        ("machine", run.machine),
        ("data", run.data),
        ("status", run.status),
    ):
        (folder / f"{name}.json").write_text(json.dumps(asdict(table)), encoding="utf-8")
    if run.plan:
        (folder / "plan.json").write_text(json.dumps(run.plan.as_dict()), encoding="utf-8")
    files = {
        "steps": run.steps,
        "evals": run.evals,
        **{f"predictions/{name}": run.predictions[name] for name in run.predictions},
    }
    for name, records in files.items():
        text = "".join(json.dumps(record.as_dict()) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def _config(name: str, seed: int) -> dict[str, Any]:
    return {
        "run": {"dir": f"runs/{name}", "seed": seed},
        "model": {
            "path": "t5-nano",
            "config": None,
            "init": "pretrained",
            "dropout": 0.1,
        },
        "task": {"name": "squad_v2", "no_answer": "no answer", "train_answers": "first"},
        "data": {
            "train": ["runs/corpus/train.json"],
            "eval": ["runs/corpus/dev.json"],
            "columns": {},
            "on_bad_record": "skip",
            "max_input_tokens": 192,
            "max_target_tokens": 16,
            "overlong": "truncate",
            "bucket_pool": 8,
            "cache_dir": None,
        },
        "optimizer": {"name": "adafactor", "preset": "t5-paper", "lr": 0.003},
        "schedule": {"name": "linear", "warmup_steps": 30},
        "train": {
            "num_steps": NUM_STEPS,
            "num_epochs": None,
            "batch_size": 32,
            "global_batch_size": 64,
            "precision": "auto",
            "max_grad_norm": 1.0,
            "log_every_steps": 10,
            "num_threads": None,
        },
        "eval": {"every_steps": EVERY, "at_start": True, "batch_size": 64, "max_new_tokens": None, "metric": None},
        "checkpoint": {"every_steps": None, "keep": 2},
        "report": {"title": None, "beside": ["runs/context-blind"], "sinks": []},
        "strategy": {"name": "single"},
        "launch": {"nproc": 1},
        "device": "auto",
    }


def _machine() -> dict[str, Any]:
    return {
        "format_version": 1,
        "device": {"kind": "cpu", "name": "AMD EPYC 7B13", "memory_bytes": None},
        "host": {"cpu": "AMD EPYC 7B13", "num_cores": 2, "memory_bytes": 25276514304, "os": "Linux 6.6 (Debian 12)"},
        "versions": {"fivetune": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.23.0", "python": "3.11.2"},
        "git": {"commit": "6f1c0de9a77b41c2b0a5", "dirty": True},
        "precision": "fp32",
        "attention": "sdpa",
        "num_parameters": 3145984,
        "command": "fivetune train recipes/quickstart.yaml --optimizer.lr 3e-3",
    }


def _status(evals: list[dict[str, Any]]) -> dict[str, Any]:
    phases = {"train": 118.2, "evaluate": 33.9, "checkpoint": 4.1, "prepare": 3.3}
    best = {"step": 250, "metric": "f1", "score": evals[5]["scores"]["f1"]}
    return {
        "state": "finished",
        "why": None,
        "warnings": [
            {"message": "Precision: bf16 is not fast on this CPU; fp32 is used."},
            {"message": "Tokenizer: 3 examples hold '{' (unknown)."},
        ],
        "step": NUM_STEPS,
        "best": best,
        "started": "2026-11-21T02:10:24+00:00",
        "seconds": 161.4,
        "seconds_by_phase": phases,
        "num_resumes": 1,
    }


def _steps(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    records = []
    for step in range(1, NUM_STEPS + 1):
        loss = 0.16 + 4.6 * math.exp(-step / 38) + rng.gauss(0, 0.04 + 0.25 * math.exp(-step / 60))
        lr = 0.003 * min(step / 30, 1) * (1 - max(0, step - 30) / (NUM_STEPS - 30))
        inputs, targets, seconds = rng.randint(6800, 8400), rng.randint(330, 420), rng.gauss(0.39, 0.03)
        records.append(
            {
                "step": step,
                "loss": max(loss, 0.02),
                "lr": lr,
                "effective_lr": lr * 0.084 * rng.uniform(0.95, 1.05),
                "grad_norm": abs(rng.gauss(0.6 + 3 * math.exp(-step / 40), 0.15)) + (4 if step in (87, 203) else 0),
                "num_input_tokens": inputs,
                "num_target_tokens": targets,
                "padding_fraction": max(0.0, rng.gauss(0.031, 0.011)),
                "step_seconds": seconds + (0.8 if step == 1 else 0),
                "data_seconds": abs(rng.gauss(0.004, 0.002)),
                "peak_bytes": 734003200 + 131072 * min(step, 40),
                "mfu": None,
                "world_size": 1,
                "num_examples_seen": 64 * step,
            }
        )
    return records


def _scores(has: float, no: float) -> dict[str, float]:
    exact, f1 = 0.5 * (has + no), 0.5 * (min(has + 2.6, 100) + no)
    return {
        "exact": exact,
        "f1": f1,
        "total": 640,
        "HasAns_exact": has,
        "HasAns_f1": min(has + 2.6, 100),
        "HasAns_total": 320,
        "NoAns_exact": no,
        "NoAns_f1": no,
        "NoAns_total": 320,
    }


def _eval(step: int) -> dict[str, Any]:
    has = (0.3, 31.0, 66.0, 83.4, 89.7, 92.2, 91.6)[step // EVERY]
    no = (11.9, 74.0, 88.0, 92.2, 91.9, 93.1, 92.8)[step // EVERY]
    rates = {"cap_hit": 0.21 if step == 0 else 0.004, "sentinel": 0.44 if step == 0 else 0.0, "empty": 0.5}
    rates |= {"not_in_context": 0.012, "teacher_forced_exact": has / 100, "free_running_exact": has / 100}
    loss = 0.22 + 4.9 * math.exp(-step / 40)
    return {
        "step": step,
        "run_step": step,
        "task": "squad_v2",
        "task_version": 1,
        "split": "eval",
        "num_examples": 640,
        "num_clipped": 9,
        "scores": _scores(has, no),
        "loss": loss,
        "rates": rates,
        "max_new_tokens": 18,
        "seconds": 4.8,
    }


def make_data(num: int, num_skipped: int) -> dict[str, Any]:
    edges = list(range(0, 264, 8))
    weights = [math.exp(-(((edge - 120) / 38) ** 2)) + 0.02 * (60 < edge < 230) for edge in edges[:-1]]
    counts = [round(num * weight / sum(weights)) for weight in weights]
    targets = [
        round(num * share) for share in (0.0, 0.08, 0.46, 0.2, 0.11, 0.07, 0.04, 0.02, 0.01, 0.005, 0.003, 0.002)
    ]
    return {
        "source": ["runs/corpus/train.json"],
        "num_examples": num,
        "num_read": num + num_skipped,
        "num_kept": num,
        "num_records_kept": num,
        "num_skipped": num_skipped,
        "num_skipped_bad": num_skipped,
        "skips": [
            {"where": f"train.json:{17 * (i + 1)}", "reason": "answers.text is empty"} for i in range(num_skipped)
        ],
        "num_examples_clipped": 14 * num // 1000,
        "num_clipped_input_tokens": 221 * num // 1000,
        "num_clipped_targets": 0,
        "num_answers_lost": num // 500,
        "input_lengths": {"edges": edges, "counts": counts},
        "target_lengths": {"edges": [i * 2 for i in range(13)], "counts": targets},
        "num_input_tokens": 118 * num,
        "num_target_tokens": 6 * num,
        "max_input_tokens": 192,
        "max_target_tokens": 16,
        "num_unknown_tokens": num // 25,
    }


@cache
def _predictions(step: int) -> list[Prediction]:
    rng, chance, record = random.Random(7), random.Random(step), _eval(step)
    return [_prediction(rng, chance, i, record["scores"]) for i in range(record["num_examples"])]


def _prediction(rng: random.Random, chance: random.Random, i: int, scores: dict[str, float]) -> Prediction:
    person, place, thing, other = rng.choice(NAMES), rng.choice(PLACES), rng.choice(THINGS), rng.choice(NAMES)
    question = f"Who carried {thing} to {place}?" if i != 3 else f"Who wrote {HOSTILE} \u202eon the wall?"
    context = (
        f"In the spring {other} left {rng.choice(PLACES)}. {person} carried {thing} to {place}, and was paid for it."
    )
    references = [person, person.split()[-1]] if i % 2 == 0 else []
    right = chance.random() < scores["HasAns_exact" if references else "NoAns_exact"] / 100
    truth = references[0] if references else ""
    wrong = f"{person} carried" if i % 6 == 0 and references else other if references else person
    prediction = truth if right else wrong if i != 3 else HOSTILE
    exact = float(prediction in (references or [""]))
    f1 = exact or (0.8 if references and person in prediction else 0.0)
    sure = 0.55 + 0.44 * chance.random() ** (0.4 if exact else 2)
    return Prediction(
        id=f"q{i:04d}",
        inputs=f"question: {question} context: {context}",
        prediction=prediction,
        references=tuple(references),
        scores={"exact": exact, "f1": f1},
        hit_cap=i % 211 == 5,
        logprob=3 * math.log(sure),
        num_tokens=3,
        confidence=sure,
        no_answer_score=(1 - sure if prediction else sure) * (0.2 if references else 1.0),
        num_input_tokens=60 + 7 * (i % 19),
        num_clipped_tokens=9 * (i % 71 == 0),
        answer_clipped=i % 142 == 0 and bool(references),
        sentinel=False,
        unknown_chars=0,
        meta={"question": question, "answerable": bool(references), "source_task": ("riddles", "news")[i % 3 == 0]},
    )


def label_run() -> Run:
    """A run of a task with three labels; how the last is named needs escaping."""
    rng, labels = random.Random(3), ("positive", "negative", HOSTILE)
    lines = []
    for i in range(300):
        gold = labels[min(i % 5, 2)]
        said = gold if rng.random() < 0.8 else rng.choice(labels)
        lines.append(
            {
                "id": str(i),
                "inputs": f"sentence: {i}",
                "prediction": said,
                "references": [gold],
                "hit_cap": False,
                "scores": {"exact_match": float(said == gold)},
                "confidence": rng.uniform(0.4, 1),
                "meta": {},
                "left_label_set": False,
            }
        )
    scores = {"exact_match": sum(line["scores"]["exact_match"] for line in lines) / 3, "total": 300}
    record = make_eval(9, scores, num_examples=300, rates={"left_label_set": 0.02})
    return fake_run(name="labels", evals=[record], status=make_best(9, "exact_match"), predictions={"eval-9": lines})
