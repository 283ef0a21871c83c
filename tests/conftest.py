"""Fixtures: the tiny tokenizer and model are made once per session."""

from __future__ import annotations

import atexit
import gc
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny, and as many tests run at once as there are cores
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the tests start many processes: each would compile the package anew

import pytest
from built_once import build_once
from hypothesis import settings

settings.register_profile("release", settings.default, max_examples=2_000)

# Programs of test_tpu.py, whose environment has jax.
collect_ignore = ["tpu_compile.py", "tpu_process.py"]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail test files that cannot be imported: --doctest-ignore-import-errors, meant for Triton, would skip them."""
    report = yield
    if report.skipped and "unable to import module" in str(report.longrepr):
        report.outcome = "failed"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow tests first: at the end, short ones keep all workers busy."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_xdist_auto_num_workers() -> int:
    """Half as many workers again as processors: many tests wait for servers, signals and processes of their own."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return processors + processors // 2


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of collected tests live until the end: the garbage collector need not look at them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    """Runs where tests run. Torch is imported late here: the process that only starts xdist's workers needs none."""
    import torch

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, which runs respect
    torch.set_num_threads(1)  # the models are tiny: a second thread only waits
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        remember_builtins(interpreter)


def remember_builtins(interpreter: Any) -> None:
    """Triton's interpreter searches its language for what to patch in every call of a kernel's function, half its time.

    Here it searches each module and class once.
    """
    members: dict[Any, list[tuple[str, Any]]] = {}
    is_builtin = interpreter.tl.core.is_builtin

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in members:
            members[package] = [(name, one) for name, one in inspect.getmembers(package) if is_builtin(one)]
        for name, member in members[package]:
            if getattr(package, name) is member:
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


def pytest_sessionfinish() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # see `end_worker`
        return
    gc.unfreeze()  # what Triton registered is released before the interpreter ends


def end_worker(pid: int) -> None:
    """End a worker of xdist, which has reported everything: to free its million objects one by one takes seconds."""
    if os.getpid() == pid:  # not in a process that a test has forked
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(end_worker, os.getpid())  # registered first, called last


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import kit

    return kit.make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    import kit

    return kit.make_model(tmp_path_factory.mktemp("models") / "tiny-t5", tokenizer_folder)


@pytest.fixture(scope="session")
def family_folders(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> dict[str, Path]:
    """A saved model of every family; copy one before changing it."""
    import kit

    def build(folder: Path) -> dict[str, Path]:
        return {family: kit.make_model(folder / family, tokenizer_folder, family=family) for family in kit.FAMILIES}

    return build_once(tmp_path_factory, "families", build)


@pytest.fixture(autouse=True)
def files_without_sync(monkeypatch: pytest.MonkeyPatch):
    """A training syncs some 80 files, a third of its time here; killed processes do not need it, lost power does."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def unloaded_machine(monkeypatch: pytest.MonkeyPatch):
    """Pre-flight warns of a loaded machine; no test depends on what else runs beside it."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.fixture(autouse=True)
def normal_floats():
    """What a set-up leaves on for the process would make other tests' small floats 0."""
    import torch

    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def cpu_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Steps and phases are timed by the CPU seconds of their thread, which other programs hardly change.

    The value of the fixture lets seconds pass on this clock without waiting.
    """
    passed = 0.0

    def wait(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: time.thread_time() + passed)
    return wait
