"""`penstock doctor machine`: what it says of values, and of a machine on which something is really broken."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.deploy.doctor import machine_check
from penstock.deploy.doctor.findings import Finding

GIB = 1 << 30


@pytest.mark.parametrize(
    ("finding", "level", "says"),
    [
        (machine_check.check_sandbox(""), "ok", "only what they have started"),
        (
            machine_check.check_sandbox("the kernel has no Landlock"),
            "warning",
            "can signal and trace other processes",
        ),
        (machine_check.check_memory(64 * GIB, 8), "ok", "64.0 GiB free"),
        (machine_check.check_memory(2 * GIB, 8), "warning", "2.0 GiB free"),
        (machine_check.check_memory(GIB // 4, 1), "problem", "256.0 MiB free"),
    ],
)
def test_what_is_said_of_values(finding: Finding, level: str, says: str) -> None:
    assert (finding.level, says in finding.found) == (level, True), finding
    assert bool(finding.remedy) == (level != "ok")


def test_ranks_are_told_which_box_they_are(shell: Any) -> None:
    environment = shell.env({"RANK": "1", "WORLD_SIZE": "4"})
    done = subprocess.run(
        [str(Path(sys.executable).with_name("penstock")), "doctor", "machine", "--json", "--slots", "1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = {each["check"]: each["found"] for each in json.loads(done.stdout)["findings"]}
    assert "box 1 of 4" in found["ranks"]
    assert "must pass its group's box= and num_boxes=" in found["ranks"]


def test_no_target_checks_the_machine(shell: Any) -> None:
    assert shell.call("doctor").stdout.startswith("This machine\ncheck ")
    assert json.loads(shell.call("doctor", "--json", "--slots", "1").stdout)["of"] == "This machine"
    assert shell.call("doctor", "nothing-like-this").returncode == 2
    assert "--args must be a JSON list" in shell.call("doctor", "nowhere:fn", "--args", "x").error


def test_a_low_limit_of_open_files(shell: Any) -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    done = subprocess.run(
        [str(Path(sys.executable).with_name("penstock")), "doctor", "machine", "--json", "--slots", "8"],
        env=shell.env({}),
        preexec_fn=lower,
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert done.returncode == 32
    assert found["open files"]["level"] == "problem"
    assert "at most 100 may be open, but at least 160" in found["open files"]["found"]
    assert "ulimit -Hn 65536" in found["open files"]["remedy"]
    assert "pidfd_open" in found["kernel and container"]["found"]
