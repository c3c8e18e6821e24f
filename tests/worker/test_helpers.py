"""Tasks in helper processes come out as in fresh ones, and cost less."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coroutines import in_loop
from forked import join_all

from penstock.proto.errors import InputFnError
from penstock.proto.state.assignment import assigned, current_assignment
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.v1 import records_pb2
from penstock.worker.helpers.helper_pool import MIN_TASKS, HelperPool
from penstock.worker.helpers.replayers import run_task
from penstock.worker.loader.restorable_loader import RestorableLoader
from penstock.worker.processes.child_processes import ForkServer
from penstock.worker.processes.control_channel import ControlMessage
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.processes.temporary_folders import TemporaryFolders
from penstock.worker.resources.turn_queue import TurnQueue
from penstock.worker.runner.helper_process import _warm_up

DEADLINE_S = 60.0


def assignment(run: str, *arguments: Any) -> records_pb2.WorkerAssignment:
    made = records_pb2.WorkerAssignment(run=run, attempt=1, num_boxes=1, num_workers_per_box=1, seed=5)
    made.loader.input_fn = "stained:stained"
    made.loader.allow.append("stained")
    made.loader.arguments = encode_state({"args": arguments, "kwargs": {}})
    return made


@in_loop
async def test_warm_helpers_answer_like_fresh_children(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, support = (str(Path(__file__).parent.parent / folder) for folder in ("inputs", "support"))
    monkeypatch.setenv("PYTHONPATH", f"{inputs}:{support}")
    fork_server = ForkServer(TemporaryFolders())
    await fork_server.start()

    async def get(_: Any) -> ForkServer:
        return fork_server

    helpers = HelperPool(get)
    host: Any = SimpleNamespace(helper_turns=TurnQueue(2), fork_server=get, helpers=helpers, blobs=None)
    progress_page = ProgressPage.create()

    async def burst(of: records_pb2.WorkerAssignment, point: bytes, tasks: int) -> list[ControlMessage]:
        fields: dict[str, Any] = {
            "epoch": 0,
            "delivered": 3,
            "total": 3,
            "step": 3,
            "from_origin": False,
            "digests": {},
        }
        fields |= {"doubting": False, "left": {}, "abandoned_from": 0}
        each = [run_task(host, of, "slot 0", progress_page, [point], "state", **fields) for _ in range(tasks)]
        return await asyncio.gather(*each)

    with assigned(current_assignment()):
        source = RestorableLoader(assignment("plain/0", 10))
        source.build()
        point = source.open_epoch().encode()
    plain = assignment("plain/0", 10)
    (alone,) = await burst(plain, point, 1)
    assert [message.payload for message in await burst(plain, point, 2 * MIN_TASKS)] == [alone.payload] * 2 * MIN_TASKS
    state: Any = decode_state(alone.payload)
    assert state["user"] == {"done": 3, "built": 1}
    group = next(iter(helpers._groups.values()))
    await burst(plain, point, 2 * MIN_TASKS)  # by now nothing is left to learn, whichever helper was first
    assert group.unfit == ""
    assert {"stained", "statistics"} <= set(group.modules or ())

    def ready() -> set[int]:
        known = set(group.modules or ())
        return {each.child.pid for each in group.idle if each.child is not None and each.modules >= known}

    kept = ready()
    assert kept
    await burst(plain, point, 2 * MIN_TASKS)
    assert kept <= ready(), "they are used again"
    for otherwise in ("raises", "dies"):
        odd = assignment(f"{otherwise}/0", 10, fork_server.pid, otherwise)
        await burst(odd, point, 1)
        payloads = {message.payload for message in await burst(odd, point, 2 * MIN_TASKS)}
        assert payloads == {alone.payload}
    with pytest.raises(InputFnError, match="no child of the fork server"):
        await burst(assignment("wrong/0", 10, 1, "raises"), point, 1)
    helpers.forget(set())
    assert not helpers._groups
    fork_server.close()
    await fork_server.wait()
    progress_page.close()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import json", ""),
        ("import random; random.random()", "importing changed the random generators"),
        ("import penstock.worker; penstock.worker.current_assignment()", "importing read the assignment"),
        ("import threading; over = threading.Event(); threading.Thread(target=over.wait).start()", "the threads"),
        ("file = open(__file__)", "the open files"),
        ("raise SystemExit", "importing raised InputFnError"),
    ],
)
def test_imports_that_do_more_are_told(code: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "imported.py").write_text(f"{code}\n\ndef make(): ...\n")
    spec = records_pb2.LoaderSpec(input_fn="imported:make", allow=["imported"])

    def warm_up() -> None:
        with assigned(current_assignment()):
            said = _warm_up(spec, ["json", "no_such_module"])
        assert why in said
        assert bool(why) == bool(said)

    join_all(warm_up)  # in a child, as in a worker: here threads of other tests end at any time
