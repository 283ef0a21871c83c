"""`fivetune predict --shard`: several commands answer a file, the last one merges what they have answered."""

from __future__ import annotations

import json
from pathlib import Path

import kit
import pytest

import fivetune
from fivetune.cli import main
from fivetune.data.shard import Shard
from fivetune.errors import FiveTuneEnvironmentError
from fivetune.rundir.records import Prediction
from fivetune.training.answers.answer_folder import keep_answers, lock_answers
from fivetune.training.answers.answer_log import AnswerWriter
from reliability.warm import start_command, wait_until


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    fivetune.train(kit.recipe(folder, model_folder, train__num_steps=2), quiet=True, preflight=False)
    return folder / "run"


def write_source(path: Path, *, last: str = "What is it?") -> Path:
    """Eleven records: ids that repeat in one shard of three and over two, one that is no JSON, one without an id."""
    rows = [{"id": f"q{number}", "question": f"Who is {number}?", "context": "It is Ann."} for number in range(10)]
    rows[3]["id"] = rows[0]["id"]
    rows[7]["id"] = rows[2]["id"]
    del rows[5]["id"]
    rows[9]["question"] = last
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join([*lines[:6], "{", *lines[6:]]) + "\n")
    return path


def predict(run: Path, source: Path, target: Path, *words: str) -> int:
    return main(["predict", str(run), "--input", str(source), "--output", str(target), *words])


def test_shards_in_any_order_write_what_one_command_writes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_source(tmp_path / "in.jsonl")
    assert predict(run, source, tmp_path / "whole.csv") == 0
    whole = capsys.readouterr().err
    target = tmp_path / "out.csv"
    assert predict(run, source, target, "--shard", "3/3", "--json") == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == {
        "output": None, "num_records": 3, "num_answers": 3, "num_unsure": 0, "num_skipped": 0, "num_other_types": 0,
        "step": 2, "missing_shards": [1, 2],
    }  # fmt: skip
    assert f"{target}: 2 of 3 shards are missing: 1, 2" in told.err
    assert predict(run, source, target, "--shard", "1/3") == 0
    assert not target.exists()
    assert predict(run, source, target, "--shard", "2/3", "--launch.nproc", "1") == 0
    assert target.read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert whole.splitlines()[-1] in capsys.readouterr().err.splitlines()
    assert not (tmp_path / "out.csv.partial").exists()
    # A command that comes too late changes nothing.
    assert predict(run, source, target, "--shard", "2/3") == 2
    assert "exists. Add --overwrite" in capsys.readouterr().err and not (tmp_path / "out.csv.partial").exists()


def test_a_stopped_shard_goes_on_and_one_that_stops_in_the_merge_merges_again(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = write_source(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    append = AnswerWriter.append
    with pytest.MonkeyPatch.context() as patch:

        def stop(writer: AnswerWriter, question: int, prediction: Prediction) -> None:
            append(writer, question, prediction)
            raise KeyboardInterrupt

        patch.setattr(AnswerWriter, "append", stop)
        assert predict(run, source, target, "--shard", "1/2") == 130
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fivetune.training.answers.output.write_predictions", lambda *given: 1 / 0)
        assert predict(run, source, target, "--shard", "2/2") == 0
        capsys.readouterr()
        assert predict(run, source, target, "--shard", "1/2") == 1
    assert "1 of 5 records are answered already in " in capsys.readouterr().err
    assert not target.exists()
    assert predict(run, source, target, "--shard", "1/2") == 0
    assert [json.loads(line)["id"] for line in target.read_text().splitlines()][:3] == ["q0", "q1", "q2"]
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out.jsonl"]


def test_more_shards_than_records_and_shards_without_a_usable_record_are_merged(run: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"question": "Who?", "context": "Ann."}\n{\n')
    for number in (1, 2, 3):
        assert not target.exists()
        assert predict(run, source, target, "--shard", f"{number}/3") == 0
    first, second = (json.loads(line) for line in target.read_text().splitlines())
    assert first["prediction"] is not None and second["prediction"] is None and second["skipped"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shard", "3/2"], "--shard 3/2: allowed is NUMBER/COUNT, such as 1/8 to 8/8."),
        (["--shard", "0/2"], "--shard 0/2: allowed is"),
        (["--shard", "two"], "--shard two: allowed is"),
    ],
)
def test_a_wrong_shard_is_refused(run, tmp_path, capsys, words, message):
    assert predict(run, write_source(tmp_path / "in.jsonl"), tmp_path / "o.csv", *words) == 2
    assert message in capsys.readouterr().err


def test_a_shard_needs_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(run), "--inputs", "a", "--shard", "1/2"]) == 2
    assert "--shard: several processes share a file. Give --input FILE and --output FILE." in capsys.readouterr().err


def test_other_content_other_settings_and_another_number_of_shards_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = write_source(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    folder = tmp_path / "out.jsonl.partial"
    assert predict(run, source, target, "--shard", "1/2") == 0
    assert predict(run, source, target, "--shard", "1/3") == 4
    assert f"{folder}: holds answers of 2 shards. Go on with these commands" in capsys.readouterr().err
    assert predict(run, source, target) == 4
    assert f"{folder}: holds answers of 2 shards." in capsys.readouterr().err
    assert predict(run, source, target, "--shard", "2/2", "--eval.num_beams", "2") == 3
    assert (
        f"{folder}/1-of-2: was answered with other data, weights or settings: eval.num_beams was 1, it is 2."
        in capsys.readouterr().err
    )
    write_source(source, last="Another one?")
    assert predict(run, source, target, "--shard", "2/2") == 3
    assert f"{folder}/1-of-2: was answered with other data, weights or settings: data was " in capsys.readouterr().err
    assert not target.exists()
    # The shard of the old content is answered again.
    assert predict(run, source, target, "--shard", "1/2") == predict(run, source, target, "--shard", "2/2") == 0
    assert len(target.read_text().splitlines()) == 11


def test_answers_of_a_command_without_shards_stay(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out.csv.partial"
    folder.mkdir()
    (folder / "lock").touch()
    (folder / "answers.json").write_text("{}")
    assert predict(run, write_source(tmp_path / "in.jsonl"), tmp_path / "out.csv", "--shard", "1/2") == 4
    assert f"{folder}: holds answers of a command without --shard." in capsys.readouterr().err
    assert (folder / "answers.json").is_file()


def test_a_refused_shard_leaves_nothing(run: Path, tmp_path: Path) -> None:
    assert predict(run / "nothing", write_source(tmp_path / "in.jsonl"), tmp_path / "out.csv", "--shard", "1/2") == 4
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_second_command_of_a_shard_leaves_the_first_one_done(tmp_path: Path) -> None:
    with keep_answers(tmp_path / "out.csv", Shard(0, 2), is_first=True) as folder:
        (folder / "done").touch()
        with (
            pytest.raises(FiveTuneEnvironmentError, match="another process answers into it"),
            keep_answers(tmp_path / "out.csv", Shard(0, 2), is_first=True),
        ):
            pytest.fail("two commands answer one shard")
    assert (folder / "done").is_file()


@pytest.mark.parametrize("names", [[], [".nfs0001"]])
def test_a_folder_that_is_being_removed_is_taken_over(tmp_path: Path, names: list[str]) -> None:
    folder = tmp_path / "out.csv.partial"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    with lock_answers(folder):
        assert (folder / "lock").is_file()
    assert folder.exists() == bool(names)


@pytest.mark.parametrize("name", ["notes.txt", ""])
def test_what_is_in_the_way_stays(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "out.csv.partial"
    if name:
        folder.mkdir()
    (folder / name).write_text("mine")
    with pytest.raises(FiveTuneEnvironmentError, match="is in the way"), lock_answers(folder):
        pytest.fail("it is taken over")
    assert (folder / name).read_text() == "mine"


@pytest.mark.slow
def test_shards_that_end_together_are_merged_once(run: Path, tmp_path: Path) -> None:
    source, target = write_source(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    command = ["predict", str(run), "--input", str(source), "--output", str(target)]
    folder = tmp_path / "out.jsonl.partial"
    started = [start_command(*command, "--shard", str(Shard(number, 3))) for number in range(3)]
    wait_until(lambda: len(list(folder.glob("*-of-3"))) == 3, 60, every=0.01)
    with lock_answers(folder, waits=True):  # all must wait before they merge
        wait_until(lambda: len(list(folder.glob("*/done"))) == 3, 60)
    done = [one.finish() for one in started]
    assert [one.returncode for one in done] == [0, 0, 0]
    assert sum("11 records: 10 answered" in one.stderr for one in done) == 1
    assert len(target.read_text().splitlines()) == 11 and not folder.exists()
