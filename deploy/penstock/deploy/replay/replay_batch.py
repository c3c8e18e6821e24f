"""`penstock replay`: recreates a delivered batch on this machine. The loader, user code that the run names, runs in
child processes, and only if the caller allows its module: another user may have written the name."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.deploy.doctor.loader_check import json_option
from penstock.deploy.loader_processes import LoaderForkServer, LoaderProcess, Task, run_tasks
from penstock.deploy.operations.show_state import run_name
from penstock.deploy.replay.stream_replay import StreamReplay
from penstock.proto.errors import (
    BoxOutOfRangeError,
    InputFnNotAllowedError,
    InputFnNotFoundError,
    InvalidArgumentError,
    ReplayMismatchError,
    StateUnavailableError,
    UnknownRunError,
)
from penstock.proto.state.allowed_modules import module_of, under
from penstock.proto.state.loader_names import MAIN, loader_name, name_of
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.runtime.telemetry.progress import Progress
from penstock.runtime.telemetry.units import seconds
from penstock.worker.processes.control_channel import ControlMessage

if TYPE_CHECKING:
    from penstock.client.states.saved_state import SavedState
    from penstock.deploy.replay.plan import ReplayPlan
    from penstock.proto.rpc.calls import CoordinatorClient


@dataclass(frozen=True)
class ReplayRequest:
    """Batch to replay, and where its history is. Raises InvalidArgumentError for invalid values."""

    run: str | None
    """None: from a checkpoint alone."""
    step: int
    box: int = 0
    out: Path | None = None
    checkpoints: Sequence[Path] = ()
    args: str | None = None
    """Arguments of input_fn as JSON, like `kwargs`; None: the run's, if there is one."""
    kwargs: str | None = None
    allow: Sequence[str] = ()
    script: Path | None = None
    """Script that defines the input_fn, if it was the job's main script."""
    deadline_s: float = 3600.0

    def __post_init__(self) -> None:
        if self.run is None and not self.checkpoints:
            raise InvalidArgumentError(
                "RUN or --checkpoint must be given, got neither. Name the run as `penstock status` shows it"
            )
        if self.run is None and not (self.allow or self.script):
            raise InputFnNotAllowedError(
                "--allow must permit the input_fn of the checkpoint's run, because the replay runs it on this machine. "
                "Pass --allow and its package, or --script if it is in the training script"
            )
        if self.out is not None:
            _check_out(self.out)


def _check_out(out: Path) -> None:
    from penstock.deploy.operations.batch_tables import FORMATS  # imports torch

    if out.suffix not in FORMATS:
        raise InvalidArgumentError(
            f"--out must end with one of {', '.join(FORMATS)}, got {out}. Choose one of these endings"
        )
    if not out.absolute().parent.is_dir():
        raise InvalidArgumentError(f"--out must be in an existing directory, got {out}. Make the directory first")


def replay(
    request: ReplayRequest, client: CoordinatorClient | None, server: LoaderForkServer | None = None
) -> dict[str, Any]:
    """Return the batch's content and origin. `client`: of the coordinator that knows the run, if one is given;
    `server`: None: a new one. Raises the error that prevents the replay; ReplayMismatchError if the batch differs from
    the delivered one."""
    histories = [] if client is None else _histories(request, client)
    # imported here, because torch, which they import, takes seconds, before which the errors above are raised
    from penstock.deploy.operations.saved_file import read_state
    from penstock.deploy.replay.plan import attempt_of, plan

    if histories:
        history = attempt_of(histories, request.box, request.step)
        saved = [read_state(path, history.opening.loader.input_fn) for path in request.checkpoints]
    else:
        saved = sorted((read_state(path, None) for path in request.checkpoints), key=lambda state: state.step)
        history = _of_checkpoint(saved[0], request)
    steps = plan(history, saved, request.step)
    history.opening.loader.CopyFrom(_loader(request, history, client))
    with ExitStack() as closing:
        server = server or closing.enter_context(LoaderForkServer("penstock.deploy.replay.slot_replay"))
        children = [
            closing.enter_context(server.fork(f"replaying worker slot {slot}"))
            for slot in range(history.opening.num_workers_per_box)
        ]
        return _BatchReplay(request, history, steps, client, children).run()


def _histories(request: ReplayRequest, client: CoordinatorClient) -> Sequence[pb.History]:
    name = run_name(cast(str, request.run))
    histories = client.fetch_histories(name, request.box)
    if not histories:
        raise UnknownRunError(
            f"the coordinator at {client.address} has no record of box {request.box} of run {name}. `penstock "
            "status --all` lists the runs; one that ended long ago can be replayed only from a --checkpoint"
        )
    if not (request.allow or request.script):
        _check_allowed(request, histories[-1].opening.loader.input_fn)
    return histories


def _check_allowed(request: ReplayRequest, input_fn: str) -> None:
    module = module_of(input_fn)
    if module == MAIN:
        if request.script is None:
            raise InputFnNotFoundError(
                f"--script must be given, because input_fn {loader_name(input_fn)!r} is defined in the main script of "
                'its job. The script is imported without running what is under `if __name__ == "__main__":`'
            )
    elif not under(module, request.allow):
        raise InputFnNotAllowedError(
            f"--allow must permit the run's input_fn, {input_fn}, because the replay runs it on this machine. "
            f"Pass --allow {module.partition('.')[0]}"
        )


def _of_checkpoint(saved: SavedState, request: ReplayRequest) -> pb.History:
    """Return the history that a saved state tells: without the arguments of input_fn."""
    if saved.step >= request.step or not saved.positions:
        have = f"only steps from {saved.step + 1} on" if saved.positions else "its run had not begun"
        raise StateUnavailableError(
            f"the checkpoint of step {saved.step} cannot be used to replay step {request.step}: {have}. Pass another "
            "checkpoint, or name the RUN"
        )
    if request.box >= saved.num_boxes:
        raise BoxOutOfRangeError(
            f"--box must be from 0 to {saved.num_boxes - 1}, the boxes of the checkpoint, got {request.box}"
        )
    history = pb.History(attempt=0)
    opening = history.opening
    opening.box, opening.num_boxes = request.box, saved.num_boxes
    opening.num_workers_per_box = saved.num_workers_per_box
    opening.has_seed, opening.seed = True, saved.seed or 0
    opening.loader.input_fn, opening.loader.title = saved.input_fn, saved.title
    opening.loader.options.full_digest, opening.loader.options.row_digest = saved.full_digest, saved.by_rows
    opening.start.CopyFrom(saved.positions[request.box].to_proto())
    return history


def _loader(request: ReplayRequest, history: pb.History, client: CoordinatorClient | None) -> records_pb2.LoaderSpec:
    """Return what the child processes need to import and call input_fn."""
    from penstock.proto.state.codec import decode_state, encode_state

    opened = history.opening.loader
    _check_allowed(request, opened.input_fn)
    spec = records_pb2.LoaderSpec(input_fn=opened.input_fn, options=opened.options, allow=request.allow)
    if module_of(opened.input_fn) == MAIN:
        spec.main_path = str(cast(Path, request.script).absolute())
    arguments: Any = {"args": (), "kwargs": {}}
    if client is not None and (request.args is None or request.kwargs is None):
        remedy = "Pass both --args and --kwargs"
        blob = opened.arguments_blob
        data = _stored(client, blob, f"the arguments of {name_of(opened)}", remedy) if blob else opened.arguments
        arguments = decode_state(data) if data else arguments
    if request.args is not None:
        arguments["args"] = tuple(json_option("--args", request.args, list))
    if request.kwargs is not None:
        arguments["kwargs"] = json_option("--kwargs", request.kwargs, dict)
    spec.arguments = encode_state(arguments)
    return spec


def _stored(client: CoordinatorClient, blob: str, what: str, remedy: str) -> bytes:
    """Return a large value that the coordinator stored by itself."""
    try:
        return client.get_blob(blob)
    except StateUnavailableError as error:
        raise StateUnavailableError(f"the coordinator no longer has {what}. {remedy}") from error


def _publish(part: Path, out: Path) -> None:
    try:
        os.replace(part, out)
    except OSError as error:
        raise InvalidArgumentError(f"--out {out} cannot be written: {error.strerror}. Pass another path") from error


class _BatchReplay:
    """Replay of a delivered batch by a plan (plan.py). `children`: by worker slot, with slot_replay.py as program."""

    def __init__(
        self,
        request: ReplayRequest,
        history: pb.History,
        plan: ReplayPlan,
        client: CoordinatorClient | None,
        children: Sequence[LoaderProcess],
    ) -> None:
        self._request, self._history, self._plan, self._client = request, history, plan, client
        self._children = children
        self._began = time.monotonic()
        self._made: dict[LoaderProcess, int] = {}
        self._line = Progress()

    def _ask(self, tasks: Mapping[int, Task]) -> dict[int, ControlMessage]:
        """Run tasks in these slots' children at the same time, and return the answers by slot."""
        asked = {self._children[slot]: task for slot, task in tasks.items()}
        answers = run_tasks(asked, self._began + self._request.deadline_s, self._show_progress)
        return {slot: answers[self._children[slot]] for slot in tasks}

    def run(self) -> dict[str, Any]:
        """Advance to the step, read the batch, advance to the digest. Return the batch's content and origin."""
        request = self._request
        start = self._plan.start.position
        count = len(start.total)
        print(
            f"penstock: replaying box {request.box} from {self._where}: {request.step - start.step} steps of {count} "
            "workers",
            file=sys.stderr,
            flush=True,
        )
        self._ask({slot: self._begin(slot) for slot in range(count)})
        stream = StreamReplay(self._ask, start, self._plan.abandoned)
        stream.to(request.step)
        reached, slot = stream.at.copy(), stream.slot
        out = None if request.out is None else request.out.absolute()
        part = None if out is None else out.with_name(f".{secrets.token_hex(8)}{out.suffix}")
        try:
            shown = self._ask({slot: Task("show", {"out": part and str(part)})})[slot]
            verified, why = self._verify(stream)
            if part is not None and out is not None:
                _publish(part, out)
        finally:
            if part is not None:
                part.unlink(missing_ok=True)
            self._line.finish()
        opening = self._history.opening
        return {
            "run": request.run and run_name(request.run),
            "attempt": self._history.attempt or None,
            "box": request.box,
            "step": request.step,
            "slot": slot,
            "worker_step": reached.total[slot],
            "epoch": reached.epoch,
            "input_fn": name_of(opening.loader),
            "seed": opening.seed,
            "num_boxes": opening.num_boxes,
            "num_workers_per_box": opening.num_workers_per_box,
            "replayed_from": {"step": start.step, "what": self._where},
            "verified": verified,
            "verification": why,
            "digest": f"{shown.fields['digest']:016x}",
            **json.loads(shown.payload),
            "out": out and str(out),
        }

    @property
    def _where(self) -> str:
        start = self._plan.start
        if start.checkpoint is not None or not self._history.attempt:
            return f"the checkpoint of step {start.position.step}"
        if None not in self._plan.snapshots and start.position.step > self._history.opening.start.step:
            return f"snapshots before step {start.position.step + 1}"
        return f"the start of attempt {self._history.attempt} (step {self._history.opening.start.step})"

    def _begin(self, slot: int) -> Task:
        opening, start = self._history.opening, self._plan.start
        position, saved = start.position, start.checkpoint
        slots = self._history.slots
        assignment = records_pb2.WorkerAssignment(
            run=self._request.run or "replay/0",
            attempt=max(1, self._history.attempt),
            box=opening.box,
            slot=slot,
            generation=1,
            num_boxes=opening.num_boxes,
            num_workers_per_box=opening.num_workers_per_box,
            seed=opening.seed,
            loader=opening.loader,
            resume=opening.resume,
            start=opening.start,
            skips=slots[slot].skips if slot < len(slots) else (),
            mixture_changes=self._history.mixture_changes,
        )
        header, parts = None, []
        if saved is not None:
            begun = saved.start(opening.box, opening.num_boxes, opening.num_workers_per_box, strict=True)
            assignment.resume.CopyFrom(begun.resume("checkpoint"))
            assignment.start.CopyFrom(begun.position)
            parts = [begun.blob]
        elif (header := self._plan.snapshots[slot]) is not None:
            assert self._client is not None
            parts = [self._client.fetch_snapshot(header)]
        elif opening.resume.blob:
            assert self._client is not None
            what = f"the state of step {opening.start.step} from which attempt {self._history.attempt} was resumed"
            remedy = "Pass the file with that state (--checkpoint)"
            parts = [_stored(self._client, opening.resume.blob, what, remedy)]
        fields = {
            "snapshot": header is not None,
            "epoch": position.epoch,
            "total": position.total[slot],
            "live": slot in position.live,
        }
        return Task("start", fields, assignment.SerializeToString(), parts)

    def _verify(self, stream: StreamReplay) -> tuple[bool, str]:
        """Compare the stream digest, if the plan says where. Return whether it was compared, and a text."""
        check, first = self._plan.check, self._plan.start.position.step + 1
        if check is None:
            return False, f"not verified: {self._plan.unverified}"
        stream.to(check.step)
        if stream.chain() != check.chain or stream.at.total != check.total:
            raise ReplayMismatchError(
                f"the stream digest of the replayed steps {first} to {check.step} of box {self._request.box} must "
                f"equal that of the delivered batches, {check.chain or 0:016x}, got {stream.chain() or 0:016x}. The "
                f"data or the code has changed, or {name_of(self._history.opening.loader)} is not deterministic: run "
                "`penstock doctor`"
            )
        return True, f"verified by the stream digest of steps {first} to {check.step}"

    def _show_progress(self, child: LoaderProcess, message: ControlMessage) -> None:
        """Show on standard error how many batches the workers have made."""
        self._made[child] = message.fields["total"]
        start: Position = self._plan.start.position
        made = max(0, sum(total - start.total[self._children.index(at)] for at, total in self._made.items()))
        note = seconds(time.monotonic() - self._began)
        self._line.count("penstock:", made, self._request.step - start.step, "batches", note)
