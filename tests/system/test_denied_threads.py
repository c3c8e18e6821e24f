"""A kernel that gives a job too few threads, or too little address space, as containers do: everything ends in time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from other_users import opened, why_not
from waiting import PATIENCE

USER = "61246"
"""A user that the system's database does not have, of whom nothing else runs: the kernel counts threads by user."""
TIMEOUT_S = 20
JOB = """
import sys, time
import torch
from penstock.client import Appliance, DataExecutor, DataLoader

def rows(count):
    return [torch.tensor(row) for row in range(count)]

if __name__ == "__main__":
    began = time.monotonic()
    try:
        with Appliance(num_workers_per_box=1, timeout_s=%d) as appliance:
            print(len(list(DataExecutor(DataLoader(rows, 9), appliance=appliance))), end=" ")
    except Exception as error:
        print(repr(error), end=" ")
    print(time.monotonic() - began)
"""


@pytest.fixture(scope="module")
def before() -> Sequence[str]:
    user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--inh-caps=-all"]
    before = [*opened(), *user]
    if why := why_not(before):
        pytest.skip(why)
    return before


@pytest.mark.timeout(PATIENCE * 120)
@pytest.mark.parametrize(("limit", "value"), [("-u", 12), ("-u", 18), ("-u", 25), ("-v", 1_100_000)])
def test_a_job_without_threads_ends(before: Sequence[str], limit: str, value: int) -> None:
    shell = ["bash", "-c", f'ulimit {limit} {value}; exec "$@"', "bash"]
    environment = {**os.environ, "HOME": "/tmp", "TMPDIR": "/tmp", "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    done = subprocess.run(
        [*before, *shell, sys.executable, "-c", JOB % TIMEOUT_S],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 60,
        check=False,
    )
    said = done.stdout.splitlines()[-1]
    assert float(said.split()[-1]) < PATIENCE * TIMEOUT_S, "of which the opening, and the closing, take a part each"
    assert time.monotonic() - began < PATIENCE * 60
    if limit == "-u" and said.split()[0] != "9":  # with 25 it may just work
        assert "Error" in said.split()[0], said
        assert "can't start new thread" in said or "embedded coordinator" in said, said
    assert not left(int(USER)), "the daemons end too"


def left(user: int) -> list[int]:
    """Return the processes of a user, once those that are ending had time for it."""
    until = time.monotonic() + PATIENCE * 5
    while True:
        found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and owner(entry) == user]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.05)


def owner(process: Path) -> int:
    try:
        return process.stat().st_uid
    except OSError:
        return -1
