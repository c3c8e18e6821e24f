"""Nine incidents of real processes with default settings, watched by a real Prometheus with our alerts: each alert
fires before the job ends, or within half a minute after, and none fires for what is healthy beside it. All at once,
because each takes minutes: one coordinator has the jobs that fail by their input, and those that lose a process have
their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml
from held_port import HeldPort
from small_disk import small_disk_at

REPO = Path(__file__).parents[2]
AFTER_S = 30.0
"""Longest time from a job's end to its alert."""
LONGEST_S = 420.0
DISK = 400 << 20
"""Above the limit of the alert."""


@dataclass
class Job:
    process: subprocess.Popen[str]
    ended_at: float | None = None

    def look(self) -> None:
        if self.ended_at is None and self.process.poll() is not None:
            self.ended_at = time.monotonic()


@dataclass
class Site:
    """A coordinator with its workers and jobs."""

    shell: Any
    coordinator: Any
    address: str
    """Where Prometheus reads the coordinator's metrics."""
    workers: list[Any] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)

    def add_worker(self, slots: int) -> None:
        started = self.shell.start(
            *("worker", "--slots", str(slots), "--allow", "ends", "--http", "127.0.0.1:0"),
            *("--name", f"w{len(self.workers)}"),
        )
        self.workers.append(started)
        self.addresses.append(str(started.url("metrics at")).removeprefix("http://"))

    def run(self, job: str, *arguments: object) -> None:
        program = str(REPO / "tests" / "inputs" / "incident_job.py")
        log = (self.shell.folder / f"{job}.log").open("w")
        with log:
            process = subprocess.Popen(
                [sys.executable, program, job, *map(str, arguments)],
                env=self.shell.env({"PYTHONWARNINGS": "ignore"}),
                cwd=self.shell.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.jobs[job] = Job(process)

    def is_stepping(self) -> None:
        for job in self.jobs.values():
            assert job.process.stdout is not None
            assert job.process.stdout.readline() == "first step\n"


def kill(started: Any) -> None:
    """Kill the daemon with all below it, as the loss of its machine does."""
    os.killpg(started.process.pid, signal.SIGKILL)


class Prometheus:
    """Debian's Prometheus with our rules, at the intervals that docs/metrics.md gives."""

    def __init__(self, folder: Path) -> None:
        page = (REPO / "docs" / "metrics.md").read_text()
        given = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
        self.targets = folder / "targets.json"
        scrape = {"job_name": "penstock", "file_sd_configs": [{"files": [str(self.targets)]}]}
        rules = [str(REPO / "deploy" / "grafana" / "alerts.yml")]
        config = {"global": given["global"], "rule_files": rules, "scrape_configs": [scrape]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = HeldPort()
        self.url = f"http://127.0.0.1:{port.number}"
        port.close()
        self.log = (folder / "prometheus.log").open("w")
        self.process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"),
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stdout=self.log,
            stderr=self.log,
        )
        self.first: dict[tuple[str, str, str], float] = {}
        """(alert, instance, run or reason) -> monotonic time when it was first seen firing."""

    def look(self) -> None:
        with urlopen(f"{self.url}/api/v1/alerts", timeout=30) as answer:
            found = json.load(answer)["data"]["alerts"]
        for alert in found:
            labels = alert["labels"]
            which = labels.get("run") or labels.get("reason", "")
            if alert["state"] == "firing":
                self.first.setdefault((labels["alertname"], labels["instance"], which), time.monotonic())

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self.log.close()


@dataclass
class Sites:
    shell: Any
    folder: Path
    made: list[Site] = field(default_factory=list)

    def make(self, *workers: int, state: Path | None = None) -> Site:
        folder = self.folder / f"site{len(self.made)}"
        folder.mkdir()
        shell = type(self.shell)(folder)
        shell.environment["PENSTOCK_LOG_FORMAT"] = "json"
        coordinator = shell.start(
            *("coordinator", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"),
            *("--state-dir", str(state or folder / "state")),
        )
        shell.environment["PENSTOCK_COORDINATOR"] = coordinator.line
        site = Site(shell, coordinator, str(coordinator.url("dashboard at")).removeprefix("http://"))
        for slots in workers:
            site.add_worker(slots)
        self.made.append(site)
        return site

    def close(self) -> None:
        for site in self.made:
            for job in site.jobs.values():
                job.process.kill()
                job.process.wait()
                assert job.process.stdout is not None
                job.process.stdout.close()
            site.shell.close()


@pytest.fixture
def sites(shell: Any, tmp_path: Path) -> Iterator[Sites]:
    made = Sites(shell, tmp_path)
    yield made
    made.close()


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("Prometheus is not here: Debian has it in the package prometheus")
    started = Prometheus(tmp_path)
    yield started
    started.stop()


def fill(disk: Path) -> None:
    with open(disk / "ballast", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 20))
        except OSError:
            return


ENDLESS = 1 << 30
WANTED = {
    # (alert, site, run or reason) -> the job whose end it must not miss by more than AFTER_S; "": it goes on
    ("PenstockStalled", "inputs", "stalled/0"): "stalled",
    ("PenstockRunFailed", "inputs", "stalled"): "stalled",
    ("PenstockSlotsWithoutWorker", "fleet", "fleet/0"): "fleet",
    ("PenstockWorkerLost", "fleet", ""): "fleet",
    ("PenstockRunFailed", "fleet", "no workers"): "fleet",
    ("PenstockWorkerLost", "pair", ""): "",
    ("PenstockRunFailed", "inputs", "raised"): "raised",
    ("PenstockRunFailed", "inputs", "quarantined"): "poison",
    ("PenstockCoordinatorDown", "head", ""): "",
    ("PenstockInputBound", "inputs", "bound/0"): "",
    ("PenstockDiskFull", "disk", ""): "",
    ("PenstockCoordinatorDown", "node", ""): "node",
}
"""Beside these, workers whose coordinator is gone say so."""
ALSO_TRUE = {("PenstockRecoveringOften", "inputs", "poison/0"), ("PenstockInputBound", "inputs", "stalled/0")}
"""A batch that is made far ahead of the loop kills more runners than the four after which the loop is told; and a loop
that waits for ever for a batch is bound by its input, if the timeout leaves that alert its time."""


@pytest.mark.timeout(900)
def test_nine_incidents(sites: Sites, prometheus: Prometheus, tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "disk", DISK) as disk:
        by_name = {
            "inputs": sites.make(8),
            "fleet": sites.make(2),
            "pair": sites.make(2, 2),
            "head": sites.make(1),
            "disk": sites.make(1, state=disk / "state"),
            "node": sites.make(1, 1),
        }
        targets = [address for site in sites.made for address in (site.address, *site.addresses)]
        prometheus.targets.write_text(json.dumps([{"targets": targets}]))
        play(by_name, prometheus, disk)
        check(by_name, prometheus)


def play(by_name: dict[str, Site], prometheus: Prometheus, disk: Path) -> None:
    for name, site in by_name.items():
        if name != "inputs":
            site.run(name, 2 if len(site.workers) > 1 or name == "fleet" else 1, 0.1, "ends", ENDLESS, 0.0)
    inputs = by_name["inputs"]
    inputs.run("healthy", 1, 0.1, "ends", ENDLESS, 0.0)
    inputs.run("bound", 1, 0.0, "ends", ENDLESS, 0.2)
    inputs.run("stalled", 1, 0.1, "hangs", 200, 0.0)
    inputs.run("raised", 1, 0.1, "raises", 200, 0.0)
    inputs.run("poison", 1, 0.1, "kills", 200, 0.0)
    for site in by_name.values():
        site.is_stepping()
    time.sleep(25)  # Prometheus has seen all as they are when they are well
    kill(by_name["fleet"].workers[0])
    kill(by_name["pair"].workers[0])
    kill(by_name["head"].coordinator)
    fill(disk)
    kill(by_name["node"].coordinator)
    kill(by_name["node"].workers[0])
    until = time.monotonic() + LONGEST_S
    while time.monotonic() < until and not all_seen(by_name, prometheus):
        time.sleep(1)
        prometheus.look()
        for site in by_name.values():
            for job in site.jobs.values():
                job.look()


def all_seen(by_name: dict[str, Site], prometheus: Prometheus) -> bool:
    return all((alert, by_name[site].address, which) in prometheus.first for alert, site, which in WANTED)


def check(by_name: dict[str, Site], prometheus: Prometheus) -> None:
    names = {site.address: name for name, site in by_name.items()}
    of_workers = {address: name for name, site in by_name.items() for address in site.addresses}
    seen = {
        (alert, names[instance], which): at
        for (alert, instance, which), at in prometheus.first.items()
        if instance in names
    }
    lines = []
    late = []
    for wanted, of_job in WANTED.items():
        site = by_name[wanted[1]]
        ended_at = site.jobs[of_job].ended_at if of_job else None
        at = seen.get(wanted)
        lines.append(f"{wanted}: {'not at all' if at is None else 'seen'}, job ended {ended_at}, alert {at}")
        if at is None or (ended_at is not None and at > ended_at + AFTER_S):
            late.append(wanted)
    assert not late, "\n".join(lines)
    assert set(seen) <= WANTED.keys() | ALSO_TRUE, "none fires for what is well"
    cut_off = {of_workers[instance] for alert, instance, _ in prometheus.first if instance in of_workers}
    assert cut_off <= {"head", "node"}
    going = {name: site.jobs[name].ended_at for name, site in by_name.items() if name in ("pair", "head", "disk")}
    assert going == dict.fromkeys(going), "these jobs go on"
    assert by_name["inputs"].jobs["healthy"].ended_at is None
