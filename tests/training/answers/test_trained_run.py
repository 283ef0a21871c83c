"""A run in Python: one object for scores, report, answers and evaluations; tables in memory as data."""

from __future__ import annotations

import datetime
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_type_hints

import kit
import pytest
from safetensors.torch import load_file

import fivetune
from fivetune import cli, rundir
from fivetune.data.readers.tables import iter_rows
from fivetune.delivery.serving.models import open_models
from fivetune.errors import ConfigError, DataError, FiveTuneEnvironmentError, InterruptedRunError, RunDirError
from fivetune.plugins import KINDS
from fivetune.rundir.progress import Progress
from fivetune.training.answers.batch_size import AutoBatchSize
from fivetune.training.answers.evaluator import Evaluator
from fivetune.training.answers.loading import load_run_model
from fivetune.training.answers.requests import list_inputs

CLASSIFY = {"task": {"name": "classification", "inputs": "colour: {thing}", "label": "colour"}}
FAST = {"train.num_steps": 2, "eval.every_steps": 2, "eval.at_start": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> fivetune.TrainedRun:
    folder = tmp_path_factory.mktemp("python")
    return fivetune.train(kit.recipe(folder, model_folder), FAST, quiet=True, preflight=False)


def rows(num: int = 8) -> list[dict[str, Any]]:
    return [{"id": f"r{i}", "thing": f"{kit.COLOURS[i % 2]} hat {i}", "colour": kit.COLOURS[i % 2]} for i in range(num)]


def classify(folder: Path, model: Path, train: object, **changes: Any) -> fivetune.TrainedRun:
    given = {**kit.recipe(folder, model, **CLASSIFY), "data": {"train": train, "cache_dir": str(folder / "cache")}}
    return fivetune.train(given, {**FAST, **changes.pop("settings", {})}, quiet=True, preflight=False, **changes)


# --- the object ---


def test_train_and_open_run_give_the_same_object(run: fivetune.TrainedRun) -> None:
    opened = fivetune.open_run(run.folder)
    assert type(run) is type(opened) is fivetune.TrainedRun
    assert opened.evals == run.evals and opened.scores == run.scores and repr(opened) == repr(run)
    record = run.evals[-1]
    assert run.scores["exact"] == record.scores["exact"]
    assert (run.scores["f1"].low, run.scores["f1"].high) == record.intervals["f1"]
    assert repr(run).startswith(f"TrainedRun('{run.folder}', squad_v2, step 2 of 2, ") and len(repr(run)) < 200


def test_the_model_is_loaded_once_and_only_for_answers(
    run: fivetune.TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[Path] = []
    whole = load_run_model

    def count(folder: Path, *args: Any, **options: Any) -> object:
        loads.append(folder)
        return whole(folder, *args, **options)

    monkeypatch.setattr("fivetune.training.answers.trained_run.load_run_model", count)
    opened = fivetune.open_run(run.folder)
    assert opened.scores and opened.status.state == "finished" and not loads
    record = {"question": "What has Ann?", "context": "Ann has a red hat."}
    assert len(opened.predict([record])) == len(opened.predict([record, record])) - 1 == 1
    opened.evaluate([{**record, "answers": ["red hat"]}], split="own")
    assert len(loads) == 1


def test_a_run_without_a_model_can_be_read(run: fivetune.TrainedRun, tmp_path: Path) -> None:
    for name in ("config.yaml", "status.json", "evals.jsonl", "machine.json"):
        (tmp_path / name).write_bytes((run.folder / name).read_bytes())
    opened = fivetune.open_run(tmp_path)
    assert opened.scores == run.scores
    with pytest.raises(RunDirError, match="model"):
        opened.predict([{"question": "a", "context": "b"}])
    with pytest.raises(ConfigError, match=r"^optimizer\.lr: has no effect here"):
        fivetune.open_run(run.folder, {"optimizer.lr": 1})


def test_a_run_that_was_stopped_answers_with_its_newest_whole_checkpoint(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Progress, "show_step", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(InterruptedRunError):
        classify(tmp_path, model_folder, rows())
    monkeypatch.undo()
    opened = fivetune.open_run(tmp_path / "run")
    with pytest.warns(UserWarning, match=r"/run: the run is not finished; its checkpoint of step 1 answers$"):
        answers = opened.predict(rows())
    assert {one.prediction for one in answers} <= {*kit.COLOURS} and opened.step == 1
    assert opened.loaded.config.eval.max_new_tokens
    saved = load_file(tmp_path / "run/checkpoints/1/model.safetensors")
    assert all(saved[name].equal(one) for name, one in opened.loaded.model.named_parameters())
    capsys.readouterr()
    given = tmp_path / "rows.jsonl"
    given.write_text("".join(f"{json.dumps(one)}\n" for one in rows()))
    words = ["predict", str(opened.folder), "--input", str(given), "--output", str(tmp_path / "out.jsonl")]
    assert cli.main(words) == 0 and "checkpoint of step 1" in capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [one["prediction"] for one in lines] == [one.prediction for one in answers]
    with pytest.raises(RunDirError, match="has no model/ yet"):  # its scores would be the training's
        opened.evaluate(rows(), split="own")
    with (tmp_path / "run/checkpoints/1/model.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(RunDirError, match="has no model/ yet"):
        fivetune.predict(opened.folder, rows())


def test_answers_are_a_table(run: fivetune.TrainedRun) -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    record = {"question": "What has Ann?", "context": "Ann has a red hat."}
    answers = run.predict(pandas.DataFrame([record, {**record, "context": None}]))
    frame = answers.to_pandas()
    assert isinstance(answers, list) and [*frame.columns[:3]] == ["id", "inputs", "prediction"]
    assert [*frame.prediction] == [one.prediction for one in answers] and frame.skipped[1] == answers[1].skipped
    same = run.predict(polars.DataFrame([record])).to_polars(["prediction", "num_tokens", "answer"])
    assert same["prediction"].to_list() == [answers[0].prediction] and same.columns == ["prediction", "num_tokens"]
    with pytest.raises(ConfigError, match=r"score: Prediction has no such field\. Did you mean scores"):
        answers.to_pandas(["score"])
    assert run.predict([]).to_pandas().empty


def test_a_frame_keeps_its_index_may_be_empty_and_needs_the_columns(run: fivetune.TrainedRun) -> None:
    pd = pytest.importorskip("pandas")
    row = {"question": "Who?", "context": "Rollo came."}
    frame = pd.DataFrame([row, row], index=[7, 3])
    joined = frame.join(run.predict(frame).to_pandas(["prediction"]))
    assert [*joined.index] == [7, 3] and joined.prediction.notna().all()
    assert run.predict(frame.head(0)) == run.predict([]) == []
    wrong = frame.rename(columns={"context": "text"})
    with pytest.raises(DataError, match=r"inputs: none of 2 records can be answered\..* context"):
        run.predict(wrong)
    (half, whole) = run.predict([{"text": "a"}, row])  # one record that can be answered: the others are named
    assert half.skipped and not whole.skipped


def test_texts_are_the_only_column_of_a_task(
    tmp_path: Path, model_folder: Path, run: fivetune.TrainedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    classifier = classify(tmp_path, model_folder, rows())
    by_text, by_record = classifier.predict(["red hat"]), classifier.predict([{"thing": "red hat"}])
    assert by_text == by_record and by_text[0].inputs == "colour: red hat"
    capsys.readouterr()
    assert cli.main(["predict", str(classifier.folder), "--inputs", "red hat"]) == 0
    assert json.loads(capsys.readouterr().out)["logprob"] == pytest.approx(by_text[0].logprob, rel=1e-4)
    record = {"question": "What has Ann?", "context": "Ann has a red hat."}
    whole = run.predict(["question: What has Ann? context: Ann has a red hat."])
    assert whole[0].prediction == run.predict([record])[0].prediction  # of several columns, as the model reads it


@pytest.mark.parametrize("call", [lambda folder, data: fivetune.evaluate(folder, {"data.eval": data}),
                                  lambda folder, data: fivetune.open_run(folder).evaluate(data)])  # fmt: skip
def test_no_table_is_written_for_a_run_that_cannot_evaluate(
    tmp_path: Path, run: fivetune.TrainedRun, call: Any
) -> None:
    (tmp_path / "run").mkdir()
    for name in ("config.yaml", "status.json", "evals.jsonl", "machine.json"):
        (tmp_path / "run" / name).write_bytes((run.folder / name).read_bytes())
    with pytest.raises(RunDirError, match="model"):
        call(tmp_path / "run", [{"question": "a", "context": "b", "answers": ["b"]}])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("size", [0, -1, True, "many", 1.5])
def test_a_batch_size_is_a_number_or_auto(run: fivetune.TrainedRun, size: Any) -> None:
    with pytest.raises(ConfigError, match=r"batch_size: .* is no size. Allowed are whole numbers from 1 and 'auto'"):
        run.predict([], batch_size=size)


def test_auto_halves_where_memory_runs_out_and_answers_nothing_twice(
    run: fivetune.TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, sizes, answered = Evaluator.predict, list[int](), list[int]()

    def predict(self: Evaluator, *args: Any, **options: Any) -> Any:
        sizes.append(self.decoding.batch_size)
        for number, one in enumerate(whole(self, *args, **options)):
            if self.decoding.batch_size > 2 and number == 3:
                raise RuntimeError("CUDA out of memory.")
            answered.append(one[0])
            yield one

    monkeypatch.setattr(Evaluator, "predict", predict)
    monkeypatch.setattr(AutoBatchSize, "choose", lambda self, *_: self.limit or 8)
    record = {"question": "What has Ann?", "context": "Ann has a red hat."}
    opened = fivetune.open_run(run.folder)
    assert [one.id for one in opened.predict([record] * 9)] == [str(i) for i in range(9)]
    assert sizes == [8, 4, 2] and sorted(answered) == list(range(9))
    assert len(opened.predict([record])) == 1 and sizes == [8, 4, 2, 2]  # it is remembered
    with pytest.raises(FiveTuneEnvironmentError, match=r"device: out of memory: .* or eval\.batch_size"):
        opened.predict([record] * 9, batch_size=4)


def test_auto_fits_the_batch_into_the_free_memory(run: fivetune.TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_run_model(run.folder)
    evaluator, sizes = loaded.build_evaluator(), dict[float, int]()
    for free in (1e12, 4e6, 1.0):
        monkeypatch.setattr("fivetune.training.answers.batch_size.measure_free_bytes", lambda kind, free=free: free)
        sizes[free] = AutoBatchSize().choose(evaluator, loaded.model)
    assert sizes[1e12] == 64 and sizes[1.0] == 1 and 1 < sizes[4e6] < 64


# --- shown in a notebook ---


class _Frames(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append({"tag": tag, **dict(attrs)})


def test_the_report_is_shown_in_a_frame_that_needs_no_other_file(run: fivetune.TrainedRun) -> None:
    page = run.report()
    parser = _Frames()
    parser.feed(page._repr_html_())
    (frame,) = parser.found
    assert frame["tag"] == "iframe" and frame["srcdoc"] == Path(page).read_text() and "src" not in frame
    assert str(page) == str(run.folder / "report.html") and "allow-same-origin" not in str(frame["sandbox"])


def test_a_run_is_shown_as_a_table_of_its_scores(run: fivetune.TrainedRun) -> None:
    shown = run._repr_html_()
    assert f"<td>exact</td><td>{run.scores['exact']:.2f}</td>" in shown and "step 2 of 2" in shown


# --- tables ---


def test_a_list_of_records_trains_as_the_file_of_them(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "file").mkdir()
    (tmp_path / "table").mkdir()
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows()))
    classify(tmp_path / "file", model_folder, str(path))
    done = classify(tmp_path / "table", model_folder, rows())
    assert kit.weights_of(tmp_path / "file/run") == kit.weights_of(tmp_path / "table/run")
    (written,) = done.config["data"]["train"]
    assert Path(written).read_text() == path.read_text() and done.data.train.source == (written,)
    assert fivetune.load_config(done.folder).data.train == (written,)


def test_a_run_of_a_table_resumes_with_that_table_only(tmp_path: Path, model_folder: Path) -> None:
    done = classify(tmp_path, model_folder, rows())
    more = {"train.num_steps": 4}
    assert classify(tmp_path, model_folder, rows(), resume=True, settings=more).status.step == 4
    changed = [*rows(), {"thing": "blue hat", "colour": "blue"}]
    with pytest.raises(ConfigError, match=r"data\.train"):
        classify(tmp_path, model_folder, changed, resume=True)
    done = fivetune.train(done.folder, {"train.num_steps": 5}, resume=True, quiet=True, preflight=False)
    assert done.status.step == 5 and done.status.num_resumes == 2


def test_frames_and_data_sets_are_their_rows() -> None:
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    frame = pandas.DataFrame(
        {"a": ["x", None], "b": [1.5, float("nan")], "c": [pandas.Timestamp("2026-01-02"), pandas.NaT]}
    )
    expected = [{"a": "x", "b": 1.5, "c": "2026-01-02T00:00:00"}, {"a": None, "b": None, "c": None}]
    assert list(iter_rows(frame, "data.train")) == expected
    one, two = ({"a": ["x"]}, {"a": ["y"]})
    splits = datasets.DatasetDict(train=datasets.Dataset.from_dict(one), validation=datasets.Dataset.from_dict(two))
    assert list(iter_rows(splits["train"], "inputs")) == list(iter_rows(splits, "data.train")) == [{"a": "x"}]
    assert list(iter_rows(splits, "data.eval")) == [{"a": "y"}]
    with pytest.raises(DataError, match=r"inputs: the DatasetDict has several splits. There are: train, validation. G"):
        list(iter_rows(splits, "inputs"))
    del splits["validation"]
    with pytest.raises(DataError, match=r"data\.eval: the DatasetDict has no split named validation or eval or dev"):
        list(iter_rows(splits, "data.eval"))


def test_a_frame_of_polars_is_its_rows() -> None:
    polars = pytest.importorskip("polars")
    date = datetime.date(2026, 1, 2)
    frame = polars.DataFrame(
        {
            "text": ["x", None],
            "number": [1.5, float("nan")],
            "whole": [3, None],
            "day": [date, None],
            "moment": [datetime.datetime(2026, 1, 2, 3), None],
            "label": polars.Series(["a", "b"], dtype=polars.Categorical),
            "list": [["p", "q"], []],
            "table": [{"deep": 1}, None],
        }
    )
    first = {"text": "x", "number": 1.5, "whole": 3, "day": "2026-01-02", "moment": "2026-01-02T03:00:00", "label": "a"}
    empty = dict.fromkeys(frame.columns)
    found = [{**first, "list": ["p", "q"], "table": {"deep": 1}}, {**empty, "label": "b", "list": []}]
    assert list(iter_rows(frame, "data.train")) == found
    assert list_inputs(frame) == found and list_inputs(frame["label"]) == ["a", "b"]


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_frame_trains_evaluates_and_is_answered(tmp_path: Path, model_folder: Path, library: str) -> None:
    frame = pytest.importorskip(library).DataFrame(rows())
    done = classify(tmp_path, model_folder, frame, settings={"data.eval": frame.head(4)})
    assert done.data.eval is not None and done.data.eval.num_examples == 4
    record = done.evaluate(frame, split="all")
    assert record.num_examples == 8 and done.evals[-1] == record == fivetune.open_run(done.folder).evals[-1]
    assert fivetune.evaluate(done.folder, {"data.eval": frame}).scores == record.scores
    assert [one.id for one in done.predict(frame)] == [f"r{i}" for i in range(8)]
    assert done.predict(frame["thing"])[0].prediction == done.predict(frame)[0].prediction


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame.drop(columns="thing"), "data.train[0]: "),
        (lambda frame: frame.head(0), "data.train: the DataFrame has no rows. Allowed is at least one."),
        (lambda frame: frame.assign(thing=[None, *frame.thing[1:]]), "data.train[0]: thing is null"),
        (lambda frame: frame.rename(columns={"id": "thing"}), "data.train: two columns are named 'thing'. Rename one."),
        (lambda frame: frame.rename(columns={"id": 3}), "data.train: the column '3' is a int. Allowed are names."),
        (lambda frame: frame.assign(x=b"a"), "data.train[0]['x']: b'a' is of type bytes. Allowed are text, numbers"),
        (lambda frame: [*frame.to_dict("records"), 3], "data.train[8]: is '3' (int). Allowed are records"),
    ],
)
def test_errors_name_the_row_of_a_table(tmp_path: Path, model_folder: Path, change: Any, message: str) -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(DataError) as caught:
        classify(tmp_path, model_folder, change(pandas.DataFrame(rows())))
    assert str(caught.value).startswith(message) and "tables" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_only_data_may_be_a_frame(tmp_path: Path, model_folder: Path) -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ConfigError, match=r"^task\.labels: a DataFrame. Allowed for data\.train, data\.eval and parts"):
        classify(tmp_path, model_folder, rows(), settings={"task.labels": pandas.DataFrame()})


def test_pandas_and_datasets_are_not_imported() -> None:
    code = (
        "import sys, fivetune.training.answers.trained_run\n"
        "from fivetune.training.answers.requests import list_inputs\n"
        "assert list_inputs([{'a': 1}]) and not {'pandas', 'datasets'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- stopped ---

PROGRAM = """
import json, sys, fivetune
try:
    fivetune.train(json.loads(sys.argv[1]), preflight=False)
except fivetune.errors.InterruptedRunError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.release
def test_ctrl_c_in_a_program_saves_and_names_the_call_that_resumes(tmp_path: Path, model_folder: Path) -> None:
    settings = kit.recipe(tmp_path, model_folder, eval__at_start=False, eval__every_steps=100_000)
    settings["train"]["num_steps"] = 100_000
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, json.dumps(settings)], stdout=subprocess.PIPE, text=True)
    steps = tmp_path / "run" / rundir.STEPS
    while child.poll() is None and not (steps.is_file() and steps.stat().st_size):
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGINT)
    printed, _ = child.communicate(timeout=60)
    assert child.returncode == 130 and printed.startswith("stopped by SIGINT after step ")
    opened = fivetune.open_run(tmp_path / "run")
    assert opened.status.state == "interrupted" and repr(opened).endswith(
        f"squad_v2, interrupted, step {opened.status.step:,} of 100,000)"
    )
    changes = {"train.num_steps": opened.status.step + 3}
    done = fivetune.train(tmp_path / "run", changes, resume=True, quiet=True, preflight=False)
    (tmp_path / "whole").mkdir()
    whole = fivetune.train(settings, {**changes, "run.dir": str(tmp_path / "whole/run")}, quiet=True, preflight=False)
    assert [one.loss for one in done.steps] == [one.loss for one in whole.steps]
    assert kit.weights_of(done.folder) == kit.weights_of(whole.folder)


def test_the_interrupt_of_a_kernel_names_the_call_that_resumes(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel sends its process SIGINT, as Ctrl-C does."""
    monkeypatch.setattr(Progress, "show_step", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(InterruptedRunError, match=r"^stopped by SIGINT after step 1 of 2; saved\. ") as caught:
        classify(tmp_path, model_folder, rows())
    monkeypatch.undo()
    call = str(caught.value).rpartition("In Python: ")[2]
    assert call == f"fivetune.train({str(tmp_path / 'run')!r}, resume=True)"
    assert fivetune.train(str(tmp_path / "run"), resume=True).status.step == 2  # as the call has it
    assert caught.value._render_traceback_() == [f"InterruptedRunError: {caught.value}"]


# --- the names ---


@pytest.mark.parametrize("name", sorted({*fivetune.__all__} - {"__version__"}))
def test_public_names_are_documented_and_typed(name: str) -> None:
    public = getattr(fivetune, name)
    members = [public]
    if inspect.isclass(public):
        own = [getattr(public, each) for each in vars(public) if not each.startswith("_")]
        members += [each.fget if isinstance(each, property) else each for each in own]
    for member in members:
        if not callable(member) or (inspect.isclass(member) and member is not public):
            continue
        label = f"{name}.{member.__name__}"
        assert inspect.getdoc(member), f"{label} has no docstring"
        if inspect.isfunction(member) and member.__module__.startswith("fivetune"):
            given = inspect.signature(member)
            hints = {each.name for each in given.parameters.values() if each.annotation is not each.empty}
            assert hints == {*given.parameters} - {"self"}, f"{label}: parameters without a type"
            assert given.return_annotation is not given.empty, f"{label}: no return type"
            if member is public:
                assert all(word in inspect.getdoc(member) for word in ("Args", "eturns", ">>>")), label  # pyright: ignore


def test_public_types_resolve() -> None:
    assert get_type_hints(fivetune.train)["return"] is fivetune.TrainedRun


def test_a_data_file_is_trained_and_errors_name_arguments_of_python(tmp_path, monkeypatch):
    """Once with the recipe that is written for it; a second call names `resume` and `overwrite`, not flags."""
    monkeypatch.chdir(tmp_path)
    rows = [f"parcel {i} is late,delivery\nmoney back {i},refund\n" for i in range(20)]
    (tmp_path / "tickets.csv").write_text("text,label\n" + "".join(rows))
    settings = {"model.path": "t5-nano", "train.num_steps": 1, "train.num_epochs": None, "device": "cpu"}
    settings |= {"eval.at_start": False, "data.cache_dir": "cache", "train.batch_size": 2, "eval.max_examples": 2}
    settings |= {"eval.final": "subset", "train.precision": "fp32", "train.num_threads": 1}
    run = fivetune.train("tickets.csv", settings, preflight=False, quiet=True)
    assert run.status.state == "finished" and (tmp_path / "tickets.yaml").is_file()
    with pytest.raises(RunDirError, match="Add resume=True to continue it, overwrite=True"):
        fivetune.train("tickets.yaml", settings, preflight=False, quiet=True)


OWN = {  # plugins of one's own; each is a kind of which no answer of a trained run needs one
    "metrics": """
from typing import ClassVar
from fivetune.scores.metrics import PerExample
class Own(PerExample):
    main: ClassVar = "own_length"
    score_names: ClassVar = ("own_length", "total")
    higher_is_better: ClassVar = True
    source: ClassVar = "here"
    ratio: float = 1.0
    def score_one(self, prediction, references, details):
        return {"own_length": min(1.0, len(prediction) / 99)}
""",
    "optimizers": "from fivetune.training.optimizers.sgd import SGD\nclass Own(SGD):\n    pass\n",
    "schedules": "from fivetune.training.schedules.constant import Constant\nclass Own(Constant):\n    pass\n",
    "strategies": "from fivetune.training.strategies.single import Single\nclass Own(Single):\n    pass\n",
    "sinks": """
from typing import ClassVar
from fivetune.training.sinks import Sink
class Writer:
    def step(self, record): pass
    def evaluation(self, record): pass
    def close(self): pass
class Own(Sink):
    package: ClassVar = "json"
    def open(self, folder, config, *, first_step=1):
        return Writer()
""",
}


def test_a_run_answers_where_the_plugins_of_its_training_are_absent(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with a metric of one's own could not predict, serve or be exported elsewhere."""
    folder = tmp_path / "plugins"
    packages = {kind: importlib.import_module(KINDS[kind]) for kind in OWN}
    with monkeypatch.context() as here:
        here.setenv("FIVETUNE_PLUGINS", str(folder))
        for kind, text in OWN.items():
            (folder / kind).mkdir(parents=True)
            (folder / kind / "own.py").write_text(text)
            here.setattr(packages[kind], "__path__", list(packages[kind].__path__))
        task = {"name": "jsonl", "inputs": "colour: {thing}", "targets": "{colour}", "main_metric": "own_length"}
        task["metrics"] = [{"name": "own", "ratio": 2.0}, "exact_match"]
        (tmp_path / "hats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
        data = {"train": [str(tmp_path / "hats.jsonl")], "eval": [str(tmp_path / "hats.jsonl")]}
        settings = {"task": task, "data": data, "optimizer": "own", "schedule": "own", "report": {"sinks": ["own"]}}
        given = {**kit.recipe(tmp_path, model_folder), **settings, "strategy": "own"}
        run = fivetune.train(given, FAST, quiet=True, preflight=False)
        before = [one.prediction for one in run.predict(["red hat", "blue hat"])]
    for kind, package in packages.items():
        sys.modules.pop(f"{KINDS[kind]}.own", None)
        vars(package).pop("own", None)

    here = fivetune.open_run(run.folder)
    assert [one.prediction for one in here.predict(["red hat", "blue hat"])] == before
    answers = tmp_path / "answers.jsonl"
    predict = ["predict", str(run.folder), "--input", str(tmp_path / "hats.jsonl"), "--output", str(answers)]
    assert cli.main(predict) == 0 and len(answers.read_text().splitlines()) == 8
    options = {"shares_base": False, "max_input_tokens": 64, "num_examples": 4, "on_warning": print, "on_note": print}
    assert list(open_models([str(run.folder)], {}, **options)) == ["run"]
    assert cli.main(["export", str(run.folder), "--format", "hf", "--output", str(tmp_path / "hf")]) == 0
    assert "not proved" in (proof := " ".join(capsys.readouterr().out.split())) and "no 'own'" in proof
    assert cli.main(["report", str(run.folder)]) == 0 and cli.main(["card", str(run.folder)]) == 0
    assert "`own`" in (run.folder / "model" / "README.md").read_text()
    capsys.readouterr()
    for words in (["evaluate", str(run.folder)], ["train", str(run.folder), "--resume"]):
        assert cli.main(words) == ConfigError.exit_code
        said = " ".join(capsys.readouterr().err.split())
        assert "there is no 'own'" in said and "FIVETUNE_PLUGINS" in said
