"""Figures of a run on typed records: which evaluations, steps and devices count."""

from __future__ import annotations

import pytest
from fake_run import fake_run

from fivetune.rundir.figures import (
    compute_examples_per_second,
    compute_host_load,
    compute_median_step_seconds,
    compute_padding_share,
    compute_phase_shares,
    compute_tokens_per_second,
    compute_utilisation,
    find_best_eval,
    find_divergence,
    find_eval_changes,
    find_longest_freeze,
    list_device_series,
    select_comparable_evals,
    select_current_evals,
    select_evals_by_step,
    select_steady_steps,
)
from fivetune.rundir.records import BestEval, DeviceSample, EvalRecord, StepRecord, TelemetryRecord


def evaluation(
    step: int, f1: float = 50.0, *, split: str = "eval", num: int = 90, loss: float | None = 1.0, basis: str = "a"
) -> EvalRecord:
    return EvalRecord(step, "squad_v2", 1, split, num, 0, {"f1": f1}, loss, {}, 16, 1.0, basis=basis)


def step(number: int, *, seconds: float = 1.0, warm_up: bool = False, loss: float | None = None) -> StepRecord:
    return StepRecord(
        number, loss if loss is not None else float(number), 1e-3, None, 1.0, 80, 20, 0.5, seconds, 0.1, None, None, 1,
        8 * number, phase_seconds={"forward": 0.6 * seconds}, warm_up=warm_up,
    )  # fmt: skip


def sample(
    second: float, *devices: DeviceSample, rank: int = 0, phase: str | None = "train", **host
) -> TelemetryRecord:
    return TelemetryRecord(second, host="node", rank=rank, phase=phase, devices=devices, **host)


# --- evaluations ---


def test_the_whole_set_replaces_the_subset_of_its_step_and_other_files_are_left_out():
    evals = [evaluation(3), evaluation(3, split="subset"), evaluation(1, split="subset"), evaluation(3, split="other")]
    assert [(e.step, e.split) for e in select_evals_by_step(evals)] == [(1, "subset"), (3, "eval")]


def test_a_curve_is_made_of_evaluations_of_the_same_examples():
    evals = [evaluation(0), *(evaluation(at, split="subset", num=9) for at in (5, 10, 15)), evaluation(10)]
    assert [(e.step, e.num_examples) for e in select_comparable_evals(evals)] == [(5, 9), (10, 9), (15, 9)]
    assert select_comparable_evals([]) == []


def test_the_best_evaluation_asks_the_direction_of_its_metric():
    evals = [evaluation(0, 99.0), evaluation(1, 40.0), evaluation(2, 60.0)]
    assert find_best_eval(evals, metric="f1", higher_is_better=True) == evals[2]
    assert find_best_eval(evals, metric="f1", higher_is_better=False) == evals[1]
    assert find_best_eval(evals, metric="f1", higher_is_better=True, chosen=BestEval(1, "f1", 0.0)) == evals[1]
    assert find_best_eval(evals, metric="exact", higher_is_better=True) is None


def test_equal_scores_go_to_the_lower_loss_and_then_to_the_later_step():
    evals = [evaluation(1, loss=2.97), evaluation(2, loss=0.71), evaluation(3, loss=0.9)]
    assert find_best_eval(evals, metric="f1", higher_is_better=True) == evals[1]
    assert find_best_eval([evaluation(1), evaluation(2)], metric="f1", higher_is_better=True) == evaluation(2)
    assert find_best_eval([evaluation(1), evaluation(2, loss=None)], metric="f1", higher_is_better=False).step == 2


def test_a_subset_is_not_compared_with_the_whole_set():
    evals = [evaluation(1, 90.0, split="subset", num=9), evaluation(2, 60.0)]
    assert find_best_eval(evals, metric="f1", higher_is_better=True) == evals[1]
    assert find_best_eval(evals[:1], metric="f1", higher_is_better=True) == evals[0]


def test_evaluations_of_other_data_or_settings_than_the_last_are_not_compared():
    """A resume had changed data.eval: the curve joined both, and the set with more evaluations counted."""
    before, after = [evaluation(at, 90.0) for at in (0, 1, 2)], [evaluation(at, 40.0, basis="b") for at in (2, 3)]
    evals = [*before, evaluation(2, split="other", basis="c"), *after]
    assert select_comparable_evals(evals) == select_current_evals(evals) == after
    assert find_best_eval(evals, metric="f1", higher_is_better=True) == after[1]
    by_step = select_evals_by_step(evals)
    assert by_step == [*before[:2], *after] and find_eval_changes(by_step) == [2]


def test_a_subset_beside_the_whole_set_is_no_change_but_another_size_of_it_is():
    evals = [evaluation(0), *(evaluation(at, split="subset", num=9) for at in (1, 2)), evaluation(3)]
    assert find_eval_changes(evals) == []
    more = [*evals, evaluation(4, split="subset", num=20)]
    assert find_eval_changes(more) == [4] and select_current_evals(more) == [evals[0], evals[3], more[-1]]


def test_the_subset_of_other_data_replaces_the_whole_set_of_its_step():
    evals = [evaluation(2), evaluation(2, split="subset", num=9, basis="b")]
    assert select_evals_by_step(evals) == evals[1:]


# --- steps ---


def test_speeds_leave_out_the_first_step_and_the_warm_up():
    steps = [step(1, seconds=9.0), step(2, seconds=7.0, warm_up=True), step(3, seconds=2.0), step(4, seconds=3.0)]
    assert [each.step for each in select_steady_steps(steps)] == [3, 4]
    assert compute_tokens_per_second(steps) == 40.0
    assert compute_examples_per_second(steps) == 16 / 5
    assert compute_median_step_seconds(steps) == 2.5
    assert compute_phase_shares(steps) == pytest.approx({"data": 0.04, "forward": 0.6})
    assert compute_padding_share(steps) == 0.5
    for compute in (compute_tokens_per_second, compute_examples_per_second, compute_median_step_seconds):
        assert compute(steps[:1]) is None
    assert compute_padding_share([]) is None and compute_phase_shares([]) == {}


def test_the_longest_stretch_of_equal_losses():
    losses = (3.0, 2.0, 2.0, 1.0, 1.0, 1.0, 4.0)
    assert find_longest_freeze([step(at, loss=loss) for at, loss in enumerate(losses, start=1)]) == (3, 4)
    assert find_longest_freeze([]) == (0, 0)
    assert find_longest_freeze(fake_run().steps)[0] == 1


# --- devices and hosts ---


def test_a_device_counts_once_and_only_if_the_run_may_use_it():
    records = [
        sample(0, DeviceSample(0, utilisation=0.8, ours=True), DeviceSample(1, utilisation=0.9, ours=False)),
        sample(0, DeviceSample(0, utilisation=0.1), rank=1),
        sample(1, DeviceSample(0, utilisation=0.6, ours=True), DeviceSample(2, utilisation=0.4), phase="evaluate"),
    ]
    series = list_device_series(records)
    assert [(device.index, device.is_used, len(device.samples)) for device in series] == [
        (0, True, 2), (1, False, 1), (2, True, 1),
    ]  # fmt: skip
    assert compute_utilisation(records) == 0.8  # of device 0, by rank 0, while training
    assert compute_utilisation([]) is None


def test_what_other_programs_take_of_a_host():
    records = [
        sample(at, rank=rank, process_cores=0.5, core_utilisation=(1.0, 0.8)) for at in (0, 1) for rank in (0, 1)
    ]
    load = compute_host_load(records)
    assert load and (load.own_cores, load.num_cores) == (1.0, 2) and load.other_cores == pytest.approx(0.8)
    assert compute_host_load([sample(0, process_cores=0.5)]) is None


# --- divergence ---

NOISY = (
    11.31, 7.61, 6.55, 8.46, 4.91, 5.45, 8.37, 8.10, 4.27, 5.75, 7.48, 7.08, 4.07, 6.89, 5.78, 4.02, 3.97, 4.35, 5.27,
    3.30, 7.48, 6.71, 6.98, 3.53, 4.24, 6.54, 3.17, 3.13, 6.74, 6.67, 6.20, 2.21, 2.79, 5.79, 3.73, 3.50, 3.02, 5.24,
    2.11, 2.66, 6.01, 6.66, 5.54, 3.00, 1.93, 1.36, 6.06, 4.45, 1.72, 1.97, 3.40, 5.73, 1.60, 1.53, 2.41, 6.30, 4.73,
    6.42, 1.42, 5.08,
)  # fmt: skip
"""Losses of a healthy run: batches of 8 with short answers have 1.4 to 2, those with long ones 6 to 7."""

RUINED = (11.31, 264.9, 587.2, 1411.9, 1678.7, 778.9, 1479.0, 1507.2, 679.8, 899.5, 663.2, 644.4)
"""Losses of a run with a learning rate of 10."""


@pytest.mark.parametrize("first_step", range(0, 52, 3))  # a resumed run knows its own steps only
def test_the_noise_of_small_batches_is_no_divergence(first_step):
    losses = NOISY[first_step:]
    for num_steps in range(len(losses) + 1):
        assert find_divergence(dict(enumerate(losses[:num_steps])), {}, vocab_size=2048) is None


def test_a_rate_that_ruins_the_weights_at_once_is_a_divergence_from_the_first_step():
    for num_steps in range(9, len(RUINED) + 1):
        found = find_divergence(dict(enumerate(RUINED[:num_steps], start=1)), {}, vocab_size=2048)
        assert found and (found.step, found.lowest_loss) == (1, 11.31)


def test_noisy_losses_that_leave_their_range_for_good_have_diverged():
    losses = dict(enumerate([*NOISY, *(loss + 9 for loss in NOISY[-10:])]))
    found = find_divergence(losses, {}, vocab_size=2048)
    assert found and found.last_loss > 9
    assert find_divergence(losses, {}, vocab_size=2048, eval_losses={0: 10.6, 40: 5.9, 69: 15.0})
    assert find_divergence(losses, {}, vocab_size=2048, eval_losses={0: 10.6, 40: 5.9, 69: 5.3}) is None
