"""Two nodes with addresses of their own: network namespaces of this machine, joined by a cable of the kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import kit
import pytest
import yaml

from fivetune import rundir

NAMES, ADDRESSES = (f"fivetune-{os.getpid()}-a", f"fivetune-{os.getpid()}-b"), ("10.231.7.1", "10.231.7.2")


def run_ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Generator[None]:
    if not shutil.which("ip") or os.geteuid() != 0:
        pytest.skip("network namespaces need the command ip (Debian: iproute2) and root")
    try:
        for name in NAMES:
            run_ip(f"netns add {name}")
        run_ip(f"link add cable netns {NAMES[0]} type veth peer name cable netns {NAMES[1]}")
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            run_ip(f"-n {name} address add {address}/24 dev cable")
            run_ip(f"-n {name} link set cable up")
            run_ip(f"-n {name} link set lo up")
        yield
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.mark.release
def test_a_run_on_two_nodes_with_their_own_addresses(namespaces, tmp_path: Path, model_folder: Path):
    table = kit.recipe(
        tmp_path,
        model_folder,
        strategy="ddp",
        launch={"nnodes": 2},
        train__num_steps=2,
        eval__at_start=False,
        eval__every_steps=10**6,
    )
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(table))
    words = [sys.executable, "-m", "fivetune", "train", str(tmp_path / "r.yaml"), "--no-preflight", "--quiet"]
    # The host's name is 127.0.0.1 in every namespace: gloo is given the cable.
    meeting = {"PET_MASTER_ADDR": ADDRESSES[0], "PET_MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "cable"}
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *words],
            env={**os.environ, **meeting, "PET_NODE_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, name in enumerate(NAMES)
    ]
    printed = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    done = rundir.read_run(tmp_path / "run")
    assert done.status.state == "finished" and [step.world_size for step in done.steps] == [2, 2]
    assert "fivetune: " not in "".join(printed)
