"""Megatron-core: the batches of a loader as the `data_iterator` of its pipeline schedules.

The ranks of one data-parallel rank (tensor, context and pipeline parallel) need the same microbatch, so they are one
box: one rank, the reader, iterates the loader, and the others get its batches (batch_relay.py). Ranks of one stage call
`next` together; stages, and model chunks of a virtual pipeline, do not.

A batch has memory of its own on all ranks: Megatron's RerunDataIterator keeps all microbatches of an iteration, which
may be more than the ring has entries. A microbatch counts as delivered when the reader's first stage takes it. States
are saved between two iterations, when all stages have taken the same ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self, Unpack, cast

import torch

from penstock.client.api.appliance import Appliance
from penstock.client.api.appliance_settings import ApplianceOptions
from penstock.client.api.data_loader import DataLoader
from penstock.client.api.executor import DataExecutor
from penstock.client.integrations.batch_messages import BatchMessages
from penstock.client.integrations.batch_relay import NOTHING, Kind, Message, Relay, error_of, failure_message
from penstock.client.integrations.rank_groups import RankGroups, Stages
from penstock.client.states.saved_state import is_to_be_filled
from penstock.client.stream.checkpoint_schedule import CheckpointSteps, checked_int
from penstock.proto.errors import InvalidArgumentError, PenstockError, StateMismatchError
from penstock.proto.state.codec import decode_state, encode_state

__all__ = ["DataIterator", "RankGroups", "box_appliance"]


def box_appliance(
    *, ranks: RankGroups | None = None, **settings: Unpack[ApplianceOptions]
) -> AbstractContextManager[Appliance | None]:
    """Return the `Appliance(**settings)` of this rank's box, to be opened by `with`; on ranks that do not iterate the
    loader, a context manager that does nothing.

    Args:
        ranks: position of this rank among the ranks that share a model; None: as in megatron.core.parallel_state.
        settings: arguments of Appliance. box, num_boxes and device are not allowed."""
    wrong = sorted({"box", "num_boxes", "device"} & settings.keys())
    if wrong:
        raise InvalidArgumentError(
            f"box_appliance sets the box and keeps batches on the host, got the argument {wrong[0]}: leave it out"
        )
    ranks = ranks or RankGroups.of_megatron()
    if not ranks.reads:
        return nullcontext()
    settings["box"], settings["num_boxes"] = ranks.box, ranks.num_boxes
    return Appliance(**settings)


class DataIterator:
    """Iterator over microbatches for Megatron-core's `forward_backward_func(data_iterator=...)`.

    Example, the same on all ranks::

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
        dp = parallel_state.get_data_parallel_world_size()
        loader = DataLoader(input_fn, global_batch_size=micro_batch_size * dp)
        with box_appliance(seed=1), DataIterator(loader, num_steps=train_iters * num_microbatches) as data:
            for iteration in range(train_iters):
                forward_backward_func(data_iterator=data, num_microbatches=num_microbatches, ...)

    A batch of the loader is one microbatch of one data-parallel rank. All ranks create the iterator, at the same point,
    because that opens process groups. With a virtual pipeline pass `data.chunks(number of model chunks)`; with context
    parallelism see docs/from_megatron.md.

    Args:
        loader: the Penstock DataLoader. Only one rank of each box iterates it; on others it costs nothing.
        num_steps: number of microbatches of this box, over as many epochs as needed; None: one epoch.
        checkpoint_steps: as for DataExecutor, in microbatches.
        stages: stages of the pipeline that take batches: "ends" (the first, for its tokens, and the last, for its
            labels) or "all". `next` on another stage is an error.
        ranks: position of this rank among the ranks that share a model; None: as in megatron.core.parallel_state.
        timeout_s: longest wait for another rank, in seconds. Keep it above the appliance's timeout_s, so that the
            reader's error reaches the other ranks.

    Raises:
        InvalidArgumentError: Megatron's parallel state is not initialized, or an argument has an invalid value.

    `next` raises StopIteration on all ranks after the same microbatch; on the reader the stream's errors, on the others
    errors of the same class and text (PenstockError in place of an error of another library); LaneLostError if another
    rank of the box has ended."""

    def __init__(
        self,
        loader: DataLoader,
        *,
        num_steps: int | None = None,
        checkpoint_steps: CheckpointSteps = None,
        stages: Stages = "ends",
        ranks: RankGroups | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        if stages not in ("ends", "all"):
            raise InvalidArgumentError(f'stages must be "ends" or "all", got {stages!r}')
        if timeout_s <= 0:
            raise InvalidArgumentError(f"timeout_s must be > 0, got {timeout_s}")
        self._ranks = ranks = ranks or RankGroups.of_megatron()
        self._loader, self._stages = loader, stages
        self._executor = DataExecutor(loader, num_steps, checkpoint_steps)
        self._relay = Relay(ranks, stages, timeout_s)
        self._messages = BatchMessages()
        self._consumed: int | None = 0
        self._rows: int | None = 0
        """Rows that this box's loader has delivered since a state was loaded; None if unknown."""
        self._base: int | None = 0
        """Samples that all boxes had consumed at the loaded state; None if unknown."""
        self._begin()

    def _begin(self) -> None:
        self._source: Iterator[Any] | None = None
        self._batches: deque[torch.Tensor] = deque()
        self._first = 0
        """Number of the first microbatch in `_batches`, from 0 since the last load of a state."""
        self._cursors: list[_Chunk] = []
        self._over: PenstockError | StopIteration | None = None

    # ---- for the schedules

    def __iter__(self) -> DataIterator:
        return self

    def __next__(self) -> Any:
        if not self._cursors:
            self.chunks(1)
        if len(self._cursors) > 1:
            raise InvalidArgumentError("data_iterator must be the list that chunks() returned, got the DataIterator")
        return next(self._cursors[0])

    def chunks(self, count: int) -> list[Iterator[Any]]:
        """Return, for a virtual pipeline, `count` iterators over all microbatches, one for each model chunk."""
        checked_int("count", count)
        if self._cursors and len(self._cursors) != count:
            raise InvalidArgumentError(
                f"chunks() must get the same number each time and before next(), {len(self._cursors)}, got {count}"
            )
        if not self._cursors:
            self._cursors = [_Chunk(self, chunk, count) for chunk in range(count)]
        return list(self._cursors)

    def _at(self, number: int) -> Any:
        while number >= self._first + len(self._batches):
            if self._over is not None:
                raise self._over
            self._fetch()
        return self._messages.unpack(self._batches[number - self._first])

    def _passed(self) -> None:
        """Drop the microbatches that all model chunks of this rank have taken."""
        least = min(chunk.taken for chunk in self._cursors if chunk.takes)
        while self._first < least:
            self._batches.popleft()
            self._first += 1

    def _fetch(self) -> None:
        """Get the next microbatch from the loader or the reader. If there is none, record the reason."""
        kind, content = self._read() if self._ranks.reads else self._relay.receive()
        if kind is Kind.BATCH:
            self._batches.append(content)
        elif kind is Kind.END:
            self._over = StopIteration()
        else:
            self._over = self._over or error_of(content)

    def _read(self) -> Message:
        """On the reader: take the loader's next batch, and send it to the other ranks."""
        message: Message = Kind.END, NOTHING
        try:
            if self._source is None:
                self._source = iter(self._executor)
            for batch in self._source:
                content = self._messages.pack(batch)
                rows = self._messages.rows(content)
                self._rows = None if rows is None or self._rows is None else self._rows + rows
                message = Kind.BATCH, content
                break
        except Exception as error:
            self._over = error if isinstance(error, PenstockError) else None
            message = failure_message(error, self._ranks.rank)
        self._relay.send(message)
        return message

    # ---- states

    @property
    def consumed_samples(self) -> int | None:
        """Number of samples that all boxes have consumed over the whole life of the run, at the last state_dict() or
        load_state_dict(): Megatron's consumed_train_samples. None if the rows of a batch could not be counted."""
        return self._consumed

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last microbatch: {"loader": the DataLoader's state, "consumed_samples": int}.

        All ranks of the job call this together, between two iterations, and get the same value; save it once.
        (torch.distributed.checkpoint.load, which requests a state to load into, gets an empty one.) Raises the errors
        of DataLoader.state_dict(), on all ranks of the box."""
        if is_to_be_filled():
            return {"loader": self._loader.state_dict(), "consumed_samples": 0}
        kind, content = self._relay.share(self._state() if self._ranks.reads else None)
        if kind is not Kind.STATE:
            raise error_of(content)
        state: dict[str, Any] = cast(dict[str, Any], decode_state(content.numpy().tobytes()))
        self._consumed = state["consumed_samples"]
        return state

    def _state(self) -> Message:
        unknown = self._rows is None or self._base is None
        counts = [self._relay.sum_over_boxes(count) for count in (self._rows or 0, int(unknown))]
        try:
            consumed = None if counts[1] or self._base is None else self._base + counts[0]
            state = {"loader": self._loader.state_dict(), "consumed_samples": consumed}
            return Kind.STATE, torch.frombuffer(bytearray(encode_state(state)), dtype=torch.uint8)
        except Exception as error:
            return failure_message(error, self._ranks.rank)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, from which the next microbatch resumes, also on other numbers of data-, tensor-, context- and
        pipeline-parallel ranks. All ranks call this, before the first `next`, or between two iterations.

        Raises the errors of DataLoader.load_state_dict(), and StateMismatchError for a state of anything else."""
        if not isinstance(state_dict, dict) or not {"loader", "consumed_samples"} <= state_dict.keys():
            raise StateMismatchError(
                f"a DataIterator's state must have loader and consumed_samples, got {repr(state_dict)[:80]}"
            )
        self._end()
        self._begin()
        self._loader.load_state_dict(state_dict["loader"])
        self._base = self._consumed = state_dict["consumed_samples"]
        self._rows = 0

    # ---- the end

    def close(self) -> None:
        """End the loop, and wait until other stages have all batches. Call this on all ranks, before
        destroy_process_group(). A `with` calls it at its end, but does not wait after an error."""
        self._end()
        self._relay.close()

    def _end(self) -> None:
        close = getattr(self._source, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        if kind is None:  # after an error other stages may never request the rest
            self._relay.close()


class _Chunk:
    def __init__(self, owner: DataIterator, number: int, count: int) -> None:
        self._owner, self._number, self._count = owner, number, count
        self.takes = owner._ranks.takes(owner._stages, number, count)
        self.taken = 0

    def __iter__(self) -> _Chunk:
        return self

    def __next__(self) -> Any:
        if not self.takes:
            ranks = self._owner._ranks
            raise InvalidArgumentError(
                "next(data_iterator) must be called on the first stage's first model chunk and the last stage's last "
                f"only, got a call on chunk {self._number} of {self._count}, stage {ranks.stage} of "
                f"{ranks.num_stages}: "
                'pass DataIterator(stages="all")'
            )
        batch = self._owner._at(self.taken)
        self.taken += 1
        self._owner._passed()
        return batch
