"""The copy of a run in a bucket: whole or absent, never in the way of the training, enough for an empty machine."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from threading import Event
from typing import Any

import kit
import pytest
from bucket import bucket, s3_server  # noqa: F401
from ranks import start_ranks

from fivetune import cli, rundir, train
from fivetune.config import load_config
from fivetune.data import storage
from fivetune.data.storage import StorageError, delete_object, get_object, join_location, list_objects, put_object
from fivetune.data.store.stream import TrainingStream
from fivetune.errors import ConfigError, InterruptedRunError, RunDirError
from fivetune.rundir.checksums import find_damage
from fivetune.training import loop
from fivetune.training.state import bucket as copies
from fivetune.training.state import checkpoint
from fivetune.training.training import Training
from reliability.warm import WarmProcess

STEPS = 6


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSES", (0.0, 0.0))


@pytest.fixture
def url(bucket: str) -> str:  # noqa: F811
    return f"{bucket}/runs/squad"


def recipe(folder: Path, model_folder: Path, url: str | None, **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    saved = {"every_steps": 2, "url": url, **changes}
    return kit.recipe(folder, model_folder, checkpoint=saved, eval__at_start=False, train__num_steps=STEPS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, model_folder) -> tuple[bytes, list[float], dict[int, Any]]:
    """Weights, losses and ids of each step of a run without a bucket."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        ids = note_ids(patch)
        run = train(recipe(folder, model_folder, None), preflight=False, quiet=True)
    return kit.weights_of(folder / "run"), [step.loss for step in run.steps], ids


def note_ids(patch: pytest.MonkeyPatch) -> dict[int, list[list[str]]]:
    """The ids of the batches of each step that is assembled."""
    found: dict[int, list[list[str]]] = {}
    build = TrainingStream.build_micro_batches

    def note(self: TrainingStream, step: int) -> Any:
        batches = build(self, step)
        found[step] = [list(batch.ids) for batch in batches]
        return batches

    patch.setattr(TrainingStream, "build_micro_batches", note)
    return found


def steps_at(url: str) -> dict[int, bool]:
    """The checkpoints at the URL, and whether each is whole."""
    return {step: "manifest.json" in names for step, names in copies.list_copied_steps(url).items()}


def fetch_all(url: str, folder: Path) -> Path:
    for name in list_objects(url):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(get_object(join_location(url, name)))
    return folder


def train_until_killed(table: dict[str, Any], ids: Path, at_step: int) -> None:
    """The process notes the ids of its steps and is killed in one, when the checkpoint before it is uploaded."""
    step, uploaded, upload = loop.run_step, Event(), copies.Uploader._upload_newest
    patch = pytest.MonkeyPatch()
    found = note_ids(patch)

    def finish(self: copies.Uploader, newest: int, best: int | None) -> None:
        upload(self, newest, best)
        if newest == at_step:
            uploaded.set()

    def kill(training: Training, groups: Any) -> bool:
        if training.state.step == at_step:
            assert uploaded.wait(60)
            ids.write_text(json.dumps(found))
            os.kill(os.getpid(), signal.SIGKILL)
        return step(training, groups)

    patch.setattr(copies.Uploader, "_upload_newest", finish)
    patch.setattr(loop, "run_step", kill)
    train(table, preflight=False, quiet=True)


def test_prepare_train_checkpoint_kill_resume_on_an_empty_machine(tmp_path, model_folder, url, plain, monkeypatch):
    """Data and checkpoints in the bucket; the process is killed and its disk is lost, another folder goes on."""
    first, second, data = tmp_path / "first", tmp_path / "second", url.replace("/runs/", "/data/")
    table = recipe(first, model_folder, url)
    (first / "recipe.json").write_text(json.dumps(table))
    assert cli.main(["prepare", str(first / "recipe.json"), "--output", data, "--quiet"]) == 0
    table["data"] |= {"train": f"{data}/train", "eval": f"{data}/eval"}
    with WarmProcess(train_until_killed, table, tmp_path / "ids.json", 4) as process:
        ended = process.wait()
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert steps_at(url)[4] is True
    shutil.rmtree(first)
    table["run"]["dir"], table["data"]["cache_dir"] = str(second / "elsewhere"), str(second / "cache")
    ids = note_ids(monkeypatch)
    run = train(table, resume=True, preflight=False, quiet=True)
    killed = {int(step): taken for step, taken in json.loads((tmp_path / "ids.json").read_text()).items()}
    assert [part.step for part in run.machine.parts] == [0, 4] and {4, 5} <= ids.keys() <= {0, 4, 5}
    assert all(killed[step] == plain[2][step] for step in range(4)) and all(ids[step] == plain[2][step] for step in ids)
    assert kit.weights_of(second / "elsewhere") == plain[0] and [step.loss for step in run.steps] == plain[1]
    copy = fetch_all(url, tmp_path / "copy")
    assert kit.weights_of(copy) == plain[0] and find_damage(copy / "model") is None
    assert (copy / "steps.jsonl").read_bytes() == (second / "elsewhere" / "steps.jsonl").read_bytes()
    assert json.loads((copy / "status.json").read_text())["state"] == "finished"


def train_rank(table: dict[str, Any], resume: bool) -> None:
    storage.PAUSES = (0.0, 0.0)
    train(table, resume=resume, preflight=False, quiet=True)


@pytest.mark.release
def test_two_ranks_upload_their_shards_and_go_on_from_the_bucket(tmp_path, model_folder, url):
    """Half of a run, the loss of its disk, and the rest."""
    table = {**recipe(tmp_path, model_folder, url), "strategy": "fsdp", "launch": {"nproc": 2}}
    half = {**table, "train": {**table["train"], "num_steps": 4}}
    for one, resume in ((half, False), (table, True)):
        ended = start_ranks(train_rank, one, resume)
        assert [rank.returncode for rank in ended] == [0, 0], [rank.stderr for rank in ended]
        if one is half:
            assert {"__0_0.distcp", "__1_0.distcp"} <= set(list_objects(join_location(url, "checkpoints", "4")))
            before = rundir.read_run(tmp_path / "run")
            shutil.rmtree(tmp_path / "run")
    run = rundir.read_run(tmp_path / "run")
    assert [part.step for part in run.machine.parts] == [0, 4] and [step.step for step in run.steps] == [*range(1, 7)]
    assert [step.loss for step in run.steps[:4]] == [step.loss for step in before.steps]


@pytest.mark.parametrize(
    ("protocol", "background"), [("s3", False), ("file", True), kit.release("s3", True), kit.release("file", False)]
)
def test_the_newest_and_the_best_are_kept_at_the_url(tmp_path, model_folder, request, plain, background, protocol):
    url = request.getfixturevalue("url") if protocol == "s3" else f"file://{tmp_path}/copy"
    table = recipe(tmp_path, model_folder, url, every_steps=1, background=background)
    run = train(table, preflight=False, quiet=True)
    best = run.status.best.step
    assert steps_at(url)[STEPS] and steps_at(url)[best] and all(steps_at(url).values())
    assert len(steps_at(url)) <= 3  # which ones besides the newest and the best depends on how fast uploads are
    assert run.warnings == [] and kit.weights_of(tmp_path / "run") == plain[0]
    copy = fetch_all(url, tmp_path / "fetched")
    assert all(find_damage(copy / "checkpoints" / str(step)) is None for step in steps_at(url))
    assert find_damage(copy / "model") is None
    names = {"config.yaml", "machine.json", "plan.json", "data.json", "status.json", "steps.jsonl", "evals.jsonl"}
    assert names <= {path.name for path in copy.iterdir()} and (copy / "predictions").is_dir()
    assert not any("write-test" in name for name in list_objects(url))


def test_a_slow_upload_takes_the_newest_of_those_that_wait(tmp_path, model_folder, url, monkeypatch):
    """Two checkpoints are written while the first is uploaded: the newer one is next, none is removed too early."""
    begun, done, taken, work, step = Event(), Event(), [], copies.Uploader._upload_newest, loop.run_step

    def upload(self: copies.Uploader, newest: int, best: int | None) -> None:
        taken.append(newest)
        begun.set()
        assert newest != 1 or done.wait(60)
        work(self, newest, best)

    def run(training: Training, groups: Any) -> bool:
        if training.state.step == 1:
            assert begun.wait(60)
        if training.state.step == 5:
            done.set()
        return step(training, groups)

    monkeypatch.setattr(copies.Uploader, "_upload_newest", upload)
    monkeypatch.setattr(loop, "run_step", run)
    table = recipe(tmp_path, model_folder, url, every_steps=1)
    table["data"]["eval"] = []
    assert train(table, preflight=False, quiet=True).warnings == []
    assert taken[0] == 1 and taken[1] >= 5 and taken[-1] == 6 and 2 not in taken
    assert steps_at(url)[6]


def test_an_upload_that_fails_is_a_warning_and_the_next_one_succeeds(tmp_path, model_folder, url, monkeypatch, plain):
    put, refused = copies.put_file, []

    def refuse(source: Path, location: str) -> None:
        if "/checkpoints/2/" in location:
            refused.append(location)
            raise StorageError(f"{location}: cannot be written after 6 attempts (reset).")
        put(source, location)

    monkeypatch.setattr(copies, "put_file", refuse)
    run = train(recipe(tmp_path, model_folder, url), preflight=False, quiet=True)
    assert run.status.state == "finished" and run.status.incomplete is None and refused
    (warning,) = run.warnings
    assert warning.startswith(f"the checkpoint of step 2 is not at {url}: {url}/checkpoints/2/")
    assert warning.endswith("(reset). The run continues; its own checkpoints are whole.")
    assert steps_at(url).get(2) is not True and steps_at(url)[6]
    assert kit.weights_of(tmp_path / "run") == plain[0]


def test_a_model_that_is_not_in_the_bucket_is_an_incomplete_run(tmp_path, model_folder, url, monkeypatch, capsys):
    put = copies.put_file

    def refuse(source: Path, location: str) -> None:
        if "/model/" in location:
            raise StorageError(f"{location}: cannot be written: no rights.")
        put(source, location)

    monkeypatch.setattr(copies, "put_file", refuse)
    (tmp_path / "recipe.json").write_text(json.dumps(recipe(tmp_path, model_folder, url)))
    assert cli.main(["train", str(tmp_path / "recipe.json"), "--quiet", "--no-preflight"]) == 6
    words = " ".join(capsys.readouterr().err.split())
    assert "no rights. The model and all records are in" in words
    assert (tmp_path / "run/model/model.safetensors").exists()


def test_a_signal_waits_for_the_upload(tmp_path, model_folder, url, monkeypatch, plain):
    step = loop.run_step

    def hit(training: Training, groups: Any) -> bool:
        if training.state.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(training, groups)

    table = recipe(tmp_path, model_folder, url)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "run_step", hit)
        with pytest.raises(InterruptedRunError, match=r"after step 5 of 6; saved\."):
            train(table, preflight=False, quiet=True)
    assert steps_at(url)[5]
    shutil.rmtree(tmp_path / "run")
    run = train(table, resume=True, preflight=False, quiet=True)
    assert [part.step for part in run.machine.parts] == [0, 5] and kit.weights_of(tmp_path / "run") == plain[0]


# --- resuming ---


@pytest.fixture
def stopped(tmp_path, model_folder, url, monkeypatch) -> dict[str, Any]:
    """A run that was stopped after step 4, with whole checkpoints of steps 2, 3 and 4 in the bucket alone."""
    table = recipe(tmp_path, model_folder, url, keep=5)
    step = loop.run_step

    def hit(training: Training, groups: Any) -> bool:
        if training.state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        training.uploader.wait()
        return step(training, groups)

    with monkeypatch.context() as patch, pytest.raises(InterruptedRunError):
        patch.setattr(loop, "run_step", hit)
        train(table, preflight=False, quiet=True)
    assert steps_at(url) == {2: True, 3: True, 4: True}
    shutil.move(tmp_path / "run", tmp_path / "lost")
    return table


def tear(url: str) -> str:
    delete_object(f"{url}/checkpoints/4/manifest.json")
    return "checkpoints/4: manifest.json is missing: its upload was not finished. Going back to the checkpoint before"


def corrupt(url: str) -> str:
    content = bytearray(get_object(f"{url}/checkpoints/4/state.pt"))
    content[len(content) // 2] ^= 255
    put_object(f"{url}/checkpoints/4/state.pt", bytes(content))
    return "checkpoints/4/state.pt: is damaged (its checksum differs). Going back to the checkpoint before it."


def lose(url: str) -> str:
    delete_object(f"{url}/checkpoints/4/model.safetensors")
    return "checkpoints/4/model.safetensors: no such file or bucket"


@pytest.mark.parametrize("damage", [kit.release(tear), corrupt, kit.release(lose)])
def test_a_checkpoint_that_is_not_whole_is_named_and_the_one_before_is_taken(stopped, url, tmp_path, plain, damage):
    words = damage(url)
    run = train(stopped, resume=True, preflight=False, quiet=True)
    assert [words in warning for warning in run.warnings] == [True]
    assert [part.step for part in run.machine.parts] == [0, 3]
    assert kit.weights_of(tmp_path / "run") == plain[0] and [one.loss for one in run.steps] == plain[1]
    assert all(steps_at(url).values()) and 6 in steps_at(url)
    assert not [*(tmp_path / "run/checkpoints").glob(".staging-*")]


def test_the_newer_of_disk_and_bucket_is_taken(stopped, url, tmp_path, plain):
    """An older copy of the run is on the disk; then one that is as new, and nothing is fetched."""
    shutil.copytree(tmp_path / "lost", tmp_path / "run", symlinks=True)
    for step in (3, 4):
        shutil.rmtree(tmp_path / "run/checkpoints" / str(step))
    (tmp_path / "run/steps.jsonl").write_text("")
    run = train(stopped, {"train.num_steps": 4}, resume=True, preflight=False, quiet=True)
    assert run.machine.parts[-1].step == 4 and [one.loss for one in run.steps] == plain[1][:4]
    for name in list_objects(f"{url}/checkpoints"):
        delete_object(f"{url}/checkpoints/{name}")
    run = train(stopped, resume=True, preflight=False, quiet=True)
    assert run.machine.parts[-1].step == 4 and kit.weights_of(tmp_path / "run") == plain[0]


def test_a_damaged_checkpoint_on_the_disk_is_replaced_from_the_bucket(stopped, tmp_path, plain):
    shutil.copytree(tmp_path / "lost", tmp_path / "run", symlinks=True)
    for step in (3, 4):
        (tmp_path / f"run/checkpoints/{step}/state.pt").write_bytes(b"")
    run = train(stopped, resume=True, preflight=False, quiet=True)
    assert run.machine.parts[-1].step == 4 and kit.weights_of(tmp_path / "run") == plain[0]
    assert any("checkpoints/4: state.pt is damaged" in warning for warning in run.warnings)


def test_another_run_in_the_bucket_is_refused(stopped, url, tmp_path):
    with pytest.raises(
        RunDirError, match=rf"^{url}: holds the checkpoint of step 4 of a run already\. Add resume=True"
    ):
        train(stopped, preflight=False, quiet=True)
    assert not (tmp_path / "run").exists()
    shutil.copytree(tmp_path / "lost", tmp_path / "run", symlinks=True)
    shutil.rmtree(tmp_path / "run/checkpoints")
    machine = tmp_path / "run/machine.json"
    machine.write_text(json.dumps({**json.loads(machine.read_text()), "run_id": "another"}))
    with pytest.raises(RunDirError, match=rf"^{url}: holds another run \(id \w+\) than \S+/run \(id another\)"):
        train(stopped, resume=True, preflight=False, quiet=True)
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_folder_that_is_no_run_is_left_alone(stopped, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/letter.txt").write_text("Dear Ann")
    with pytest.raises(RunDirError, match=r"is not empty and not a run directory"):
        train(stopped, resume=True, preflight=False, quiet=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["letter.txt"]


def test_a_full_disk_while_a_checkpoint_is_fetched(stopped, tmp_path, monkeypatch, plain):
    fetch = copies.fetch_file

    def refuse(location: str, target: Path, **options: Any) -> None:
        if target.name == "state.pt":
            raise OSError(errno.ENOSPC, "No space left on device")
        fetch(location, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(copies, "fetch_file", refuse)
        with pytest.raises(RunDirError, match=r"cannot be written: No space left on device\. Free disk space, or"):
            train(stopped, resume=True, preflight=False, quiet=True)
    assert checkpoint.list_steps(tmp_path / "run/checkpoints") == []
    train(stopped, resume=True, preflight=False, quiet=True)
    assert kit.weights_of(tmp_path / "run") == plain[0]


def test_nothing_to_resume_begins_at_step_0(tmp_path, model_folder, url, plain):
    """A job that was stopped before its first checkpoint starts again with the same words."""
    run = train(recipe(tmp_path, model_folder, url), resume=True, preflight=False, quiet=True)
    assert [part.step for part in run.machine.parts] == [0] and kit.weights_of(tmp_path / "run") == plain[0]


# --- what is wrong before a run begins ---


def refuse_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without any right, whom the server checks from now on."""
    import boto3
    import s3fs

    boto3.client("iam").create_user(UserName="ann")
    key = boto3.client("iam").create_access_key(UserName="ann")["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    monkeypatch.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0)
    s3fs.S3FileSystem.clear_instance_cache()


def cut_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3fs.S3FileSystem.clear_instance_cache()


def rename_host(monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://bucket.invalid")
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (refuse_rights, "cannot be written: no rights (Access Denied). Give this machine credentials"),
        kit.release(cut_network, "cannot be written after 3 attempts"),
        (rename_host, "cannot be written after 3 attempts"),
        (None, "no such file or bucket"),
    ],
)
def test_a_bucket_that_cannot_be_written_ends_before_the_model_is_loaded(
    tmp_path, model_folder, url, monkeypatch, capsys, spoil, words
):
    place = url if spoil else url.replace("/runs/", "-none/runs/")
    table = recipe(tmp_path, model_folder, place)
    table["model"]["path"] = str(tmp_path / "no-such-model")
    (tmp_path / "recipe.json").write_text(json.dumps(table))
    if spoil:
        spoil(monkeypatch)
    assert cli.main(["train", str(tmp_path / "recipe.json"), "--quiet", "--no-preflight"]) == 4
    told = " ".join(capsys.readouterr().err.split())
    assert f"{place}/.write-test-0: {words}" in told and told.count("fivetune: ") == 1
    assert not (tmp_path / "run").exists()


def test_a_url_is_a_url(tmp_path, model_folder):
    with pytest.raises(ConfigError, match=r"checkpoint\.url.*'backup/squad' is not a URL\. Checkpoints are always"):
        load_config(recipe(tmp_path, model_folder, "backup/squad"))


def test_the_name_of_the_run_stands_in_the_url():
    assert copies.locate_copy("s3://b/runs/{run}", "runs/squad-2") == "s3://b/runs/squad-2"


def test_a_status_that_cannot_be_uploaded_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "status.json").write_text("{}")
    monkeypatch.setattr(storage.Path, "mkdir", lambda *args, **options: (_ for _ in ()).throw(OSError("no network")))
    warnings: list[str] = []
    copies.Uploader(str(tmp_path / "copy"), tmp_path).upload_status(warnings.append)
    assert len(warnings) == 1 and warnings[0].endswith(
        f"The copy is that of a run that has not ended; copy {tmp_path}/status.json to it."
    )
    assert warnings[0].startswith(f"{tmp_path}/copy/status.json: cannot be written after 3 attempts")


def test_names_that_lead_elsewhere_are_refused(tmp_path):
    place, folder = tmp_path / "copy" / "3", tmp_path / "run"
    (place / "sub").mkdir(parents=True)
    (place / "manifest.json").write_text('{"format_version": 1, "files": {"../../evil": {"size": 0, "crc32": 0}}}')
    with pytest.raises(storage.DamagedObjectError, match=r"'\.\./\.\./evil' is not the name of a file of this folder"):
        copies._fetch_checkpoint(str(place), folder / "checkpoints" / "3")
    (tmp_path / "copy" / "predictions" / "a").mkdir(parents=True)
    (tmp_path / "copy" / "predictions" / "a" / "b.jsonl").touch()
    with pytest.raises(RunDirError, match=r"predictions: 'a/b\.jsonl' is not the name of a file\. Delete it\."):
        copies._fetch_records(str(tmp_path / "copy"), folder)
    assert not folder.exists()
