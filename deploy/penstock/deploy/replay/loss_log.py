"""Loss logs, and the spikes in them.

The height of a loss is its distance from the running median, in robust standard deviations:

    height = (loss - median) / max(1.4826 * MAD, 0.001 * |median|)

Median and MAD (median absolute deviation from the median) are computed from the finite losses among the last BEFORE
losses before this one. 1.4826 * MAD is the standard deviation of normally distributed losses, and a single spike hardly
changes median or MAD. A loss that is NaN or infinity has infinite height; a loss of minus infinity is no spike. A
finite loss has height 0 if fewer than FEWEST of the BEFORE losses before it are finite.

Consecutive logged steps with heights above LEAST are one spike. The spike's step is the step with the greatest height;
if several losses are not finite, the first of these.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from penstock.proto.errors import InvalidArgumentError

__all__ = ["BEFORE", "LEAST", "Loss", "Spike", "read_losses", "spikes_of"]

BEFORE = 50
"""Number of losses before a loss whose median is the running median that the loss is compared with. Near the beginning
of a log there are fewer."""
FEWEST = 8
"""Smallest number of finite losses before a loss; with fewer, a finite loss does not count as a spike."""
LEAST = 3.0
"""Height (distance from the running median, in standard deviations) above which a loss belongs to a spike."""
FACTOR, FLOOR = 1.4826, 1e-3


@dataclass(frozen=True)
class Loss:
    """Loss that was logged at one step."""

    step: int
    loss: float


@dataclass(frozen=True)
class Spike:
    """Jump of the loss above its running median, over one or more logged steps."""

    step: int
    loss: float
    median: float
    height: float
    first: int
    """First logged step of the spike, which may last several steps."""
    last: int
    """Last logged step of the spike."""

    def plain(self) -> dict[str, Any]:
        """Return the spike as JSON values. NaN and infinite numbers, which JSON does not have, are texts."""
        numbers = {name: getattr(self, name) for name in ("loss", "median", "height")}
        shown = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
        return {"step": self.step, **shown, "first": self.first, "last": self.last}


def read_losses(path: Path) -> list[Loss]:
    """Return the losses of a log, in order of step. The log has JSON lines with `step` and `loss`, or is a CSV file
    with these columns. If a step has several losses, the last one counts, because a resumed job logs steps again. Lines
    without a step or a loss, such as those of evaluations, are left out, and so is a last JSON line that is cut off.

    Raises InvalidArgumentError for a file without losses, and for a line that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"--loss {path} cannot be read: {error}. Check that the file exists and that this user may read it"
        ) from error
    found: dict[int, float] = {}
    if not text.strip():
        raise InvalidArgumentError(
            f"--loss {path} must have losses, got an empty file. Pass the log of the training job"
        )
    lines = _of_json(path, text) if text.lstrip()[:1] == "{" else _of_csv(path, text)
    for number, step, loss in lines:
        found[_step(path, number, step)] = _loss(path, number, loss)
    if not found:
        raise InvalidArgumentError(
            f'--loss {path} must have lines with `step` and `loss`, as JSON ({{"step": 7, "loss": 2.5}}) or as CSV '
            "with a header, got none. Log both at each step"
        )
    return [Loss(step, found[step]) for step in sorted(found)]


def _of_json(path: Path, text: str) -> Iterator[tuple[int, Any, Any]]:
    lines = text.split("\n")  # splitlines() also splits at characters that JSON texts may contain
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return  # the job was killed while it wrote its last line
            raise InvalidArgumentError(
                f"--loss {path}: line {number} must be a JSON object: {error}. Correct the line"
            ) from error
        if isinstance(value, dict) and value.get("step") is not None and value.get("loss") is not None:
            yield number, value["step"], value["loss"]


def _of_csv(path: Path, text: str) -> Iterator[tuple[int, Any, Any]]:
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    names = {name.strip().lower(): name for name in reader.fieldnames or () if name}
    if not {"step", "loss"} <= names.keys():
        raise InvalidArgumentError(
            f"--loss {path} must be JSON lines, or CSV with the columns step and loss, got the header "
            f"{', '.join(reader.fieldnames or ())!r:.200}. Name the columns so"
        )
    try:
        for row in reader:
            step, loss = row[names["step"]], row[names["loss"]]
            if step and loss:
                yield reader.line_num, step, loss
    except csv.Error as error:
        raise InvalidArgumentError(
            f"--loss {path}: line {reader.line_num} must be CSV: {error}. Correct the line"
        ) from error


def _step(path: Path, number: int, value: Any) -> int:
    try:
        step = float(value) if isinstance(value, str) and not value.strip().isdecimal() else value  # pandas writes 7.0
        if isinstance(step, bool) or float(step) != int(step):
            raise ValueError
        step = int(step)
    except (TypeError, ValueError, OverflowError):
        step = None
    if step is None or step < 1:
        remedy = "Correct the line" if step is None else "If the log counts from 0, add 1 to its steps"
        raise InvalidArgumentError(
            f"--loss {path}: step in line {number} must be a whole number >= 1, as executor.step counts, got "
            f"{value!r:.80}. {remedy}"
        )
    return int(step)


def _loss(path: Path, number: int, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgumentError(
            f"--loss {path}: loss in line {number} must be a number, got {value!r:.80}. Correct the line"
        ) from None


def spikes_of(losses: Sequence[Loss], most: int) -> list[Spike]:
    """Return the highest spikes of a log, at most `most`, the highest first. Raises InvalidArgumentError if there are
    too few losses to compute a median."""
    if len(losses) <= FEWEST:
        raise InvalidArgumentError(
            f"--loss must have at least {FEWEST + 1} losses, because a spike is a loss far above the median of those "
            f"before it, got {len(losses)}. Pass a longer log"
        )
    spikes: list[Spike] = []
    begun: list[Spike] = []
    for at, one in enumerate(losses):
        middle, height = _height(losses, at)
        if height > LEAST:
            begun.append(Spike(one.step, one.loss, middle, height, one.step, one.step))
        elif begun:
            spikes.append(_joined(begun))
            begun = []
    if begun:
        spikes.append(_joined(begun))
    return sorted(spikes, key=lambda spike: (-spike.height, spike.step))[:most]


def _joined(parts: list[Spike]) -> Spike:
    top = max(parts, key=lambda spike: spike.height)  # if several are not finite, the first
    return Spike(top.step, top.loss, top.median, top.height, parts[0].step, parts[-1].step)


def _height(losses: Sequence[Loss], at: int) -> tuple[float, float]:
    """Return the running median before the loss at index `at`, and the loss's height above it."""
    near = [losses[index].loss for index in range(max(0, at - BEFORE), at) if math.isfinite(losses[index].loss)]
    loss = losses[at].loss
    middle = median(near) if near else math.nan
    if not math.isfinite(loss):
        return middle, math.inf if loss != -math.inf else -math.inf
    if len(near) < FEWEST:
        return middle, 0.0
    spread = median(abs(value - middle) for value in near)
    scale = max(FACTOR * spread, FLOOR * abs(middle))
    return middle, (loss - middle) / scale if scale else math.inf if loss > middle else 0.0
