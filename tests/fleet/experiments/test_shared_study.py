"""One study of several processes: in a journal file, and in a real PostgreSQL on loopback."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest
from shared_study import NUM_EVALS, build_recipe, share_study

from fivetune.config import load_config
from fivetune.fleet.experiments.study import Study
from reliability.warm import WarmProcess

pytestmark = pytest.mark.slow
NUM_TRIALS, NUM_PROCESSES = 12, 3


def find_postgres() -> Path | None:
    """The folder of initdb and postgres: Debian keeps them out of PATH."""
    named = shutil.which("initdb")
    places = [Path(named).parent] if named else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((place for place in places if (place / "postgres").exists()), None)


@pytest.fixture
def postgres() -> Generator[str]:
    """The URL of an empty database of a server that runs only for this test."""
    programs = find_postgres()
    if programs is None:
        pytest.skip("no PostgreSQL (Debian: apt-get install --no-install-recommends postgresql)")
    pytest.importorskip("psycopg2", reason="pip install psycopg2-binary")
    user = None
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        user = next((one.pw_name for one in pwd.getpwall() if one.pw_name in ("postgres", "nobody")), None)
        if user is None:
            pytest.skip("PostgreSQL does not run as root, and there is no other user")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        if user:
            shutil.chown(folder, user)
        data = f"{folder}/data"
        quick = ["-c", "fsync=off", "-c", "full_page_writes=off", "-c", f"unix_socket_directories={folder}"]
        init = [programs / "initdb", "-D", data, "-U", "ann", "--auth=trust", "--no-sync", "--no-locale", "-E", "UTF8"]
        subprocess.run(init, user=user, cwd=folder, check=True, capture_output=True)
        words = [programs / "postgres", "-D", data, "-h", "127.0.0.1", "-p", str(port), *quick]
        with subprocess.Popen(words, user=user, cwd=folder, stderr=subprocess.DEVNULL) as server:
            try:
                wait_for_port(port)
                yield f"postgresql+psycopg2://ann:geheim@127.0.0.1:{port}/postgres"
            finally:
                server.send_signal(signal.SIGINT)  # ends open connections


def wait_for_port(port: int) -> None:
    import psycopg2

    until = time.monotonic() + 30
    while True:
        try:
            psycopg2.connect(host="127.0.0.1", port=port, user="ann", dbname="postgres").close()
            return
        except psycopg2.OperationalError:
            assert time.monotonic() < until
            time.sleep(0.05)


def share(folder: Path, storage: str) -> list[str]:
    """The lines of each process that shared the study."""
    arguments = (str(folder), storage, "hyperband", NUM_TRIALS)
    with ExitStack() as stack:
        started = [stack.enter_context(WarmProcess(share_study, *arguments)) for _ in range(NUM_PROCESSES)]
        done = [process.wait(240) for process in started]
    assert [one.returncode for one in done] == [0] * NUM_PROCESSES, [one.stderr for one in done]
    return [one.stdout for one in done]


def check_study(folder: Path, storage: str, printed: list[str]) -> None:
    found = Study(load_config(build_recipe(storage, "hyperband", NUM_TRIALS)), folder).build_search()
    trials = found.trials
    assert [one.number for one in trials] == list(range(NUM_TRIALS))
    assert len({one.settings["optimizer.lr"] for one in trials}) == NUM_TRIALS
    assert {one.state for one in trials} == {"finished", "pruned"}, "hyperband stops some"
    assert all(len(one.curve) == NUM_EVALS for one in trials if one.state == "finished")
    assert all(0 < len(one.curve) < NUM_EVALS for one in trials if one.state == "pruned")
    assert found.best and found.best.score == max(one.score for one in trials if one.state == "finished")
    assert sum(text.count("trial ") for text in printed) >= NUM_TRIALS
    assert sum("trial " in text for text in printed) > 1, "several processes took part"
    assert (folder / "best.yaml").is_file() and (folder / "search.html").is_file()


def test_processes_share_a_journal(tmp_path):
    check_study(tmp_path / "s", "journal", share(tmp_path / "s", "journal"))


@pytest.mark.release
def test_processes_share_a_database(tmp_path, postgres):
    check_study(tmp_path / "s", postgres, share(tmp_path / "s", postgres))
    held = [path.name for path in (tmp_path / "s").rglob("*") if path.is_file() and b"geheim" in path.read_bytes()]
    assert held == []
