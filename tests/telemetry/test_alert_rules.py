"""Each alert fires for what it is for, and not otherwise: Prometheus's own engine evaluates the rules on given series.
tests/deploy/test_alerts.py has the incidents of real processes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

RULES = Path(__file__).parents[2] / "deploy" / "grafana" / "alerts.yml"
DAY = 86400
COORDINATOR, WORKER = "{job='penstock', instance='c:1'}", "{job='penstock', instance='w:1'}"
BOX = "{job='penstock', instance='c:1', run='lm/0', box='0'}"


def of_run(**labels: str) -> str:
    return "{job='penstock', instance='c:1', " + ", ".join(f"{name}='{value}'" for name, value in labels.items()) + "}"


Series = dict[str, str]
"""Name and labels -> values every 10 seconds, in the notation of promtool: start, step and count."""


def bound(share: float) -> Series:
    return {
        f"penstock_box_wait_seconds_total{BOX}": f"0+{10 * share}x60",
        f"penstock_box_live{BOX}": "1x60",
    }


def waiting(steps: str, slot: str = "2x60", live: str = "1x60") -> Series:
    return {
        f"penstock_box_steps_total{BOX}": steps,
        f"penstock_box_waiting_for_slot{BOX}": slot,
        f"penstock_box_live{BOX}": live,
    }


def ended(reason: str, values: str) -> Series:
    return {f"penstock_runs_ended_total{of_run(reason=reason)}": values}


def slots(values: str, phase: str = "waiting") -> Series:
    return {f"penstock_run_slots{of_run(run='lm/0', phase=phase)}": values}


def two_coordinators(gone: str) -> Series:
    """One answers all the time; the other one has these values, and is not up when it has none."""
    other = COORDINATOR.replace("c:1", "d:1")
    up = "1x2 0x60" if "stale" in gone else "1x60"
    return {
        f"penstock_coordinator_uptime_seconds{COORDINATOR}": "0+10x60",
        f"up{COORDINATOR}": "1x60",
        f"penstock_coordinator_uptime_seconds{other}": gone,
        f"up{other}": up,
        "up{job='node', instance='n:1'}": "0x60",
    }


def cut_off(age: str) -> Series:
    return {
        f"penstock_worker_heartbeat_age_seconds{WORKER}": age,
        f"penstock_worker_lease_seconds{WORKER}": "3x60",
    }


def commits(slow: int) -> Series:
    name = "penstock_coordinator_commit_seconds_bucket"
    return {
        f"{name}{of_run(le='0.25')}": f"0+{100 - slow}x120",
        f"{name}{of_run(le='1')}": "0+100x120",
        f"{name}{of_run(le='+Inf')}": "0+100x120",
    }


def budget(share: float) -> Series:
    return {
        f"penstock_coordinator_snapshot_bytes{COORDINATOR}": f"{share * 1000}x120",
        f"penstock_coordinator_snapshot_limit_bytes{COORDINATOR}": "1000x120",
    }


def certificate(kind: str, days: int) -> Series:
    return {f"penstock_{kind}_certificate_expires_timestamp_seconds{COORDINATOR}": f"{days * DAY}x60"}


CASES: dict[str, tuple[list[tuple[Series, int]], list[tuple[Series, int]]]] = {
    # alert -> series with which it fires after so many seconds; series with which it does not
    "PenstockRunFailed": (
        [(ended(reason, "0x5 1x60"), 60) for reason in ("raised", "quarantined", "stalled", "no workers")],
        [
            (ended("stalled", "3x60"), 300),
            (ended("finished", "0+1x60"), 300),
            (ended("closed", "0+1x60"), 300),
            (ended("superseded", "0+1x60"), 300),
        ],
    ),
    "PenstockStalled": (
        [(waiting("0+5x10 50x60"), 180), (waiting("0x60"), 70)],
        [
            (waiting("0+5x10 50x60"), 150),
            (waiting("0+1x60"), 300),
            (waiting("0x60", slot="-1x60"), 300),
            (waiting("0x60", slot="2x9 -1 2x50"), 140),
            (waiting("0x60"), 40),
            (waiting("0x60") | slots("1x60"), 140),
            (waiting("0x60", live="1x7 0x60"), 90),
        ],
    ),
    "PenstockSlotsWithoutWorker": (
        [(slots("0x3 2x60"), 70)],
        [(slots("2x2 0x60"), 120), (slots("2x60", "starting"), 120)],
    ),
    "PenstockWorkerLost": (
        [({f"penstock_workers_lost_total{COORDINATOR}": "0x5 1x60"}, 60)],
        [({f"penstock_workers_lost_total{COORDINATOR}": "4x60"}, 300)],
    ),
    "PenstockCoordinatorDown": (
        [(two_coordinators("0+10x2 stale"), 70), (two_coordinators("0+10x2 stale"), 500)],
        [(two_coordinators("0+10x60"), 500), (two_coordinators("0+10x2 stale"), 40)],
    ),
    "PenstockWorkerCutOff": ([(cut_off("0+10x60"), 60)], [(cut_off("1x60"), 300), (cut_off("-1x60"), 300)]),
    "PenstockInputBound": ([(bound(0.3), 260)], [(bound(0.1), 500), (bound(0.3), 60)]),
    "PenstockDiskFull": (
        [({f"penstock_coordinator_disk_free_bytes{COORDINATOR}": "1000000000x3 0x60"}, 50)],
        [({f"penstock_coordinator_disk_free_bytes{COORDINATOR}": "1000000000x60"}, 300)],
    ),
    "PenstockRecoveringOften": (
        [({f"penstock_run_recoveries_total{of_run(run='lm/0')}": "0+1x60"}, 300)],
        [({f"penstock_run_recoveries_total{of_run(run='lm/0')}": "0+1x4 4x60"}, 300)],
    ),
    "PenstockSnapshotBudget": ([(budget(0.9), 700)], [(budget(0.8), 700), (budget(0.9), 500)]),
    "PenstockCommitsSlow": ([(commits(2), 1000)], [(commits(0), 1000)]),
    "PenstockCheckpointFailed": (
        [({f"penstock_checkpoint_saves_total{of_run(status='error')}": "0x5 1x60"}, 60)],
        [({f"penstock_checkpoint_saves_total{of_run(status='ok')}": "0x5 1x60"}, 60)],
    ),
    "PenstockCertificateExpires": (
        [(certificate("coordinator", 13), 60), (certificate("worker", 1), 60)],
        [(certificate("coordinator", 0), 60), (certificate("worker", 15), 60)],
    ),
}


def firing(alert: str, series: Series, at_s: int, folder: Path) -> bool:
    """Whether the alert fires with the series after so many seconds, by promtool."""
    test = {
        "interval": "10s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": f"{at_s}s", "alertname": alert, "exp_alerts": []}],
    }
    file = folder / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "10s", "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60)
    said = done.stdout + done.stderr
    assert done.returncode == 0 or f'alertname="{alert}"' in said, said
    return done.returncode != 0  # it expects none


def rules() -> list[Any]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return list(group["rules"])


def test_every_alert_has_its_cases() -> None:
    assert [rule["alert"] for rule in rules()] == list(CASES)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool of Debian's package prometheus is not here")
@pytest.mark.parametrize("alert", CASES)
def test_alert_fires_for_what_it_is_for(alert: str, tmp_path: Path) -> None:
    fires, silent = CASES[alert]
    assert [firing(alert, series, at_s, tmp_path) for series, at_s in fires] == [True] * len(fires)
    assert [firing(alert, series, at_s, tmp_path) for series, at_s in silent] == [False] * len(silent)
