"""`make demo`: train through Penstock, kill the training, resume it, and prove that nothing was lost or repeated.

A coordinator and two worker daemons run as processes of their own, and train.py as one process for each of 2 boxes:

    (a) uninterrupted, with 2 workers a box
    (b) the same, saved at a step that the workers do not divide, killed some steps later, resumed from the checkpoint
    (c) resumed from the same checkpoint with 3 workers a box

Then the logs are compared: (b) must equal (a) batch by batch and loss by loss to the last bit, and (c) must see each
window of the epoch once. The exit status is 1 if they do not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.proto.state import decode_state, encode_state

EXAMPLES = Path(__file__).resolve().parents[1]
BOXES = 2
DEADLINE_S = 300.0  # of each run, and of each daemon's start

Step = dict[str, Any]
"""A line of a box's log."""


class DemoError(Exception):
    """Something did not come up, did not end well, or did not end in time."""


@dataclass
class Run:
    """What one start of the training left behind."""

    name: str
    title: str
    logs: list[list[Step]]
    """Of each box."""

    @property
    def rows(self) -> dict[tuple[int, int], Step]:
        """(step, box) -> the line of the log."""
        return {(row["step"], box): row for box, log in enumerate(self.logs) for row in log}

    @property
    def steps_per_s(self) -> float:
        return (len(self.logs[0]) - 1) / self._seconds

    @property
    def waited(self) -> float:
        """Share of the time in which box 0 waited for data, from its first batch to its last."""
        return float(sum(row["waited_s"] for row in self.logs[0][1:])) / self._seconds

    @property
    def _seconds(self) -> float:
        return float(self.logs[0][-1]["time"] - self.logs[0][0]["time"])


class Demo:
    """The processes, and the folder that all of them write to."""

    def __init__(self, out: Path, steps: int, save_at: int) -> None:
        self.out = out
        self.steps = steps
        self.save_at = save_at
        ours = ("PENSTOCK_", "TORCHELASTIC_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        # The token is nowhere but in the environment: command lines can be read by everyone on the machine.
        self.environment = {**kept, "PYTHONPATH": str(EXAMPLES), "PENSTOCK_TOKEN": secrets.token_urlsafe(24)}

    @contextlib.contextmanager
    def daemons(self) -> Iterator[None]:
        """A coordinator on a free port, and two worker daemons with three slots each."""
        with contextlib.ExitStack() as stack:
            lifeline = ["--lifeline-pid", str(os.getpid())]
            books = ["--listen", "127.0.0.1:0", "--state-dir", str(self.out / "coordinator")]
            address = self.daemon(stack, "coordinator", "penstock.appliance", *books, *lifeline)
            for name in ("worker-1", "worker-2"):
                work = ["--coordinator", address, "--name", name, "--slots", "3", "--allow", "train_lm"]
                self.daemon(stack, name, "penstock.worker", *work, *lifeline)
            self.environment["PENSTOCK_COORDINATOR"] = address
            yield

    def daemon(self, stack: contextlib.ExitStack, name: str, *command: str) -> str:
        """Start a daemon, to be stopped with the stack; returns the line that it writes when it is up."""
        read, write = os.pipe()
        process = self.start(name, *command, "--ready-fd", str(write), pass_fds=(write,))
        stack.callback(stop, process)
        os.close(write)
        with open(read) as ready:
            in_time, _, _ = select.select([ready], [], [], DEADLINE_S)
            line = ready.readline().strip() if in_time else ""
        if not line:
            raise DemoError(f"the {name} did not start:\n{self.last_words(name)}")
        return line

    def start(
        self, name: str, *command: str, pass_fds: tuple[int, ...] = (), env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Run a Python module; what it prints goes to a file."""
        with open(self.out / f"{name}.log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                env={**self.environment, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
            )

    def train(
        self, name: str, title: str, *, job: str, workers: int, resume: Path | None = None, kill_at: int = 0
    ) -> Run:
        """Run train.py on all boxes, to the end or until every box has logged step `kill_at`."""
        print(f"running {title}", flush=True)
        folder = self.out / name
        folder.mkdir()
        command = ["train_lm.train", "--steps", str(self.steps), "--checkpoint-every", str(self.save_at)]
        command += ["--out", str(folder), *(["--resume", str(resume)] if resume else [])]
        env = {
            "PENSTOCK_JOB": job,
            "PENSTOCK_NUM_WORKERS_PER_BOX": str(workers),
            **({} if resume else {"PENSTOCK_SEED": "1"}),  # a state remembers the seed of its run
            # From here on it is what torchrun would set; started by hand, the processes can be killed one by one.
            "WORLD_SIZE": str(BOXES),
            "LOCAL_WORLD_SIZE": str(BOXES),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        boxes = [f"{name}-box{rank}" for rank in range(BOXES)]
        processes = [
            self.start(box, *command, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank, box in enumerate(boxes)
        ]
        logs = [folder / f"box{rank}.jsonl" for rank in range(BOXES)]
        deadline = time.monotonic() + DEADLINE_S
        try:
            while any(process.poll() is None for process in processes):
                if kill_at and all(len(read_log(log)) and read_log(log)[-1]["step"] >= kill_at for log in logs):
                    break
                for process, box in zip(processes, boxes, strict=True):
                    if process.poll():
                        raise DemoError(f"{box} ended with status {process.returncode}:\n{self.last_words(box)}")
                if time.monotonic() > deadline:
                    raise DemoError(f"{title} took more than {DEADLINE_S:g} s:\n{self.last_words(*boxes)}")
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()  # SIGKILL: the training cannot prepare for it
            statuses = [process.wait() for process in processes]
        expected = -signal.SIGKILL if kill_at else 0
        if any(status != expected for status in statuses):
            raise DemoError(f"{title}: the boxes ended with {statuses}, not {expected}:\n{self.last_words(*boxes)}")
        return Run(name, title, [read_log(log) for log in logs])

    def last_words(self, *names: str) -> str:
        """The ends of what processes printed."""
        return "\n".join(
            f"--- {name}\n" + "\n".join((self.out / f"{name}.log").read_text(errors="replace").splitlines()[-25:])
            for name in names
        )


def read_log(path: Path) -> list[Step]:
    """The whole lines of a box's log, which may be killed while it writes one."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---- what must be true


def differences(run: Run, reference: Run) -> list[str]:
    """Where a run's batches or losses are not those of the reference, to the bit."""
    return [
        f"{run.title}, step {step}, box {box}: {key} is {row[key]}, not {reference.rows[step, box][key]}"
        for (step, box), row in run.rows.items()
        for key in ("digest", "loss")
        if row[key] != reference.rows[step, box][key]
    ]


def check(a: Run, before: Run, after: Run, other: Run, steps: int, save_at: int) -> list[tuple[str, list[str]]]:
    """(what must be true, what was found against it)."""
    whole = {(step, box) for step in range(1, steps + 1) for box in range(BOXES)}
    rest = {place for place in whole if place[0] > save_at}
    gaps = [
        f"{run.title} has steps {sorted(run.rows)[0][0]} to {sorted(run.rows)[-1][0]}"
        for run, expected in ((a, whole), (after, rest), (other, rest))
        if run.rows.keys() != expected
    ]
    history = [row for (step, _), row in before.rows.items() if step <= save_at] + list(other.rows.values())
    seen = Counter(window for row in history if row["epoch"] == 0 for window in row["windows"])
    windows = {window for row in a.rows.values() if row["epoch"] == 0 for window in row["windows"]}
    num_windows = max(windows) + 1
    amiss = [f"window {w} was seen {seen[w]} times" for w in range(num_windows) if seen[w] != 1]
    amiss += [] if any(row["epoch"] > 0 for row in history) else ["the epoch did not end"]
    compared = len(before.rows) + len(after.rows)
    once = f"(c) sees each of the {num_windows} windows of the first epoch once, steps 1-{save_at} of (b) included"
    return [
        ("every step is there once", gaps),
        (
            f"(b) equals (a): {compared} batches by digest, {compared} losses to the last bit",
            differences(before, a) + differences(after, a),
        ),
        (once, amiss),
        (f"(c) has the order of (a) too: {len(other.rows)} batches and losses equal", differences(other, a)),
    ]


# ---- what is shown


def table(runs: list[Run], checkpoint: Path) -> str:
    saved: Any = decode_state(checkpoint.read_bytes())
    lines = [f"{'':42}{'steps':>9}{'steps/s':>9}{'waiting for data':>18}"]
    for run in runs:
        steps = f"{run.logs[0][0]['step']}-{run.logs[0][-1]['step']}"
        lines.append(f"{run.title:42}{steps:>9}{run.steps_per_s:>9.1f}{run.waited:>18.1%}")
    sizes = len(encode_state(saved["loader"])), checkpoint.stat().st_size
    lines.append(f"state of the loader: {sizes[0]:,} bytes of a checkpoint of {sizes[1]:,}")
    return "\n".join(lines)


def plot(runs: list[Run], save_at: int, path: Path) -> str:
    """Loss curves as PNG; returns what became of it."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed (pip install 'penstock[demo]')"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run, look in zip(runs, ("-", "x", "o", "."), strict=True):
        steps = [row["step"] for row in run.logs[0]]
        losses = [sum(float.fromhex(log[i]["loss"]) for log in run.logs) / BOXES for i in range(len(steps))]
        broad = look == "-"  # the others lie on it
        axes.plot(steps, losses, look, markerfacecolor="none", lw=4 if broad else 1, alpha=0.4 if broad else 1)
        axes.lines[-1].set_label(run.title)
    axes.axvline(save_at + 0.5, color="gray", linestyle=":", label=f"checkpoint of step {save_at}")
    axes.set(xlabel="step", ylabel="loss (nats a byte, mean of the boxes)", title="Interrupted or not: one training")
    axes.legend()
    figure.savefig(path, dpi=120)
    return f"loss curves: {os.path.relpath(path)}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains, kills, resumes and compares.")
    parser.add_argument("--out", type=Path, help="a new or empty folder (examples/train_lm/out, emptied first)")
    parser.add_argument("--steps", type=int, default=100, help="more than the 80 of an epoch (100)")
    parser.add_argument("--save-at", type=int, default=37, metavar="STEP")
    parser.add_argument("--kill-at", type=int, default=45, metavar="STEP")
    options = parser.parse_args()
    if not 1 <= options.save_at <= options.kill_at < options.steps:
        parser.error("1 <= --save-at <= --kill-at < --steps is what can be shown")
    out: Path = options.out or EXAMPLES / "train_lm" / "out"
    if options.out is None:
        shutil.rmtree(out, ignore_errors=True)
    elif out.exists() and next(out.iterdir(), None):
        parser.error(f"--out {out} is not empty")
    out.mkdir(parents=True, exist_ok=True)
    demo = Demo(out.resolve(), options.steps, options.save_at)
    began = time.monotonic()
    try:
        with demo.daemons():
            a = demo.train("a", "(a) uninterrupted", job="a", workers=2)
            before = demo.train("b-killed", "(b) until it is killed", job="b", workers=2, kill_at=options.kill_at)
            checkpoint = demo.out / before.name / f"step-{options.save_at}.ckpt"
            after = demo.train("b-resumed", "(b) resumed", job="b", workers=2, resume=checkpoint)
            other = demo.train("c", "(c) resumed with 3 workers a box", job="c", workers=3, resume=checkpoint)
    except DemoError as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    runs = [a, before, after, other]
    print(f"\n{table(runs, checkpoint)}\n{plot(runs, options.save_at, demo.out / 'loss.png')}\n")
    found = check(a, before, after, other, options.steps, options.save_at)
    for claim, against in found:
        print(f"{'ok    ' if not against else 'FAILED'} {claim}")
        for line in against[:5]:
            print(f"         {line}")
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if any(against for _, against in found) else 0


if __name__ == "__main__":
    sys.exit(main())
