"""Runner of a pure loader: the slot's process waits between epochs, and forks a process for each epoch.

    this process    import, input_fn ── wait for the next epoch ── fork ── wait for the child ── take over ──┐
                                                ▲                                                            │
                                                └────────────────────────────────────────────────────────────┘
    child           go to the position (a replay, or a snapshot and a replay) ── stream ── END ── hand over ── end

Epoch start, resume, recovery and migration are one operation. While a child lives, it alone uses sockets, ring and
page. A wrong way to the position ends the child, and the next way gets a new one. A migration's target goes near the
loop's position while the old runner serves, and on from there once the loop's Hello names the true one. If that is not
ahead in the same epoch, the child ends, and the slot begins as after a loss.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from penstock.proto.errors import LaneLostError, PenstockError
from penstock.proto.v1 import lane_pb2
from penstock.worker.loader.epoch_goal import EpochGoal
from penstock.worker.loader.restart_plan import is_compared, replay_s
from penstock.worker.loader.restart_points import UNFIT, RestartPoint
from penstock.worker.loader.slot_loader import part_of
from penstock.worker.loader.start import saved_goal, start
from penstock.worker.loader.travel import begin, finish, reach
from penstock.worker.processes.control_channel import DescriptorsClosedError
from penstock.worker.runner.epoch_process import Outcome, run_epoch
from penstock.worker.runner.slot_stream import SlotStream, StartData, StopError
from penstock.worker.runner.user_errors import told

_log = logging.getLogger("penstock.worker")


class _AsideError(Exception):
    """A migration's target is not on the way to the position of the loop's Hello."""


class EpochRunner:
    """Control of a pure loader's slot. build: calls input_fn in each child; None: called here, the children inherit the
    loader."""

    def __init__(self, stream: SlotStream, sent: StartData, build: Callable[[], None] | None = None) -> None:
        self._stream, self._sent, self._build = stream, sent, build
        self._replay_s = replay_s(stream.assignment.loader.options)
        self._ready = False
        self._way = 0
        self._seeds: tuple[int, ...] = ()
        """Hashes of the states in which input_fn has left the loader's generators."""
        self._last_chain = (-1, 0)
        self._told_equal = False
        self._to_prepare: tuple[int, bool] | None = None
        """See SlotStream.on_prepare."""
        self._files = {} if build is not None else _offsets()

    def run(self) -> None:
        self._stream.source.learn_resume(self._sent.resume)
        self._stream.on_prepare = self._note_prepare
        goal = self._first_goal()
        self._stream.source.learn_labels(self._stream.producer.labels)  # first batches were made under these
        self._stream.source.learn_firsts(self._sent.firsts)
        while True:
            outcome = self._in_child(goal)
            goal = self._next_goal(goal, outcome) if outcome is not None else self._left_goal(goal)
            goal = self._await_epoch(goal)

    def _in_child(self, goal: EpochGoal | None) -> Outcome | None:
        stream = self._stream
        for fd, offset in self._files.items():
            with contextlib.suppress(OSError):
                os.lseek(fd, offset, os.SEEK_SET)
        stream.source.learn_labels(stream.producer.labels)
        a = stream.assignment
        title = f"penstock-epoch {a.run} box {a.box} slot {a.slot}"
        epoch = goal.epoch if goal is not None and goal.prepares else None
        outcome = run_epoch(
            title,
            lambda show: self._child(goal, show),
            stream.source.drop,
            stream.page.made_by,
            stream.producer,
            lambda: stream.has_unread_break(epoch),
        )
        stream.page.refresh()
        stream.page.made_by(0)
        if outcome is None:
            return None
        stream.producer.take_over(outcome.record["producer"], outcome.fds)
        if outcome.record["hello"]:
            stream.hello = lane_pb2.Hello.FromString(outcome.record["hello"])
        stream.points = [RestartPoint.decode(data) for data in outcome.record["points"]]
        stream.source.learn_firsts(outcome.record["firsts"])
        if outcome.record["why"] == "stopped":
            raise StopError
        return outcome

    # ---- in this process, between two epochs

    def _first_goal(self) -> EpochGoal | None:
        """Return where the slot begins; None if the child must find it by the state to resume from."""
        stream = self._stream
        if not stream.assignment.recovery:
            return None
        self._send_ready()
        stream.doing("waiting")
        while stream.hello is None:
            stream.serve(None)
            if stream.hello is None and self._to_prepare is not None:
                points, (total, loop_waits) = [*self._sent.points, *stream.points], self._to_prepare
                goal = EpochGoal.prepared(points, total, loop_waits=loop_waits, replay_s=self._replay_s)
                if goal is not None:
                    return goal
                self._to_prepare = None
                stream.prepared(0)
        return self._goal_of_hello()

    def _note_prepare(self, total: int, loop_waits: bool) -> None:
        self._to_prepare = total, loop_waits

    def _goal_of_hello(self) -> EpochGoal:
        stream = self._stream
        while (hello := stream.hello) is None:
            stream.serve(None)
        total = hello.next_total - 1
        points = [*self._sent.points, *stream.points]
        samples = max((point.position.samples for point in points if point.total <= total), default=0)
        self._seeds = next((point.seeds for point in points if point.seeds), ())
        if stream.producer.abandoned:
            return self._after_abandoned(samples)
        limit_s = 0.0 if stream.assignment.spares_memory else self._replay_s
        return EpochGoal.within(hello.epoch, total, hello.began, points, hello.chain, replay_s=limit_s)

    def _next_goal(self, goal: EpochGoal | None, outcome: Outcome) -> EpochGoal | None:
        record = outcome.record
        if record["why"] == "aside":
            self._way = 0
            return self._goal_of_hello()
        if record["why"] == "unfit":
            if goal is not None and goal.prepares and self._stream.hello is not None:
                goal = self._goal_of_hello()
                self._way = len(goal.ways) - 1
            else:
                self._way += 1
            return goal
        self._ready, self._way, self._seeds = True, 0, tuple(record["seeds"])
        epoch, _, total, samples = record["position"]
        if record["iterable"] and self._speaks:
            self._tell_equal(epoch, total)
        return self._beginning(epoch, total, samples)

    def _left_goal(self, goal: EpochGoal | None) -> EpochGoal:
        self._ready, self._way = True, 0
        stream = self._stream
        if goal is not None and goal.prepares:
            stream.hello = None
            stream.begin_anew()
            return self._goal_of_hello()
        if self._build is None:
            self._seeds = stream.source.seeds
        stream.doing("waiting")
        stream.begin_anew()
        while not stream.producer.abandoned:  # the child had read it at last: the next Hello says it again
            stream.serve(None)
        return self._after_abandoned(stream.page.samples if goal is None else goal.ways[-1].position.samples)

    def _beginning(self, epoch: int, total: int, samples: int) -> EpochGoal:
        return replace(EpochGoal.beginning(epoch, total, samples), seeds=self._seeds)

    def _await_epoch(self, goal: EpochGoal | None) -> EpochGoal | None:
        """Wait until the training job allows the epoch of the goal, or abandons one: then return another goal."""
        stream = self._stream
        if goal is None or not self._ready or goal.prepares:
            return goal
        while True:
            if stream.producer.abandoned:
                goal = self._after_abandoned(goal.ways[-1].position.samples)
            if stream.producer.open_epochs >= goal.epoch:
                return goal
            stream.doing("waiting")
            stream.serve(None)

    def _after_abandoned(self, samples: int) -> EpochGoal:
        """Return the epoch after the last abandoned one. samples: up to the last delivered batch, if the page does not
        know it."""
        stream = self._stream
        producer, page = stream.producer, stream.page
        while producer.abandoned:
            epoch = producer.abandoned.popleft()
        delivered = page.entry(producer.delivered)
        samples = samples if delivered is None else delivered.samples
        stream.left(epoch, producer.delivered, samples)
        return self._beginning(epoch + 1, producer.delivered, samples)

    def _send_ready(self) -> None:
        self._stream.channel.send("ready", self._stream.source.capabilities.SerializeToString())
        self._ready = True

    # ---- in the child

    def _child(self, goal: EpochGoal | None, show_lane: Callable[[int], None]) -> Outcome:
        stream = self._stream
        stream.on_lane = show_lane
        stream.host_user_code()
        stream.space_snapshots(self._replay_s / 2)
        stream.producer.map_rings()
        try:
            if not self._arrive(goal):
                return self._outcome("unfit")
        except _AsideError:
            return self._outcome("aside")
        except (StopError, LaneLostError):
            return self._outcome("stopped")
        source = stream.source
        before = source.numbers() if not source.position.total and self._speaks else None
        try:
            stream.stream_epoch()
        except (StopError, LaneLostError):
            return self._outcome("stopped")
        except DescriptorsClosedError:
            raise
        except Exception as error:
            self._fail(error)
            return self._outcome("stopped")
        if before is not None:
            self._tell_changed(before, source.numbers())
        if source.is_open:  # the loop has abandoned an epoch, which the slot's process handles
            source.leave_epoch()
        return self._outcome("over")

    @property
    def _speaks(self) -> bool:
        """True if this process logs what is the same in all slots."""
        return not (self._stream.assignment.box or self._stream.assignment.slot)

    def _tell_changed(self, before: dict[str, float], after: dict[str, float]) -> None:
        changed = [name for name, value in after.items() if before.get(name, value) != value]
        if changed:
            _log.warning(
                "%s: %s changed during epoch 0. Each epoch begins with what input_fn left: make what depends on the "
                "epoch follow from set_epoch(), or from current_assignment().epoch",
                self._stream.source.name,
                ", ".join(changed[:8]),
            )

    def _tell_equal(self, epoch: int, total: int) -> None:
        page = self._stream.page
        last = page.entry(total)
        if last is None or last.epoch != epoch - 1 or page.ends().get(epoch - 1) != total:
            return
        before, self._last_chain = self._last_chain, (epoch - 1, last.chain)
        if before == (epoch - 2, last.chain) and not self._told_equal:
            self._told_equal = True
            _log.warning(
                "%s: epochs %d and %d have equal batches, because each begins with what input_fn left. If they should "
                "differ, give the dataset a method set_epoch(epoch), or read current_assignment().epoch",
                self._stream.source.name,
                epoch - 2,
                epoch - 1,
            )

    def _fail(self, error: Exception) -> None:
        with contextlib.suppress(StopError, LaneLostError):
            self._stream.fail(error)

    def _arrive(self, goal: EpochGoal | None) -> bool:
        """Go to the first position, and report the slot ready. Return False if another way remains to try; an error
        ends the slot."""
        stream = self._stream
        try:
            if self._build is not None:
                self._build()
            return not self._go(goal)
        except (StopError, LaneLostError, DescriptorsClosedError, _AsideError):
            raise
        except Exception as error:
            if self._ready:
                self._fail(error)
            else:
                stream.channel.send("failed", error=told(error))
            raise StopError from error

    def _go(self, goal: EpochGoal | None) -> bool:
        stream = self._stream
        source, sent = stream.source, self._sent
        if goal is None:
            if part_of(stream.assignment, sent.resume) is None:
                self._start_anew()
                return False
            goal = saved_goal(source, cast(dict[str, Any], sent.resume))
        way = goal.ways[self._way]
        try:
            if goal.prepares:
                self._follow(goal, way)
            else:
                reach(source, goal, way, stream.seek)
        except UNFIT as error:
            if self._way + 1 == len(goal.ways):
                if goal.prepares and stream.hello is None:  # the training job gets the error, if it comes again
                    self._await_hello_at(0)
                    raise _AsideError from error
                raise
            source.log_unfit(error)
            stream.channel.send("unfit", what=f"{getattr(error, 'message', error)}. The epoch was made again instead")
            return True
        self._arrived(way, goal.ways[-1])
        return False

    def _follow(self, goal: EpochGoal, way: RestartPoint) -> None:
        """Go near the loop, which another runner serves, then where its Hello says. Raises _AsideError if that is not
        ahead in this epoch, or too near to compare `way`."""
        stream, source = self._stream, self._stream.source

        def is_compared_now() -> bool:
            total = source.position.total
            return way.is_epoch_start or is_compared(way, total, source.spent_s, self._replay_s)

        def is_enough() -> bool:
            return stream.hello is not None or (source.position.total >= goal.total and is_compared_now())

        begin(source, goal, way)
        is_open, total = stream.follow(is_enough), source.position.total
        hello = self._await_hello_at(total)
        there = (hello.epoch, hello.began, True) == (goal.epoch, way.began, is_open)
        if stream.producer.abandoned or not there or hello.next_total <= total:
            raise _AsideError
        finish(source, replace(goal, total=hello.next_total - 1, chain=hello.chain), way, stream.seek)
        if not is_compared_now():
            raise _AsideError

    def _await_hello_at(self, total: int) -> lane_pb2.Hello:
        """Report that the slot may migrate after batch `total`, and wait for the Hello."""
        stream = self._stream
        if stream.hello is None:
            stream.prepared(total)
            stream.doing("waiting")
        while stream.hello is None:
            stream.serve(None)
        return stream.hello

    def _start_anew(self) -> None:
        """Begin without a position of this slot: fresh, between epochs, or from another topology, which the loader
        divides."""
        stream = self._stream
        start(stream.source, self._sent.resume, lambda point, begins: self._arrived(point, point), stream.seek)

    def _arrived(self, way: RestartPoint, beginning: RestartPoint) -> None:
        stream = self._stream
        source, page = stream.source, stream.page
        for point in (beginning, way) if way is not beginning else (way,):
            stream.keep(point, start=True, epoch_start=point.is_epoch_start)
        if not self._ready:
            self._probe()
            self._send_ready()
        page.set_position(source.position.total, source.position.epoch, source.position.samples)

    def _probe(self) -> None:
        """Count a loader as one without state methods if state_dict() raises at the beginning: it is then saved only
        with replay=True."""
        stream = self._stream
        source = stream.source
        if source.capabilities.state_methods == 2:
            try:
                source.state(stream.step_of(source.position.total))
            except PenstockError as error:
                source.capabilities.state_methods = 0
                if not stream.assignment.loader.options.replay_without_state:
                    source.capabilities.not_restartable = (
                        f"its state_dict() fails at the beginning ({error.message.splitlines()[0]:.300}). Correct it, "
                        "or save by replay: Appliance(replay=True)"
                    )

    def _outcome(self, why: str) -> Outcome:
        stream = self._stream
        stream.release_lease()
        position = stream.source.position
        producer, fds = stream.producer.hand_over()
        return Outcome(
            {
                "why": why,
                "position": position.as_list(),
                "seeds": [*stream.source.seeds],
                "iterable": stream.source.is_iterable,
                "producer": producer,
                "hello": b"" if stream.hello is None else stream.hello.SerializeToString(),
                "points": [point.encode() for point in stream.points] if why in ("aside", "unfit") else [],
                "firsts": [[*key, digest] for key, digest in stream.source.awaited.items()],
            },
            fds,
        )


def _offsets() -> dict[int, int]:
    """Return offsets of open regular files, which a child shares."""
    offsets = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            fd = int(name)
            if fd > sys.stderr.fileno() and stat.S_ISREG(os.fstat(fd).st_mode):
                offsets[fd] = os.lseek(fd, 0, os.SEEK_CUR)
    return offsets
