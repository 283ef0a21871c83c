"""The benchmarks' protocol: order of windows, ratios, equal work. No times are tested."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import harness, train
from benchmarks.harness import UnequalWork, Window, Work
from benchmarks.plan import Plan
from benchmarks.sides import make_side
from benchmarks.workloads import MODELS, Examples, Law, make_model
from fivetune.model.flops import count_train_flops
from fivetune.model.load import load_model_and_tokenizer


class Fake:
    """A side that does nothing, writes down when it was asked, and may do less than it was asked for."""

    def __init__(self, name: str, log: list[str], *, lazy: int = 0) -> None:
        self.name, self.log, self.lazy = name, log, lazy

    def work(self, num_units: int) -> Work:
        self.log.append(self.name)
        return Work(num_units - self.lazy, {"examples": num_units})


def windows(*rates: float) -> list[Window]:
    return [Window(Work(1, {"tokens": rate}), 1.0) for rate in rates]


# --- the protocol ---


def test_windows_are_interleaved_there_and_back():
    log: list[str] = []
    found = harness.interleaved([Fake("a", log), Fake("b", log)], num_units=3, num_windows=4)
    assert "".join(log) == "abbaabba"
    assert [w.work.num_units for w in found["b"]] == [3] * 4
    harness.same_totals(found, "examples")


def test_unequal_work_is_refused():
    with pytest.raises(UnequalWork, match="b: did 2 units, 3 were asked for"):
        harness.interleaved([Fake("a", []), Fake("b", [], lazy=1)], num_units=3, num_windows=1)
    with pytest.raises(UnequalWork, match="tokens: the sides did not do the same"):
        harness.same_totals({"a": windows(1, 2), "b": windows(1, 3)}, "tokens")


def test_the_ratio_is_that_of_medians_its_ends_are_of_neighbours():
    found = harness.ratio(windows(10, 20, 90), windows(10, 5, 30), "tokens")
    assert found.as_list() == [2.0, 1.0, 4.0]


def test_a_result_is_a_file_with_the_machine_in_it(tmp_path):
    path = harness.write_result("train cpu/t5", {"machine": harness.facts("cpu")}, tmp_path)
    assert path.name == "train-cpu-t5.json"
    machine = json.loads(path.read_text())["machine"]
    assert machine["versions"]["torch"] and machine["host"]["num_cores"] and machine["num_threads"]


def test_the_peak_of_a_process_is_its_own():
    peak = harness.peak_resident()
    if peak is None:
        pytest.skip("the system does not tell")
    block = torch.ones(64 << 20, dtype=torch.uint8)
    assert harness.peak_resident() >= peak and block.numel() < harness.peak_resident()  # type: ignore[operator]


# --- what is counted ---


def test_flops_are_counted_per_example_and_stack():
    config = Namespace(
        d_model=2, num_heads=1, d_kv=2, d_ff=4, is_gated_act=True, num_layers=3, num_decoder_layers=1, vocab_size=10
    )
    flops = count_train_flops(config, [4, 2], [1, 3])
    assert flops.encoder == 6 * 3 * (16 + 24) * 6 + 24 * 3 * (16 + 4)
    assert flops.decoder == 6 * (24 + 24 + 20) * 4 + 12 * 4 * 6 + 24 * (1 / 2 + 9 / 2 + 4 + 6)
    parts = [count_train_flops(config, [s], [t]).total for s, t in ((4, 1), (2, 3))]
    assert flops.total == sum(parts)


def test_lengths_stay_in_their_bounds():
    lengths = Law(40, 30, 64).draw(np.random.default_rng(0), 500)
    assert lengths.min() >= 2 and lengths.max() == 64


# --- the sides ---


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    found = train.parse_arguments(["--model", "t5-tiny", "--workload", "translation", "--batch-size", "4"])
    found.folder = tmp_path_factory.mktemp("bench")
    train.make_model(found.model, found.folder, seed=0)
    train.prepare(found, "few", 16)
    return found


@pytest.mark.release
@pytest.mark.parametrize("peer", ["default", "tuned-bf16", "padded", "plain"])
def test_a_peer_does_the_same_updates_on_the_same_weights(args, peer):
    pytest.importorskip("accelerate")
    sides = [make_side(name, train.make_plan(args, name, "few", 4), attention="sdpa") for name in ("fivetune", peer)]
    try:
        weights = {side.name: train._weights(side, "") for side in sides}
        train.same_weights(weights)
        found = harness.interleaved(sides, 2, 2)
        harness.same_totals(found, "tokens")  # each went once through all examples
        figures, ours = (train.side_figures(found[name], 1e12, 5e11) for name in (peer, "fivetune"))
        assert figures["mean_loss"] == pytest.approx(ours["mean_loss"], rel=0.1)
        assert 0 < figures["padding_fraction"] < 0.8
        assert figures["product_share"] == pytest.approx(2 * figures["mfu"]) and figures["mfu"] > 0
        assert [side.precision for side in sides] == ["fp32", "bf16" if peer == "tuned-bf16" else "fp32"]
    finally:
        for side in sides:
            side.close()


def test_benchmark_modules_do_not_import_in_a_circle():
    folder = Path(__file__).parents[1] / "benchmarks"
    imports = {
        path.stem: set(re.findall(r"^ *from benchmarks\.(\w+) import", path.read_text(), re.MULTILINE))
        for path in folder.glob("*.py")
    }
    assert {"sides", "plan"} <= imports["train"] and list(TopologicalSorter(imports).static_order())


@pytest.mark.release
@pytest.mark.slow
def test_a_peer_computes_umt5_without_the_forced_tie_flag(tmp_path, monkeypatch):
    from benchmarks.peers import pretrained

    tiny = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 4096}
    monkeypatch.setitem(MODELS, "umt5-tiny", {**MODELS["umt5-small"], **tiny})
    folder = make_model("umt5-tiny", tmp_path)
    plan = Plan(folder, Examples.__new__(Examples), "translation", 2, "cpu", tmp_path)
    ids = torch.arange(3, 11).reshape(2, 4)
    own = load_model_and_tokenizer(str(folder)).model.eval()
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids).loss.item() for model in (pretrained(plan, None).eval(), own)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


class FakeRemote:
    """A side that answers at once, in the precision of its kind, and dies when it is asked for `dies_at`."""

    dies_at: ClassVar[dict[str, str]] = {}

    def __init__(self, args: Namespace, name: str) -> None:
        self.name, self.asked = name, list[str]()

    def start(self) -> None:
        pass

    def send(self, what: str, **values: Any) -> None:
        if self.dies_at.get(self.name) == what:
            raise train.SideDiedError("out of memory: CUDA out of memory.")
        self.asked.append(what)

    def receive(self) -> dict[str, Any]:
        kind = "fp32" if self.name.endswith("fp32") else "bf16"
        start = {"precision": kind, "start_up_seconds": 1.0, "warm_up_seconds": 2.0, "last_step_seconds": 0.1}
        return {"attention": "sdpa", "weights": [1, 0.5], "peak_bytes": 1, **start}

    def ask(self, what: str, **values: Any) -> dict[str, Any]:
        self.send(what)
        return self.receive()

    def work(self, num_units: int) -> Work:
        self.send("work")
        counts = ("examples", "tokens", "positions", "flops", "nats", "cpu_seconds")
        return Work(num_units, dict.fromkeys(counts, float(num_units)))

    def close(self) -> None:
        pass


@pytest.mark.parametrize("peers", ["default", "fivetune-fp32"])
def test_own_fp32_takes_part_where_the_choice_is_bf16(monkeypatch, peers):
    monkeypatch.setattr(train, "Remote", FakeRemote)
    sides = train.Sides(train.parse_arguments(["--peers", peers]))
    for name in ("fivetune", peers):
        sides.start(name)
    assert list(sides.build("few", 4)) == list(dict.fromkeys(["fivetune", peers, "fivetune-fp32"]))
    sides.build("few", 4)
    assert len(sides.names) == len(set(sides.names))


@pytest.mark.parametrize("dead", ["tuned", "fivetune"])
@pytest.mark.parametrize("dies_at", ["build", "warm-up", "work"])
def test_a_side_that_dies_is_a_result(tmp_path, monkeypatch, capsys, dead, dies_at):
    monkeypatch.setattr(train, "Remote", FakeRemote)
    monkeypatch.setattr(FakeRemote, "dies_at", {dead: dies_at})
    monkeypatch.setattr(train, "measure_product_flops", lambda *_: 1e12)
    monkeypatch.setattr(train, "facts", lambda device: {"num_threads": 1})
    monkeypatch.setattr(train, "timed_window", lambda side, num_units: Window(side.work(num_units), 1.0))
    words = ["--model", "t5-tiny", "--workload", "translation", "--batch-size", "4,2", "--as-on-gpu"]
    given = train.parse_arguments([*words, "--peers", "tuned,default"])
    given.folder = tmp_path
    results = list(train.measure(given))
    assert [result["batch_size"] for result in results] == [4] * 4 + [2] * 4
    assert [result["num_rounds"] for result in results] == [1, 2, 3, 4] * 2
    alive = {"fivetune", "tuned", "default"} - {dead}
    for result in results:
        assert result["died"] == {dead: "out of memory: CUDA out of memory."} and set(result["sides"]) == alive
        assert set(result["ratios"]) == ({"default"} if dead == "tuned" else set())
    train.report(results[-1])
    assert f"{dead} died: out of memory" in capsys.readouterr().out


def test_why_a_process_died(tmp_path, monkeypatch):
    given = train.parse_arguments(["--model", "t5-tiny"])
    given.folder = tmp_path
    for code, why in (
        ("raise RuntimeError('CUDA out of memory. Tried')", "out of memory: RuntimeError: CUDA out of memory. Tried"),
        ("import os; os.kill(os.getpid(), 9)", "it was killed by signal 9"),
        ("raise SystemExit(3)", "it ended with code 3"),
    ):
        remote = train.Remote(given, "tuned")
        monkeypatch.setattr(remote, "_command", [sys.executable, "-c", code])
        with pytest.raises(train.SideDiedError, match=re.escape(why)):
            remote.ask("build")
        remote.close()


def test_every_program_takes_json():
    folder = Path(train.__file__).parent
    texts = {path.stem: path.read_text() for path in folder.glob("*.py") if "__main__" in path.read_text()}
    assert len(texts) > 15
    assert not [name for name, text in texts.items() if not re.search(r"make_parser|parse_arguments", text)]
    printed = r"publish_result|\.json\b|print\(json\.dumps"
    assert not [name for name, text in texts.items() if not re.search(printed, text)]


def test_adapters_are_compared_in_fp32_unless_another_precision_is_given(monkeypatch):
    from benchmarks import adapters

    seen = []
    result = {"name": "x", "ratios": {"default": {"same_examples": 2}}}
    monkeypatch.setattr(
        adapters, "measure_models", lambda args: seen.append((args.adapter, args.precision)) or [result]
    )
    monkeypatch.setattr(adapters, "report", lambda result: None)
    monkeypatch.setattr(adapters, "publish_result", lambda *args: None)
    for words in ([], ["--precision", "auto"], ["--adapter", "dora"]):
        monkeypatch.setattr(sys, "argv", ["adapters", "--threads", str(torch.get_num_threads()), *words])
        assert adapters.main() == 0
    assert seen == [("lora", "fp32"), ("lora", "auto"), ("dora", "fp32")]


def test_both_sides_of_a_ratio_are_named_with_their_precision(capsys):
    train.report(json.loads((harness.RESULTS / "train-cpu-t5-small-squad-16.json").read_text()))
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("FiveTune (bf16) against", "tuned (fp32)", "tuned-bf16 (bf16)"))


def test_other_weights_are_refused():
    with pytest.raises(UnequalWork, match="do not start from the same weights"):
        train.same_weights({"fivetune": [10, 0.5], "tuned": [10, 0.6]})


@pytest.mark.release
def test_a_whole_run_in_processes(tmp_path, monkeypatch, capsys):
    pytest.importorskip("accelerate")
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "train",
            "--model",
            "t5-tiny",
            "--workload",
            "translation",
            "--peers",
            "tuned",
            "--batch-size",
            "4",
            "--minutes",
            "0.01",
            "--threads",
            "1",
            "--results",
            str(tmp_path),
            "--json",
        ],
    )
    train.main()
    (path,) = tmp_path.iterdir()
    result = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert {name: side["wait_policy"] for name, side in result["sides"].items()} == {
        "fivetune": "PASSIVE",
        "tuned": psutil.Process().environ().get("OMP_WAIT_POLICY"),
    }
    assert result["sides"]["tuned"]["padding_fraction"] > 0 == result["sides"]["fivetune"]["padding_fraction"]
    assert result["ratios"]["tuned"]["same_examples"] > 0 and result["sides"]["fivetune"]["peak_bytes"] > 2**26


def test_every_lever_replaces_something_that_exists():
    from benchmarks import levers

    for changes in levers.WAYS.values():
        assert all(hasattr(module, name) for module, name, _ in changes)
