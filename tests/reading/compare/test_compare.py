"""Comparing runs: the figures of each, their spread, whether they did the same work, what changed for which example."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_run import make_step, write_run

from fivetune.cli import main
from fivetune.commands.compare import print_comparison
from fivetune.errors import RunDirError
from fivetune.reading.compare import MEASURES, compare, compare_predictions, group_runs
from fivetune.reading.compare.measures import (
    TIME_MEASURES,
    compute_measures,
    compute_seconds_to_score,
    find_best_score,
)
from fivetune.reading.compare.records import Comparison, Variant
from fivetune.reading.compare.spread import T_QUANTILES, compute_mean_interval, compute_t_quantile
from fivetune.reading.report.comparison import build_comparison_page
from fivetune.reading.report.comparison.variants import describe_outcome
from fivetune.rundir.figures import compute_energy_joules
from fivetune.rundir.records import (
    BestEval,
    DataSummary,
    DeviceFacts,
    DeviceSample,
    EvalRecord,
    GitFacts,
    MachineRecord,
    Prediction,
    Run,
    RunStatus,
    SplitSummary,
    StepRecord,
    TelemetryRecord,
)

EVERY = 2


def make_run(
    name: str = "a",
    *,
    seed: int = 1,
    scores: tuple[float, ...] = (10.0, 50.0, 40.0),
    step_seconds: float = 2.0,
    world_size: int = 1,
    right: str = "1100",
    **settings: Any,
) -> Run:
    """Four updates of 8 examples, evaluated every two; `right` says which examples the best evaluation has right."""
    config: dict[str, Any] = {
        "run": {"seed": seed, "dir": f"runs/{name}"},
        "task": {"name": "squad_v2"},
        "optimizer": {"name": "adamw", "lr": 0.1},
        "train": {"num_steps": 4, "precision": "fp32"},
        "launch": {"nproc": 1},
        "strategy": {"name": "single"},
    }
    for key, value in settings.items():
        section, _, inner = key.partition("__")
        config[section] = {**config[section], inner: value}
    steps = [
        StepRecord(
            **make_step(
                i,
                lr=0.1,
                effective_lr=0.1,
                num_input_tokens=90,
                num_target_tokens=10,
                padding_fraction=0.2,
                step_seconds=step_seconds + 8 * (i == 1),
                data_seconds=0.5,
                peak_bytes=100 * i,
                world_size=world_size,
                num_examples_seen=8 * i,
                warm_up=i == 1,
            )
        )
        for i in range(1, 5)
    ]
    evals = [
        EvalRecord(
            step=i * EVERY,
            split="eval",
            task="squad_v2",
            task_version=1,
            num_examples=len(right),
            scores={"f1": score, "total": len(right)},
            loss=2.0 - i / 2,
            seconds=1.0,
            num_clipped=0,
            max_new_tokens=16,
            rates={},
        )
        for i, score in enumerate(scores)
    ]
    best = max(evals, key=lambda e: e.scores["f1"])
    predictions = [
        Prediction(
            id=f"q{i}",
            inputs=f"question {i}",
            references=("yes",),
            prediction="yes" if mark == "1" else "no",
            scores={"f1": float(mark), "exact": float(mark)},
        )
        for i, mark in enumerate(right)
    ]
    data = SplitSummary(fingerprint="f" * 8, num_examples=32)
    return Run(
        name=name,
        config=config,
        machine=MachineRecord(
            device=DeviceFacts("cpu"), versions={"torch": "2"}, git=GitFacts(commit="abc", dirty=False)
        ),
        status=RunStatus(
            state="finished", seconds=36.0 * step_seconds, best=BestEval(best.step, "f1", best.scores["f1"])
        ),
        data=DataSummary(train=data, eval=data),
        steps=steps,
        evals=evals,
        predictions={f"eval-{best.step}": predictions},
    )


LEFT, RIGHT = "\u201c", "\u201d"


def of(*runs: Run, **options: Any) -> Comparison:
    variants, varied = group_runs(runs)
    return compare(variants, **{"title": "t", "varied": varied, **options})


# --- figures of one run ---


def test_measures_of_a_run():
    found = compute_measures(make_run(), metric="f1", price_per_hour=100.0)
    assert found.keys() == MEASURES.keys()
    assert (found["score_best"], found["score_last"], found["loss_best"], found["loss_last"]) == (50.0, 40.0, 1.0, 1.0)
    assert (found["seconds"], found["train_seconds"], found["step_seconds"]) == (72.0, 16.0, 2.0)
    assert (found["examples_per_second"], found["tokens_per_second"], found["data_wait"]) == (4.0, 50.0, 0.25)
    assert found["padding"] == pytest.approx(0.2) and found["peak_bytes"] == 400
    assert (found["cost"], found["cost_per_point"]) == (2.0, 0.04)
    assert found["energy_joules"] is None and found["mfu"] is None and found["utilisation"] is None


def test_a_run_without_anything_has_no_figures():
    empty = replace(make_run(), steps=[], evals=[], status=RunStatus(), predictions={})
    assert set(compute_measures(empty, metric="f1", price_per_hour=1.0).values()) == {None}


def test_seconds_until_a_score_is_reached():
    run = make_run(scores=(10.0, 50.0, 60.0))
    assert [compute_seconds_to_score(run, "f1", target) for target in (5, 50, 55, 70)] == [0.0, 12.0, 16.0, None]


def test_scores_of_a_part_are_not_held_against_scores_of_the_whole():
    run = make_run(scores=(10.0, 50.0, 40.0))
    whole = [replace(run.evals[0], scores={"f1": 5.0}), replace(run.evals[1], scores={"f1": 70.0})]
    limited = replace(run, evals=[*whole, *(replace(e, split="subset") for e in run.evals[1:])])
    found = compute_measures(limited, metric="f1")
    assert (found["score_best"], found["score_last"], find_best_score(limited, "f1")) == (70.0, 40.0, 50.0)
    assert compute_seconds_to_score(limited, "f1", 50.0) == 12.0
    assert of(limited).variants[0].measures["seconds_to_score"].value == 12.0


def sample(second: float, *devices: DeviceSample, rank: int = 0) -> TelemetryRecord:
    return TelemetryRecord(second, host="h", rank=rank, phase="train", devices=devices)


def test_energy_by_counter_and_by_power():
    counted = [sample(0, DeviceSample(0, energy_joules=100, ours=True)), sample(1, DeviceSample(0, energy_joules=350))]
    watts = {0: 100, 1: 200, 3: 200}
    drawn = [sample(second, DeviceSample(0, power_watts=value, ours=True)) for second, value in watts.items()]
    foreign = [sample(second, DeviceSample(1, power_watts=900, ours=False)) for second in (0, 1)]
    assert compute_energy_joules(counted + foreign) == 250.0
    assert compute_energy_joules(drawn) == 550.0
    assert (
        compute_energy_joules([*drawn, *(sample(second, DeviceSample(0, power_watts=1), rank=1) for second in (0, 3))])
        == 550.0
    )
    assert compute_energy_joules([sample(second, DeviceSample(0, power_watts=100)) for second in (0, 100)]) is None
    assert compute_energy_joules([sample(0), sample(1)]) is None
    instances = [sample(second, *(DeviceSample(0, power_watts=50, mig=mig) for mig in (0, 1))) for second in (0, 2)]
    assert compute_energy_joules(instances) == 200.0


# --- spread ---


def test_t_quantiles_are_those_of_the_distribution():
    """Checked by integrating the density; the expansion goes on where the table ends."""
    from math import gamma, pi, sqrt

    for degrees in (1, 2, 5, 20, 21, 60):
        scale = gamma((degrees + 1) / 2) / (sqrt(degrees * pi) * gamma(degrees / 2))
        step = compute_t_quantile(degrees) / 20_000
        inside = (
            sum((1 + ((i + 0.5) * step) ** 2 / degrees) ** (-(degrees + 1) / 2) for i in range(20_000)) * step * scale
        )
        assert inside == pytest.approx(0.475, abs=2e-5), degrees
    assert len(T_QUANTILES) == 20


def test_repeats_give_intervals_and_ratios_by_seed():
    runs = [
        make_run(f"{name}-seed{seed}", seed=seed, scores=(0.0, score), step_seconds=seconds, optimizer__lr=lr)
        for name, lr, seed, score, seconds in (
            ("a", 0.1, 1, 50.0, 2.0),
            ("a", 0.1, 2, 60.0, 4.0),
            ("b", 0.2, 1, 55.0, 1.0),
            ("b", 0.2, 2, 67.0, 1.0),
        )
    ]
    a, b = of(*runs).variants
    assert (a.name, b.name, b.settings) == ("a", "b", {"optimizer.lr": 0.2})
    score = a.measures["score_best"]
    assert (score.value, score.num, score.spread) == (55.0, 2, "values")
    assert (score.low, score.high) == (50.0, 60.0)  # Student's t would give -8.5 to 118.5: too few seeds
    third = compute_mean_interval([50.0, 55.0, 60.0])
    assert third.spread == "seeds" and third.high == pytest.approx(55 + 4.3027 * 5 / 3**0.5, rel=1e-4)
    assert (a.measures["step_seconds"].low, a.measures["step_seconds"].high) == (2.0, 4.0)
    assert b.against["score_best"].value == 6.0  # +5 and +7, seed by seed
    speed = b.against["examples_per_second"]
    assert (speed.value, speed.low, speed.high, speed.spread) == (3.0, 2.0, 4.0, "range")
    assert a.against == {} and a.pareto is False and b.pareto is True


def test_paired_bootstrap_over_examples():
    a = make_run("a", scores=(0.0, 50.0), right="1100" * 50)
    b = make_run("b", scores=(0.0, 75.0), right="1110" * 50, optimizer__lr=0.2)
    found = of(a, b).variants[1].over_examples
    assert found is not None and found.low is not None and found.high is not None and found.p_value is not None
    assert found.value == 25.0 and 15 < found.low < 25 < found.high < 35 and found.p_value < 0.01
    other = replace(b, predictions={"eval-2": [Prediction(id="else", scores={"f1": 0.75})]})
    assert of(a, other).variants[1].over_examples is None
    no_mean = replace(b, evals=[replace(e, scores={"f1": 76.0}) for e in b.evals])
    assert of(a, no_mean).variants[1].over_examples is None


def test_a_score_that_is_no_mean_is_computed_again_from_the_predictions():
    def with_part(run: Run, score: float) -> Run:
        evals = [replace(e, scores={"HasAns_exact": score}) for e in run.evals]
        best = replace(run.status.best, metric="HasAns_exact")
        return replace(run, evals=evals, status=replace(run.status, best=best))

    a, b = make_run("a", right="1100" * 50), make_run("b", right="1110" * 50, optimizer__lr=0.2)
    found = of(with_part(a, 50.0), with_part(b, 75.0), metric="HasAns_exact").variants[1].over_examples
    assert found is not None and found.value == 25.0 and found.low is not None and 15 < found.low < 25
    assert of(with_part(a, 50.0), with_part(b, 76.0), metric="HasAns_exact").variants[1].over_examples is None


# --- speed and devices ---


def test_scaling_is_held_against_the_measured_one_device_run():
    one = make_run("one")
    two = make_run("two", step_seconds=1.25, world_size=2, launch__nproc=2, strategy__name="ddp")
    other = make_run("other", step_seconds=1.25, world_size=2, launch__nproc=2, train__precision="bf16")
    found = of(one, two, other).variants
    assert [variant.measures["scaling_efficiency"].value for variant in found] == [None, 0.8, None]
    assert found[1].measures["world_size"].value == 2


def test_losses_of_scaling_are_divided_by_phase():
    def with_phases(run: Run, **phases: float) -> Run:
        steps = [replace(step, data_seconds=0.0, phase_seconds=phases) for step in run.steps]
        return replace(run, steps=steps)

    one = with_phases(make_run("one", step_seconds=8.0), forward=4.0, backward=2.0, optimizer=1.0)
    two = make_run("two", step_seconds=5.0, world_size=2, launch__nproc=2, strategy__name="ddp")
    two = with_phases(two, forward=2.0, backward=1.5, optimizer=1.0, exchange=0.25)
    (alone, both) = of(one, two).variants
    assert both.measures["scaling_efficiency"].value == 0.8 and alone.scaling_losses == {}
    expected = {"forward": 0.0, "backward": 0.1, "optimizer": 0.1, "exchange": 0.05, "data": 0.0, "other": -0.05}
    assert both.scaling_losses == pytest.approx(expected)
    assert sum(both.scaling_losses.values()) == pytest.approx(1 - 0.8)
    without = make_run("two", step_seconds=5.0, world_size=2, launch__nproc=2, strategy__name="ddp")
    assert of(one, without).variants[1].scaling_losses == {}


def test_scaling_is_held_against_the_same_batch_where_it_was_measured():
    def run(name: str, size: int, batch: int, seconds: float) -> Run:
        return make_run(name, step_seconds=seconds, world_size=size, launch__nproc=size, train__batch_size=batch)

    alone = [run("small", 1, 8, 2.0), run("big", 1, 16, 1.0)]
    variants = of(*alone, run("small two", 2, 8, 1.25), run("big two", 2, 16, 0.625)).variants
    assert [one.measures["scaling_efficiency"].value for one in variants[2:]] == [0.8, 0.8]
    assert of(alone[0], run("wide", 2, 16, 1.0)).variants[1].measures["scaling_efficiency"].value == 1.0


def test_an_idle_second_device_is_told():
    asked = make_run("asked", world_size=1, launch__nproc=2, strategy__name="ddp")
    found = of(make_run("one"), asked)
    assert "asked: 2 devices were requested, but the world size is 1" in found.warnings[0]
    assert found.variants[1].measures["scaling_efficiency"].value is None


# --- the same examples ---

OTHER_SET = DataSummary(eval=SplitSummary(fingerprint="e" * 8, source=("x/other.json",), num_examples=32))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"data": OTHER_SET},
            "4 examples, fingerprint ffffffff in a; 4 examples, of other.json, fingerprint eeeeeeee in",
        ),
        (
            {"evals": [replace(one, num_examples=3) for one in make_run().evals]},
            "fingerprint ffffffff in a; 3 examples,",
        ),
    ],
)
def test_scores_of_different_sets_have_no_winner(tmp_path, capsys, change, named):
    ours, theirs = make_run("a"), replace(make_run("b", optimizer__lr=0.2, scores=(1.0, 90.0, 80.0)), **change)
    found = of(ours, theirs)
    text = " ".join(describe_outcome(found))
    assert "Scores are not compared, and no variant is named as the best. Runs differ in the examples that they" in text
    assert named in text and "has the best" not in text and "Pareto" not in text and "than the baseline" not in text
    assert not any(one.pareto or one.over_examples for one in found.variants)
    assert not {"score_best", "score_last", "loss_best", "seconds_to_score"} & {*found.variants[1].against}
    assert found.variants[1].measures["seconds_to_score"].value is None and "seconds" in found.variants[1].against
    folders = [str(write_run(tmp_path / run.name, run)) for run in (ours, theirs)]
    assert main(["compare", *folders, "--json"]) == 0
    printed = capsys.readouterr().out
    assert named in " ".join(printed.split()) and "Pareto-optimal" not in printed
    assert named in json.loads(printed.splitlines()[-1])["incomparable"]


@pytest.mark.parametrize(
    "change",
    [
        {"data": DataSummary()},  # data.json is lost
        {"data": replace(OTHER_SET, eval=replace(OTHER_SET.eval, source=()))},  # by another length limit
        {"evals": make_run().evals[:2]},
        {"evals": [replace(make_run().evals[0], split="subset", num_examples=3), *make_run().evals[1:]]},
    ],
)
def test_scores_of_the_same_examples_have_a_winner(change):
    other = make_run("b", task__max_answer=9, scores=(1.0, 90.0, 80.0))
    found = of(make_run("a"), replace(other, **change))
    assert found.incomparable == "" and found.variants[1].pareto
    assert "has the best F1" in " ".join(describe_outcome(found)) or "evals" in change


# --- the same work ---


def test_the_same_work_has_no_warnings():
    found = of(make_run("a"), make_run("b", optimizer__lr=0.2))
    assert found.warnings == () and found.varied == ("optimizer.lr",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": make_run().steps[:2]}, "updates: 4 in a; 2 in b."),
        (
            {"data": DataSummary(eval=SplitSummary(fingerprint="e" * 8, num_examples=9))},
            "the evaluation set: ffffffff with 32 ex",
        ),
        ({"machine": replace(make_run().machine, versions={"torch": "3"})}, "the version of torch: 2 in a; 3 in b."),
        (
            {"machine": replace(make_run().machine, device=DeviceFacts("cuda"))},
            "the kind of device: cpu in a; cuda in b.",
        ),
        (
            {"machine": replace(make_run().machine, git=GitFacts("abc", dirty=True))},
            "the commit: abc in a; abc with changes in b.",
        ),
        ({"evals": [replace(e, task_version=2) for e in make_run().evals]}, "squad_v2 1 in a; squad_v2 2 in b."),
        (
            {"steps": [replace(s, num_input_tokens=91) for s in make_run().steps]},
            "different examples from update 1 on",
        ),
        (
            {"steps": [replace(s, num_examples_seen=9 * s.step) for s in make_run().steps]},
            "update: 8.0 in a; 9.0 in",
        ),
        (
            {"status": replace(make_run().status, state="interrupted")},
            "b is interrupted after 4 of unknown steps",
        ),
        ({"status": replace(make_run().status, num_resumes=1)}, "b was interrupted and resumed: its times"),
    ],
)
def test_whatever_else_differs_is_told(change, said):
    found = of(make_run("a"), replace(make_run("b", optimizer__lr=0.2), **change))
    assert any(said in warning for warning in found.warnings), found.warnings


def test_a_difference_within_a_variant_names_its_runs():
    one, two = make_run("a-seed1"), make_run("a-seed2", seed=2)
    other = replace(two, machine=replace(two.machine, num_threads=2))
    found = of(one, other, make_run("b-seed1", optimizer__lr=0.2))
    assert "Runs differ in threads: unknown in a-seed1 and b; 2 in a-seed2." in found.warnings


def test_only_what_is_varied_may_differ():
    runs = make_run("a"), make_run("b", optimizer__lr=0.2, train__precision="bf16")
    found = of(*runs, varied=("optimizer.lr",))
    assert "Runs differ in the setting train.precision: fp32 in a; bf16 in b." in found.warnings
    confounded = "b differs from every other variant in at least 2 settings at once (optimizer.lr and train.precision)"
    assert any(warning.startswith(confounded) for warning in of(*runs).warnings)
    between = make_run("c", train__precision="bf16")
    assert of(*runs, between).warnings == ()


def test_entries_of_a_varied_table_may_differ():
    runs = make_run("a", train__rates={}), make_run("b", train__rates={"encoder": 100})
    assert not [words for words in of(*runs, varied=("train.rates",)).warnings if "train.rates" in words]
    assert any("the setting train.rates.encoder" in words for words in of(*runs, varied=("optimizer.lr",)).warnings)


def test_runs_at_the_same_time_are_told():
    def timed(run: Run, minute: int) -> Run:
        status = replace(run.status, started=f"2026-01-01T00:0{minute}:00+0000")
        return replace(run, status=status, telemetry=[sample(0)])

    a, b = make_run("a"), make_run("b", optimizer__lr=0.2)
    assert "a and b ran at the same time on h, which distorts their times." in of(timed(a, 0), timed(b, 1)).warnings
    assert of(timed(a, 0), timed(b, 2)).warnings == ()


def beside_others(run: Run, own: float) -> Run:
    """The run on two cores of which 1.8 were busy, `own` of them with the run."""
    return replace(
        run,
        telemetry=[
            TelemetryRecord(t, host="h", phase="train", core_utilisation=(1.0, 0.8), process_cores=own)
            for t in range(3)
        ],
    )


def test_load_of_other_programs_is_told():
    a, b = make_run("a"), make_run("b", optimizer__lr=0.2)
    said = "Other programs kept cores busy while b ran, up to 1.3 of 2 cores beside b: this distorts their times."
    assert of(beside_others(a, 1.7), beside_others(b, 0.5)).warnings == (said,)


def test_no_claim_about_speed_where_times_are_not_the_runs_own(capsys):
    a, b = make_run("a"), make_run("b", optimizer__lr=0.2, step_seconds=1.0)
    own, disturbed = of(a, b), of(beside_others(a, 1.7), beside_others(b, 0.5))
    assert (own.disturbed, disturbed.disturbed) == ((), ("b",))
    assert [variant.pareto for variant in own.variants] == [False, True]
    assert [variant.pareto for variant in disturbed.variants] == [False, False]
    assert {"seconds", "examples_per_second"} <= set(own.variants[1].against)
    assert set(disturbed.variants[1].against) & set(TIME_MEASURES) == set()
    assert "score_best" in disturbed.variants[1].against
    said = " ".join(describe_outcome(disturbed))
    assert "fastest" in " ".join(describe_outcome(own)) and "fastest" not in said and "quicker" not in said
    assert "Speeds are not compared: other work used the machine beside 1 run" in said
    assert "Pareto front" not in [section.title for section in build_comparison_page(disturbed).sections]
    for one, is_marked in ((own, False), (disturbed, True)):
        print_comparison(one)
        shown = capsys.readouterr().out
        assert ("time !" in shown) == ("examples/s !" in shown) == is_marked and "f1 !" not in shown


@pytest.mark.parametrize("rule", ["abstention", "majority_label"])
def test_a_variant_that_learnt_silence_or_one_label_wins_nothing(rule):
    """A random model that answers nothing was "best, significant" and on the Pareto front of a shipped page."""
    silent = make_run("silent", scores=(10.0, 99.0), step_seconds=0.5, optimizer__lr=0.2)
    if rule == "abstention":
        names = {"HasAns_exact": 0.0, "NoAns_exact": 100.0, "exact": 99.0, "HasAns_total": 8.0}
        evals = [replace(one, scores=one.scores | names) for one in silent.evals]
    else:
        evals = [replace(one, rates={"one_label": 1.0, "majority_label": 0.5}) for one in silent.evals]
    silent = replace(silent, evals=evals)
    found = of(make_run("a"), silent)
    said = " ".join(describe_outcome(found))
    assert f"No variant has a better F1 than the baseline {LEFT}a{RIGHT}" in said
    assert f"{LEFT}silent{RIGHT} (F1 99.00) is left out: learnt to give" in said or "left out: learnt one label" in said
    assert not found.variants[1].pareto and found.variants[0].pareto
    alone = of(silent, replace(silent, name="other", config=make_run("other", optimizer__lr=0.3).config))
    assert "No variant is the best, because none has learnt the task." in " ".join(describe_outcome(alone))


def test_the_last_score_is_only_beside_the_best_of_the_same_examples():
    """The best score was of 600 examples, the last one of 200; their difference was called over-fitting."""
    run = make_run(scores=(10.0, 50.0, 40.0))
    last = replace(run.evals[-1], num_examples=run.evals[-1].num_examples + 1)
    found = compute_measures(replace(run, evals=[*run.evals[:-1], last]), metric="f1")
    assert (found["score_best"], found["score_last"]) == (50.0, None)


def test_equal_scores_are_decided_by_the_evaluation_loss():
    a, b = (make_run(name, scores=(0.0, 0.0, 0.0), optimizer__lr=lr) for name, lr in (("a", 0.1), ("b", 0.2)))
    b = replace(b, evals=[replace(e, loss=e.loss / 2) for e in b.evals])
    said = " ".join(describe_outcome(of(a, b)))
    assert "All variants have the same F1, 0.00; the evaluation loss decides." in said
    assert "\u201cb\u201d has the lowest evaluation loss: 0.500, \u22120.500 against the baseline" in said
    curves = next(one for one in build_comparison_page(of(a, b)).sections if one.title == "Curves")
    assert "F1 is 0 in every evaluation of every run" in str(curves.parts[-1]) and len(curves.parts) == 3


# --- examples ---


def test_changes_between_two_runs():
    before = make_run("a", scores=(0.0, 50.0), right="1100")
    after = make_run("b", scores=(0.0, 50.0), right="1010")
    before, after = (run.read_predictions(run.evals[-1]) for run in (before, after))
    found = compare_predictions(before, after, metric="f1")
    assert found is not None and found.score == "f1"
    groups = (found.both_right, found.broken, found.fixed, found.both_wrong)
    assert [[one.id for one in group] for group in groups] == [["q0"], ["q1"], ["q2"], ["q3"]]
    assert (found.fixed[0].before, found.fixed[0].after, found.fixed[0].inputs) == ("no", "yes", "question 2")
    assert compare_predictions(before, [], metric="f1") is None


def test_runs_that_were_never_evaluated_are_compared_by_their_speed():
    runs = [
        replace(make_run(name, step_seconds=seconds, optimizer__lr=seconds), evals=[], predictions={})
        for name, seconds in (("a", 2.0), ("b", 1.0))
    ]
    b = of(*runs, metric="f1").variants[1]
    assert b.against["examples_per_second"].value == 2.0 and b.measures["score_best"].value is None


def test_runs_of_other_tasks_have_no_score_of_this_metric():
    other = make_run("b", task__name="gsm8k")
    evals = [replace(e, scores={"accuracy": 9.0}) for e in other.evals]
    a, b = of(make_run("a"), replace(other, evals=evals, status=RunStatus(state="finished")), metric="f1").variants
    assert (a.measures["score_best"].value, b.measures["score_best"].value, b.over_examples) == (50.0, None, None)


def test_runs_of_one_name_are_all_there():
    runs = [make_run(name, optimizer__lr=lr) for name, lr in (("a (2)", 0.1), ("a", 0.2), ("a", 0.3))]
    assert [one.name for one in of(*runs).variants] == ["a (2)", "a", "a (3)"]


# --- the command ---


def test_failures_and_unknown_names():
    failed = Variant("f", {}, (), measures={}, failures=("f-seed1: out of memory.",))
    good = Variant("g", {}, (make_run(),), measures={})
    found = compare([failed, good], title="t", metric="f1")
    assert (
        found.baseline == "f"
        and found.variants[1].against == {}
        and found.variants[0].measures["seconds"].value is None
    )
    with pytest.raises(RunDirError, match=r"metric: no run has a score 'f2'. Did you mean f1"):
        compare([good], title="t", metric="f2")
    with pytest.raises(RunDirError, match=r"baseline: there is no variant 'h'. "):
        compare([good], title="t", baseline="h")


def test_run_directories_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folders = [
        str(write_run(tmp_path / name, make_run(name, optimizer__lr=lr, step_seconds=seconds)))
        for name, lr, seconds in (("a", 0.1, 2.0), ("b", 0.2, 1.0))
    ]
    assert main(["compare", *folders, "--json"]) == 0
    printed = capsys.readouterr().out
    table = json.loads(printed.splitlines()[-1])
    assert table["variants"][1]["against"]["examples_per_second"]["value"] == 2.0
    assert "2.00 x" in printed and (tmp_path / "comparison-a-b.html").is_file()
    assert main(["compare", folders[0]]) == 2 and "cannot be compared: no other run is given" in capsys.readouterr().err
    assert main(["compare", *folders, "--price-per-hour", "nan"]) == 2 and "0 or more" in capsys.readouterr().err
    assert main(["compare", *folders, "--resume"]) == 2 and "only a sweep file trains runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--vary", "optimizer.lrr"], 2, "--vary optimizer.lrr: no run has this setting. Did you mean optimizer.lr"),
        (["--price-per-hour", "-3"], 2, "--price-per-hour -3.0: give a number, 0 or more"),
        (["--metric", "f2"], 2, "--metric f2: there is no such name. Did you mean f1"),
        (["--baseline", "c"], 2, "--baseline c: there is no such name. Allowed: a, b"),
        (["--output", "{}/no/x.html"], 2, "there is no folder"),
        (["--output", "{}"], 2, "is a folder. Give a file in it"),
        (["{}/nope"], 4, "nope: no such directory"),
    ],
)
def test_what_is_asked_must_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags, code, said):
    folders = [str(write_run(tmp_path / name, make_run(name, optimizer__lr=lr))) for name, lr in (("a", 1), ("b", 2))]
    assert main(["compare", *folders, *(flag.format(tmp_path) for flag in flags)]) == code
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_comparing_needs_no_torch(tmp_path: Path):
    folders = [
        str(write_run(tmp_path / name, make_run(name, optimizer__lr=lr))) for name, lr in (("a", 0.1), ("b", 0.2))
    ]
    blocked = "import sys; sys.modules['torch'] = None; from fivetune.cli import main"
    code = f"{blocked}; sys.exit(main(['compare', *{folders}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
