"""Record of a runner having asked for its assignment: each runner has its own, also if one fork server forked them
all."""

from __future__ import annotations

import os

from penstock.proto.state.assignment import NEUTRAL, assigned, current_assignment, looked_at, set_assignment


def test_later_sibling_keeps_the_read_mark() -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        set_assignment(NEUTRAL)
        current_assignment()
        sibling = os.fork()
        if sibling == 0:
            set_assignment(NEUTRAL)
            os._exit(0)
        os.waitpid(sibling, 0)
        os.write(write, b"1" if looked_at() else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"1"
    os.close(read)
    os.close(write)


def test_a_process_that_the_loader_forked_counts() -> None:
    with assigned(NEUTRAL):
        assert not looked_at()
        child = os.fork()
        if child == 0:
            current_assignment()
            os._exit(0)
        os.waitpid(child, 0)
        assert looked_at()
