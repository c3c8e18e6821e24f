"""Allowed input_fns: workers refuse what is not under their prefixes, and the coordinator does not assign it to
them."""

from __future__ import annotations

import functools
import os

import pytest
import streams
from fake_cluster import FakeCluster, FakeWorker

from penstock.appliance.limits import Limits
from penstock.proto.errors import InputFnNotAllowedError
from penstock.proto.state.allowed_modules import under
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.worker.processes.user_code import check_plain, load_input_fn


@pytest.mark.parametrize(
    ("module", "prefixes", "may"),
    [
        ("a", ["a"], True),
        ("a.b", ["a"], True),
        ("ab", ["a"], False),
        ("a", ["a.b"], False),
        ("a.b.c", ["x", "a.b"], True),
        ("anything", ["*"], True),
        ("a", [], False),
        ("", ["a"], False),
    ],
)
def test_prefixes_are_of_whole_names(module: str, prefixes: list[str], may: bool) -> None:
    assert under(module, prefixes) is may


# ---------------------------------------------------------------------------------------------------------- placement


def register(world: FakeCluster, name: str, *allow: str, slots: int = 8, host: str = "host-a") -> FakeWorker:
    world.state_machine.workers.register_worker(
        pb.RegisterWorkerRequest(worker=name, session=f"{name}-1", host_id=host, slots=slots, allow=allow)
    )
    return FakeWorker(world, name, f"{name}-1", host, slots)


@pytest.fixture
def world() -> FakeCluster:
    """A cluster whose coordinator has been up for a while."""
    world = FakeCluster(Limits(worker_lease_s=3.0))
    world.run_for(4.0)
    return world


def test_who_waits_does_not_hold_up_others(world: FakeCluster) -> None:
    register(world, "full", "m", slots=2)
    world.open()
    world.open(job="waits")
    worker = register(world, "other", "x")
    request = pb.OpenRunRequest(job="goes", num_boxes=1, num_workers_per_box=1, client_id="c")
    request.loader.input_fn = "x.data:f"
    world.state_machine.attempts.open_run(request)
    assert [assignment.run for assignment in worker.heartbeat().assignments] == ["goes/0"]


def test_slot_that_none_may_run_fails_at_once(world: FakeCluster) -> None:
    worker = register(world, "w", "other", "more")
    box = world.open()
    world.run_for(0.5, [worker, box])
    view = box.watch().slots[0]
    assert (view.phase, view.error.name) == (pb.FAILED, "InputFnNotAllowedError")
    assert view.error.message == (
        "module 'm' of input_fn 'm:f' must be under a prefix that a worker allows (more, other), but none of the 1 "
        "workers may run the module: start workers with --allow m"
    )


def test_slot_waits_without_workers_or_at_start(world: FakeCluster) -> None:
    box = world.open()
    world.run_for(1.0, [box])
    assert box.phases() == ["WAITING", "WAITING"]
    fresh = FakeCluster(Limits(worker_lease_s=3.0))
    first, box = register(fresh, "first", "other"), fresh.open()
    fresh.run_for(2.0, [first, box])
    assert box.phases() == ["WAITING", "WAITING"], "the others may still be on their way back"
    second = register(fresh, "second", "m")
    fresh.run_for(2.0, [first, second, box])
    assert box.phases() == ["STARTING", "STARTING"]


# ------------------------------------------------------------------------------------------------------- on the worker


def spec(input_fn: str, *allow: str) -> records_pb2.LoaderSpec:
    return records_pb2.LoaderSpec(input_fn=input_fn, allow=allow)


@pytest.mark.parametrize("name", ["patients:subprocess.Popen", "streams:DataLoader", "streams:Any"])
def test_imports_of_an_allowed_module_are_refused(name: str) -> None:
    from penstock.proto.errors import InputFnNotFoundError

    with pytest.raises((InputFnNotAllowedError, InputFnNotFoundError)):
        load_input_fn(spec(name, "streams", "patients"))


def test_what_is_defined_where_it_may_be_is_found() -> None:
    assert callable(load_input_fn(spec("streams:counter", "streams")))
    assert callable(load_input_fn(spec("streams:Counter", "streams")))
    assert callable(load_input_fn(spec("streams:DataLoader", "streams", "torch")))
    assert callable(load_input_fn(spec("streams:DataLoader", "*")))
    assert callable(load_input_fn(spec("streams:DataLoader")))  # in the training process and in the doctor
    with pytest.raises(InputFnNotAllowedError, match=r"is defined in module 'torch\.utils\.data\.dataloader'"):
        load_input_fn(spec("streams:DataLoader", "streams"))


def test_partial_is_defined_where_its_function_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "own", functools.partial(streams.counter, 3), raising=False)
    monkeypatch.setattr(streams, "shell", functools.partial(os.system, "true"), raising=False)
    assert callable(load_input_fn(spec("streams:own", "streams")))
    with pytest.raises(InputFnNotAllowedError, match="is defined in module 'posix'"):
        load_input_fn(spec("streams:shell", "streams", "functools"))


def test_search_path_or_script_of_peer_is_refused() -> None:
    check_plain(spec("streams:counter"))
    for said in (records_pb2.LoaderSpec(sys_path=["/tmp"]), records_pb2.LoaderSpec(main_path="/tmp/x.py")):
        with pytest.raises(InputFnNotAllowedError, match="only an embedded worker accepts"):
            check_plain(said)
