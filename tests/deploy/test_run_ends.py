"""How runs end, told to an operator: by `penstock status`, in JSON, metrics and the log, and to his own command."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import ends
import pytest
from appliances import made
from prometheus_client.parser import text_string_to_metric_families
from waiting import until

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.errors import DeadlineError, InputFnError, NoWorkersError, PoisonBatchError, SupersededError

COUNTS = {
    "finished": 1,
    "closed": 1,
    "raised": 1,
    "quarantined": 1,
    "stalled": 1,
    "no workers": 1,
    "superseded": 1,
    "client lost": 0,
}


@dataclass
class Told:
    """What is told of runs that have ended, one for each reason, by the job's name."""

    shell: Any
    log: list[dict[str, Any]]
    hook: dict[str, dict[str, Any]]
    status: dict[str, dict[str, Any]]
    metrics: dict[str, int]


def job(shell: Any, name: str, **settings: Any) -> Appliance:
    known = shell.environment
    usual = {"num_workers_per_box": 1, "seed": 5, "timeout_s": 60, "box": 0, "num_boxes": 1}
    given = {"job": name, "token": known["PENSTOCK_TOKEN"], **usual, **settings}
    return made(known["PENSTOCK_COORDINATOR"], **given)


def run_jobs(shell: Any) -> None:
    with job(shell, "finished") as appliance:
        assert len(list(DataExecutor(DataLoader(ends.ending, "ends"), appliance=appliance))) == 3
    with job(shell, "closed") as appliance:
        for _ in DataExecutor(DataLoader(ends.ending, "ends"), appliance=appliance):
            break
    with job(shell, "raised") as appliance, pytest.raises(InputFnError):
        list(DataExecutor(DataLoader(ends.ending, "raises"), appliance=appliance))
    with (
        job(shell, "stalled", timeout_s=4) as appliance,
        pytest.warns(UserWarning, match="slow worker"),
        pytest.raises(DeadlineError) as stalled,
    ):
        list(DataExecutor(DataLoader(ends.ending, "hangs"), appliance=appliance))
    assert "in ending" in stalled.value.remote_traceback
    with job(shell, "no workers", timeout_s=2, num_workers_per_box=9) as appliance, pytest.raises(NoWorkersError):
        list(DataExecutor(DataLoader(ends.ending, "ends"), appliance=appliance))
    with job(shell, "superseded", attempt="one") as appliance:
        steps = iter(DataExecutor(DataLoader(ends.ending, "ends", 1000, 0.01), appliance=appliance))
        next(steps)
        with job(shell, "superseded", attempt="two") as second:
            again = iter(DataExecutor(DataLoader(ends.ending, "ends", 1000, 0.01), appliance=second))
            next(again)
            with pytest.raises(SupersededError):
                list(steps)
            look = json.loads(shell.call("status", "--json").stdout)
            (run,) = (run for run in look["runs"] if run["run"] == "superseded/0")
            assert (run["open"], run["attempt"], run["end"]["attempt"]) == (True, 2, 1)
            assert run["end"]["reason"] == "superseded"
            del again
            COUNTS["closed"] = 2
    with (
        job(shell, "quarantined") as appliance,
        pytest.warns(UserWarning, match="was recovered"),
        pytest.raises(PoisonBatchError),
    ):
        list(DataExecutor(DataLoader(ends.ending, "kills"), appliance=appliance))


@pytest.fixture(scope="module")
def told(module_shell: Any) -> Told:
    shell, hooked = module_shell, module_shell.folder / "ends.jsonl"
    shell.environment["PENSTOCK_LOG_FORMAT"] = "json"
    command = f"tee -a {hooked} '$(touch shell)'"  # a shell would run touch; tee makes a file of this name
    started = shell.start(
        *("coordinator", "--listen", "127.0.0.1:0", "--state-dir", "state", "--http", "127.0.0.1:0"),
        *("--on-end", command),
    )
    shell.environment["PENSTOCK_COORDINATOR"] = started.line
    shell.start("worker", "--slots", "4", "--allow", "ends")
    run_jobs(shell)
    until(lambda: hooked.exists() and len(hooked.read_text().splitlines()) == sum(COUNTS.values()))
    found = json.loads(shell.call("status", "--json").stdout)
    with urlopen(f"{found['coordinator']['dashboard'].rstrip('/')}/metrics") as page:
        families = {family.name: family for family in text_string_to_metric_families(page.read().decode())}
    counted = {sample.labels["reason"]: int(sample.value) for sample in families["penstock_runs_ended"].samples}
    free = families["penstock_coordinator_disk_free_bytes"].samples[0].value
    assert 0 < free < 1 << 60
    log = [json.loads(line) for line in started.log.read_text().splitlines()]
    hook = [json.loads(line) for line in hooked.read_text().splitlines()]
    status = {run["run"].removesuffix("/0"): run["end"] for run in found["runs"]}
    return Told(
        shell, log, {one["run"].removesuffix("/0"): one for one in hook if one["attempt"] == 1}, status, counted
    )


def test_each_run_has_its_reason(told: Told) -> None:
    names = [reason for reason, count in COUNTS.items() if count]
    assert {name: told.hook[name]["reason"] for name in names} == {name: name for name in names}
    assert told.metrics == COUNTS
    faults = {"raised", "quarantined", "stalled", "no workers"}
    for name in names:
        end, one = told.status[name], dict(told.hook[name])
        if name != "superseded":
            assert end.pop("age_s") >= 0
            assert end == one, "the command gets what `penstock status --json` shows"
        assert one["fault"] == (name in faults)
        lines = [line for line in told.log if line.get("run") == f"{name}/0" and "run ended: " in line["message"]]
        assert lines[0]["message"].startswith(f"{name}/0: run ended: {name}, after step ")
        assert (lines[0]["attempt"], lines[0]["step"], lines[0].get("box")) == (1, one["step"], one["box"])
        assert lines[0]["level"] == ("warning" if name in faults else "info")
    raised, stalled, lost = (told.hook[name] for name in ("raised", "stalled", "quarantined"))
    assert (raised["error"], raised["box"], raised["step"]) == ("InputFnError", 0, 3)
    assert "no such image" in raised["text"]
    assert (stalled["error"], stalled["step"]) == ("DeadlineError", 3)
    assert "in next() of batch 4" in stalled["text"]
    assert (lost["error"], lost["step"]) == ("PoisonBatchError", 3)
    assert abs(time.time() - stalled["at"]) < 600


def test_status_tells_what_has_failed(told: Told) -> None:
    shown = told.shell.call("status").stdout
    assert "Failed lately" in shown
    assert "stalled" in shown
    assert "finished" not in shown
    rows = told.shell.call("status", "--all").stdout
    assert "Ended runs" in rows
    assert "finished" in rows


def test_command_is_run_without_a_shell(told: Told) -> None:
    assert not (told.shell.folder / "shell").exists()
    assert (told.shell.folder / "$(touch shell)").exists()


@pytest.mark.parametrize(
    ("command", "why"), [("no-such-program now", "'no-such-program' is no"), ("x 'y", "quotation")]
)
def test_wrong_command_is_refused_at_the_start(shell: Any, command: str, why: str) -> None:
    done = shell.call("coordinator", "--listen", "127.0.0.1:0", "--state-dir", ":memory:", "--on-end", command)
    assert done.returncode == 2
    assert why in done.error


def test_command_that_fails_is_logged_and_the_last_end_is_told(shell: Any, tmp_path: Path) -> None:
    """The coordinator stops right after the run's end."""
    started = shell.start("coordinator", "--listen", "127.0.0.1:0", "--state-dir", "state", "--on-end", "cat - nothing")
    shell.environment["PENSTOCK_COORDINATOR"] = started.line
    with job(shell, "lm", timeout_s=1) as appliance, pytest.raises(NoWorkersError):
        next(iter(DataExecutor(DataLoader(ends.ending, "ends"), appliance=appliance)))
    assert started.stop() == 0
    assert "lm/0: the command of --on-end ended with status 1: cat: nothing: No such file" in started.log.read_text()
