"""A status in words: every face says the same of it, and JSON keeps the names that scripts rely on."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from penstock.appliance.server.dashboard import dashboard
from penstock.deploy.operations.show_status import tables
from penstock.deploy.operations.watch_status import Screen
from penstock.proto.errors import UnknownRunError
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.telemetry.cluster_view import as_dict, end_record, view


def status() -> pb.StatusReply:
    """Box 0 waits for slot 1, which has failed; worker b drained, and was lost meanwhile."""
    reply = pb.StatusReply(version="0.1.0", uptime_s=3700)
    run = reply.runs.add(run="j/0", attempt=2, num_boxes=1, num_workers_per_box=2, open=True, input_fn="a:b")
    run.steps_per_s, run.wait_share = 123.4, 0.256
    run.bottleneck.CopyFrom(pb.Bottleneck(kind="recovering", input_bound=True, text="see its error", box=0, slot=1))
    box = run.boxes.add(box=0, live=True, step=9, steps_per_s=123.4, wait_share=0.256, waiting_for="slot 1")
    box.slots.add(slot=0, phase=pb.READY, worker="a", queued=3, batches_per_s=61.7, snapshot_age_s=130)
    failed = box.slots.add(slot=1, phase=pb.FAILED, worker="b", doing="in next() for 3 s", wait_share=0.25)
    failed.error.name, failed.error.message = "InputFnError", "it\n  raised"
    reply.workers.add(worker="a", slots=2, slots_used=1, live=True, batches_per_s=61.7)
    reply.workers.add(worker="b", slots=2, slots_used=1, draining=True, seen_s_ago=130)
    dead = reply.runs.add(run="dead/0", attempt=3)
    dead.end.CopyFrom(
        pb.RunEnd(attempt=3, reason="stalled", text="waited 120 s", error="DeadlineError", box=0, step=77)
    )
    dead.end.fault, dead.end.wall_s, reply.wall_s = True, 1000, 1240
    reply.events.add(kind="slot failed", fault=True, count=2, text="for good", run="j/0", age_s=130, wall_s=5)
    return reply


def as_json(reply: pb.StatusReply, address: str = "") -> Any:
    return json.loads(json.dumps(view(reply, address), default=as_dict))


def faces() -> dict[str, str]:
    found = view(status(), "head:7070")
    console = Console(width=200, height=60, file=io.StringIO())
    console.print(Screen(found))
    assert isinstance(console.file, io.StringIO)
    return {
        "status": "\n".join("  ".join(row) for table in tables(found) for row in table.rows),
        "watch": console.file.getvalue(),
        "dashboard": json.dumps(dashboard(found), ensure_ascii=False),
    }


def test_every_face_says_the_same() -> None:
    words = ("see its error", "InputFnError: it raised", "failed", "lost", "26%", "123", "2 min ago", "61.7", "1/2")
    for name, text in faces().items():
        assert [word for word in (*words, "slot 1") if word not in text] == [], name
        assert [word for word in ("FAILED", "draining", "in next()") if word in text] == [], name


def test_end_of_a_run_is_shown_with_its_reason() -> None:
    words = ("dead/0", "4 min ago", "stalled", "77", "DeadlineError: waited 120 s")
    shown = faces()
    for name in ("status", "dashboard"):
        assert [word for word in words if word not in shown[name]] == [], name
    reply = status()
    reply.wall_s = 10_000
    assert not [table for table in tables(view(reply)) if table.title == "Failed lately" and table.rows]
    (ended,) = (table for table in tables(view(reply), show_all=True) if table.title == "Ended runs")
    assert ended.rows[0][1] == "dead/0"


def test_run_of_which_a_box_has_failed_says_so() -> None:
    reply = status()
    run = reply.runs[0]
    run.boxes[0].closed, run.boxes[0].live = True, False
    run.end.CopyFrom(pb.RunEnd(attempt=1, error="InputFnError", text="it raised", box=0))
    (found,) = (run for run in view(reply).runs if run.run == "j/0")
    assert (found.state, found.boxes[0].state, found.finding.title) == ("open", "closed", "Recovering"), (
        "an old attempt"
    )
    run.end.attempt = run.attempt
    (found,) = (run for run in view(reply).runs if run.run == "j/0")
    assert (found.state, found.finding.title, found.finding.alarm) == ("failed", "Failed", "bad")
    assert found.finding.text == "Box 0 has closed: InputFnError: it raised"


def test_live_runs_come_first_and_ended_are_folded() -> None:
    reply = pb.StatusReply(version="0.1.0")
    for name, still, live in (("old/0", False, False), ("gone/0", True, False), ("older/0", False, False)):
        reply.runs.add(run=name, open=still).boxes.add(live=live)
    reply.runs.MergeFrom(status().runs)
    found = view(reply, "head:7070")
    assert [run.run for run in found.runs] == ["j/0", "gone/0", "old/0", "older/0", "dead/0"]
    folded, whole = tables(found)[0], tables(found, show_all=True)[0]
    assert [row[0] for row in folded.rows] == ["j/0", "gone/0"]
    assert (folded.note, whole.note) == ("3 runs have ended: `penstock status --all` shows them.", "")
    assert [row[0] for row in whole.rows] == ["j/0", "gone/0", "old/0", "older/0", "dead/0"]
    assert [row[2] for row in whole.rows] == ["open", "open", "closed", "closed", "stalled"]
    assert dashboard(found)["ended"] == "3 runs have ended."
    assert [run["run"] for run in as_json(reply)["runs"]] == ["j/0", "gone/0", "old/0", "older/0", "dead/0"]


def test_one_run_is_shown_alone() -> None:
    reply = status()
    reply.workers.add(worker="elsewhere", slots=2, live=True)
    reply.events.add(kind="worker joined", worker="elsewhere", text="2 slots")
    found = view(reply)
    for name in ("j", "j/0"):
        one = found.only(name)
        assert [run.run for run in one.runs] == ["j/0"]
        assert [worker.worker for worker in one.workers] == ["a", "b"]
        assert [event.kind for event in one.events] == ["slot failed"]
    assert [worker.worker for worker in found.only("dead").workers] == ["a", "b", "elsewhere"], "where it may run"
    with pytest.raises(UnknownRunError, match="no run 'j/1': see `penstock status --all`"):
        found.only("j/1")


def test_json_keeps_its_names() -> None:
    found = as_json(status(), "head:7070")
    run = found["runs"][0]
    box, (slot, failed) = run["boxes"][0], run["boxes"][0]["slots"]
    assert list(found) == ["coordinator", "recommended_workers", "runs", "workers", "events"]
    assert list(found["coordinator"]) == ["address", "version", "uptime_s", "dashboard"]
    assert list(run) == [
        *("run", "attempt", "open", "input_fn", "num_boxes", "num_workers_per_box", "recommended_workers_per_box"),
        *("recoveries", "steps_per_s", "batches_per_s", "wait_share", "bottleneck", "boxes", "states", "end"),
    ]
    assert run["end"] is None
    end = {"run": "dead/0", "attempt": 3, "reason": "stalled", "fault": True, "text": "waited 120 s"}
    end |= {"error": "DeadlineError", "box": 0, "step": 77, "at": 1000.0}
    assert found["runs"][1]["end"] == end | {"age_s": 240.0}
    assert end_record("dead/0", status().runs[1].end) == end
    assert list(run["bottleneck"]) == ["kind", "input_bound", "text", "wait_share", "box", "slot", "worker", "blame"]
    assert list(box) == [
        *("run", "box", "live", "closed", "step", "epoch", "epoch_ended", "steps_per_s", "waited_s", "waited_share"),
        *("wait_share", "waiting_for", "slots"),
    ]
    assert list(slot) == [
        *("run", "box", "slot", "worker", "target_worker", "generation", "phase", "queued", "batches_per_s", "batch_s"),
        *("wait_share", "snapshot_age_s", "restarts", "note", "doing", "skipped", "error"),
    ]
    assert (failed["phase"], failed["error"]) == ("FAILED", {"name": "InputFnError", "message": "it\n  raised"})
    assert list(found["workers"][0]) == [
        *("worker", "live", "draining", "slots", "slots_used", "seen_s_ago", "batches_per_s", "wait_share", "host_id"),
        *("tcp_address", "version", "allow"),
    ]
    assert list(found["events"][0]) == ["kind", "fault", "at", "age_s", "text", "run", "worker", "count"]
