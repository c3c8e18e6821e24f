"""`AsyncCheckpointer`: model, optimizer and data position of one step, saved while the training continues.

    save:  collect ─> agree with the other ranks ─> stage to shared memory ─> send to the writer process ─> return
                                                                                     │
    files in their place ─> commit by rank 0's writer <──────────────────────────────┘

The ranks communicate only in `save` and `restore`, on the training thread: one small exchange, and a larger one if the
structure of the state has changed. Each rank learns from its writer how a save ended, and shares the result at the next
save, so either all ranks raise an error, or none. One exception: a rank that fails when it copies its values raises
that at once, and all ranks raise it at the next save."""

from __future__ import annotations

import gc
import json
import logging
import os
import secrets
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch.distributed as dist

from penstock.client.checkpoint.restoring.check import differences
from penstock.client.checkpoint.restoring.places import FolderPlace, PinnedCheckpoint, place_at
from penstock.client.checkpoint.restoring.restore import TRIES, LoadedCheckpoint, chosen, load
from penstock.client.checkpoint.saving.agreement import AgreedSave, Agreement
from penstock.client.checkpoint.saving.ranks import Ranks
from penstock.client.checkpoint.saving.save_lock import CallLock, SignalWatch
from penstock.client.checkpoint.saving.staging import Staged, StagingBuffer
from penstock.client.checkpoint.saving.writer_process import PendingSave, WriterProcess, wait_all
from penstock.client.stream import open_streams
from penstock.proto.errors import CheckpointError, InvalidArgumentError, PenstockError
from penstock.runtime.process.forks import OwnerProcess

_log = logging.getLogger("penstock.checkpoint")

OnExit = Literal["finish", "abandon"]
LONGEST_S = 30 * 86400.0


@dataclass(frozen=True)
class Progress:
    """Progress of this rank's saves that are not on the disk yet."""

    step: int | None
    """Step whose checkpoint is being written; None if none is being written."""
    written: int
    """Number of bytes written so far, for all saves that are not on the disk yet."""
    total: int
    """Number of bytes to write in all, for all saves that are not on the disk yet."""


class AsyncCheckpointer:
    """Checkpoints in a folder or a bucket: saved asynchronously, committed atomically, restored on any number of ranks.

    Every rank creates an AsyncCheckpointer, and all ranks call `save` and `restore` together. A checkpoint exists
    completely, with model and loader at the same step, or not at all.

    Example::

        with AsyncCheckpointer("/shared/run-1", keep_last=3) as checkpointer:
            checkpointer.restore({"model": model, "optimizer": optimizer, "loader": loader})
            for step, batch in enumerate(loader):
                ...
                if step % 100 == 0:
                    checkpointer.save(step, {"model": model, "optimizer": optimizer, "loader": loader})

    Args:
        folder: path that all ranks see, created if missing; or s3://BUCKET/RUN in an object store that speaks S3 and
            knows conditional writes, which no other running job may use.
        local: for a bucket: folder on this machine's disk for copies of this rank's files of the newest checkpoint. A
            restore reads what is undamaged there, and the rest from the bucket. Only the bucket says which checkpoints
            exist.
        storage_options: for a bucket: options of s3fs, such as a key or an endpoint, in values of JSON; else the
            environment and the machine's role decide, as for other programs.
        keep_last: number of the newest checkpoints to keep, others are deleted; None: keep all.
        keep_every: also keep the checkpoints at multiples of this step; needs keep_last.
        threads: number of writing threads on each rank, and largest number of files (twice with separation_hint).
        separation_hint: prefix of the names of values that are saved in separate files. None: all share the files.
        fsync: True: a complete checkpoint in a folder survives a power failure. (If only the process stops, nothing is
            lost anyway.)
        buffers: number of saves that may be unwritten at a time. 1: save() waits until the previous save is written. 2:
            save() waits only for the save before the previous one, and two copies of the state take twice the memory.
        timeout_s: seconds after which a save that is not on the disk has failed. A rank waits a minute longer for
            others.
        on_signal: signal or signals (such as `signal.SIGTERM`) that make `signalled` return True and do not end the
            process. The script's earlier handler still runs. Only a second Ctrl-C acts as it does without
            `on_signal`.
        on_exit: what the writer process does with an unwritten save when the training process ends or is killed:
            "finish" or "abandon" it.
        check_replicas: compare values that several ranks have under one name, because only one copy is saved. An object
            that differs is an error, a tensor that differs a warning (of large tensors, samples are compared).
        group: process group of the ranks that save together; None: all ranks.

    Each buffer takes as much shared memory as one copy of what this rank saves.

    Raises InvalidArgumentError for an invalid argument, CheckpointError if the writer process cannot be started."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        local: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        threads: int = 2,
        separation_hint: str | None = None,
        fsync: bool = True,
        buffers: int = 1,
        timeout_s: float = 1800.0,
        on_signal: int | Iterable[int] = (),
        on_exit: OnExit = "finish",
        check_replicas: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        counts = {"keep_last": keep_last, "keep_every": keep_every, "threads": threads, "buffers": buffers}
        for name, value in counts.items():
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InvalidArgumentError(f"AsyncCheckpointer: {name} must be an int >= 1, got {value!r}")
        if buffers > 2:
            raise InvalidArgumentError(f"AsyncCheckpointer: buffers must be 1 or 2, got {buffers}")
        if not 0 < timeout_s <= LONGEST_S:
            raise InvalidArgumentError(f"AsyncCheckpointer: timeout_s must be in (0, {LONGEST_S:g}], got {timeout_s!r}")
        if on_exit not in ("finish", "abandon"):
            raise InvalidArgumentError(f'AsyncCheckpointer: on_exit must be "finish" or "abandon", got {on_exit!r}')
        if keep_every is not None and keep_last is None:
            raise InvalidArgumentError(f"AsyncCheckpointer: keep_every={keep_every} needs keep_last, got none")
        self._place = place_at(folder, timeout_s, local=local, storage_options=storage_options)
        self.address = self._place.address
        """Path of the folder, or URL without credentials."""
        if isinstance(self._place, FolderPlace) and not (local is None and storage_options is None):
            raise InvalidArgumentError(
                f"AsyncCheckpointer: local and storage_options are for a bucket s3://BUCKET/RUN, got {self.address!r}"
            )
        self._where: dict[str, Any] = {
            "address": self.address,
            "folder": os.fspath(folder).rstrip("/") if self._in_bucket else self.address,
            "local": None if local is None else str(Path(local).absolute()),
            "storage_options": _as_json(storage_options),
            "owner": secrets.token_hex(8),
        }
        self._keep_last, self._keep_every = keep_last, keep_every
        self._threads, self._hint, self._fsync = threads, separation_hint, fsync
        self._timeout_s, self._on_exit = timeout_s, on_exit
        self._group = group
        self._ranks = Ranks(group, timeout_s)
        self._agreement = Agreement(self._ranks, threads, separation_hint, check_replicas)
        self._buffers = [StagingBuffer() for _ in range(buffers)]
        self._pending: list[PendingSave] = []
        """Saves being written, and ended saves whose results were not read yet, oldest first."""
        self._unraised: list[CheckpointError] = []
        self._last: PendingSave | None = None
        self._closed = False
        self._calls = CallLock()
        self._owner = OwnerProcess()
        self._writer = WriterProcess(self._ranks.rank)
        self._finalizer = weakref.finalize(self, _leave, self._writer, self._pending, on_exit, timeout_s, os.getpid())
        self._writer.start()
        self._signals = SignalWatch(on_signal)
        weakref.finalize(self, self._signals.close)

    @property
    def _in_bucket(self) -> bool:
        return not isinstance(self._place, FolderPlace)

    @property
    def folder(self) -> Path:
        """The folder. Raises CheckpointError for a bucket, which has an `address`."""
        if self._in_bucket:
            raise CheckpointError(
                f"this AsyncCheckpointer saves into a bucket, which is no folder: use {self.address!r}"
            )
        return Path(self.address)

    # ---- saving

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Save a checkpoint. Return once the state is copied to shared memory; it is written while training continues.

        Args:
            step: number of the checkpoint, >= 0; saving a step again replaces it.
            state: dict of names and values: modules, optimizers, loaders, objects with `state_dict` and
                `load_state_dict`, or nested dicts of tensors and plain values.

        Raises:
            CheckpointError: the previous save failed (this step was then not saved; call `save` again), a rank could
                not take part, or the ranks' states contradict each other. All ranks raise this error. If a rank cannot
                copy its values to shared memory, it alone raises the error, and all ranks raise it at the next call.
            InvalidArgumentError: the state or the step is invalid. If only on some ranks, the others raise
                CheckpointError."""
        self._check_open()
        began = time.monotonic()
        try:
            while not self._save(step, state):
                pass
        finally:
            open_streams.saves.stalled(time.monotonic() - began)

    def _save(self, step: int, state: Mapping[str, Any]) -> bool:
        """Return False if another thread or a signal handler has taken the free buffer meanwhile."""
        self._make_room()
        with self._calls.one("save"), _no_collection():
            self._check_open()
            if len(self._in_flight) >= len(self._buffers):
                return False
            self._collect_ended()
            in_flight = [one.request["save"] for one in self._in_flight]
            self._submit(step, self._agreement.agree_on_save(step, self.address, state, self._unraised, in_flight))
        return True

    def signalled(self) -> bool:
        """Return True if any rank has received a signal of `on_signal`. All ranks call this together, so all stop after
        the same step. With several ranks the call takes about 0.3 ms."""
        self._check_open()
        if self._ranks.size == 1:
            return bool(self._signals.received)
        with self._calls.one("signalled"):
            answers = self._ranks.together(
                "signalled",
                "the ranks could not exchange whether they received a signal",
                lambda: {"signal": self._signals.received},
            )
        return any(answer["signal"] for answer in answers)

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Plan the first `save`, of a state with this structure, and allocate its memory. All ranks call this together.
        Without `prepare` the first save takes 0.7 s longer for each GiB. Waits for saves being written. Raises the
        errors of `save`."""
        self._check_open()
        while True:
            wait_all(self._writer, list(self._pending), None)
            with self._calls.one("prepare"):
                self._check_open()
                if self._in_flight:
                    continue
                self._collect_ended()
                agreed = self._agreement.agree_on_save(0, self.address, state, self._unraised, [])
                for buffer in self._buffers:
                    self._stage(agreed, buffer)
                return

    def _submit(self, step: int, agreed: AgreedSave) -> None:
        ranks = self._ranks
        in_flight = [one.buffer for one in self._in_flight]
        buffer = next(one for one in self._buffers if one not in in_flight)
        request: dict[str, Any] = {
            "save": agreed.save,
            "step": step,
            "rank": ranks.rank,
            "ranks": ranks.size,
            **self._where,
            "files": [],
            "error": None,
            "threads": self._threads,
            "fsync": self._fsync,
            "finish": self._on_exit == "finish",
            "timeout_s": self._timeout_s,
            "keep_last": self._keep_last,
            "keep_every": self._keep_every,
            "in_flight": agreed.in_flight,
            "commit": None,
        }
        failure: Exception | None = None
        try:
            request["files"], index = self._stage(agreed, buffer)
            if ranks.rank == 0:
                plan = {str(rank): files for rank, files in enumerate(agreed.plan.files(agreed.lengths))}
                request["commit"] = {"plan": plan, "index": index}
        # the other ranks may have returned already: their writers get the error from this rank's writer
        except Exception as error:
            failure, request["error"] = error, f"{type(error).__name__}: {error}"
        if failure is None or ranks.size > 1:
            self._last = pending = PendingSave(request, buffer)
            self._pending.append(pending)
            self._writer.submit(pending, buffer.image, [one.image for one in self._buffers if one.image is not None])
        if failure is not None:
            if ranks.size == 1:
                open_streams.saves.refused()
            raise CheckpointError(f"step {step} was not saved: rank {ranks.rank}: {request['error']}") from failure

    def _stage(self, agreed: AgreedSave, buffer: StagingBuffer) -> Staged:
        layout = agreed.plan.layouts[self._ranks.rank]
        return buffer.stage(
            layout,
            {one.key: agreed.objects[one.key] for file in layout for one in file.others},
            agreed.plan.index(agreed.lengths) if self._ranks.rank == 0 else b"",
            agreed.collected.tensor,
        )

    def _make_room(self) -> None:
        in_flight = self._in_flight
        if len(in_flight) >= len(self._buffers):
            wait_all(self._writer, in_flight[: len(in_flight) - len(self._buffers) + 1], None)

    @property
    def _in_flight(self) -> list[PendingSave]:
        return [one for one in list(self._pending) if not one.ended.is_set()]

    def _collect_ended(self) -> None:
        for one in [one for one in self._pending if one.ended.is_set()]:
            self._pending.remove(one)
            if one.error is not None:
                self._unraised.append(one.error)

    # ---- afterwards

    @property
    def progress(self) -> Progress:
        in_flight = self._in_flight
        step = in_flight[0].step if in_flight else None
        return Progress(step, sum(one.written for one in in_flight), sum(one.total for one in in_flight))

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all saves are on the disk.

        Raises:
            CheckpointError: a save failed; the error names the rank and the cause.
            DeadlineError: `timeout_s` seconds have passed; the saves continue. With timeout_s=None there is no limit
                besides the checkpointer's timeout_s.
        """
        self._owner.check(f"AsyncCheckpointer({self.address!r})")
        wait_all(self._writer, list(self._pending), timeout_s)
        with self._calls.one("wait"):
            self._collect_ended()
            errors = [*self._unraised]
            self._unraised.clear()
        if errors:
            raise errors[0]

    def result(self, timeout_s: float | None = None) -> Path | str:
        """Wait until the checkpoint of the last save() is on the disk, and return its path, in a bucket its URL. Raises
        the errors of `wait`, also those of earlier saves; CheckpointError before the first save()."""
        if self._last is None:
            raise CheckpointError("AsyncCheckpointer.result() must be called after save(): nothing was saved yet")
        self.wait(timeout_s)
        if self._last.error is not None:
            raise self._last.error
        address = self._place.address_of(self._last.step, self._last.request["save"])
        return address if self._in_bucket else Path(address)

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint in the folder; None if it has none. That is the one saved
        last, whose step need not be the largest. Warns of newer checkpoints that are damaged, or of torch's `dcp.save`.
        Raises CheckpointNotFoundError if it has only such ones."""
        return self._place.latest()

    def newest(self) -> int | None:
        """Return the step that `restore` would load; None if the folder has no checkpoint. All ranks call this
        together. Like `restore`, it first waits for saves being written, also by an earlier job, and raises its
        errors."""
        self._check_open()
        wait_all(self._writer, list(self._pending), None)
        with self._calls.one("newest", hold=False), ExitStack() as held:
            found: int | None = self._choose("newest", held, None, False).get("step")
            return found

    def restore(
        self,
        state: Mapping[str, Any],
        step: int | None = None,
        *,
        verify: bool = False,
        allow_unsafe_types: bool = False,
    ) -> int | None:
        """Load a checkpoint into the objects and values of `state`, on the present number of ranks.

        Args:
            state: as for `save`. Modules, optimizers, loaders and other objects with `load_state_dict` are loaded.
                Dicts and lists become what was saved, in place; their tensors are filled where shape and dtype fit,
                and replaced elsewhere. Other values are replaced in `state`. Saved top-level values that it does not
                name are ignored.
            step: step of the checkpoint to restore, also of a folder step-N that torch's `dcp.save` wrote, which has no
                checksums; None: the checkpoint that was saved last.
            verify: let rank 0 first read all files of the checkpoint and compare their checksums. False: each rank
                compares only the checksums of what it reads.
            allow_unsafe_types: unpickle objects of any class. Only for checkpoints that only you can have written.

        Returns the step that was restored; None if `step` is None and the folder has no checkpoint.

        Raises:
            CheckpointNotFoundError: the folder has no checkpoint of this step; the error lists the steps that it has.
                Without a `step`: it has only checkpoints of `dcp.save`. (Beside older ones of ours they are a warning.)
            CheckpointCorruptError: the checkpoint is damaged; the error names the file, and the newest good checkpoint.
            CheckpointError: a rank could not load the checkpoint, or the checkpoint does not fit `state`. All ranks
                raise this error, and everything in `state` is as it was. (An object whose own `load_state_dict` raised,
                and then refuses its former state too, is named in the log.)
            InvalidArgumentError: the ranks ask for different steps.
        """
        self._check_open()
        wait_all(self._writer, list(self._pending), None)
        # Signal handlers may run meanwhile: a restore takes long, and changes nothing before everything was read.
        with self._calls.one("restore", hold=False), _no_collection():
            return self._restore(state, step, verify, allow_unsafe_types)

    def _restore(
        self, state: Mapping[str, Any], step: int | None, verify: bool, allow_unsafe_types: bool
    ) -> int | None:
        for _ in range(TRIES):
            with ExitStack() as held:
                choice = self._choose("restore", held, step, verify)
                if "address" not in choice:
                    return None
                if self._load(choice, state, allow_unsafe_types):
                    return int(choice["step"])
        raise CheckpointError(
            f"{self.address}: another save replaced the checkpoint {TRIES} times. Wait until no job saves there"
        )

    def _choose(self, call: str, held: ExitStack, step: int | None, verify: bool) -> dict[str, Any]:
        """Let rank 0 choose the checkpoint to restore, pinned until `held` is closed. No "address": there is none."""
        ranks = self._ranks

        def choosing() -> dict[str, Any]:
            if ranks.rank:
                return {"asked": step}
            found = held.enter_context(chosen(self._place, step, verify))
            return {"asked": step} if found is None else {"asked": step, **found._asdict()}

        answers = ranks.together(call, "nothing was restored", choosing)
        if any(answer["asked"] != step for answer in answers):
            asked = ", ".join(f"rank {rank}: {answer['asked']}" for rank, answer in enumerate(answers))
            raise InvalidArgumentError(f"all ranks must restore the same step, got {asked}")
        return answers[0]

    def _load(self, choice: dict[str, Any], state: Mapping[str, Any], unsafe: bool) -> bool:
        """Return False if another save replaced the checkpoint before all ranks had opened it."""
        loaded: LoadedCheckpoint | None = None

        def loading() -> dict[str, Any]:
            nonlocal loaded
            loaded = load(self._place, _pinned(choice), state, self._ranks.rank, self._threads, unsafe)
            return {"there": loaded is not None, "can_raise": loaded is not None and loaded.can_raise}

        def putting() -> dict[str, Any]:
            assert loaded is not None
            loaded.put(keep=can_raise)
            return {}

        what = f"{choice['address']} was not restored"
        answers = self._ranks.together("restore", what, loading)
        if not all(answer["there"] for answer in answers):
            return False
        assert loaded is not None
        can_raise = any(answer["can_raise"] for answer in answers)
        try:
            self._ranks.together("restore", what, putting)
        except BaseException:
            loaded.undo()
            raise
        loaded.finish()
        return True

    def check(self, state: Mapping[str, Any]) -> list[str]:
        """Try whether `state` survives a save and a restore: the first thing to do with a new kind of state.

        It is saved into a temporary folder within the checkpointer's, restored in place with its tensors cleared
        before, compared bit by bit, and put back as it was. All ranks call this together. Takes the memory of one more
        copy of the state, and about three times as long as a save.

        Returns a line for each value that would not come back, by its name in the checkpoint, of all ranks; [] if all
        would. Raises the errors of `save`, which refuses what cannot be restored."""
        self._check_open()
        with self._calls.one("check", hold=False):
            own = {"name": f".check-{secrets.token_hex(4)}"}
            name = self._ranks.together("check", "nothing was checked", lambda: own)[0]["name"]
            place, options = f"{self._where['folder']}/{name}", self._where["storage_options"]
            try:
                with AsyncCheckpointer(
                    place, storage_options=options, threads=self._threads, fsync=False, group=self._group
                ) as trial:
                    trial.save(0, state)
                    trial.wait()
                    return trial._differences(state)
            finally:
                if self._ranks.rank == 0:
                    place_at(place, self._timeout_s, storage_options=options).clear()

    def _differences(self, state: Mapping[str, Any]) -> list[str]:
        ranks = self._ranks

        def comparing() -> dict[str, Any]:
            try:
                loaded = load(self._place, _pinned(choice), state, ranks.rank, self._threads, False)
                assert loaded is not None
                return {"lines": differences(loaded, state, ranks.rank, ranks.size)}
            except CheckpointError as error:
                return {"lines": [error.message.replace(choice["address"], "the checkpoint")]}

        with ExitStack() as held:
            choice = self._choose("check", held, None, False)
            answers = ranks.together("check", "nothing was checked", comparing)
        return list(dict.fromkeys(line for answer in answers for line in answer["lines"]))

    # ---- closing

    def close(self, *, abandon: bool = False) -> None:
        """End the writer process, after its saves (`abandon`: without them). Raises the errors of `wait`."""
        if self._closed or not self._owner.is_here:  # a forked child has neither writer nor saves
            return
        self._closed = True
        try:
            if abandon:
                self._writer.kill("abandoned by close(abandon=True)")
            else:
                self.wait()
        finally:
            self._finalizer.detach()
            # After an interrupted wait the writer may still finish the save.
            self._writer.stop(finish=bool(self._in_flight) and self._on_exit == "finish")
            self._signals.close()
            self._ranks.close()
            for buffer in self._buffers:
                buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close(abandon=self._on_exit == "abandon")
        except PenstockError as failed:  # do not hide the error that ended the training
            _log.warning("%s", failed.message)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this AsyncCheckpointer is closed: create another one")
        self._owner.check(f"AsyncCheckpointer({self.address!r})")


def _pinned(choice: dict[str, Any]) -> PinnedCheckpoint:
    return PinnedCheckpoint(choice["step"], choice["address"], choice["save"])


def _as_json(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the options, which the writer process gets as JSON."""
    try:
        return None if options is None else dict(json.loads(json.dumps(dict(options))))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"AsyncCheckpointer: storage_options must have values of JSON: {error}") from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause garbage collection: one collection takes longer than a save of thousands of small entries."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _leave(writer: WriterProcess, pending: list[PendingSave], on_exit: OnExit, timeout_s: float, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child has neither writer nor saves
    if on_exit == "abandon":
        writer.kill("abandoned, because the training process ended")
    else:
        for one in pending:
            writer.wait(one, timeout_s)
    writer.stop()
