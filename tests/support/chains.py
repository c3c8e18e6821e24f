"""A run that is saved and resumed again and again, compared batch by batch with the one that was not interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import census
import torch
from family import has_ring

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.state.codec import decode_state, encode_state

__all__ = ["ENDS", "INSIDE", "OVER", "Chain", "compare", "kill_runners", "plain", "resumed", "runners", "whole"]

INSIDE, OVER, ENDS = (5, 11, 19), (10, 31, 55), (24, 36, 48)
"""Steps to save at, where two workers have 12 batches in an epoch: within the first one, in one after the other, and at
ends of epochs."""
LOST_AFTER = 4
"""Steps of a launch before one of its runners is killed."""


@dataclass(frozen=True)
class Chain:
    """Steps at which a run is saved, and resumed by the next launch."""

    saves: tuple[int, ...]
    """Steps of the box, over all launches."""
    announced: bool = False
    """The steps are checkpoint steps, so that workers take a snapshot just there."""
    lost: bool = False
    """A runner of each launch but the first is killed."""

    def __str__(self) -> str:
        words = ["-".join(map(str, self.saves)), "announced" if self.announced else "other"]
        return " ".join([*words, *(["lost"] if self.lost else [])])


def plain(batch: Any) -> Any:
    """A batch as something that == compares to the bit."""
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [plain(value) for value in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor) or hasattr(batch, "tolist") else batch


def whole(appliance: Appliance, input_fn: Callable[..., Any], steps: int, *args: Any, **kwargs: Any) -> list[Any]:
    """The run without a save."""
    loader = DataLoader(input_fn, *args, **kwargs)
    return [plain(batch) for batch in DataExecutor(loader, num_steps=steps, appliance=appliance)]


def resumed(
    appliance: Appliance, state: Any, steps: int, input_fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> list[Any]:
    """The batches of a new loader that goes on from a state."""
    loader = DataLoader(input_fn, *args, **kwargs)
    loader.load_state_dict(state)
    return [plain(batch) for batch in DataExecutor(loader, num_steps=steps, appliance=appliance)]


def compare(
    appliance: Appliance, chain: Chain, expected: list[Any], input_fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Go along the chain. Raises AssertionError at the first batch that is another one."""
    state: bytes | None = None
    start = 0
    for launch, stop in enumerate([*chain.saves, len(expected)]):
        loader = DataLoader(input_fn, *args, **kwargs)
        if state is not None:
            loader.load_state_dict(decode_state(state))  # type: ignore[arg-type]
        steps = [stop] if chain.announced else None
        executor = DataExecutor(loader, num_steps=stop - start, checkpoint_steps=steps, appliance=appliance)
        for batch in executor:
            step = executor.step
            assert plain(batch) == expected[step - 1], (
                f"launch {launch}, from step {start}: step {step} is {plain(batch)}, not {expected[step - 1]}"
            )
            if chain.lost and launch and step == start + LOST_AFTER:
                _kill_one(launch)
        assert executor.step == stop, f"launch {launch} ended at step {executor.step} of {stop}"
        if stop < len(expected):
            state = encode_state(loader.state_dict())
        start = stop


def _kill_one(number: int) -> None:
    while True:
        found = sorted(runners())
        if not found:
            continue
        with contextlib.suppress(ProcessLookupError):  # one of the launch before, which has just ended
            os.kill(found[number % len(found)], signal.SIGKILL)
            return


def runners() -> set[int]:
    """Runners below this process that have sent something: children of a fork server. Helpers have no ring, and neither
    has a runner that was killed a moment ago."""
    below = census.descendants(os.getpid())
    return {runner for pid in below if _is_fork_server(pid) for runner in census.children(pid) if has_ring(runner)}


def _is_fork_server(pid: int) -> bool:
    try:
        return b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def kill_runners(before: set[int]) -> None:
    """Kill all runners but those that were there before."""
    for pid in runners() - before:
        with contextlib.suppress(ProcessLookupError):  # one that has just ended
            os.kill(pid, signal.SIGKILL)
