"""Checks of `penstock doctor` on a loader: whether, and how, it can be saved and resumed exactly.

1. First stream: batches without an interruption, with a snapshot after each.
2. Single restores in fresh processes, early to late, at the end of the first epoch and at the start of the first two:
   the batches that follow are compared with the first stream's.
3. Chains of restores: a state of the restored loader is restored in the next process, and once more.
4. Launches, with all four state methods: the states of all workers are aggregated, deaggregated in fresh processes, and
   saved again. If load_state_dict accepts only results of deaggregate_state_dict, they and a new start replace 2 and 3.

A loader without state methods is tested by a new start alone. A run that finds other batches behind a state makes the
epoch again, so even a loader with wrong states can be resumed if it repeats its batches; the verdict names the cost.
"""

from __future__ import annotations

import json
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.deploy.console.exit_codes import CANNOT_SAVE, DIFFERS
from penstock.deploy.loader_processes import LoaderForkServer, Task, run_tasks
from penstock.proto.errors import DeadlineError, InvalidArgumentError, PenstockError
from penstock.worker.processes.control_channel import ControlMessage

TRIALS = "penstock.deploy.doctor.loader_trials"
STATE, METHODS, REPLAY = "state", "methods", "replay"
"""Ways to save a loader: its own state; aggregate_state_dict and deaggregate_state_dict; replay of the epoch."""
COMPARED = 8
"""Most events (batches and ends of epochs) compared after a restore, before the next state is taken."""
_WHERE = {
    "start": "from the start, by replay",
    "early": "after batch {total}",
    "mid": "after batch {total}",
    "end": "after batch {total}, the last of its epoch",
    "second epoch": "at the start of the next epoch (batch {total} done)",
    "late": "after batch {total}",
    "resume": "after batch {total}, by aggregate and deaggregate",
}
GENERATIONS = 3
"""Restores in a chain, each but the first from a state of a loader that was restored before."""
_CHAINED = ("early", "end")
"""Restart points from which chains start."""
_AGAIN = ("", ", saved by a loader that was restored", ", saved by one that was restored twice")


@dataclass(frozen=True)
class LoaderRequest:
    """Loader to examine and settings, as given on the command line."""

    input_fn: str
    args: str
    """Positional arguments of input_fn, as a JSON list."""
    kwargs: str
    """Keyword arguments of input_fn, as a JSON object."""
    batches: int
    workers: int
    replay: bool
    """True if a loader without state methods may be saved by replay."""
    seed: int
    deadline_s: float
    """Longest time of each child process, in seconds."""

    def fields(self, slot: int) -> dict[str, Any]:
        """Return the fields of every task (loader_trials.py), as worker `slot`. Raises InvalidArgumentError."""
        module, _, name = self.input_fn.partition(":")
        if not module or not name:
            raise InvalidArgumentError(
                "the target must be MODULE:NAME, such as mypackage.data:train_input, got "
                f"{self.input_fn!r}. Name a function or a folder"
            )
        return {
            "input_fn": self.input_fn,
            "args": json_option("--args", self.args, list),
            "kwargs": json_option("--kwargs", self.kwargs, dict),
            "slot": slot,
            "workers": self.workers,
            "seed": self.seed,
        }


def json_option(option: str, text: str, kind: type) -> Any:
    """Return the value of a JSON option of this type. Raises InvalidArgumentError."""
    what = "list, such as '[1, \"a\"]'" if kind is list else "object, such as '{\"name\": 1}'"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(f"{option} must be a JSON {what}, got {text!r}: {error}") from error
    if not isinstance(value, kind):
        raise InvalidArgumentError(f"{option} must be a JSON {what}, got {text!r}")
    return value


@dataclass
class LoaderCheck:
    """Result of one restore at a restart point."""

    where: str
    total: int
    """Batches before the restart point, over all epochs of the worker."""
    by_methods: bool
    """True if restored by the loader's aggregate_state_dict and deaggregate_state_dict."""
    generation: int = 1
    """1 for a restore of the first stream's state, 2 for one of the state that this loader saved, ..."""
    exact: bool = True
    differs: int | None = None
    """First batch that differs, from 1; None if none does, or after an error."""
    what: str = ""
    """What differs, or the error's message; "" if the restore was exact."""
    traceback: str = ""


@dataclass
class ExaminedLoader:
    """Loader of one simulated worker, with the results of its checks."""

    slot: int
    capabilities: dict[str, Any]
    streamed: dict[str, Any]
    """Results of the first stream (loader_trials.py): `events`; `looked_at` (input_fn read its assignment);
    `worker_info` (torch's answer to it); `samples`; `unsaved` (why no state could be encoded, or ""); `shared_files`
    (whose offset its own processes share); `state_bytes` (largest)."""
    points: dict[str, tuple[int, bool, bytes]]
    """Restart point -> (batches before it, True at the start of an epoch, encoded state)."""
    rows: Sequence[int] = ()
    """Digests of the first epoch's samples, as far as it was streamed."""
    checks: list[LoaderCheck] = field(default_factory=list)

    @property
    def batches(self) -> int:
        return sum(event[2] is not None for event in self.streamed["events"])

    @property
    def epochs_ended(self) -> int:
        return len(self.streamed["events"]) - self.batches

    def events_after(self, total: int, *, epoch_start: bool) -> list[list[Any]]:
        """Return the first stream's events after `total` batches; `epoch_start`: from the next epoch's first batch."""
        events: list[list[Any]] = self.streamed["events"]
        start = next(
            (i for i, event in enumerate(events) if event[1] > total or (event[1] == total and event[2] is None)),
            len(events),
        )
        at_end = start < len(events) and events[start][2] is None
        return events[start + 1 :] if epoch_start and total and at_end else events[start:]


@dataclass
class LoaderReport:
    request: LoaderRequest
    loaders: list[ExaminedLoader]
    code: int
    saved_by: str | None
    """STATE, METHODS or REPLAY; None: it cannot be saved."""
    verdict: str
    warnings: list[str]


def examine(request: LoaderRequest) -> LoaderReport:
    """Run all checks of a loader. Raises its error if it fails before it can be examined."""
    request.fields(0)
    with LoaderForkServer(TRIALS) as server:
        return examine_in(server, request)


def examine_in(server: LoaderForkServer, request: LoaderRequest) -> LoaderReport:
    """Run all checks in children of this server, whose program is TRIALS."""
    return _Examination(server, request).run()


def _saves(examined: ExaminedLoader) -> bool:
    capabilities = examined.capabilities
    return (
        bool(capabilities["state_methods"]) and not capabilities["not_restartable"] and not examined.streamed["unsaved"]
    )


def _needs_deaggregation(examined: ExaminedLoader) -> bool:
    """Return whether load_state_dict accepts only results of deaggregate_state_dict."""
    return bool(examined.capabilities["state_methods"] == 4 and not examined.capabilities["loads_own_state"])


def _restored(examined: ExaminedLoader) -> Iterator[str]:
    """Yield "start", and the other restart points if the worker's own states can be loaded. Of two points after the
    first epoch's last batch, only "end" is used."""
    end = examined.points.get("end", (0, False, b""))[0]
    for name, (total, epoch_start, _) in examined.points.items():
        alone = _saves(examined) and not _needs_deaggregation(examined)
        if name == "start" or (alone and (name in _CHAINED or epoch_start or total != end)):
            yield name


class _Examination:
    def __init__(self, server: LoaderForkServer, request: LoaderRequest) -> None:
        self._server, self._request = server, request

    def run(self) -> LoaderReport:
        request = self._request
        loaders = [self._stream(slot) for slot in range(request.workers)]
        for examined in loaders:
            for name in _restored(examined):
                self._chain(examined, name)
        if _saves(loaders[0]) and loaders[0].capabilities["state_methods"] == 4:
            self._launches(loaders)
        return LoaderReport(request, loaders, *_verdict(request, loaders), list(_warnings(request, loaders)))

    def _run(
        self, what: str, task: str, slot: int, parts: Sequence[bytes] = (), **fields: Any
    ) -> tuple[ControlMessage, list[ControlMessage]]:
        """Run a task (loader_trials.py) in a fresh child process. Return its answer, and the messages before it."""
        messages: list[ControlMessage] = []
        request = self._request
        with self._server.fork(f"{what}, worker {slot}") as child:
            asked = {child: Task(task, request.fields(slot) | fields, parts=parts)}
            until = time.monotonic() + request.deadline_s
            return run_tasks(asked, until, lambda _, message: messages.append(message))[child], messages

    def _stream(self, slot: int) -> ExaminedLoader:
        request = self._request
        what = f"streaming {request.batches} batches of {request.input_fn}"
        done, messages = self._run(what, "stream", slot, batches=request.batches)
        points = {
            message.fields["name"]: (message.fields["total"], message.fields["epoch_start"], message.payload)
            for message in messages
            if message.kind == "point"
        }
        streamed = dict(done.fields)
        rows = array("Q", next(message.payload for message in messages if message.kind == "rows"))
        return ExaminedLoader(slot, streamed.pop("capabilities"), streamed, points, rows)

    def _restore(
        self, examined: ExaminedLoader, check: LoaderCheck, task: str, parts: Sequence[bytes], **fields: Any
    ) -> bytes | None:
        """Restore the loader in a child process and record whether it yields the first stream's events. Return its
        saved state; None if none was asked for, or after an error or a wrong batch."""
        examined.checks.append(check)
        what = f"restoring {self._request.input_fn} {check.where}"
        answer = self._try(check, what, task, parts, examined.slot, **fields)
        if answer is None:
            return None
        done, messages = answer
        if not done.fields["same"]:
            check.exact, check.differs, check.what = False, done.fields["differs"], done.fields["what"]
        return messages[0].payload if messages else None

    def _try(
        self, check: LoaderCheck, what: str, task: str, parts: Sequence[bytes], slot: int, **fields: Any
    ) -> tuple[ControlMessage, list[ControlMessage]] | None:
        """Run a task of a check; record an error, and return None."""
        try:
            return self._run(what, task, slot, parts, **fields)
        except DeadlineError:
            raise
        except PenstockError as error:
            check.exact, check.what, check.traceback = False, error.message, error.remote_traceback
            return None

    def _chain(self, examined: ExaminedLoader, name: str) -> None:
        """Restore a loader at a restart point; if a chain starts there, again from the state that it saved, ..."""
        total, epoch_start, data = examined.points[name]
        last = GENERATIONS if name in _CHAINED else 1
        for generation in range(1, last + 1):
            events = examined.events_after(total, epoch_start=epoch_start)
            if generation > 1 and not events:
                return
            until = _up_to_a_batch(events[:COMPARED])
            where = (_WHERE[name] if generation == 1 else "after batch {total}").format(total=total)
            check = LoaderCheck(where + _AGAIN[generation - 1], total, False, generation)
            then = [until[-1][1], until[-1][1] * self._request.workers] if generation < last and until else None
            following = self._restore(examined, check, "check", [data], events=events, then=then)
            if following is None or then is None or not check.exact:
                return
            total, epoch_start, data = then[0], False, following

    # ---- launches, by the loader's own aggregate and deaggregate

    def _launches(self, loaders: list[ExaminedLoader]) -> None:
        """Check launches in the first epoch, and chains of them if own states cannot be loaded."""
        for name in ("early", "mid"):
            if not all(_within_first_epoch(examined, name) for examined in loaders):
                continue
            total = loaders[0].points[name][0]
            parts: list[bytes] | None = [examined.points[name][2] for examined in loaders]
            last = GENERATIONS if _needs_deaggregation(loaders[0]) and name in _CHAINED else 1
            for generation in range(1, last + 1):
                if parts is not None:
                    parts = self._launch(loaders, total, parts, generation)
                    total += COMPARED

    def _launch(
        self, loaders: list[ExaminedLoader], total: int, parts: list[bytes], generation: int
    ) -> list[bytes] | None:
        """Resume all workers after `total` batches of each, and compare their next COMPARED ones. Return their encoded
        states then; None after an error or a wrong batch, or if an epoch ends within or right after these.
        `generation`: number of the launch in its chain, from 1."""
        where = _WHERE["resume"].format(total=total) + _AGAIN[generation - 1]
        aggregation = LoaderCheck(where, total, True, generation)
        what = f"aggregate_state_dict() of {self._request.input_fn}"
        answer = self._try(aggregation, what, "aggregate", parts, 0)
        if answer is None:
            loaders[0].checks.append(aggregation)
            return None
        step = total * len(loaders)
        following = []
        for examined, part in zip(loaders, parts, strict=True):
            events = examined.events_after(total, epoch_start=False)[:COMPARED]
            beyond = examined.events_after(total + COMPARED, epoch_start=False)[:1]
            inside = len(events) == COMPARED and all(event[2] is not None for event in [*events, *beyond])
            then = [total + COMPARED, step + COMPARED * len(loaders)] if inside else None
            launch = {"step": step, "totals": [total] * len(loaders)}
            fields = {"events": events, "launch": launch, "then": then}
            check = LoaderCheck(where, total, True, generation)
            following.append(self._restore(examined, check, "resume", [part, answer[0].payload], **fields))
        return [data for data in following if data is not None] if all(following) else None


def _up_to_a_batch(events: list[list[Any]]) -> list[list[Any]]:
    """Leave out ends of epochs after the last batch, after which a state is taken."""
    while events and events[-1][2] is None:
        events = events[:-1]
    return events


def _within_first_epoch(examined: ExaminedLoader, name: str) -> bool:
    if name not in examined.points:
        return False
    after = examined.events_after(examined.points[name][0], epoch_start=False)
    return bool(after) and after[0][0] == 0 and after[0][2] is not None


# ---- the verdict


NO_METHODS = (
    "cannot be saved as it is: the loader has no state_dict and load_state_dict. Give it the methods of "
    "RestartableDataLoader, or save by replay: Appliance(replay=True), which --replay checks here"
)
BAD_METHODS = (
    "With the same numbers of boxes and workers that is an error in a run; with other numbers the run goes on with "
    "other batches"
)
WRONG_STATE = (
    "So a run that finds other batches behind a state makes the epoch again from its start, which takes as long as "
    "making those batches. Does the loader count after its `yield`, prefetch in the background, count twice after a "
    "restore, or omit generators from its state?"
)


def _verdict(request: LoaderRequest, loaders: list[ExaminedLoader]) -> tuple[int, str | None, str]:
    """Return the exit code, how the loader is saved (None: not at all), and the verdict."""
    capabilities = loaders[0].capabilities
    reasons = [capabilities["not_restartable"], *(examined.streamed["unsaved"] for examined in loaders)]
    if any(reasons):
        return CANNOT_SAVE, None, f"cannot be saved: {next(filter(None, reasons))}"
    wrong = [check for examined in loaders for check in examined.checks if not check.exact]
    if (again := next((check for check in wrong if check.where == _WHERE["start"]), None)) is not None:
        return DIFFERS, None, _not_repeatable(again, shared_files=any(_shared_files(loaders)))
    if not capabilities["state_methods"]:
        if request.replay:
            return 0, REPLAY, "can be saved and resumed exactly, by replay from the start of the epoch"
        return CANNOT_SAVE, None, NO_METHODS
    for check in reversed(wrong):
        if check.by_methods:
            what = f"restored {check.where}, {check.what}"
            return DIFFERS, REPLAY, f"cannot be resumed by its own methods: {what}. {BAD_METHODS}"
    if wrong:
        what = f"restored {wrong[0].where}, {wrong[0].what}"
        return 0, REPLAY, f"can be saved at any step and resumed exactly, by counted replay: {what}. {WRONG_STATE}"
    own = METHODS if _needs_deaggregation(loaders[0]) else STATE
    return 0, own, "can be saved at any step and resumed exactly"


def _not_repeatable(check: LoaderCheck, *, shared_files: bool) -> str:
    if check.differs is None:
        return (
            f"cannot be resumed: started again in a fresh process, the loader fails ({check.what}). Let input_fn "
            "succeed each time that it is called, also if files or locks of an earlier call are still there"
        )
    if shared_files:
        return f"cannot be resumed: after a new start it yields other batches ({check.what}). See the shared file below"
    return (
        f"cannot be resumed: after a new start it yields other batches ({check.what}). Draw random numbers from the "
        "seeded generators of python, numpy and torch, or seed your own from current_assignment().seed, not from the "
        "clock or the system's entropy"
    )


def _equal_samples(loaders: list[ExaminedLoader]) -> Iterator[str]:
    """Warn of samples that several workers stream. If the data repeat themselves, so do one worker's samples: some 2 *
    (W - 1) shared ones for each repetition within one of W workers."""
    streamed_by = Counter(digest for examined in loaders for digest in set(examined.rows))
    total = sum(len(examined.rows) for examined in loaders)
    shared = sum(streamed_by[digest] > 1 for examined in loaders for digest in examined.rows)
    repeated = sum(len(examined.rows) - len(set(examined.rows)) for examined in loaders)
    if shared > 4 * len(loaders) * repeated:
        yield (
            f"{shared} of {total} samples of the first epoch come from more than one of the {len(loaders)} workers. "
            "Unless the data hold equal samples, the workers' shares overlap: divide the input once, by "
            "penstock.worker.current_assignment() or torch's get_worker_info()"
        )


def _shared_files(loaders: list[ExaminedLoader]) -> Iterator[str]:
    files = sorted({path for examined in loaders for path in examined.streamed["shared_files"]})
    if files:
        yield (
            f"the loader's own processes share {', '.join(files[:3])}, which was open when they were forked, and its "
            "offset: they read wrong rows at times. Open it in each process, at its first use"
        )


def _wrong_length(loaders: list[ExaminedLoader]) -> Iterator[str]:
    for examined in loaders:
        length, epoch = examined.capabilities["length"], [e for e in examined.streamed["events"] if e[0] == 0]
        batches = sum(digest is not None for _, _, digest in epoch)
        if 0 <= length != batches and (epoch[-1][2] is None or batches > length):
            yield (
                f"len() of worker {examined.slot}'s loader is {length}, and its first epoch has "
                f"{batches}{'' if epoch[-1][2] is None else ' or more'} batches. A loop that counts on len() ends too "
                "early or too late, or the worker's share is smaller than meant. Let len() be the number of batches "
                "that this worker makes"
            )
            return


def _warnings(request: LoaderRequest, loaders: list[ExaminedLoader]) -> Iterator[str]:
    from penstock.proto.state.found_generators import SAME_DRAWS, same_draws  # imports torch

    digests = [[event[2] for event in examined.streamed["events"] if event[2] is not None] for examined in loaders]
    reads_assignment = any(examined.streamed["looked_at"] for examined in loaders)
    if request.workers > 1 and (not reads_assignment or all(each == digests[0] for each in digests)):
        why = "and all stream the same batches" if reads_assignment else "and the loader never reads its assignment"
        yield (
            f"there are {request.workers} workers, {why}, so each worker streams the whole input. Shard the input by "
            "penstock.worker.current_assignment() or torch's get_worker_info()"
        )
    else:
        yield from _equal_samples(loaders)
    if same_draws([examined.capabilities["generators_state"] for examined in loaders]):
        yield f"random generators {loaders[0].capabilities['generators']}. {SAME_DRAWS}"
    yield from _wrong_length(loaders)
    yield from _shared_files(loaders)
    if all(len(set(each)) == 1 for each in digests):
        yield "all batches are the same, so a wrong batch cannot be detected. Check with real data"
