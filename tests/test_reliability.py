"""The campaign that measures reliability: what is counted, what continues, what the page says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, cast

import psutil
import pytest

from fivetune.rundir import lock_file
from fivetune.rundir.checksums import write_checksums
from reliability import __main__ as command
from reliability import batch, campaign, row_mutants
from reliability.campaign import Campaign, Row, Trial
from reliability.mutants import MUTANTS
from reliability.page import END, START, write_table
from reliability.row_mutants import ROW_MUTANTS, SURVIVED
from reliability.rows import kills, network
from reliability.warm import WarmProcess
from reliability.workload import check_resumed_from, find_newest_step

RAN: list[str] = []


def make_row(failing: int = 0, **options) -> Row:
    def make_trials(workload, random):
        def run(folder: Path, number: int) -> None:
            RAN.append(f"{number}")
            (folder / "left").touch()
            assert number >= failing, "the weights differ"

        for number in range(30):
            yield Trial(f"{number} at {random.random():.3f}", lambda folder, number=number: run(folder, number))

    return Row("R1", "a fault", "a promise", make_trials, num_trials=6, num_release=30, **options)


@pytest.fixture
def make_campaign(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "Workload", lambda folder: None)
    monkeypatch.setattr(campaign, "describe_code", lambda: "0123")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    RAN.clear()
    return lambda **options: Campaign(tmp_path / "campaign", **{"tell": lambda line: None, **options})


def test_trials_are_counted_and_a_failure_is_named_with_its_files(make_campaign):
    (row,) = make_campaign().run([make_row(failing=2)])["rows"]
    assert (row["num_trials"], len(row["failures"]), row["bound"]) == (6, 2, None)
    text = row["failures"][next(iter(row["failures"]))]
    assert text.startswith("AssertionError in test_reliability.py:") and "the weights differ" in text
    assert (Path(text.split("files: ")[1]) / "left").exists()


def test_a_row_without_failure_bounds_its_rate_and_shows_the_peer(make_campaign, tmp_path):
    result = make_campaign().run([make_row(make_peer_trials=make_row(failing=3).make_trials)])
    (row,) = result["rows"]
    assert (row["bound"], row["peer"]) == (0.5, {"num_trials": 1, "num_failures": 1})
    page = tmp_path / "page.md"
    page.write_text(f"above\n{START}\nold\n{END}\nbelow\n")
    write_table(page, result)
    assert "| R1 | a fault | a promise | 6 of 6 | 50 % | 0 of 1 |" in page.read_text()
    assert page.read_text().startswith("above\n") and page.read_text().endswith(f"{END}\nbelow\n")
    assert "old" not in page.read_text()


def test_the_peer_has_all_trials_in_a_release_alone(make_campaign):
    row = make_row(make_peer_trials=make_row().make_trials)
    assert make_campaign().run([row])["rows"][0]["peer"]["num_trials"] == 1
    assert make_campaign(release=True).run([row])["rows"][0]["peer"]["num_trials"] == 30


@pytest.mark.parametrize(
    ("ends_at", "failures"), [(None, ["", "the case is 1"]), (1, ["", "not checked, since b ended"])]
)
def test_cases_of_one_process_fail_by_name(tmp_path, monkeypatch, ends_at, failures):
    """The second case fails, or ends the process of all."""

    class Process:
        def __init__(self, work, check, cases, place):
            with suppress(SystemExit):
                work(check, cases, place)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def wait(self, seconds):
            return CompletedProcess("", 7, "", "")

    def check(folder: Path, case: int) -> None:
        if case == ends_at:
            raise SystemExit
        assert case == 0, f"the case is {case}"

    monkeypatch.setattr(batch, "WarmProcess", Process)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = []
    for trial in batch.share_process(check, {"a": 0, "b": 1}):
        try:
            trial.run(tmp_path)
        except AssertionError as error:
            found.append(str(error))
        else:
            found.append("")
    assert len(found) == 2 and all(text in one for text, one in zip(failures, found, strict=True)) and not found[0]


def test_a_campaign_goes_on_where_it_stopped(make_campaign):
    make_campaign().run([make_row()])
    assert len(RAN) == 6
    (row,) = make_campaign(release=True).run([make_row()])["rows"]
    assert len(RAN) == row["num_trials"] == 30


def test_results_of_changed_code_are_not_used_again(make_campaign, monkeypatch):
    monkeypatch.setattr(campaign, "describe_code", lambda: "0123-changed")
    for _ in range(2):
        make_campaign().run([make_row()])
    assert len(RAN) == 12


def test_a_row_that_cannot_be_set_up_fails_and_the_others_run(make_campaign):
    def make_trials(workload, random):
        yield Trial("first", lambda folder: None)
        raise OSError("no space")

    whole = make_row()
    rows = make_campaign().run([replace(whole, name="R2", make_trials=make_trials), whole])["rows"]
    assert list(rows[0]["failures"]) == ["set-up of R2"] and "no space" in rows[0]["failures"]["set-up of R2"]
    assert (rows[1]["num_trials"], rows[1]["failures"]) == (6, {})


def test_a_row_without_trials_fails(make_campaign):
    (row,) = make_campaign().run([replace(make_row(), make_trials=lambda workload, random: [])])["rows"]
    assert "R1: no trial" in row["failures"]["set-up of R1"]


def test_a_campaign_tells_how_far_it_is(make_campaign, monkeypatch):
    monkeypatch.setattr(campaign, "PROGRESS_SECONDS", 0)
    told: list[str] = []
    make_campaign(tell=told.append, jobs=1).run([make_row()])
    assert told[5] == "6 of 6 trials"


def test_the_command_exits_by_the_result(make_campaign, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "list_rows", lambda: [make_row(failing=1)])
    monkeypatch.setattr(command, "describe_code", lambda: "0123")
    for words, code in (
        ("--list", 0),
        (f"--only R1, --folder {tmp_path / 'campaign'}", 2),
        (f"--folder {tmp_path / 'campaign'}", 1),
    ):
        assert call(monkeypatch, *words.split()) == code
    assert "0 of 1 rows are green, 0 not run; seed 291;" in capsys.readouterr().out
    assert json.loads((tmp_path / "campaign" / "reliability.json").read_text())["rows"][0]["num_trials"] == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "R1, R99"], "--only: no row 'R99'; rows: R1"),
        (["--only", ""], "--only: no row ''; rows: R1"),
        (["--folder", __file__], f"--folder {__file__}: is a file"),
        (["--only", "R1", "--page", "page.md"], "--page: the table has all rows. Leave --only out."),
    ],
)
def test_wrong_rows_are_refused(words, message, monkeypatch, capsys):
    monkeypatch.setattr(command, "list_rows", lambda: [make_row()])
    assert call(monkeypatch, *words) == 2
    assert message in capsys.readouterr().err


def call(monkeypatch, *words: str) -> object:
    """The exit code of the command; its handling of SIGTERM stays out of the tests."""
    monkeypatch.setattr("sys.argv", ["reliability", *words])
    monkeypatch.setattr("sys.warnoptions", [])
    monkeypatch.setattr(command.signal, "signal", lambda *handler: None)
    try:
        return command.main()
    except SystemExit as exit:
        return exit.code


def test_a_second_campaign_in_the_folder_is_refused(make_campaign, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "list_rows", lambda: [make_row()])
    (tmp_path / "campaign").mkdir()
    with (tmp_path / "campaign" / ".lock").open("ab") as lock:
        assert lock_file(lock)
        assert call(monkeypatch, "--folder", str(tmp_path / "campaign")) == 2
    assert f"{tmp_path / 'campaign'}: another campaign runs there." in capsys.readouterr().err
    assert RAN == []


def test_an_interrupted_campaign_kills_its_trials_and_records_none_of_them(make_campaign, tmp_path, monkeypatch):
    processes: list[subprocess.Popen[bytes]] = []
    list_children = psutil.Process.children

    def list_own(self: psutil.Process, recursive: bool) -> list[psutil.Process]:
        """Without what other tests have started in this process."""
        return [one for one in list_children(self, recursive) if one.pid in {each.pid for each in processes}]

    monkeypatch.setattr(psutil.Process, "children", list_own)
    monkeypatch.setattr(campaign, "adopt_orphans", lambda: None)

    def wait(folder: Path) -> None:
        processes.append(subprocess.Popen(["sleep", "60"]))
        (tmp_path / "begun").touch()
        assert processes[0].wait() == 0

    def interrupt(line: str) -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    quick = Row("R1", "a fault", "a promise", lambda *_: iter([Trial("quick", lambda folder: None)]), num_trials=1)
    slow = Row("R2", "a fault", "a promise", lambda *_: iter([Trial("slow", wait)]), num_trials=1)
    with pytest.raises(KeyboardInterrupt):
        make_campaign(tell=interrupt, jobs=2).run([quick, slow])
    assert processes[0].returncode == -signal.SIGKILL
    (journal,) = (tmp_path / "campaign").glob("*.jsonl")
    assert [json.loads(line)["trial"] for line in journal.read_text().splitlines()] == ["quick"]


def test_a_journal_that_was_torn_or_interrupted_holds_whole_results_only(tmp_path):
    path = tmp_path / "trials.jsonl"
    with closing(campaign.Journal(path, print)) as journal:
        journal.run_once("R1", Trial("a", lambda folder: None), peer=False)
    with path.open("a") as file:
        file.write('{"row": "R1", "tri')
    journal = campaign.Journal(path, print)
    journal.close()
    assert list(journal._known) == [("R1", "a", False)]
    journal.run_once("R1", Trial("b", lambda folder: None), peer=False)
    assert path.read_text().endswith('"tri')


def test_an_output_that_cannot_be_written_is_refused_before_the_trials(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "list_rows", lambda: [make_row()])
    (tmp_path / "page.md").write_text("no markers")
    RAN.clear()
    for words in (f"--output {tmp_path}/no/x.json", f"--output {tmp_path}", f"--page {tmp_path}/page.md"):
        assert call(monkeypatch, "--folder", str(tmp_path / "folder"), *words.split()) == 2
    assert capsys.readouterr().err.count("error: ") == 3 and RAN == []


def test_an_interrupted_command_says_that_it_goes_on(tmp_path, monkeypatch, capsys):
    def interrupt(self, rows):
        raise KeyboardInterrupt

    monkeypatch.setattr(Campaign, "run", interrupt)
    assert call(monkeypatch, "--only", "R5", "--folder", str(tmp_path)) == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_a_release_without_a_row_is_not_green(make_campaign, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "list_rows", lambda: [make_row(), make_row(explain_absence=lambda: "no slurmctld")])
    assert call(monkeypatch, "--folder", str(tmp_path / "campaign")) == 0
    assert call(monkeypatch, "--folder", str(tmp_path / "campaign"), "--release") == 1


def test_a_row_that_cannot_run_here_says_why(make_campaign, tmp_path):
    told: list[str] = []
    result = make_campaign(tell=told.append).run([make_row(explain_absence=lambda: "no slurmctld")])
    assert (RAN, result["rows"][0]["bound"], told) == ([], None, ["R1   not run: no slurmctld  a fault"])
    (tmp_path / "page.md").write_text(f"{START}\n{END}\n")
    write_table(tmp_path / "page.md", result)
    assert "| R1 | a fault | a promise | not run: no slurmctld |  |  |" in (tmp_path / "page.md").read_text()
    make_campaign(tell=told.append).run([replace(make_row(), num_trials=0)])
    assert told[1:] == ["R1   not run: in a release only  a fault"]


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
def test_the_packets_of_an_attempt_to_connect_are_counted(address):
    if ":" in address and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this kernel has no IPv6")
    if why := network.explain_absence():
        pytest.skip(why)
    attempt = f"""
import socket
from contextlib import suppress
from reliability.rows.network import count_packets, enter_silent_network
enter_silent_network()
before = count_packets()
with suppress(OSError):
    socket.create_connection(("{address}", 80), timeout=5)
raise SystemExit(10 * before + count_packets())
"""
    with WarmProcess(exec, attempt) as process:
        assert 0 < process.wait().returncode < 10


def test_processes_of_several_threads_keep_their_exit_codes():
    """Python reads the exit codes of all ended processes whenever one starts: of two reads one gets 255."""

    def run_some(number: int) -> set[int]:
        codes: set[int] = set()
        for _ in range(20):
            with WarmProcess(int, str(number)) as process:
                while process.code is None:
                    pass
                codes.add(process.wait().returncode)
        return codes

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(run_some, range(6))) == [{number} for number in range(6)]


@pytest.mark.parametrize("signum", ["SIGHUP", "SIGINT"])
def test_a_trial_takes_signals_that_the_campaign_ignores(signum):
    """nohup has it ignore SIGHUP, a shell's & SIGINT; a trial would end well, and its signal would show nothing."""
    code = f"""
import signal
from reliability import warm
signal.signal(signal.{signum}, signal.SIG_IGN)
warm.SERVER.set_forkserver_preload([])
with warm.WarmProcess(signal.raise_signal, signal.{signum}) as process:
    raise SystemExit(process.wait().returncode != 0)
"""
    environ = {**os.environ, "PYTHONPATH": str(campaign.ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr


def test_every_row_has_a_name_of_its_own():
    names = [row.name for row in command.list_rows()]
    assert len(names) == len(set(names)) and "R1" in names


@pytest.mark.parametrize("mutant", dict.fromkeys([*MUTANTS, *ROW_MUTANTS.values()]), ids=lambda mutant: mutant.name)
def test_every_mutant_changes_one_place_and_names_tests_that_are_there(mutant):
    source = (campaign.ROOT / "fivetune" / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1, f"{mutant.file} has another text now: fix the mutant"
    assert all((campaign.ROOT / file).is_file() for file in mutant.tests)
    assert mutant.tests or mutant not in MUTANTS


def test_every_row_has_a_mutant():
    assert set(ROW_MUTANTS) == {row.name for row in command.list_rows()}


@pytest.mark.parametrize(
    ("failing", "code", "line"), [(0, SURVIVED, "none of 3 | "), (2, 0, "1: 0 at 0.000 | AssertionError")]
)
def test_the_trials_of_a_row_run_up_to_the_first_that_fails(make_campaign, monkeypatch, capsys, failing, code, line):
    monkeypatch.setattr(row_mutants, "Workload", lambda folder: None)
    assert row_mutants.run_until_failure(replace(make_row(failing), num_release=3), seed=0) == code
    said = re.sub(r"at 0[.][0-9]+", "at 0.000", capsys.readouterr().out)
    assert said.startswith(line) and len(RAN) == (3 if code else 1)


@pytest.mark.parametrize(
    ("work", "num"),
    [("shutil.rmtree('a')", 4), ("os.symlink('nothing', 'b')", 1), ("os.rename('a/x', 'a/y')", 1), ("open('a/x')", 0)],
)
def test_operations_are_counted_also_below_an_open_folder(tmp_path, work, num):
    """Removing a tree of two files and a folder: bare names beside open folders; a link counts by its own place."""
    (tmp_path / "run" / "a" / "b").mkdir(parents=True)
    for name in ("a/x", "a/b/x"):
        (tmp_path / "run" / name).touch()
    watch = "from reliability.faults import watch_file_operations as watch; watch('.', print)"
    code = f"import os, shutil; {watch}; {work}"
    words = [sys.executable, "-c", code]
    done = subprocess.run(
        words,
        cwd=tmp_path / "run",
        env={**os.environ, "PYTHONPATH": str(campaign.ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr, len(done.stdout.split())) == (0, "", num)


def test_the_newest_whole_checkpoint_is_found_and_a_resume_must_begin_there(tmp_path):
    """One that was being replaced has another name; one without a manifest is no checkpoint."""
    for name in ("2", ".7.old", "9"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert find_newest_step(tmp_path) == 0
    for name in ("2", ".7.old"):
        write_checksums(tmp_path / "checkpoints" / name)
    assert find_newest_step(tmp_path) == 7
    (tmp_path / "machine.json").write_text(json.dumps({"parts": [{"step": 0, "started": "", "device": "cpu"}]}))
    with pytest.raises(AssertionError, match="went on from step 0, and its newest whole checkpoint was that of step 7"):
        check_resumed_from(tmp_path, 7)


def test_a_kill_that_misses_is_drawn_again_and_what_was_there_is_put_back(tmp_path, monkeypatch):
    """The first two processes have written and ended; the third is hit."""
    place, ended, start = tmp_path / "run", iter([0.5, 0.4, None]), cast("Any", lambda: None)
    times: list[float] = []
    place.mkdir()

    def kill_after(process: str, seconds: float) -> float | None:
        assert not (place / "written").exists()
        (place / "written").touch()
        times.append(seconds)
        return next(ended)

    monkeypatch.setattr(kills, "kill_after", kill_after)
    kills.kill_during(start, place, 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["run"] and (place / "written").exists()
    assert times == pytest.approx([1.0, 0.3, 0.24])  # earlier than the end of the one that was missed
    ended = iter([0.5] * kills.NUM_DRAWS)
    (place / "written").unlink()
    with pytest.raises(AssertionError, match=r"^no kill hit; the last one was after "):
        kills.kill_during(start, place, 1.0)
