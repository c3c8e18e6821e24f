"""A status in words: every face says the same of it, and JSON keeps the names that scripts rely on."""

from __future__ import annotations

import io
import json
from typing import Any

from rich.console import Console

from penstock.appliance.server.dashboard import dashboard
from penstock.deploy.operations.show_status import tables
from penstock.deploy.operations.watch_status import Screen
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.telemetry.cluster_view import as_dict, view


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


def test_live_runs_come_first_and_ended_are_folded() -> None:
    reply = pb.StatusReply(version="0.1.0")
    for name, still, live in (("old/0", False, False), ("gone/0", True, False), ("older/0", False, False)):
        reply.runs.add(run=name, open=still).boxes.add(live=live)
    reply.runs.MergeFrom(status().runs)
    found = view(reply, "head:7070")
    assert [run.run for run in found.runs] == ["j/0", "gone/0", "old/0", "older/0"]
    folded, whole = tables(found)[0], tables(found, show_all=True)[0]
    assert [row[0] for row in folded.rows] == ["j/0", "gone/0"]
    assert (folded.note, whole.note) == ("2 runs have ended: `penstock status --all` shows them.", "")
    assert [row[0] for row in whole.rows] == ["j/0", "gone/0", "old/0", "older/0"]
    assert dashboard(found)["ended"] == "2 runs have ended."
    assert [run["run"] for run in as_json(reply)["runs"]] == ["j/0", "gone/0", "old/0", "older/0"]


def test_json_keeps_its_names() -> None:
    found = as_json(status(), "head:7070")
    run = found["runs"][0]
    box, (slot, failed) = run["boxes"][0], run["boxes"][0]["slots"]
    assert list(found) == ["coordinator", "recommended_workers", "runs", "workers", "events"]
    assert list(found["coordinator"]) == ["address", "version", "uptime_s", "dashboard"]
    assert list(run) == [
        *("run", "attempt", "open", "input_fn", "num_boxes", "num_workers_per_box", "recommended_workers_per_box"),
        *("recoveries", "steps_per_s", "batches_per_s", "wait_share", "bottleneck", "boxes", "states"),
    ]
    assert list(run["bottleneck"]) == ["kind", "input_bound", "text", "wait_share", "box", "slot", "worker", "blame"]
    assert list(box) == [
        *("run", "box", "live", "step", "epoch", "epoch_ended", "steps_per_s", "waited_s", "waited_share"),
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
