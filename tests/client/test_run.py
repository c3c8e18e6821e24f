"""Views of its slots that a run has: the coordinator's replies come to two threads, in any order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.client.stream.open_run import OpenRun
from penstock.proto.errors import CoordinatorUnavailableError
from penstock.proto.rpc.calls import CoordinatorClient, FetchedState
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb


class FakeLink:
    host, force_tcp, compression, embedded = "here", False, None, True

    def client(self) -> Any:
        return CoordinatorClient("127.0.0.1:1", "token", insecure=True)  # it is never called


@pytest.fixture
def run() -> Iterator[OpenRun]:
    run = OpenRun(FakeLink(), pb.OpenRunRequest(job="job", num_boxes=1, num_workers_per_box=2), lambda run: None)  # type: ignore[arg-type]
    yield run
    run.close()


def reply(version: int, *phases: pb.SlotPhase.ValueType) -> pb.WatchRunReply:
    views = [pb.SlotView(slot=slot, generation=1, phase=phase) for slot, phase in enumerate(phases)]
    return pb.WatchRunReply(version=version, slots=views)


def test_abandoned_epochs_are_reported_once(run: OpenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs that an answered report had are in the coordinator's journal; the others follow, so many at a time."""
    sent: list[list[int]] = []
    away = False

    def watch(request: pb.WatchRunRequest) -> pb.WatchRunReply:
        sent.append([one.epoch for one in request.abandoned])
        if away:
            raise CoordinatorUnavailableError("away")
        return pb.WatchRunReply()

    def fetch(request: pb.FetchStateRequest) -> FetchedState:
        sent.append([one.epoch for one in request.progress.abandoned])
        return FetchedState()

    monkeypatch.setattr(run._client, "watch_run", watch)
    monkeypatch.setattr(run._client, "fetch_state", fetch)
    monkeypatch.setattr("penstock.client.stream.open_run.ABANDONED_SENT", 2)
    run.progress.abandoned = ((0, 3),)
    run.report()
    run.progress.abandoned = ((0, 3), (1, 5))
    away = True
    run.report()
    away = False
    run.report()
    run.report()
    assert sent == [[0], [1], [1], []]
    sent.clear()
    run.progress.abandoned = tuple((epoch, 9) for epoch in range(2, 7))  # of another reader of the same run
    assert run.fetch_state(7, 20.0) == FetchedState()
    assert sent == [[2, 3], [4, 5], [6]], "all are known before the state is looked up"


def test_epoch_starts_are_reported_once(run: OpenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report each once, and all again to a coordinator that was restarted."""
    sent: list[tuple[list[int], bool]] = []
    at, wants = Position.start(2), False
    run.progress.position = lambda: at.to_proto()

    def watch(request: pb.WatchRunRequest) -> pb.WatchRunReply:
        sent.append(([start.epoch for start in request.epoch_starts], request.omits_epoch_starts))
        return pb.WatchRunReply(wants_epoch_starts=wants)

    def begin_epoch() -> None:
        at.deliver()
        at.abandon_epoch()
        run.progress.epoch_starts.add(at)

    monkeypatch.setattr(run._client, "watch_run", watch)
    run.report()
    begin_epoch()
    begin_epoch()
    run.report()
    begin_epoch()
    wants = True
    run.report()
    wants = False
    run.report()
    run.report()
    assert sent == [([], False), ([1, 2], False), ([3], True), ([1, 2, 3], False), ([], True)]


@pytest.mark.parametrize("embedded", [False, True])
def test_end_is_reported_to_a_restarted_coordinator(
    run: OpenRun, monkeypatch: pytest.MonkeyPatch, embedded: bool
) -> None:
    tries = 0

    def close(request: pb.CloseRunRequest, *, deadline_s: float) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise CoordinatorUnavailableError("away")

    monkeypatch.setattr(run._client, "close_run", close)
    monkeypatch.setattr(run._client, "reach", lambda seconds: None)
    monkeypatch.setattr(run.link, "embedded", embedded)
    run.attempt = 1
    run.close()
    assert tries == (1 if embedded else 3)


def test_overtaken_reply_changes_nothing(run: OpenRun) -> None:
    run._take(reply(5, pb.READY, pb.STARTING))
    told = run.version
    run._take(reply(7, pb.READY, pb.READY))
    assert run.version == told + 1
    run._take(reply(6, pb.READY, pb.STARTING))
    run._take(reply(7, pb.READY, pb.READY))
    assert [view.phase for view in run.views] == [pb.READY, pb.READY]
    assert run.version == told + 1, "nothing new was told"


def test_state_query_waits_for_the_coordinator(
    run: OpenRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, deadlines = 100.0, list[float]()
    monkeypatch.setattr("penstock.client.stream.open_run.time.monotonic", lambda: now)

    def reach(seconds: float) -> None:
        nonlocal now
        now += 60

    def fetch(request: pb.FetchStateRequest) -> FetchedState:
        nonlocal now
        deadlines.append(request.deadline_s)
        now += 5
        if len(deadlines) < 5:
            raise CoordinatorUnavailableError("away")
        return FetchedState()

    monkeypatch.setattr(run, "reach", reach)
    monkeypatch.setattr(run._client, "fetch_state", fetch)
    assert run.fetch_state(7, 20.0) == FetchedState()
    assert deadlines == [20.0] * 5, "the time that it was away for does not count"
    assert next(record.getMessage() for record in caplog.records) == (
        "waiting for the state of step 7: the coordinator has not answered for 65 s: away"
    )

    deadlines.clear()
    monkeypatch.setattr("penstock.client.stream.open_run.AWAY_S", 100.0)
    with pytest.raises(CoordinatorUnavailableError):
        run.fetch_state(7, 20.0)
    assert len(deadlines) == 3
