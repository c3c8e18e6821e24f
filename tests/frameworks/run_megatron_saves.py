"""Releases of Megatron-core and NVRx save with Penstock's writer and their own schedulers, and load what it wrote.

The packages have no tests in them, so this does what their repositories' tests of the asynchronous writer do. Left out:
the texts `Worker failure` and `Invalid Setup!`, because here nothing is forked; the same bytes as `FileSystemWriter`,
because the zip archives have no checksums of their own; the writer's private parts; `TorchAsyncCheckpoint`, local
checkpoints and version checks, which use no writer; CUDA, groups of eight ranks, and what needs `megatron.training`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

RELEASES = Path(sys.prefix, "releases")
"""Wheels for another Python, of which only modules in Python are used; of Megatron-core 0.16.1 the installed one is."""
SCRIPT = Path(__file__).with_name("megatron_saves.py")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("releases", "strategy", "persistent"),
    [
        ([], "torch", False),
        ([], "torch", True),
        (["megatron-core==0.17.0"], "mcore", True),
        (["megatron-core==0.19.2"], "mcore", False),
        (["megatron-core==0.17.0", "nvidia-resiliency-ext==0.7.0"], "nvrx", True),
        (["megatron-core==0.19.2", "nvidia-resiliency-ext==0.7.0"], "nvrx", True),
        (["megatron-core==0.19.2", "nvidia-resiliency-ext==0.7.0"], "nvrx", False),
        (["nvidia-resiliency-ext==0.4.1"], "alone", True),
        (["nvidia-resiliency-ext==0.7.0"], "alone", True),
        (["nvidia-resiliency-ext==0.7.0"], "alone", False),
    ],
)
def test_saved_and_loaded(tmp_path: Path, releases: list[str], strategy: str, persistent: bool) -> None:
    folders = [RELEASES / name for name in releases]
    assert all(folder.is_dir() for folder in folders), "make frameworks installs them"
    paths = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(tmp_path), strategy, str(persistent)]
    environment = {**os.environ, "PYTHONPATH": paths, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, start_new_session=True) for rank in range(2)
    ]
    try:
        assert [rank.wait(540) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:  # and their schedulers' processes, which would wait for ever
            if rank.poll() != 0:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
    finished = [name for name in json.loads((tmp_path / "saves-0.json").read_text()) if "aborted" not in name]
    again = ["3", "4"] * (releases == ["nvidia-resiliency-ext==0.7.0"])  # after failures
    assert finished == ["1", "2", "3", "4", *(["at once"] if strategy != "alone" else again)]
