"""Histories over real processes: a cluster, the training processes of a job, and what happens to them.

A cluster lives through many histories; what a history has broken in it is mended before the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from census import alive, descendants
from cluster import TOKEN, Cluster, Daemon
from interpreters import Forked, start
from proof.histories import Fault, Plan
from proof.kinds import KINDS
from waiting import PATIENCE, until

from penstock.proto.errors import PenstockError
from penstock.proto.rpc.calls import CoordinatorClient

__all__ = ["AFTER", "DifferenceError", "History", "Outcome", "World", "reference"]

DAEMONS = 3
SLOTS = 4
"""Slots of each daemon: two of them have room for a job."""
AFTER = 12
"""Steps that a launch which is killed would make beyond its end."""
SILENCE_S = 40.0
"""Seconds without a step, on a fast machine, after which a job hangs."""
NAMED = {"ReplayMismatchError", "StateMismatchError", "NotRestartableError"}
"""Errors in which a loader that is no function may end."""


Launched = list[list[dict[str, Any]]]
"""For each box the batches of a launch, in order."""


class DifferenceError(AssertionError):
    """What came is not what the model says."""


class LoggedCluster(Cluster):
    """A cluster whose coordinator writes into a file what it has to say."""

    def _start_coordinator(self) -> Daemon:
        arguments = ["--listen", self.address, "--state-dir", str(self.state_dir)]
        with open(self.state_dir.parent / "log", "ab") as log:
            return self._start(self._module, *arguments, *self._options, stderr=log.fileno())[0]


class World:
    """A cluster for histories, one after the other."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.daemons: list[Daemon | None] = [self._daemon(number) for number in range(DAEMONS)]
        self.coordinator_lives = True
        self.jobs = 0

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[World]:
        with tempfile.TemporaryDirectory(prefix="penstock-proof-") as name:
            folder = Path(name)
            limits = "balance_after_s=0.3,balance_every_s=0.3,left_alone_s=0.3"
            cluster = LoggedCluster(folder / "state", "limited_coordinator", LIMITS=limits)
            try:
                yield cls(cluster, folder)
            finally:
                cluster.stop()

    def _daemon(self, number: int) -> Daemon:
        with open(self.folder / "log", "ab") as log:
            return self.cluster.add_worker(SLOTS, allow="proof", name=f"daemon-{number}", stderr=log.fileno())

    def log(self, job: str) -> str:
        """Return the last lines that daemons have said of a job."""
        with open(self.folder / "log", errors="replace") as log:
            return "".join([line for line in log if f"{job}/" in line and "set_vital" not in line])

    def client(self) -> CoordinatorClient:
        return CoordinatorClient(self.cluster.address, TOKEN, insecure=True)

    # ---- what is done to it

    def kill_coordinator(self) -> None:
        self.cluster.coordinator.kill()
        self.cluster.coordinator.wait(10)
        self.coordinator_lives = False

    def coordinator_back(self) -> None:
        if not self.coordinator_lives:
            self.cluster.restart_coordinator()
            self.coordinator_lives = True

    def kill_daemon(self, number: int) -> bool:
        daemon = self.daemons[number]
        if daemon is None:
            return False
        daemon.kill()
        daemon.wait(10)
        self.cluster.workers.remove(daemon)
        self.daemons[number] = None
        return True

    def daemon_back(self, number: int) -> None:
        self.coordinator_back()  # a daemon that finds none does not say that it is there
        if self.daemons[number] is None:
            self.daemons[number] = self._daemon(number)

    def drain(self, number: int, *, undo: bool = False) -> bool:
        if self.daemons[number] is None or not self.coordinator_lives:
            return False
        with self.client() as client, contextlib.suppress(PenstockError):
            client.drain(f"daemon-{number}", undo=undo)
            return True
        return False

    def processes(self, name: str, title: str = "") -> list[int]:
        """Return the processes below the daemons that have this short name, and a title with this end."""
        found = []
        for daemon in self.daemons:
            for pid in descendants(daemon.pid) if daemon is not None else ():
                with contextlib.suppress(OSError):
                    named = Path(f"/proc/{pid}/comm").read_text().strip() == name
                    if named and Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0 ").endswith(title):
                        found.append(pid)
        return found

    def mend(self, job: str) -> None:
        """Bring the cluster into order after a history."""
        self.coordinator_back()
        for number in range(DAEMONS):
            self.daemon_back(number)

        def is_mended() -> bool:
            with self.client() as client:
                status = client.status()
                for run in status.runs:
                    if run.run.startswith(f"{job}/"):
                        with contextlib.suppress(PenstockError):
                            client.end_run(run.run)
                for number in range(DAEMONS):
                    with contextlib.suppress(PenstockError):
                        client.drain(f"daemon-{number}", undo=True)
            return len(status.workers) >= DAEMONS and not self.left()

        until(is_mended, 20, lambda: f"the cluster does not come to rest: {self.left()}")

    def left(self) -> list[str]:
        """Return the names of the processes below the daemons that belong to a job."""
        found = []
        for daemon in self.daemons:
            for pid in descendants(daemon.pid) if daemon is not None else ():
                with contextlib.suppress(OSError):
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                    found += [name] if name != "penstock-forks" else []
        return found


class Trainer:
    """Training process of one box, heard line by line."""

    def __init__(self, world: World, options: dict[str, Any]) -> None:
        self.box = options["box"]
        with open(world.folder / "log", "ab") as log:
            self.process: Forked = start(
                "proof.trainer",
                [json.dumps(options)],
                world.cluster.environment,
                imports=[],
                stdout=subprocess.PIPE,
                stderr=log.fileno(),
            )
        assert self.process.stdout is not None
        self._said = self.process.stdout
        os.set_blocking(self._said.fileno(), False)
        self._rest = b""
        self.ended = False

    def fileno(self) -> int:
        return self._said.fileno()

    def hear(self) -> list[dict[str, Any]]:
        """Return what it has said since, and note its end."""
        data = self._said.read()
        if data is None:
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.ended = not data
        return [json.loads(line) for line in lines]

    def drop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._said.close()


@dataclass
class Outcome:
    """What a history has shown."""

    plan: Plan
    difference: str = ""
    named: str = ""
    """Error in which a loader that is no function ended."""
    steps: int = 0
    seconds: float = 0.0
    diary: list[str] = field(default_factory=list)
    log: str = ""
    """What daemons said of the job, if there is a difference."""

    def __str__(self) -> str:
        """One line for people; after a difference also the plan, the times of the faults and the daemons' log."""
        told = self.difference or self.named or "as expected"
        line = f"seed {self.plan.seed}: {self.plan.kind}, {self.steps} steps, {self.seconds:.1f} s: {told}"
        more = [str(self.plan), *self.diary, *self.log.splitlines()[-40:]] if self.difference else []
        return "\n  ".join([line, *more])


def reference(world: World, plan: Plan) -> list[Launched]:
    """Return what each box must receive in each launch (reference.py)."""
    process = start(
        "proof.reference",
        [plan.encoded()],
        world.cluster.environment,
        imports=[],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process.stdout as said:
        text = said.readall()
    assert process.wait(60) == 0, "the reference failed"
    rows: list[Launched] = json.loads(text)
    return rows


class History:
    """One history: its launches one after the other, each batch compared when it comes."""

    def __init__(self, world: World, plan: Plan, expected: list[Launched] | None) -> None:
        """expected: for each launch and box, the batches from the step after that from which it resumes, and maybe an
        error; None: only what a box gets twice is compared."""
        self.world, self.plan, self._expected = world, plan, expected
        world.jobs += 1
        self.job = f"proof-{os.getpid()}-{world.jobs}"
        self.outcome = Outcome(plan)
        self.got: list[list[dict[int, dict[str, Any]]]] = []
        """For each launch and box: step -> what came."""
        self._folder = world.folder / self.job
        self._workers = 0
        self._saves: Counter[tuple[int, int]] = Counter()
        """(launch, step) -> boxes that have written their state of this step."""
        self._marks: dict[tuple[int, int], tuple[int, float]] = {}
        """Worker and epoch -> step of the first batch, and the mark of the loader that made it."""
        self._mends: list[tuple[float, Callable[[], object], str]] = []
        self._began = time.monotonic()

    def play(self) -> Outcome:
        outcome = self.outcome
        try:
            for number in range(len(self.plan.launches)):
                if outcome.named:
                    break
                self._launch(number)
        except DifferenceError as difference:
            outcome.difference = str(difference)
            outcome.log = self.world.log(self.job)
        finally:
            self._mends.clear()
            try:
                self.world.mend(self.job)
            except AssertionError as error:
                outcome.difference = outcome.difference or str(error)
        outcome.seconds = time.monotonic() - self._began
        return outcome

    # ---- one launch

    def _launch(self, number: int) -> None:
        plan, launch = self.plan, self.plan.launches[number]
        boxes, self._workers = plan.topology(number)
        self._folder.mkdir(exist_ok=True)
        options = {
            "plan": plan.encoded(),
            "launch": number,
            "address": self.world.cluster.address,
            "job": self.job,
            "folder": str(self._folder),
            "stop": launch.stop + (AFTER if launch.killed else 0),
        }
        self.world.coordinator_back()
        self.got.append([{} for _ in range(boxes)])
        trainers = [Trainer(self.world, {**options, "box": box}) for box in range(boxes)]
        try:
            self._follow(number, trainers)
        finally:
            for trainer in trainers:
                trainer.drop()

    def _follow(self, number: int, trainers: list[Trainer]) -> None:
        launch = self.plan.launches[number]
        faults = list(self.plan.faults[number])
        due: list[tuple[float, Fault]] = []
        last = time.monotonic()
        over: set[int] = set()
        while len(over) < len(trainers):
            listening = [trainer for trainer in trainers if not trainer.ended]
            ready = select.select(listening, [], [], 0.01)[0]
            now = time.monotonic()
            for trainer in ready:
                for said in trainer.hear():
                    last = now
                    self._note(number, trainer.box, said)
                    if "gate" in said:
                        due += [(now + f.after_s, f) for f in faults if (f.box, f.step) == (trainer.box, said["gate"])]
                    if "end" in said or "error" in said:
                        over.add(trainer.box)
                if trainer.ended and trainer.box not in over:
                    raise DifferenceError(f"launch {number}: the training process of box {trainer.box} died")
            for moment, fault in [item for item in due if item[0] <= now]:
                due.remove((moment, fault))
                self._strike(fault, number)
            self._put_right(now)
            if self.outcome.named:
                break
            if (
                launch.killed
                and all(box and max(box) >= launch.stop for box in self.got[number])
                and self._saved(number)
            ):
                break
            if now - last > PATIENCE * SILENCE_S:
                raise DifferenceError(f"launch {number}: no step in {PATIENCE * SILENCE_S:g} s: {self._where(number)}")
        while self._mends and not launch.killed:
            self._put_right(time.monotonic())
            time.sleep(0.01)

    def _saved(self, number: int) -> bool:
        """Return whether each box has written the state from which the next launch resumes."""
        resume = self.plan.launches[number + 1].resume if number + 1 < len(self.plan.launches) else 0
        return self._saves[number, resume] == len(self.got[number]) or resume not in self.plan.launches[number].saves

    def _where(self, number: int) -> str:
        return ", ".join(f"box {box} at step {max(got, default=0)}" for box, got in enumerate(self.got[number]))

    def _note(self, number: int, box: int, said: dict[str, Any]) -> None:
        if "saved" in said:
            self._saves[number, said["saved"]] += 1
        elif "error" in said:
            text = f"launch {number}, box {box}: {said['error']}: {said['message']}"
            if self._wanted(number, box)["content"] == said["error"]:
                self.outcome.named = text
                return
            if KINDS[self.plan.kind].is_function or said["error"] not in NAMED:
                raise DifferenceError(f"{text} ({self._where(number)})")
            self.outcome.named = text
        elif "content" in said:
            self._compare(number, box, said)

    def _wanted(self, number: int, box: int) -> dict[str, Any]:
        """Return what the box must receive next in this launch."""
        row, taken = self._expected[number][box] if self._expected else [], len(self.got[number][box])
        return row[taken] if taken < len(row) else {"content": "", "brief": "nothing"}

    def _compare(self, number: int, box: int, said: dict[str, Any]) -> None:
        step, wanted = said["step"], self._wanted(number, box)
        self.got[number][box][step] = said
        self.outcome.steps += 1
        if self._expected is not None:
            if wanted["content"] != said["content"]:
                place = {name: value for name, value in wanted.items() if name not in ("content", "brief")}
                raise DifferenceError(
                    f"launch {number}, box {box}, step {step} {place}:\n    expected {wanted['brief']}"
                    f"\n    got      {said['brief']}"
                )
            return
        hidden = self.plan.arguments.get("hidden")
        for before in self.got[:number]:
            if step not in before[box] or (hidden and before[box][step]["mark"] != said["mark"]):
                continue
            if before[box][step]["content"] != said["content"]:
                raise DifferenceError(
                    f"launch {number}, box {box}, step {step} is another batch than in an earlier launch"
                )
        worker, epoch, mark = said["mark"]
        # Where no generator shows the entropy, an epoch whose first batch nobody has made may begin with another one.
        maker = int(worker), int(epoch) if hidden else 0
        began, known = self._marks.get(maker, (step, mark))
        if known != mark and (step > began or not hidden):
            raise DifferenceError(
                f"launch {number}, box {box}, step {step}: worker {worker} goes on with a loader that was seeded anew"
            )
        self._marks[maker] = min(began, step), mark

    # ---- faults

    def _put_right(self, now: float) -> None:
        for mend in [mend for mend in self._mends if mend[0] <= now]:
            self._mends.remove(mend)
            self._write(f"(over: {mend[2]})")
            mend[1]()

    def _write(self, what: str) -> None:
        self.outcome.diary.append(f"{time.monotonic() - self._began:6.2f} s  {what}")

    def _strike(self, fault: Fault, number: int) -> None:
        struck = self._hit(fault)
        steps = self._where(number)
        self._write(f"{fault}{'' if struck else ': there was nothing'} ({steps})")
        if fault.waits:
            (self._folder / f"{fault.box}.{number}.go{fault.step}").touch()

    def _hit(self, fault: Fault) -> bool:
        world = self.world
        until_s = time.monotonic() + fault.lasts_s
        if fault.kind in ("kill slot", "kill epoch", "stop slot"):
            boxes = len(self.got[-1])
            box, slot = divmod(fault.which % (boxes * self._workers), self._workers)
            what = "epoch" if fault.kind == "kill epoch" else "runner"
            pids = world.processes(f"penstock {what}", f"{self.job}/0 box {box} slot {slot}")[:1]
            if fault.kind == "stop slot":
                signal_all(pids, signal.SIGSTOP)
                self._mends.append((until_s, lambda: signal_all(alive(pids), signal.SIGCONT), str(fault)))
            else:
                signal_all(pids, signal.SIGKILL)
            return bool(pids)
        daemon = fault.which % DAEMONS
        if fault.kind == "kill coordinator":
            if not world.coordinator_lives:
                return False
            world.kill_coordinator()
            self._mends.append((until_s, world.coordinator_back, str(fault)))
            return True
        if fault.kind == "kill daemon":
            self._mends.append((until_s, lambda: world.daemon_back(daemon), str(fault)))
            return world.kill_daemon(daemon)
        assert fault.kind == "drain", fault
        self._mends.append((until_s, lambda: world.drain(daemon, undo=True), str(fault)))
        return world.drain(daemon)


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
