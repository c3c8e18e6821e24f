"""Screen of `penstock status --watch`: it fits, what matters most is on top, and peers move no cursor."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from penstock.deploy.operations.watch_status import Screen, fit
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.telemetry.cluster_view import ClusterView, view

TEXT = "Input-bound: box 7 waits for data 62% of its time, 97% of that for slot 1 on worker w7."


def reply(boxes: int = 50, slots: int = 8, worker: str = "w") -> pb.StatusReply:
    """A run in which box 7 waits for its slot 1."""
    found = pb.StatusReply(version="0.1.0", uptime_s=90, dashboard="http://127.0.0.1:7071")
    run = found.runs.add(
        run="job/0", attempt=1, num_boxes=boxes, num_workers_per_box=slots, open=True, steps_per_s=12.5
    )
    run.bottleneck.CopyFrom(pb.Bottleneck(kind="straggler", input_bound=True, text=TEXT))
    for number in range(boxes):
        box = run.boxes.add(box=number, live=True, step=100 + number, steps_per_s=12.5)
        for slot in range(slots):
            share = 0.6 if (number, slot) == (7, 1) else 0.0
            box.slots.add(slot=slot, phase=pb.READY, worker=f"{worker}{number}", queued=4, wait_share=share)
            box.wait_share += share
        found.workers.add(
            worker=f"{worker}{number}", slots=slots, slots_used=slots, live=True, wait_share=box.wait_share
        )
    for number in range(30):
        found.events.add(kind="worker joined", text=f"worker {number}", wall_s=number, count=1)
    found.events.add(kind="slot lost", fault=True, text="its worker was killed", run="job/0", wall_s=40, count=3)
    found.events.add(kind="worker left", text="worker 31", wall_s=41, count=1)
    return found


def status(**shape: Any) -> ClusterView:
    return view(reply(**shape), "127.0.0.1:7070")


def screen(found: ClusterView, width: int, height: int, away: str = "") -> list[tuple[str, str]]:
    """Style and text of each line, as rich draws them."""
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True)
    options = console.options.update(height=height)
    lines = console.render_lines(Screen(found, away), options, pad=False)
    return [(str(line[0].style or "") if line else "", "".join(part.text for part in line)) for line in lines]


@pytest.mark.parametrize(("width", "height"), [(40, 5), (80, 24)])
def test_screen_fits_and_keeps_the_bottleneck(width: int, height: int) -> None:
    lines = screen(status(), width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for _, line in lines)
    assert "Input-bound: box 7" in "\n".join(line for _, line in lines)


def test_the_most_interesting_comes_first() -> None:
    lines = [line for _, line in screen(status(), 120, 40)]
    slots = next(number for number, line in enumerate(lines) if line.startswith("slot "))
    assert "more)" in lines[slots]
    assert lines[slots + 1].startswith("job/0 7.1")
    assert "60%" in lines[slots + 1]
    events = next(number for number, line in enumerate(lines) if line.split()[:2] == ["when", "event"])
    assert "slot lost x3" in lines[events + 1]
    boxes = next(number for number, line in enumerate(lines) if line.startswith("box "))
    assert lines[boxes + 1].startswith("job/0 7")
    assert slots < events < boxes


def test_each_table_gets_its_share_of_the_rows() -> None:
    assert fit([100, 100, 100], 15) == [3, 3, 3]
    assert fit([100, 2, 100], 30) == [8, 2, 14]
    assert fit([1, 100], 4) == [0, 2]
    assert fit([], 10) == []


def test_text_from_peers_never_moves_the_cursor() -> None:
    found = status(boxes=2, slots=2, worker="\x1b[2J\x1b]0;owned\x07\n")
    text = "\n".join(line for _, line in screen(found, 400, 60))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert all("\n" not in line for _, line in screen(found, 400, 60))
