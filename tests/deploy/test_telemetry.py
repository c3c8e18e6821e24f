"""Metrics, logs and traces of real processes: a coordinator, a worker and a training job, looked at from outside.

One cluster for all tests of this module: it runs a job in which a runner dies once, and is scraped while it is open.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.proto.errors import AuthenticationError
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.runtime.telemetry.metric_catalogue import BY_NAME, CATALOGUE, Process

JOB = str(Path(__file__).parents[1] / "inputs" / "observed_job.py")
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Scrape:
    """A page of metrics, read by prometheus-client's own parser."""

    text: str
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    labels: defaultdict[str, set[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(set))

    @classmethod
    def of(cls, text: str) -> Scrape:
        scrape = cls(text)
        for family in text_string_to_metric_families(text):
            # The text format has counters by their whole name; the parser takes `_total` off the family's.
            name = f"{family.name}_total" if family.type == "counter" else family.name
            scrape.types[name] = family.type
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                assert (sample.name, labels) not in scrape.values, f"{sample.name} {labels} stands there twice"
                scrape.values[sample.name, labels] = sample.value
                scrape.labels[name].add(tuple(sorted(label for label in sample.labels if label != "le")))
        return scrape

    def get(self, name: str, **labels: str) -> float:
        return self.values[name, tuple(sorted(labels.items()))]


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@dataclass
class Cluster:
    """Observations while the job was open, and what is left."""

    shell: Any
    scrapes: dict[Process, Scrape]
    own_registry: Scrape
    logs: dict[Process, list[dict[str, Any]]]


def scraped(url: str) -> Scrape:
    status, text = fetch(f"{url}/metrics")
    assert status == 200, text
    return Scrape.of(text)


def run_job(shell: Any, scrapes: dict[Process, Scrape], urls: dict[Process, str]) -> None:
    """The job, and the scrapes while it is open."""
    job = subprocess.Popen(
        [sys.executable, JOB, str(shell.folder)],
        env=shell.env({}),
        cwd=shell.folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with job:
        assert job.stdout is not None
        assert job.stdin is not None
        try:
            ready, _, _ = select.select([job.stdout], [], [], DEADLINE_S)
            assert ready, "the job did not come to its end in time"
            urls["client"] = job.stdout.readline().strip().removesuffix("/metrics")
            for process, url in urls.items():
                scrapes[process] = scraped(url)
            until = time.monotonic() + DEADLINE_S
            name, slot = "penstock_slot_delivered_batches_total", {"run": "lm/0", "box": "0", "slot": "0"}
            while scrapes["worker"].get(name, **slot) < 100 and time.monotonic() < until:
                scrapes["worker"] = scraped(urls["worker"])  # the last acks were on their way
            job.stdin.close()
            assert job.wait(DEADLINE_S) == 0
        finally:
            job.kill()


@pytest.fixture(scope="module")
def cluster(module_shell: Any) -> Cluster:
    shell = module_shell
    shell.environment |= {
        "PENSTOCK_LOG_FORMAT": "json",
        "PENSTOCK_JOB": "lm",
        "PENSTOCK_NUM_WORKERS_PER_BOX": "2",
        "PENSTOCK_LANE": "tcp",
    }
    loopback = "127.0.0.1:0"
    first = shell.start("coordinator", "--listen", loopback, "--state-dir", "state", "--http", loopback)
    shell.environment["PENSTOCK_COORDINATOR"] = first.line
    second = shell.start(
        *("worker", "--slots", "4", "--allow", "observed", "--name", "w1", "--http", loopback),
        PYTHONWARNINGS=None,  # children write theirs to standard error by themselves, and not as JSON
    )
    urls: dict[Process, str] = {
        "coordinator": first.url("dashboard at"),
        "worker": second.url("metrics at"),
    }
    with CoordinatorClient(first.line, "not-the-token", insecure=True) as stranger, pytest.raises(AuthenticationError):
        stranger.status()
    scrapes: dict[Process, Scrape] = {}
    run_job(shell, scrapes, urls)
    assert second.stop() == 0
    assert first.stop() == 0
    logs: dict[Process, list[dict[str, Any]]] = {
        "coordinator": [json.loads(line) for line in first.log.read_text().splitlines()],
        "worker": [json.loads(line) for line in second.log.read_text().splitlines()],
    }
    own = Scrape.of((shell.folder / "own.prom").read_text())
    return Cluster(shell, scrapes, own, logs)


# ---- metrics


@pytest.mark.parametrize("process", ["coordinator", "worker", "client"])
def test_exported_metrics_match_the_catalogue(cluster: Cluster, process: Process) -> None:
    scrape = cluster.scrapes[process]
    ours = {name for name in scrape.types if name.startswith("penstock_")}
    assert ours == {metric.name for metric in CATALOGUE if process in metric.processes}
    for name in ours:
        metric = BY_NAME[name]
        assert scrape.types[name] == metric.kind
        assert scrape.labels[name] == {tuple(sorted(metric.labels))}
        assert f"# HELP {name} {metric.help}\n" in scrape.text
    assert "process_resident_memory_bytes" in scrape.types


def test_collector_in_a_users_registry_is_equal(cluster: Cluster) -> None:
    ours = {name for name in cluster.own_registry.types if name.startswith("penstock_")}
    assert ours == {metric.name for metric in CATALOGUE if "client" in metric.processes}
    assert cluster.own_registry.get("penstock_client_steps_total", run="lm/0", box="0") == 200


def test_the_figures_are_those_of_the_job(cluster: Cluster) -> None:
    """200 steps over TCP from two slots, one of whose runners dies behind step 50; a checkpoint at step 30."""
    client, worker, coordinator = (cluster.scrapes[process] for process in ("client", "worker", "coordinator"))
    box = {"run": "lm/0", "box": "0"}
    assert client.get("penstock_client_step", **box) == 200
    assert client.get("penstock_client_recoveries_total", **box) == 1
    for key in ("even", "odd"):  # the slots' own, and the dead runner's are not counted twice
        assert client.get("penstock_client_source_samples", source="numbers", key=key, **box) == 100
        assert client.get("penstock_client_source_tokens", source="numbers", key=key, **box) == 25_600
    by_slot = sum(value for (name, _), value in client.values.items() if "slot_wait" in name)
    assert by_slot == pytest.approx(client.get("penstock_client_wait_seconds_total", **box))
    assert client.get("penstock_checkpoint_saves_total", status="ok") == 1
    assert client.get("penstock_checkpoint_last_step") == 30

    assert worker.get("penstock_worker_info", worker="w1") == 1
    assert worker.get("penstock_worker_slots", phase="ready") == 2
    assert worker.get("penstock_worker_losses_total") == 1
    assert worker.get("penstock_worker_state_answers_total", status="ok") == 2
    assert worker.get("penstock_worker_sent_bytes_total", lane="tcp") > 200 * 2048
    assert worker.get("penstock_slot_delivered_batches_total", slot="0", **box) == 100
    for slot in ("0", "1"):
        made = worker.get("penstock_slot_produced_batches_total", slot=slot, **box)
        taken = worker.get("penstock_slot_delivered_batches_total", slot=slot, **box)
        assert made - taken == worker.get("penstock_slot_queue_batches", slot=slot, **box)
        assert worker.get("penstock_runner_memory_bytes", slot=slot, **box) > 1 << 20
    assert worker.get("penstock_slot_replayed_batches_total", slot="0", **box) == 0
    assert worker.get("penstock_slot_replayed_batches_total", slot="1", **box) >= 25

    assert coordinator.get("penstock_run_attempt", run="lm/0") == 1
    assert coordinator.get("penstock_run_slots", run="lm/0", phase="ready") == 2
    assert coordinator.get("penstock_run_recoveries_total", run="lm/0") == 1
    assert coordinator.get("penstock_box_live", **box) == 1
    assert coordinator.get("penstock_box_steps_total", **box) == 200
    assert coordinator.get("penstock_workers", phase="live") == 1
    assert coordinator.get("penstock_slots_used") == 2
    assert coordinator.get("penstock_coordinator_commit_seconds_count") > 0
    assert coordinator.get("penstock_coordinator_calls_total", method="OpenRun", status="OK") == 1
    assert coordinator.get("penstock_coordinator_calls_total", method="Status", status="UNAUTHENTICATED") == 1
    assert coordinator.get("penstock_coordinator_call_seconds_count", method="OpenRun") == 1


# ---- logs


def test_json_log_lines_have_time_level_process(cluster: Cluster) -> None:
    for process, lines in cluster.logs.items():
        assert lines
        for line in lines:
            assert line["process"] == process
            assert {"time", "level", "logger", "message", "pid"} <= line.keys()
            assert datetime.fromisoformat(line["time"]).utcoffset() is not None


def test_records_say_which_slot_they_are_about(cluster: Cluster) -> None:
    lines = cluster.logs["worker"]
    assert all(line["worker"] == "w1" for line in lines)
    lost = next(line for line in lines if "SIGKILL" in line["message"])
    place = {name: lost[name] for name in ("run", "attempt", "box", "slot")}
    assert place == {"run": "lm/0", "attempt": 1, "box": 0, "slot": 1}
    printed = [line for line in lines if line["logger"] == "penstock.user"]
    assert sorted({(line["slot"], line["box"], line["run"]) for line in printed}) == [(0, 0, "lm/0"), (1, 0, "lm/0")]
    generations = {line["generation"] for line in printed if line["slot"] == 1}
    assert len(generations) == 2, "the second runner of the slot has another generation"
