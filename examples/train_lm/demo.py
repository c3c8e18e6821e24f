"""`make demo`: train through Penstock, kill the training, resume it, and verify that no sample was lost or repeated.

A coordinator and two worker daemons run as processes of their own, and train.py as one process for each of 2 boxes:

    (a) uninterrupted, with 2 workers a box (b) the same, saved at a step that the number of workers does not divide,
    killed some steps later, resumed from the checkpoint (c) resumed from the same checkpoint with 3 workers a box

Then the logs are compared: (b) must equal (a) batch by batch and loss by loss, bit for bit, and (c) must see each
window of the epoch once. The exit status is 1 if they do not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from demo_cluster import Cluster, DemoError, Step, read_log, saved

from penstock.proto.state.checkpoint_files import read_manifest

EXAMPLES = Path(__file__).resolve().parents[1]

BOXES = 2


@dataclass
class Run:
    """Results of running train.py once."""

    name: str
    title: str
    logs: list[list[Step]]
    """Lines of each box's log, by box."""

    @property
    def rows(self) -> dict[tuple[int, int], Step]:
        """Return the log's line for each (step, box)."""
        return {(row["step"], box): row for box, log in enumerate(self.logs) for row in log}

    @property
    def steps_per_s(self) -> float:
        return (len(self.logs[0]) - 1) / self._seconds

    @property
    def waited(self) -> float:
        """Return the share of time in which box 0 waited for data, between its first batch and its last."""
        return float(sum(row["waited_s"] for row in self.logs[0][1:])) / self._seconds

    @property
    def _seconds(self) -> float:
        return float(self.logs[0][-1]["time"] - self.logs[0][0]["time"])


class Demo(Cluster):
    """Cluster (coordinator and workers) with the training runs that are compared."""

    def __init__(self, out: Path, steps: int, save_at: int) -> None:
        super().__init__(out)
        self.steps = steps
        self.save_at = save_at

    def run(
        self, name: str, title: str, *, job: str, workers: int, resume: Path | None = None, kill_at: int = 0
    ) -> Run:
        """Run train.py on all boxes, to the end or until every box has logged step `kill_at`.

        resume: checkpoint to start from; None: the beginning.
        """
        folder = self.out / name
        folder.mkdir()
        if resume is not None:  # a checkpoint can be copied as an ordinary folder; train.py takes the newest one
            shutil.copytree(resume, folder / "checkpoints" / resume.name)
        command = ["train_lm.train", "--steps", str(self.steps), "--checkpoint-every", str(self.save_at)]
        command += ["--out", str(folder)]
        logs = [folder / f"box{rank}.jsonl" for rank in range(BOXES)]

        def reached() -> bool:
            return all(len(read_log(log)) and read_log(log)[-1]["step"] >= kill_at for log in logs)

        env = {"PENSTOCK_JOB": job, **({} if resume else {"PENSTOCK_SEED": "1"})}  # a state contains its run's seed
        kill_when = reached if kill_at else None
        self.train(name, title, command, boxes=BOXES, workers=workers, env=env, kill_when=kill_when)
        return Run(name, title, [read_log(log) for log in logs])


# ---- checks


def differences(run: Run, reference: Run) -> list[str]:
    """Return the differences of a run's batches and losses from the reference, which must be equal bit for bit."""
    return [
        f"{run.title}, step {step}, box {box}: {key} is {row[key]}, not {reference.rows[step, box][key]}"
        for (step, box), row in run.rows.items()
        for key in ("digest", "loss")
        if row[key] != reference.rows[step, box][key]
    ]


def check(a: Run, before: Run, after: Run, other: Run, steps: int, save_at: int) -> list[tuple[str, list[str]]]:
    """Return what the demo claims, each with a list of the findings that contradict it."""
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


# ---- output


def table(runs: list[Run], checkpoint: Path) -> str:
    lines = [f"{'':42}{'steps':>9}{'steps/s':>9}{'waiting for data':>18}"]
    for run in runs:
        steps = f"{run.logs[0][0]['step']}-{run.logs[0][-1]['step']}"
        lines.append(f"{run.title:42}{steps:>9}{run.steps_per_s:>9.1f}{run.waited:>18.1%}")
    manifest = read_manifest(checkpoint)
    lines.append(f"a checkpoint: {manifest.nbytes:,} bytes in {len(manifest.files)} files, by {manifest.ranks} ranks")
    return "\n".join(lines)


def plot(runs: list[Run], save_at: int, path: Path) -> str:
    """Draw the loss curves as a PNG file; return a line about it."""
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
        broad = look == "-"  # the others are drawn over it
        axes.plot(steps, losses, look, markerfacecolor="none", lw=4 if broad else 1, alpha=0.4 if broad else 1)
        axes.lines[-1].set_label(run.title)
    axes.axvline(save_at + 0.5, color="gray", linestyle=":", label=f"checkpoint of step {save_at}")
    axes.set(xlabel="step", ylabel="loss (nats a byte, mean of the boxes)", title="Interrupted or not: one training")
    axes.legend()
    figure.savefig(path, dpi=120)
    return f"loss curves: {os.path.relpath(path)}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Train, kill, resume and compare.")
    parser.add_argument("--out", type=Path, help="new or empty folder (examples/train_lm/out, emptied first)")
    parser.add_argument("--steps", type=int, default=100, help="more than the 80 of an epoch (100)")
    parser.add_argument("--save-at", type=int, default=37, metavar="STEP")
    parser.add_argument("--kill-at", type=int, default=45, metavar="STEP")
    options = parser.parse_args()
    if not 1 <= options.save_at <= options.kill_at < options.steps:
        parser.error("the demo needs 1 <= --save-at <= --kill-at < --steps")
    out: Path = options.out or EXAMPLES / "train_lm" / "out"
    if options.out is None:
        shutil.rmtree(out, ignore_errors=True)
    elif out.exists() and next(out.iterdir(), None):
        parser.error(f"--out {out} is not empty")
    out.mkdir(parents=True, exist_ok=True)
    demo = Demo(out.resolve(), options.steps, options.save_at)
    began = time.monotonic()
    try:
        with demo.daemons("train_lm", slots=3):
            a = demo.run("a", "(a) uninterrupted", job="a", workers=2)
            before = demo.run("b-killed", "(b) until it is killed", job="b", workers=2, kill_at=options.kill_at)
            checkpoint = saved(demo.out / before.name / "checkpoints", options.save_at)
            after = demo.run("b-resumed", "(b) resumed", job="b", workers=2, resume=checkpoint)
            other = demo.run("c", "(c) resumed with 3 workers a box", job="c", workers=3, resume=checkpoint)
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
