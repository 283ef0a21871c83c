"""Path traversal by archives, links and names, and decompression bombs."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import resource
import shutil
import signal
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import yaml

from fivetune.rundir.checksums import MANIFEST
from reliability.campaign import Row, Trial
from reliability.rows.hostile import Plant, check_named_refusal, copy_finished_run, plant_as_data
from reliability.rows.kills import FEW_STEPS
from reliability.warm import WarmProcess, check_no_trace, check_success, run_command
from reliability.workload import TRAIN_WORDS, Workload

MOST_MEMORY = MOST_DISK = 256 * 2**20


def add_tar(**changes: Any) -> Callable[[Path], bytes]:
    """A tar archive with one member."""

    def make(outside: Path) -> bytes:
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode=changes.get("mode", "w")) as archive:
            member = tarfile.TarInfo(changes["name"].replace("OUTSIDE", str(outside)))
            member.size, member.type = 4, changes.get("type", tarfile.REGTYPE)
            member.linkname = str(outside) if "type" in changes else ""
            archive.addfile(member, io.BytesIO(b"evil"))
        return file.getvalue()

    return make


def make_gzip(start: bytes) -> Callable[[Path], bytes]:
    """A file of 1 GiB, in a 1,000th of that."""
    return lambda _: gzip.compress(start) + 16 * gzip.compress(bytes(2**26))


def make_zip(name: str, content: bytes = b"evil") -> Callable[[Path], bytes]:
    def make(outside: Path) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name.replace("OUTSIDE", str(outside)), content)
        return file.getvalue()

    return make


def link_in_run(name: str, *words: str) -> Plant:
    """A file of a run is a link to the file outside; the run is continued or shown."""

    def plant(folder: Path, outside: Path, workload: Workload) -> list[str]:
        run = copy_finished_run(workload, folder)
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside)
        return [words[0], str(run), *words[1:]]

    return plant


RESUME = ("train", "--resume", *TRAIN_WORDS, "--train.num_steps", "3")


def link_folder(name: str, *words: str) -> Plant:
    """A folder of a run is a link to the folder outside."""

    def plant(folder: Path, outside: Path, workload: Workload) -> list[str]:
        run = copy_finished_run(workload, folder)
        if (run / name).is_symlink():
            (run / name).unlink()
        elif (run / name).exists():
            shutil.rmtree(run / name)
        (run / name).symlink_to(outside.parent)
        return [words[0], str(run), *words[1:]]

    return plant


def name_in_recipe(**overrides: Any) -> Plant:
    """A setting that leads to the file outside, as OUTSIDE."""

    def plant(folder: Path, outside: Path, workload: Workload) -> list[str]:
        recipe = workload.write_recipe(folder, **FEW_STEPS)
        table = yaml.safe_load(recipe.read_text())
        for key, value in overrides.items():
            section, _, name = key.partition("__")
            table.setdefault(section, {})[name] = value
        recipe.write_text(yaml.safe_dump(table).replace("OUTSIDE", str(outside)))
        return ["train", str(recipe), *TRAIN_WORDS]

    return plant


def name_in_ids(folder: Path, outside: Path, workload: Workload) -> list[str]:
    recipe = workload.write_recipe(folder, **FEW_STEPS)
    path = folder / "dev.json"
    table = json.loads(path.read_text())
    for number, paragraph in enumerate(table["data"][0]["paragraphs"]):
        paragraph["qas"][0]["id"] = f"{'../' * (number + 1)}outside/precious.txt"
    path.write_text(json.dumps(table))
    return ["train", str(recipe), *TRAIN_WORDS]


def name_a_part(folder: Path, outside: Path, workload: Workload) -> list[str]:
    recipe = workload.write_recipe(folder, "mixture", **FEW_STEPS)
    table = yaml.safe_load(recipe.read_text())
    parts = table["task"]["parts"]
    parts["../../../outside/precious.txt"] = parts.pop("labels")
    recipe.write_text(yaml.safe_dump(table))
    return ["train", str(recipe), *TRAIN_WORDS]


def name_a_variant(folder: Path, outside: Path, workload: Workload) -> list[str]:
    recipe = workload.write_recipe(folder, **FEW_STEPS)
    variants = [{"name": "../../../outside/precious.txt", "optimizer.lr": 0.01}]
    sweep = {"base": str(recipe), "dir": str(folder / "sweep"), "list": variants}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    return ["compare", str(folder / "sweep.yaml")]


def name_a_shard(folder: Path, outside: Path, workload: Workload) -> list[str]:
    model = folder / "model"
    shutil.copytree(workload.model, model)
    (model / "model.safetensors").rename(outside.with_name("model.safetensors"))
    index = {"weight_map": {"shared.weight": "../../outside/model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    recipe = workload.write_recipe(folder, **FEW_STEPS)
    return ["train", str(recipe), *TRAIN_WORDS, "--model.path", str(model)]


def name_prepared_shard(key: str) -> Plant:
    """Prepared data behind a URL whose index names a whole file so that its copy lies outside."""

    def plant(folder: Path, outside: Path, workload: Workload) -> list[str]:
        recipe, prepared = workload.write_recipe(folder, **FEW_STEPS), folder / "deep" / "prepared"
        done = run_command("prepare", str(recipe), "--output", str(prepared), "--quiet")
        check_success(done)
        path = prepared / "train" / "index.json"
        index = json.loads(path.read_text())
        entry = index["rows"] if key == "rows" else index["shards"][0]
        (folder / "outside").mkdir()
        (prepared / "train" / entry["file"]).rename(folder / "outside" / "evil")
        entry["file"] = "../../../outside/evil"  # from the cache's folder of the copy, which is less deep
        path.write_text(json.dumps(index))
        return ["train", str(recipe), *TRAIN_WORDS, "--data.train", f"file://{prepared}/train"]

    return plant


def name_in_bucket(folder: Path, outside: Path, workload: Workload) -> list[str]:
    """The copy of a run whose last checkpoint lists a file of elsewhere; the run goes on on an empty machine."""
    place = folder / "copies" / "run"
    place.parent.mkdir()
    recipe = workload.write_recipe(folder, **FEW_STEPS, checkpoint__url=f"file://{place}")
    done = run_command("train", str(recipe), *TRAIN_WORDS)
    check_success(done)
    shutil.rmtree(folder / "run")
    (folder / "cache").rename(folder / "cache-of-the-first")
    name = f"../../../../{outside.parent.name}/evil"
    for checkpoint in [path for path in (place / "checkpoints").iterdir() if (path / MANIFEST).exists()]:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        manifest["files"][name] = manifest["files"]["state.pt"]
        (checkpoint / MANIFEST).write_text(json.dumps(manifest))
        target = (checkpoint / name).resolve()
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            shutil.copy(checkpoint / "state.pt", target)
    return ["train", str(recipe), "--resume", *TRAIN_WORDS, "--train.num_steps", "3"]


TRAVERSALS: dict[str, Plant] = {  # (folder of the work, file outside of it, workload) -> words
    "tar: ../": plant_as_data("a.tar", add_tar(name="../outside/precious.txt")),
    "tar: absolute": plant_as_data("a.tar", add_tar(name="OUTSIDE")),
    "tar: link": plant_as_data("a.tar", add_tar(name="link", type=tarfile.SYMTYPE)),
    "tar: hard link": plant_as_data("a.tar", add_tar(name="link", type=tarfile.LNKTYPE)),
    "tar: device": plant_as_data("a.tar", add_tar(name="device", type=tarfile.CHRTYPE)),
    "tar.gz: ../": plant_as_data("a.tar.gz", add_tar(name="../outside/precious.txt", mode="w:gz")),
    "zip: ../": plant_as_data("a.zip", make_zip("../outside/precious.txt")),
    "zip: absolute": plant_as_data("a.zip", make_zip("OUTSIDE")),
    "zip: Windows": plant_as_data("a.zip", make_zip("..\\outside\\precious.txt")),
    "zip named .jsonl": plant_as_data("a.jsonl", make_zip("../outside/precious.txt")),
    "zip bomb": plant_as_data("a.zip", make_zip("a", bytes(2**26))),
    **{
        f"gzip bomb: {name}": plant_as_data(f"a.{name}.gz", make_gzip(start))
        for name, start in {
            "jsonl": b'{"question": "',
            "json": b'{"data": [',
            "csv": b"id,q\n",
            "parquet": b"PAR1",
        }.items()
    },
    "gzip of gzip": plant_as_data("a.jsonl.gz", lambda _: gzip.compress(gzip.compress(b"{}"))),
    ".lock is a link": link_in_run(".lock", *RESUME),
    "log.txt is a link": link_in_run("log.txt", *RESUME),
    "telemetry.jsonl is a link": link_in_run("telemetry.jsonl", *RESUME),
    "steps.jsonl is a link": link_in_run("steps.jsonl", *RESUME),
    "evals.jsonl is a link": link_in_run("evals.jsonl", "evaluate"),
    "status.json is a link": link_in_run("status.json", *RESUME),
    "machine.json is a link": link_in_run("machine.json", *RESUME),
    "report.html is a link": link_in_run("report.html", "report"),
    "README.md is a link": link_in_run("model/README.md", "card"),
    "model is a link": link_folder("model", *RESUME),
    "best is a link": link_folder("best", *RESUME),
    "predictions is a link": link_folder("predictions", "evaluate"),
    "ids of records": name_in_ids,
    "name of a part": name_a_part,
    "name of a variant": name_a_variant,
    "shard of a model": name_a_shard,
    "shard of prepared data": name_prepared_shard("shards"),
    "rows of prepared data": name_prepared_shard("rows"),
    "file of a checkpoint in a bucket": name_in_bucket,
    "cache is a file": name_in_recipe(data__cache_dir="OUTSIDE"),
    "run is a file": name_in_recipe(run__dir="OUTSIDE"),
    "run below a file": name_in_recipe(run__dir="OUTSIDE/run"),
}
PRECIOUS = b"precious"


def plant_traversals(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Each plant: what lies outside the folder of the work keeps its bytes, and nothing is added beside it."""
    for name, plant in random.sample(sorted(TRAVERSALS.items()), len(TRAVERSALS)):

        def run(folder: Path, name: str = name, plant: Plant = plant) -> None:
            inside, outside = folder / "inside", folder / "outside" / "precious.txt"
            inside.mkdir()
            outside.parent.mkdir()
            outside.write_bytes(PRECIOUS)
            words = plant(inside, outside, workload)
            (folder / "peak").touch()
            before = {path for path in folder.rglob("*") if inside not in path.parents}
            done, num_bytes = run_within_limits(inside, folder / "peak", *words)
            assert outside.read_bytes() == PRECIOUS, f"the file outside was changed; {done.stderr[-600:]}"
            after = {path for path in folder.rglob("*") if inside not in path.parents}
            assert before == after, f"outside, {sorted(map(str, before ^ after))} came or went; {done.stderr[-600:]}"
            check_no_trace(done.stderr)
            assert done.returncode in (0, 2, 3, 4), f"exit code {done.returncode}: {done.stderr[-600:]}"
            if name.startswith(("tar", "zip", "gzip")):
                check_named_refusal(done, "/a.")
            if "bomb" in name:
                peak = int((folder / "peak").read_text())
                assert peak < MOST_MEMORY, f"it took {peak / 2**20:.0f} MiB of memory; {done.stderr[-600:]}"
                assert "File too large" not in done.stderr, f"it wrote {MOST_DISK / 2**20:.0f} MiB into a file"
                assert num_bytes < MOST_DISK, f"it wrote {num_bytes / 2**20:.0f} MiB to the disk"

        yield Trial(name, run)


def run_within_limits(inside: Path, peak: Path, *words: str) -> tuple[CompletedProcess[str], int]:
    """Run `fivetune WORDS`, which cannot write a file of more than MOST_DISK; its memory goes into the file `peak`.

    Returns also the largest size of all files in the folder `inside`, which temporary files are in.
    """
    most = 0
    with WarmProcess(call_within_limits, str(inside), str(peak), *words) as process:
        while process.code is None:
            most = max(most, measure_size(inside))
            time.sleep(0.02)
        return process.wait(), max(most, measure_size(inside))


def measure_size(folder: Path) -> int:
    """Bytes of all files in a folder; a file that goes away meanwhile is left out."""
    num_bytes = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                num_bytes += os.lstat(os.path.join(place, name)).st_size
    return num_bytes


def call_within_limits(inside: str, peak: str, *words: str) -> int:
    from fivetune.cli import main

    tempfile.tempdir = os.environ["TMPDIR"] = inside
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_DISK, MOST_DISK))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code = main(list(words))
    Path(peak).write_text(str((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024))
    return code


ROWS = [
    Row("R26", "an archive, a link or a name that leads out of the folder of the work; archives of 1 GiB in 1 MiB",
        "nothing outside changes; an archive is refused by name, within 256 MiB", plant_traversals),
]  # fmt: skip
