"""Several models of one server: runs, exports, and adapters on one base whose weights are in memory once."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import kit
import psutil
import pytest
from serving_kit import RECORDS, Slow, serving

import fivetune
from fivetune.cli import main
from fivetune.delivery.serving.batching import Batcher
from fivetune.delivery.serving.models import ServedModel, name_folders, open_models
from fivetune.errors import ConfigError
from fivetune.model.adapter import BASE, FOLDER
from fivetune.rundir.abstention_file import Abstention, Level, write_abstention

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it


QUIET: dict[str, Any] = {"max_input_tokens": 200, "num_examples": 0, "on_note": lambda text: None}


def train(folder: Path, model: Path, **options: Any) -> Path:
    data = folder.with_name(f"{folder.name}-data")
    data.mkdir()
    recipe = kit.recipe(
        data,
        model,
        run__dir=str(folder),
        optimizer={"name": "adamw", "lr": 0.1},
        train__num_steps=2,
        eval__every_steps=2,
        **options,
    )
    fivetune.train(recipe, quiet=True, preflight=False)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> dict[str, Path]:
    """Two adapters of one base, one with virtual tokens, and a run without."""
    folder = tmp_path_factory.mktemp("runs")
    adapters = {"red": {"name": "lora", "r": 4}, "blue": {"name": "ia3"}, "green": {"name": "prompt"}}
    found = {
        name: train(folder / name, model_folder, model__adapter=one, run__seed=seed)
        for seed, (name, one) in enumerate(adapters.items())
    }
    return found | {"whole": train(folder / "whole", model_folder)}


def opened(folders: Sequence[Path], *, shares_base: bool = False) -> dict[str, ServedModel]:
    notes: Any = {**QUIET, "on_warning": pytest.fail}
    return open_models(list(map(str, folders)), {}, shares_base=shares_base, **notes)


def run_of(model: ServedModel) -> Any:
    return model.answer.func.__self__  # type: ignore[attr-defined]  # of a partial


def test_adapters_answer_as_their_runs_on_one_copy_of_the_base(runs: dict[str, Path]) -> None:
    names = ["red", "blue", "green"]
    models = opened([runs[name] for name in names], shares_base=True)
    assert list(models) == names
    answers: set[tuple[str, ...]] = set()
    for name, model in models.items():
        [found] = model.answer([RECORDS[:12]])
        expected = fivetune.open_run(runs[name]).predict(RECORDS[:12])
        assert [one.prediction for one in found] == [one.prediction for one in expected]
        assert [one.confidence for one in found] == pytest.approx([one.confidence for one in expected], rel=1e-3)
        answers.add(tuple(f"{one.confidence:.3g}" for one in found))
    assert len(answers) == 3
    parameters = [run_of(model).loaded.model.parameters() for model in models.values()]
    weights = [{one.data_ptr(): one.nbytes for one in own} for own in parameters]
    base = set(weights[0]) & set(weights[1]) & set(weights[2])
    assert all(sum(own[one] for one in own if one not in base) < 0.2 * sum(own.values()) for own in weights)


def test_requests_name_the_model(runs: dict[str, Path]) -> None:
    models = opened([runs["red"], runs["whole"]])
    facts = {name: model.facts for name, model in models.items()}
    expected = {name: fivetune.open_run(runs[name]).predict(RECORDS[:1])[0] for name in models}
    with serving({name: model.answer for name, model in models.items()}, facts=facts) as server:
        for name, one in expected.items():
            code, found = server.post(f"/predict?model={name}", json=RECORDS[0])
            assert code == 200 and found["confidence"] == pytest.approx(one.confidence, rel=1e-3)
            code, found = server.post("/v1/completions", json={"model": name, "prompt": one.inputs})
            assert (code, found["model"], found["choices"][0]["text"]) == (200, name, one.prediction)
        assert [one["id"] for one in server.client.get("/v1/models").json()["data"]] == ["red", "whole"]
        assert server.client.get("/ready").json() == {"status": "ready", "models": ["red", "whole"]}
        for path, body, code, message in (
            ("/predict", RECORDS[0], 422, "model: missing. Several are served: red, whole. Name one."),
            ("/predict?model=grey", RECORDS[0], 404, "model: 'grey': not served here. Known: red, whole."),
            ("/predict?modle=red", RECORDS[0], 422, "'modle': no parameter of this route. Allowed is model."),
            ("/predict?model=red&model=red", RECORDS[0], 422, "model: given twice. Name one."),
            ("/v1/completions", {"prompt": "a", "model": "grey"}, 404, "model: 'grey': not served here. Known: red, "),
            ("/v1/completions", {"prompt": "a", "model": 1}, 404, "model: a number: 1: not served here."),
        ):
            found = server.post(path, json=body)
            assert found[0] == code and found[1]["error"]["message"].startswith(message)
        measures = server.read_measures()
        assert measures['fivetune_records_total{model="red"}'] == 2 == measures['fivetune_records_total{model="whole"}']
        assert server.client.get("/openapi.json").json()["paths"]["/predict"]["post"]["parameters"][0]["required"]


def test_a_batch_is_of_one_model_and_the_oldest_request_is_next() -> None:
    models = {"a": Slow(), "b": Slow()}
    batcher = Batcher(models, max_batch=4, max_wait_seconds=5, max_queue=9)
    models["b"].may_answer.set()
    asked = [("a", 1), ("b", 2), ("a", 2), ("a", 2), ("b", 1), ("a", 1)]
    futures = [batcher.submit(name, [str(number)] * size) for number, (name, size) in enumerate(asked)]
    assert models["a"].begun.wait(5) and not models["b"].begun.is_set()
    models["a"].may_answer.set()
    batcher.close()
    assert all(len(one.result(5)) == size for one, (_, size) in zip(futures, asked, strict=True))
    assert [[one[0] for one in model.asked] for model in models.values()] == [["0", "2", "3", "5"], ["1", "4"]]


def test_names_are_the_shortest_that_differ(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("a/export/hf", "b/export/hf", "c")]
    assert name_folders(folders) == ["a/export/hf", "b/export/hf", "c"]
    with pytest.raises(ConfigError, match=r"runs/\.\./c: is given twice\. Leave one out\."):
        name_folders([str(tmp_path / "c"), str(tmp_path / "runs/../c")])


@pytest.mark.parametrize("wrong", ["whole", "other base", "4 bits", "changed base", "export"])
def test_one_base_refuses_other_runs_by_name(
    runs: dict[str, Path], tmp_path: Path, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs["whole"] if wrong == "whole" else Path(shutil.copytree(runs["red"], tmp_path / "copy"))
    if wrong == "export":
        table = {"format_version": 1, "format": "hf", "options": {}, "files": {}, "source": {"run": "copy"}}
        (folder / "export.json").write_text(json.dumps(table))
    elif wrong != "whole":
        path = folder / FOLDER / BASE
        change = {"bits": 4} if wrong == "4 bits" else {"checksum": "0123"}
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    message = {
        "whole": f"--one-base: {folder} was not trained with an adapter of a base. Serve it without --one-base.",
        "other base": "(weights 0123), and " + str(runs["blue"]) + " on ",
        "4 bits": f"--one-base: {folder}: the base of its adapter was in 4 bits (qlora), and the common one is not.",
        "changed base": "with weights 0123, and ",
        "export": f"--one-base: {folder} is an export, whose weights are its own. Give the run directory.",
    }[wrong]
    first = [] if wrong == "changed base" else [str(runs["blue"])]
    assert main(["serve", "--port", "0", "--one-base", *first, str(folder)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ctranslate2", "hf"])
def test_an_export_answers_as_its_run(runs: dict[str, Path], tmp_path: Path, name: str) -> None:
    if name == "ctranslate2":
        pytest.importorskip("ctranslate2")
    source, target = runs["red"], tmp_path / name
    assert main(["export", str(source), "--format", name, "--examples", "4", "--output", str(target)]) == 0
    table = json.loads((target / "export.json").read_text())
    warned: list[str] = []
    notes: Any = {**QUIET, "on_warning": warned.append}
    models = open_models([str(source), str(target)], {}, shares_base=False, **notes)
    assert list(models) == ["red", name]
    [found], [expected] = (model.answer([RECORDS[:9]]) for model in reversed(models.values()))
    assert [one.prediction for one in found] == [one.prediction for one in expected]
    table["proof"] = {"verdict": "do not use", "reasons": ["it is slower."]}
    (target / "export.json").write_text(json.dumps(table))
    warned.clear()
    open_models([str(target)], {}, shares_base=False, **notes)
    assert warned == [f"{target}: the verdict of this export is: do not use. it is slower."]


SERVER = """
import sys, threading
from fivetune.cli import main

def report():
    sys.stdin.readline()
    print(sorted({"torch", "transformers"} & set(sys.modules)), flush=True)

threading.Thread(target=report, daemon=True).start()
sys.exit(main(["serve", *sys.argv[1:], "--device", "cpu", "--port", "0", "--examples", "0"]))
"""
MOST_BYTES = 150e6


def test_an_export_is_served_without_torch(runs: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    silent = Path(shutil.copytree(runs["whole"], tmp_path / "silent"))
    levels = (Level(0.999, 2_000, 0), Level(0.0, 4_000, 2_000))
    write_abstention(silent / "model", Abstention("accuracy", 1.0, 4_000, "eval", 2, levels, max_error=0.05))
    targets = [tmp_path / "export", tmp_path / "silent-export"]
    for run, target in zip((runs["whole"], silent), targets, strict=True):
        words = ["--format", "ctranslate2", "--examples", "2", "--output", str(target)]
        assert main(["export", str(run), *words]) == 0
    expected = fivetune.open_run(targets[0]).predict(RECORDS[:4])
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER, *map(str, targets)], **pipes) as process:
        try:
            address = next(
                found[1] for line in process.stdout if (found := re.search(r"serving on (http://\S+)", line))
            )
            asked = {"inputs": RECORDS[:4]}
            found, unsure = (
                httpx.post(f"{address}/predict?model={name}", json=asked, timeout=60).json()["predictions"]
                for name in ("export", "silent-export")
            )
            prompt = {"model": "export", "prompt": expected[0].inputs, "temperature": 2, "n": 3}
            drawn = httpx.post(f"{address}/v1/completions", json=prompt, timeout=60).json()["choices"]
            refused = httpx.post(f"{address}/v1/completions", json={**prompt, "seed": 1}, timeout=60)
            num_bytes = psutil.Process(process.pid).memory_info().rss
            process.stdin.write("\n")
            process.stdin.flush()
            loaded = next(line for line in process.stdout if line.startswith("["))
        finally:
            process.terminate()
    assert len(drawn) == 3 and refused.status_code == 422 and "seed: 1" in refused.text
    assert [(one["id"], one["prediction"]) for one in found] == [(one.id, one.prediction) for one in expected]
    assert [(one["unsure"], one["withheld"]) for one in unsure] == [(True, one.prediction) for one in expected]
    assert loaded == "[]\n" and num_bytes < MOST_BYTES
