"""A run goes to a hub on loopback and comes back; refusals, broken connections, and what is held back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import kit
import pytest
import yaml

import fivetune
from fivetune.cli import main
from fivetune.errors import RunDirError
from fivetune.rundir.checksums import MANIFEST, compute_checksum
from fivetune.rundir.export_file import read_export
from reliability.fake_hub import FakeHub, running_hub

# huggingface_hub hands the weights to its HTTP library in a deprecated way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")
SECRET = "hf_" + "Secret0" * 5


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("published")
    fivetune.train(kit.recipe(folder, model_folder, train__num_steps=1), quiet=True, preflight=False)
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between its attempts
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub


def push(run: Path, *words: str, repo: str = "me/t5-squad") -> int:
    return main(["push", str(run), repo, *words])


def test_a_pushed_run_answers_from_the_hub(run, hub, tmp_path, capsys):
    from huggingface_hub import snapshot_download
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    assert push(run, "--private", "--json") == 0
    shown = capsys.readouterr().out
    listed = {one["name"]: one for one in json.loads(shown.splitlines()[-1])["files"]}
    held = hub.files["me/t5-squad"]
    assert hub.repos == {"me/t5-squad": True}
    assert {name: (len(held[name]), sha256(held[name]).hexdigest()) for name in held} == {
        name: (one["size"], one["sha256"]) for name, one in listed.items()
    }
    assert all(one["sha256"] in shown for one in listed.values()) and hub.token not in shown
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "config.yaml"} <= set(held)
    assert not [name for name in held if "prediction" in name or name.endswith((".jsonl", ".html", ".txt", ".csv"))]
    assert str(run.parent) not in b"".join(held[name] for name in held if name != "model.safetensors").decode()

    folder = snapshot_download("me/t5-squad", endpoint=hub.address, token=hub.token, cache_dir=tmp_path / "hub")
    record = {"question": "What has Ann?", "context": "Ann has a red hat."}
    theirs, ours = fivetune.open_run(folder), fivetune.open_run(run)
    assert theirs.predict([record]) == ours.predict([record])
    assert theirs.step == ours.step
    AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
    again = len(hub.requests)
    assert push(run, "--private") == 0  # an existing repository
    assert not [line for line in hub.requests[again:] if line.startswith("PUT")]  # the weights are there


def test_a_dry_run_sends_nothing(run, hub, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    assert push(run, "--dry-run") == 0
    assert "model.safetensors" in capsys.readouterr().out and hub.requests == []


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ({"repos/create": 401}, "does not accept the token in HF_TOKEN (401)"),
        ({"repos/create": 403}, "has no write access to me (403)"),
        ({"repos/create": 404}, "finds no me, or the token does not see it (404)"),
        ({"commit": 403}, "has no write access to me (403)"),
        ({"preupload": 429}, "takes no more requests now (429)"),
        ({"commit": 500}, "answers with 500 while committing: refused"),
    ],
)
def test_a_refusal_of_the_hub_says_what_to_do(run, hub, capsys, fails, words):
    hub.fails = fails
    assert push(run) == 4
    error = capsys.readouterr().err
    assert words in error and "same command again is safe" in error
    assert error.startswith("fivetune: me/t5-squad: ") and hub.token not in error and error.count("\n") == 1
    assert not hub.files.get("me/t5-squad")


def test_an_interrupted_upload_is_repeated_without_sending_the_weights_again(run, hub, capsys):
    hub.cuts = ["/commit/"] * 9
    assert push(run) == 4
    error = capsys.readouterr().err
    assert "connection was lost while committing" in error
    assert f"See {hub.address}/me/t5-squad: it may be published. The same command" in error
    assert hub.objects and not hub.files["me/t5-squad"]
    hub.cuts, hub.requests = [], []
    assert push(run) == 0
    assert "model.safetensors" in hub.files["me/t5-squad"]
    assert not [line for line in hub.requests if line.startswith("PUT")]


@pytest.mark.parametrize(
    ("part", "doing"),
    [("repos/create", "creating the repository"), ("objects/batch", "uploading"), ("commit/", "committing")],
)
def test_a_hub_that_never_answers_is_left(run, hub, monkeypatch, capsys, part, doing):
    monkeypatch.setattr("fivetune.delivery.hub.hub.MAX_WAIT_SECONDS", 0.2)
    hub.spoils[part] = "never"
    assert push(run) == 4
    assert f"did not answer for 0.2 seconds, or the connection was lost while {doing}" in capsys.readouterr().err
    assert not hub.files.get("me/t5-squad")


def test_without_a_network_nothing_is_lost(run, hub, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert push(run) == 4
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err


def test_a_public_repository_is_refused_for_private_files(run, hub, capsys):
    hub.repos["me/t5-squad"] = False
    assert push(run, "--private") == 4
    assert "exists and is public, and --private was given" in capsys.readouterr().err
    assert not hub.files.get("me/t5-squad")


def test_the_token_comes_from_the_environment_alone(run, hub, monkeypatch, capsys):
    assert push(run, "--token", SECRET) == 2
    error = capsys.readouterr().err
    assert "HF_TOKEN" in error and SECRET not in error
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: pytest.fail("the stored login is used"))
    assert push(run) == 4
    assert "the environment variable HF_TOKEN is not set" in capsys.readouterr().err
    assert hub.requests == []


@pytest.mark.parametrize("name", ["t5", "me/t5/x", "me/t--5", "me/-t5", "me/t 5", "me/" + "a" * 97])
def test_an_invalid_name_is_refused_first(run, hub, capsys, name):
    assert push(run, repo=name) == 2
    assert f"{name}: is not a repository name" in capsys.readouterr().err and hub.requests == []


@pytest.mark.parametrize("name", ["train.csv", ".env", "predictions.jsonl", "extra/key.pem"])
def test_a_foreign_file_beside_the_weights_is_refused(run, hub, capsys, name):
    (run / "model" / name).parent.mkdir(exist_ok=True)
    (run / "model" / name).write_text("x")
    assert push(run) == 2
    assert f"model/{name}: is no part of the model" in capsys.readouterr().err and hub.requests == []


def test_a_secret_in_a_card_is_refused_without_repeating_it(run, hub, capsys):
    card = run / "model" / "README.md"
    card.write_text(card.read_text() + f"\n{'Log in ' * 2_000}with {SECRET}\n")
    assert push(run) == 2
    error = capsys.readouterr().err
    assert "README.md:" in error and "looks like an access token" in error and SECRET not in error
    assert hub.requests == []


def test_an_edited_card_is_published_as_it_is(run, hub):
    (run / "model" / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")
    assert push(run) == 0
    assert hub.files["me/t5-squad"]["README.md"] == b"---\nlicense: mit\n---\nMine.\n"


def test_damaged_weights_are_not_published(run, hub, capsys):
    weights = run / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert push(run) == 4
    assert "model.safetensors is damaged" in capsys.readouterr().err and hub.requests == []


def test_a_manifest_that_leads_out_of_the_model_is_refused(run, hub, capsys):
    """The file that it names was published."""
    (run / "secret.txt").write_text("0000")
    manifest = json.loads((run / "model" / MANIFEST).read_text())
    manifest["files"]["../secret.txt"] = compute_checksum(run / "secret.txt")
    (run / "model" / MANIFEST).write_text(json.dumps(manifest))
    assert push(run) == 4
    assert "'../secret.txt' is not the name of a file of this folder" in capsys.readouterr().err and not hub.files


def test_an_export_that_leads_out_of_its_folder_is_refused(tmp_path):
    export = {"format_version": 1, "options": {}, "format": "onnx", "source": {"run": "a"}}
    listed = {"../secret.txt": {"sha256": "0", "size": 1}}
    (tmp_path / "export.json").write_text(json.dumps({**export, "files": listed}))
    with pytest.raises(RunDirError, match=r"export\.json: damaged"):
        read_export(tmp_path)


def test_the_report_is_published_if_asked_for(run, hub, capsys):
    (run / "report.html").write_text("<html>")
    assert push(run, "--report") == 0
    assert "report.html" in hub.files["me/t5-squad"]
    (run / "report.html").unlink()
    assert push(run, "--report") == 4
    assert f"fivetune report {run}" in capsys.readouterr().err


def test_an_export_is_published_with_matching_checksums(run, hub, tmp_path, monkeypatch):
    pytest.importorskip("ctranslate2")
    from huggingface_hub import snapshot_download

    assert main(["export", str(run), "--format", "ctranslate2", "--examples", "4"]) == 0
    assert push(run / "export" / "ctranslate2") == 0
    held = hub.files["me/t5-squad"]
    card = held["README.md"].decode()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "ctranslate2"
    assert "Verdict of its proof:" in card and "AutoModelForSeq2SeqLM" not in card and "| f1 |" in card
    assert str(tmp_path) not in held["export.json"].decode()
    folder = snapshot_download("me/t5-squad", endpoint=hub.address, token=hub.token, cache_dir=tmp_path / "hub")
    record = {"question": "What has Ann?", "context": "Ann has a red hat."}
    found = fivetune.open_run(folder).predict([record])[0].prediction
    assert found == fivetune.open_run(run).predict([record])[0].prediction


def test_virtual_tokens_are_published_with_their_base(tmp_path, hub, model_folder, capsys):
    pytest.importorskip("peft")
    from huggingface_hub import snapshot_download

    options = {
        "model__adapter": {"name": "prompt", "num_virtual_tokens": 3},
        "train__num_steps": 2,
        "optimizer__lr": 0.3,
    }
    fivetune.train(kit.recipe(tmp_path, model_folder, **options), quiet=True, preflight=False)
    assert push(tmp_path / "run") == 0
    folder = snapshot_download("me/t5-squad", endpoint=hub.address, token=hub.token, cache_dir=tmp_path / "hub")
    card = (Path(folder) / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "peft" and 'subfolder="adapter"' in card
    records = [{"question": f"What has {word}?", "context": f"{word} has a red hat."} for word in kit.OWNERS]
    for file, key in (("base.json", "name"), ("adapter_config.json", "base_model_name_or_path")):
        assert str(model_folder) in (tmp_path / "run" / "adapter" / file).read_text()
        assert json.loads((Path(folder) / "adapter" / file).read_text())[key] == model_folder.name
    told = " ".join(capsys.readouterr().err.split())
    assert f"adapter: its base, {model_folder}, is no model of the hub: the adapter is published with the name" in told
    theirs, ours = fivetune.open_run(folder).predict(records), fivetune.open_run(tmp_path / "run").predict(records)
    assert [one.logprob for one in theirs] == pytest.approx([one.logprob for one in ours])


def test_an_adapter_alone_needs_a_base_on_the_hub(run, hub, capsys):
    assert push(run, "--adapter") == 2
    assert "has no adapter/: the run trained the whole model" in capsys.readouterr().err
    (run / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (run / "adapter" / name).write_bytes(b"{}")
    (run / "adapter" / "base.json").write_text('{"name": "/home/ann/cache/t5-v1_1-small", "checksum": "0"}')
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["adapter"] = {"name": "lora"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert push(run, "--adapter") == 2
    assert "is no model of the hub" in capsys.readouterr().err
    config["model"]["path"] = "google/t5-v1_1-small"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert push(run, "--adapter") == 0
    held = hub.files["me/t5-squad"]
    assert set(held) == {"README.md", "adapter_config.json", "adapter_model.safetensors", "base.json"}
    assert json.loads(held["base.json"]) == {"name": "google/t5-v1_1-small", "checksum": "0"}
    metadata = yaml.safe_load(held["README.md"].decode().split("---")[1])
    assert metadata["library_name"] == "peft" and metadata["base_model_relation"] == "adapter"
    assert metadata["base_model"] == "google/t5-v1_1-small"
