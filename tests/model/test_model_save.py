"""What a saved model promises: plain transformers generates what FiveTune generates; every file follows the umask."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import kit
import pytest
from decoding_kit import lively, question_store
from transformers import AutoModelForSeq2SeqLM

import fivetune
from fivetune.cli import main
from fivetune.data.store.batch import collate, pad
from fivetune.errors import RunDirError
from fivetune.model.decode import Decoding, generate
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.save import save_model
from fivetune.training.answers.loading import load_run_model

WAYS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4, "min_new_tokens": 5, "suppressed_ids": (3, 5, 9)},
    {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("family", kit.FAMILIES)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_generate_of_transformers_writes_what_fivetune_writes(
    tmp_path: Path, family_folders: dict[str, Path], family: str, way: dict[str, Any]
) -> None:
    folder = family_folders[family]
    loaded = load_model_and_tokenizer(str(folder))
    loaded.model = loaded.model if family == "t5" else lively(folder)
    decoding = Decoding(27, score_targets=False, **way)
    save_model(loaded.model, loaded.tokenizer, tmp_path / "model", generation=decoding.as_generation_config())
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    if family == "umt5":
        theirs.config.tie_word_embeddings = False  # the line of the model card
    store = question_store(tmp_path, folder, num_questions=9)
    rows = list(range(9))
    batch = pad(collate(store, rows), pad_id=0)
    written = theirs.generate(batch.input_ids, attention_mask=batch.attention_mask)[:, 1:].tolist()
    ours = generate(loaded.model, store, rows, decoding, device="cpu", autocast=nullcontext)
    ours = {one.row: one.token_ids for one in ours}
    assert [ours[row] for row in rows] == [ids[: ids.index(1)] if 1 in ids else ids for ids in written]
    assert family != "t5" or max(map(len, ours.values())) > 20  # transformers' own limit would cut these


def test_a_run_exports_its_own_way_of_decoding(tmp_path: Path, model_folder: Path) -> None:
    options = {"eval__num_beams": 3, "eval__length_penalty": 0.5, "train__num_steps": 1, "eval__every_steps": 1}
    fivetune.train(kit.recipe(tmp_path, model_folder, **options), quiet=True, preflight=False)
    settings = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run/model").generation_config
    assert (settings.max_new_tokens, settings.num_beams, settings.length_penalty) == (8, 3, 0.5)
    assert len(settings.suppress_tokens) == 100
    card = (tmp_path / "run/model/README.md").read_text()
    assert "pipeline_tag" not in card and "| total | 12 |" in card and ".predict([" in card
    assert "AutoModelForSeq2SeqLM.from_pretrained(" in card and "tie_word_embeddings" not in card


def test_the_card_of_umt5_corrects_the_scale_of_its_outputs(tmp_path: Path, family_folders: dict[str, Path]) -> None:
    """transformers forces the tie flag of umT5: greedy answers are the same, those of beams are not."""
    recipe = kit.recipe(tmp_path, family_folders["umt5"], train__num_steps=1)
    fivetune.train(recipe, quiet=True, preflight=False)
    lines = (tmp_path / "run/model/README.md").read_text().splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("model = AutoModel"))
    assert lines[place + 1].startswith("model.config.tie_word_embeddings = False  # transformers 5 sets it to True")


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o027, 0o640)])
def test_file_modes_follow_the_umask(tmp_path: Path, model_folder: Path, mask: int, mode: int) -> None:
    loaded = load_model_and_tokenizer(str(model_folder))
    before = os.umask(mask)
    try:
        save_model(loaded.model, loaded.tokenizer, tmp_path / "model")
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == dict.fromkeys(
        os.listdir(tmp_path / "model"), mode
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    fivetune.train(kit.recipe(folder, model_folder, train__num_steps=2), quiet=True, preflight=False)
    return folder / "run"


DAMAGES = {
    "a flipped bit": lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:],
    "4 kB of zeros": lambda data: data[:-5000] + bytes(4096) + data[-904:],
    "cut": lambda data: data[:-1],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer_config.json"])
def test_a_damaged_model_is_refused(tmp_path: Path, finished: Path, name: str, damage: str) -> None:
    run = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    path = run / "model" / name
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    said = rf"run/model: {name} is damaged .*checksum differs.*\. Export .*run/best again"
    with pytest.raises(RunDirError, match=said):
        load_run_model(run)


def test_weights_of_another_run_are_refused_and_the_best_checkpoint_restores_them(
    tmp_path: Path, finished: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    shutil.copy(model_folder / "model.safetensors", run / "model")
    assert main(["evaluate", str(run)]) == 4
    assert main(["predict", str(run), "--inputs", "question: What has Ann?"]) == 4
    assert capsys.readouterr().err.count("model.safetensors is damaged") == 2
    shutil.rmtree(run / "model")
    assert main(["train", str(run), "--run.dir", str(run), "--resume", "--quiet"]) == 0  # what the message advises
    assert kit.weights_of(run) == kit.weights_of(finished)


def test_a_card_may_be_edited(tmp_path: Path, finished: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    (run / "model/README.md").write_text("Ours.")
    assert fivetune.open_run(run).step in (1, 2)
