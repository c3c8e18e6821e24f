"""What a child hands over at the end of its epoch is taken whole, or not at all."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from forked import Child, join_all

from penstock.proto.lane.producer import Producer
from penstock.worker.processes.control_channel import ControlChannel
from penstock.worker.runner.epoch_process import Outcome, run_epoch

FDS = 40
MESSAGES = 4
"""40 descriptors are handed over in three messages, and the record in a fourth one."""


def hands_over(killed_at: int | None) -> None:
    """Run an epoch whose child is killed before it sends message `killed_at`."""
    send, left = ControlChannel.send, [1] * (MESSAGES if killed_at is None else killed_at)

    def send_or_die(*arguments: Any, **more: Any) -> None:
        if not left:
            signal.raise_signal(signal.SIGKILL)
        left.pop()
        send(*arguments, **more)

    def work(show_lane: object) -> Outcome:
        ControlChannel.send = send_or_die  # type: ignore[method-assign]
        return Outcome({"why": "over"}, [os.open(f"/proc/self/fd/{number % 3}", os.O_RDONLY) for number in range(FDS)])

    with open("/dev/null") as null:
        for number in range(3):
            os.dup2(null.fileno(), number)
    outcome = run_epoch("penstock-epoch", work, lambda: None, lambda pid: None, Producer(1 << 20), lambda: False)
    assert outcome is not None
    assert outcome.record == {"why": "over"}
    assert len({os.fstat(fd).st_rdev for fd in outcome.fds}) == 1
    assert len(outcome.fds) == FDS


def test_descriptors_and_record_arrive() -> None:
    join_all(lambda: hands_over(None))


@pytest.mark.parametrize("killed_at", [0, MESSAGES - 1])
def test_child_killed_at_its_hand_over_is_a_lost_runner(killed_at: int) -> None:
    """The slot's process ends as its child did, without waiting for what never comes."""
    died = pytest.raises(AssertionError, match=f"ended with {signal.SIGKILL.value}")
    with Child(lambda: hands_over(killed_at)) as child, died:
        child.join(20)
