"""Files of other people: pickles and code where weights, states, data and settings are read; names of elsewhere."""

from __future__ import annotations

import io
import json
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, cast

import yaml

from fivetune.rundir.checksums import MANIFEST, write_checksums
from fivetune.rundir.layout import CHECKSUMS
from reliability.campaign import Row, Trial
from reliability.rows.damage import copy_run
from reliability.rows.kills import FEW_STEPS
from reliability.warm import WarmProcess, check_no_trace, check_success, run_command
from reliability.workload import TRAIN_WORDS, Workload

LAST = f"checkpoints/{FEW_STEPS['train__num_steps']}"

Plant = Callable[[Path, Path, Workload], list[str]]  # (empty folder, canary, workload) -> words of the command


class Opener:
    """Creates the file `path` when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def make_pickle(canary: Path) -> bytes:
    return pickle.dumps({"weight": Opener(canary)})


def make_torch_file(canary: Path, **entries: object) -> bytes:
    """The same as torch.save writes it: a ZIP archive that holds a pickle."""
    import torch

    file = io.BytesIO()
    torch.save({**entries, "weight": Opener(canary)}, file)
    return file.getvalue()


def make_code(canary: Path) -> str:
    return f"open({str(canary)!r}, 'w')\nclass Evil: pass\nEvilConfig = EvilModel = EvilTokenizer = Evil\n"


# --- a model ---


def plant_in_model(change: Callable[[Path, Path], object]) -> Plant:
    """Change a copy of the model, and train it for a step."""

    def plant(folder: Path, canary: Path, workload: Workload) -> list[str]:
        model = folder / "model"
        shutil.copytree(workload.model, model)
        change(model, canary)
        (model / MANIFEST).unlink(missing_ok=True)
        recipe = workload.write_recipe(folder, **FEW_STEPS)
        return ["train", str(recipe), *TRAIN_WORDS, "--model.path", str(model), "--train.num_steps", "1"]

    return plant


def replace_weights(name: str, make: Callable[[Path], bytes]) -> Plant:
    """Put `name` in place of the weights."""

    def change(model: Path, canary: Path) -> None:
        (model / "model.safetensors").unlink()
        (model / name).write_bytes(make(canary))

    return plant_in_model(change)


def add_files(*names: str) -> Plant:
    """Put pickles beside the files of the model."""
    return plant_in_model(lambda model, canary: [(model / name).write_bytes(make_pickle(canary)) for name in names])


def add_code(file: str, settings: dict[str, Any], **kept: object) -> Plant:
    """Settings of the model that name classes of a Python file beside them."""

    def change(model: Path, canary: Path) -> None:
        (model / "evil.py").write_text(make_code(canary))
        path = model / file
        table = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**table, **settings, **kept}))

    return plant_in_model(change)


def name_pickle_as_shard(model: Path, canary: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(make_torch_file(canary))
    index = {"metadata": {}, "weight_map": {"shared.weight": "pytorch_model.bin"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def pickle_the_pieces(model: Path, canary: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "spiece.model").write_bytes(make_pickle(canary))


def add_generation_code(model: Path, canary: Path) -> None:
    (model / "custom_generate").mkdir()
    (model / "custom_generate" / "generate.py").write_text(make_code(canary))


# --- a run ---


def plant_in_checkpoint(name: str, make: Callable[[Path], bytes]) -> Plant:
    """Put a file into the last checkpoint, with a manifest that says it is whole, and go on."""

    def plant(folder: Path, canary: Path, workload: Workload) -> list[str]:
        run = copy_finished_run(workload, folder)
        checkpoint = run / LAST
        (checkpoint / name).write_bytes(make(canary))
        seal(checkpoint)
        return ["train", str(run), "--resume", *TRAIN_WORDS, "--train.num_steps", "3"]

    return plant


def plant_in_run(name: str, make: Callable[[Path], bytes], *words: str) -> Plant:
    """Put a file into a finished run, and use it."""

    def plant(folder: Path, canary: Path, workload: Workload) -> list[str]:
        run = copy_finished_run(workload, folder)
        (run / name).write_bytes(make(canary))
        if name.startswith("model/"):
            seal(run / "model")
        return [words[0], str(run), *words[1:]]

    return plant


def copy_finished_run(workload: Workload, folder: Path) -> Path:
    """A copy of a finished run of few steps whose settings name the copy, and that tells no changed records."""
    run = copy_run(workload.run_undisturbed(**FEW_STEPS).run, folder)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["run"]["dir"] = str(run)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / CHECKSUMS).unlink()
    return run


def seal(folder: Path) -> None:
    """Write the manifest again, for the same run."""
    run_id = json.loads((folder / MANIFEST).read_text())["run_id"]
    (folder / MANIFEST).unlink()
    write_checksums(folder, run_id=run_id)


# --- data and settings ---


def plant_as_data(name: str, make: Callable[[Path], bytes]) -> Plant:
    """Train on a file of this name."""

    def plant(folder: Path, canary: Path, workload: Workload) -> list[str]:
        recipe = workload.write_recipe(folder, **FEW_STEPS)
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(make(canary))
        source = path.parent if path.suffix == ".py" else path
        return ["train", str(recipe), *TRAIN_WORDS, "--data.train", str(source)]

    return plant


def make_object_array(canary: Path) -> bytes:
    import numpy as np

    file = io.BytesIO()
    np.savez(file, rows=np.array([Opener(canary)], dtype=object))
    return file.getvalue()


def plant_in_recipe(text: str) -> Plant:
    """A line of YAML at the end of a recipe; CANARY stands for the path."""

    def plant(folder: Path, canary: Path, workload: Workload) -> list[str]:
        recipe = workload.write_recipe(folder, **FEW_STEPS)
        recipe.write_text(recipe.read_text() + text.replace("CANARY", str(canary)) + "\n")
        return ["train", str(recipe), *TRAIN_WORDS]

    return plant


def plant_in_flag(folder: Path, canary: Path, workload: Workload) -> list[str]:
    text = f"!!python/object/apply:builtins.open ['{canary}', w]"
    return ["train", str(workload.write_recipe(folder, **FEW_STEPS)), *TRAIN_WORDS, "--report.title", text]


def plant_in_sweep(folder: Path, canary: Path, workload: Workload) -> list[str]:
    recipe = workload.write_recipe(folder, **FEW_STEPS)
    text = f"base: {recipe}\ntitle: !!python/object/apply:builtins.open ['{canary}', w]\n"
    (folder / "sweep.yaml").write_text(text)
    return ["compare", str(folder / "sweep.yaml"), "--dry-run"]


APPLY = "!!python/object/apply:builtins.open ['CANARY', w]"
MAP = {"AutoConfig": "evil.EvilConfig", "AutoModelForSeq2SeqLM": "evil.EvilModel"}
IGNORED = "ignored: "
"""Begins the name of a plant that is no part of what is read: the command succeeds."""
PLANTS: dict[str, Plant] = {
    "pickle as pytorch_model.bin": replace_weights("pytorch_model.bin", make_torch_file),
    "pickle as model.safetensors": replace_weights("model.safetensors", make_pickle),
    "torch file as model.safetensors": replace_weights("model.safetensors", make_torch_file),
    "pickle as tf_model.h5": replace_weights("tf_model.h5", make_pickle),
    "pickle as flax_model.msgpack": replace_weights("flax_model.msgpack", make_pickle),
    "pickle as a shard": plant_in_model(name_pickle_as_shard),
    "pickle as spiece.model": plant_in_model(pickle_the_pieces),
    "pickle as tokenizer.json": plant_in_model(lambda m, c: (m / "tokenizer.json").write_bytes(make_pickle(c))),
    "pickle as config.json": plant_in_model(lambda m, c: (m / "config.json").write_bytes(make_pickle(c))),
    "code for an unknown model": add_code("config.json", {"auto_map": MAP}, model_type="evil"),
    f"{IGNORED}pickles beside the weights": add_files("pytorch_model.bin", "training_args.bin", "optimizer.pt",
                                                      "scheduler.pt", "rng_state.pth", "adapter_model.bin"),
    f"{IGNORED}code for a known model": add_code("config.json", {"auto_map": MAP}),
    f"{IGNORED}code for a tokenizer": add_code(
        "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}}),
    f"{IGNORED}code for the generation": plant_in_model(add_generation_code),
    "optimizer state of a checkpoint": plant_in_checkpoint("state.pt", make_torch_file),
    "random states of a checkpoint": plant_in_checkpoint("state.pt", lambda canary: make_torch_file(canary, rng={})),
    "pickle as a checkpoint's state": plant_in_checkpoint("state.pt", make_pickle),
    "weights of a checkpoint": plant_in_checkpoint("model.safetensors", make_torch_file),
    f"{IGNORED}optimizer.pt in a checkpoint": plant_in_checkpoint("optimizer.pt", make_torch_file),
    "weights of a run": plant_in_run("model/model.safetensors", make_torch_file, "evaluate"),
    "settings of a run": plant_in_run(
        "config.yaml", lambda canary: f"run: {APPLY}\n".replace("CANARY", str(canary)).encode(), "evaluate"),
    "data set with a script": plant_as_data("evil/evil.py", lambda canary: make_code(canary).encode()),
    "pickled data frame": plant_as_data("data.pkl", make_pickle),
    "array of objects as data": plant_as_data("data.npz", make_object_array),
    "torch file as data": plant_as_data("data.pt", make_torch_file),
    "pickle as Parquet": plant_as_data("data.parquet", make_pickle),
    "pickle as JSON lines": plant_as_data("data.jsonl", make_pickle),
    "YAML tag that calls": plant_in_recipe(f"report: {{title: {APPLY}}}"),
    "YAML tag that names": plant_in_recipe("report: {title: !!python/name:os.system }"),
    "YAML tag that makes an object": plant_in_recipe("report: {title: !!python/object:pathlib.Path {}}"),
    f"{IGNORED}YAML tag in a flag": plant_in_flag,
    "YAML tag in a sweep": plant_in_sweep,
}  # fmt: skip


NAMED = {  # what the refusal names where it is not the file of a plant's name
    "pickle as a shard": "/pytorch_model.bin:",
    "code for an unknown model": "model_type 'evil'",
    "optimizer state of a checkpoint": f"/{LAST}/state.pt:",
    "random states of a checkpoint": f"/{LAST}/state.pt:",
    "pickle as a checkpoint's state": f"/{LAST}/state.pt:",
    "weights of a checkpoint": f"/{LAST}/model.safetensors:",
    "weights of a run": "/run/model/model.safetensors:",
    "settings of a run": "/run/config.yaml:1:",
    "data set with a script": "evil.py",
    "pickled data frame": "/data.pkl:",
    "array of objects as data": "/data.npz:",
    "torch file as data": "/data.pt:",
    "pickle as Parquet": "/data.parquet:",
    "pickle as JSON lines": "/data.jsonl:1:",
    "YAML tag that calls": "/recipe.yaml:28:",
    "YAML tag that names": "/recipe.yaml:28:",
    "YAML tag that makes an object": "/recipe.yaml:28:",
    "YAML tag in a sweep": "/sweep.yaml:2:",
}


def open_planted_files(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Each plant: the canary is never created, and what cannot be used is refused in a line that names it. The first
    trial shows that what is planted runs where it is loaded without care.
    """
    yield Trial("noticed: what is loaded without care", check_notice)
    for name, plant in random.sample(sorted(PLANTS.items()), len(PLANTS)):

        def run(folder: Path, name: str = name, plant: Plant = plant) -> None:
            canary = folder / "canary"
            words = plant(folder, canary, workload)
            done = run_command(*words)
            assert not canary.exists(), "the planted code ran"
            if name.startswith(IGNORED):
                check_success(done)
            else:
                check_named_refusal(done, NAMED.get(name) or name.rpartition(" as ")[2])

        yield Trial(name, run)


def check_notice(folder: Path) -> None:
    """Pickles, code and tags create the canary where they are loaded without care."""
    done = WarmProcess(load_without_care, str(folder)).finish()
    check_success(done)


def load_without_care(folder: str) -> None:
    """Load what is planted by the means that run it."""
    import numpy as np
    import torch

    canary, loaders = Path(folder, "canary"), cast(Any, yaml)  # whose stubs leave out what is unsafe
    for kind, load in {
        "pickle": lambda: pickle.loads(make_pickle(canary)),  # noqa: S301
        "torch file": lambda: torch.load(io.BytesIO(make_torch_file(canary)), weights_only=False),
        "array": lambda: np.load(io.BytesIO(make_object_array(canary)), allow_pickle=True)["rows"],
        "code": lambda: exec(make_code(canary), {}),
        "YAML tag": lambda: loaders.unsafe_load(APPLY.replace("CANARY", str(canary))),
    }.items():
        load()
        assert canary.exists(), f"{kind}: nothing ran"
        canary.unlink()


def check_named_refusal(done: CompletedProcess[str], named: str) -> None:
    """The command ended with the exit code of a user's error and one line that has the text.

    A resume that fails renews the report of the run and names it in a line before.
    """
    check_no_trace(done.stderr)
    assert done.returncode in (2, 3, 4), f"exit code {done.returncode}: {done.stderr[-600:]}"
    said = re.sub(r"\Areport  .*\n", "", done.stderr.strip())
    assert said.startswith("fivetune: ") and "\n" not in said, f"more than one line: {said[-900:]}"
    assert named in said, f"{named!r} is not named: {said[-600:]}"


ROWS = [
    Row("R25", "a pickle, code or a YAML tag where weights, states, data or settings are read",
        "no planted code runs; a file that is read is refused by name",
        open_planted_files),
]  # fmt: skip
