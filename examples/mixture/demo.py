"""`make demo-mixture`: change a mixture in mid-run by command, kill the training, and resume it on another topology.

    (a) uninterrupted, on 2 boxes with 2 workers each, with all weights in its code (b) with the first weights in its
    code; `penstock mix` changes them from a later step on; saved, and killed (c) resumed from there on 1 box with 3
    workers, with the first weights in its code: the change is in the state

Then rows, losses and counts are compared: (b) and (c) together must equal (a). The exit status is 1 if they do not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from demo_cluster import START_S, Cluster, DemoError, Step, read_log
from mixture.data import SOURCES, WEIGHTS
from mixture.train import GLOBAL_BATCH

from penstock.proto.state.checkpoint_files import locked, newest

STEPS, CHANGE_AT, SAVE_EVERY = 120, 90, 10
CHANGED = {"code": 0.2, "help": 0.4, "licences": 0.4}
"""Weights of the sources after step CHANGE_AT."""
CHANGED_TEXT = ",".join(f"{source}={weight}" for source, weight in CHANGED.items())
WINDOW = 10
"""Number of steps for which each point of the picture shows the sources' shares."""
APART = 1e-2
"""Largest difference of two losses, in nats, that count as equal: with another number of boxes, sums have another
order."""


class Demo(Cluster):
    """Cluster (coordinator and workers) with the training runs that are compared."""

    def run(self, name: str, title: str, boxes: int, workers: int, *more: str, change: bool = False) -> None:
        """Run train.py to the end. With `change`, change the weights by command meanwhile, and kill the training later:
        after its next checkpoint."""
        command = ["mixture.train", "--steps", str(STEPS), "--checkpoint-every", str(SAVE_EVERY)]
        command += ["--out", str(self.out / name), *more]
        changed_at: list[int] = []

        def kill() -> bool:
            return bool(changed_at) and self._step(name, boxes) >= changed_at[0] + 2 * SAVE_EVERY

        with ThreadPoolExecutor(1) as operator:
            said = operator.submit(self._change, name, boxes, changed_at) if change else None
            env, kill_when = {"PENSTOCK_JOB": name}, kill if change else None
            self.train(name, title, command, boxes=boxes, workers=workers, env=env, kill_when=kill_when)
            if said is not None:
                print(said.result())

    def _change(self, name: str, boxes: int, changed_at: list[int]) -> str:
        """Change the weights as an operator does (`penstock mix`), once the first step is done. Return the command and
        its output."""
        deadline = time.monotonic() + START_S
        while not self._step(name, boxes):
            if time.monotonic() > deadline:
                raise DemoError(f"{name} made no step for {START_S:g} s")
            time.sleep(0.02)
        arguments = ["mix", name, "--from-step", str(CHANGE_AT + 1), "--weights", CHANGED_TEXT]
        done = subprocess.run(
            [sys.executable, "-m", "penstock.deploy", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=START_S,
        )
        if done.returncode:
            raise DemoError(f"penstock {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        changed_at.append(self._step(name, boxes))
        return "\n".join(f"    {line}" for line in ("$ penstock " + " ".join(arguments), *done.stdout.splitlines()))

    def _step(self, name: str, boxes: int) -> int:
        """Return the last step that all boxes have logged; 0 if there is none."""
        logs = [read_log(self.out / name / f"box{box}.jsonl") for box in range(boxes)]
        return min(log[-1]["step"] if log else 0 for log in logs)


def saved(folder: Path) -> tuple[Path, int]:
    """Return the newest checkpoint, once it is complete, and its step. The job was killed meanwhile, but its checkpoint
    writers finish their work."""
    with locked(folder, timeout_s=30):
        found = newest(folder)
    if found is None:
        raise DemoError(f"{folder} must have a complete checkpoint, but has none")
    return found.path, found.step


class Run:
    """Results of a training run: the logs of all boxes together."""

    def __init__(self, folder: Path, boxes: int, until: int = STEPS) -> None:
        logs = [read_log(folder / f"box{box}.jsonl")[:until] for box in range(boxes)]
        self._steps: list[tuple[Step, ...]] = list(zip(*logs, strict=True))

    @property
    def rows(self) -> list[Counter[str]]:
        """Rows of the global batch of each step. Their order depends on the number of boxes."""
        return [Counter(row for line in lines for row in line["rows"]) for lines in self._steps]

    @property
    def losses(self) -> list[float]:
        """Loss of each step, which is the same on all boxes."""
        return [lines[0]["loss"] for lines in self._steps]

    def counts(self, source: str) -> list[list[int]]:
        """Return [samples, tokens] that a source has given up to each step."""
        found = [[line["counts"].get(source, [0, 0]) for line in lines] for lines in self._steps]
        return [[sum(counts) for counts in zip(*boxes, strict=True)] for boxes in found]


def check(a: Run, b: Run, c: Run) -> list[tuple[str, bool]]:
    """Return what the demo claims, and whether each claim holds."""
    losses = b.losses + c.losses
    apart = max(abs(one - other) for one, other in zip(a.losses, losses, strict=False))
    counts = all(b.counts(source) + c.counts(source) == a.counts(source) for source in SOURCES)
    lines = sum(a.counts(source)[-1][0] for source in SOURCES)
    steps = f"{len(b.rows)} and {len(c.rows)} steps"
    return [
        (f"(b) and (c), {steps}, have the {lines:,} rows of (a), each at its step", b.rows + c.rows == a.rows),
        ("they have the counts of (a) at each step, by source, in lines and in tokens", counts),
        (f"their losses are at most {apart:.1e} apart", len(losses) == STEPS and apart < APART),
    ]


# ---- output


def shares_table(a: Run) -> str:
    """Return a table of the sources' shares, wanted and delivered, before and after the change."""
    rows = [f"{'steps':10}" + "".join(f"{source:>22}" for source in SOURCES)]
    for first, last, weights in ((0, CHANGE_AT, WEIGHTS[0]), (CHANGE_AT, STEPS, CHANGED)):
        row = f"{f'{first + 1}-{last}':10}"
        for source in SOURCES:
            counts = [0, *(samples for samples, _ in a.counts(source))]
            delivered = (counts[last] - counts[first]) / ((last - first) * GLOBAL_BATCH)
            row += f"{f'{delivered:.4f} of {weights[source]:.4f}':>22}"
        rows.append(row)
    return "\n".join(rows)


def plot(a: Run, c: Run, step: int, path: Path) -> str:
    """Draw the shares and the losses as a PNG file; return a line about it."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: matplotlib is not installed (pip install 'penstock[demo]')"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (shares, losses) = pyplot.subplots(2, figsize=(8, 7), layout="constrained", sharex=True)
    ends = range(WINDOW, STEPS + 1, WINDOW)
    for source in SOURCES:
        counts = [0, *(samples for samples, _ in a.counts(source))]
        delivered = [(counts[end] - counts[end - WINDOW]) / (WINDOW * GLOBAL_BATCH) for end in ends]
        (line,) = shares.plot([end - WINDOW / 2 for end in ends], delivered, "o", label=source)
        wanted = [WEIGHTS[0][source], CHANGED[source]]
        shares.stairs(wanted, [0, CHANGE_AT, STEPS], baseline=None, color=line.get_color())
    shares.set(ylabel="share of the lines", title="The mixture: wanted (lines) and delivered (dots)")
    losses.plot(range(1, STEPS + 1), a.losses, lw=4, alpha=0.4, label="(a) uninterrupted, 2 boxes with 2 workers each")
    losses.plot(range(step + 1, STEPS + 1), c.losses, lw=1, label="(c) killed and resumed, 1 box with 3 workers")
    losses.axvline(step + 0.5, color="gray", linestyle=":", label=f"checkpoint of step {step}")
    losses.set(xlabel="step", ylabel="loss (nats a byte)")
    shares.legend(), losses.legend()
    figure.savefig(path, dpi=120)
    return f"shares and losses: {os.path.relpath(path)}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Change a mixture in mid-run, kill, resume and compare.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="folder, emptied first")
    out: Path = parser.parse_args().out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    began = time.monotonic()
    demo = Demo(out)
    try:
        with demo.daemons("mixture", slots=3):
            weights = ["--then", f"{CHANGE_AT}:{CHANGED_TEXT}"]
            demo.run("a", "(a) uninterrupted, 2 boxes with 2 workers each", 2, 2, *weights)
            demo.run("b", "(b) until it is killed", 2, 2, change=True)
            checkpoint, step = saved(out / "b" / "checkpoints")
            shutil.copytree(checkpoint, out / "c" / "checkpoints" / checkpoint.name)
            demo.run("c", f"(c) resumed after step {step}, 1 box with 3 workers", 1, 3)
    except DemoError as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    a, b, c = Run(out / "a", 2), Run(out / "b", 2, until=step), Run(out / "c", 1)
    print(
        f"\n{shares_table(a)}\nloss {a.losses[0]:.3f} -> {a.losses[-1]:.3f}; {plot(a, c, step, out / 'mixture.png')}\n"
    )
    claims = check(a, b, c)
    for claim, holds in claims:
        print(f"{'ok    ' if holds else 'FAILED'} {claim}")
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if all(holds for _, holds in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
