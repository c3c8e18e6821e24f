"""Saved states, as `DataLoader.state_dict()` returns them: pure functions that build and read them.

    loader                                       its saved state
    with the four state methods                  {**aggregated, "__penstock__": ours}
    the same, if `aggregated` is not a dict      {"state": aggregated, "__penstock__": ours}
    any other                                    {"__penstock__": ours}

    ours = {"format": 4, "step": S, "record": envelope, "of": {digest: {}}}

`aggregated`, the result of the loader's aggregate_state_dict, stays readable and free to be changed. Penstock's part is
one key with an envelope and its checksum, which checkpoint libraries carry along even if they change nested values. It
is the same on all boxes, so every rank saves the same value.

Libraries that load in place (torch.distributed.checkpoint) first request a state and fill in its values; one that only
the saved state has would be left out silently. So the record holds a copy of the user's part, and torch's `load` gets a
state with only Penstock's values (`blank`). Other such libraries are detected by `of`, a dict from a digest of the
record to an empty dict: they neither save nor load an empty dict, so after their load `of` has the digest of the state
that was filled. Then the copy in the record is used."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast

import xxhash

from penstock.proto.batch.digest import MASK, DigestCover
from penstock.proto.errors import PenstockError, StateCorruptError, StateMismatchError, StateVersionError
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.state.counts import COUNTS, Rows, counts_part
from penstock.proto.state.loader_names import loader_name
from penstock.proto.state.position import MOST, Position
from penstock.proto.state.state_dict import StateDict
from penstock.proto.v1 import records_pb2

Layers = Literal["keep", "restart"]
KEEP: Layers = "keep"
KEY = "__penstock__"
STATE = "state"
FORMAT = 4
"""Format of saved states that this version writes and reads."""


@dataclass(frozen=True)
class WorkerPart:
    """One worker slot's part. `worker_step` and `samples` count its batches and samples up to the step."""

    box: int
    slot: int
    worker_step: int
    samples: int
    digest: int
    """That of the slot's last batch, 0 before the first. A resume that makes this batch again must get it."""
    restart: Any
    """Where a replay up to the step starts. Only penstock.worker knows its contents."""
    user: Any = None
    """State of the user's loader; None with four state methods, whose states are saved aggregated only."""
    next_digest: int = 0
    """That of the slot's first batch after the step; 0 if unknown. A resume must get the same one."""
    next_epoch: bool = False
    """The slot's first batch after the step is the first of the next epoch."""
    chain: int = 0
    """Hash over the slot's batches in its epoch up to the step; 0 before the first, or if unknown."""

    def to_dict(self) -> dict[str, Any]:
        # by identity: user code's values may compare in ways of their own
        values = ((field, getattr(self, field.name)) for field in fields(self))
        return {field.name: value for field, value in values if value is not field.default}

    def __post_init__(self) -> None:
        """Raise ValueError for impossible values: another program may have written the saved state."""
        counts = (self.box, self.slot, self.worker_step, self.samples, self.digest, self.next_digest, self.chain)
        if any(type(count) is not int or not 0 <= count <= MASK for count in counts):
            raise ValueError(f"the counts of a worker in a state must be ints from 0 to {MASK}, got {counts!r:.200}")
        if type(self.next_epoch) is not bool or not isinstance(self.restart, dict):
            raise ValueError("next_epoch of a worker in a state must be a bool, and restart must be a dict")


@dataclass(frozen=True)
class BoxStart:
    position: records_pb2.BoxPosition
    blob: bytes
    """Envelope with the state of the workers' loaders; b"" without one."""
    same_topology: bool
    """`blob` has a part for each slot, which then resumes exactly where the slot of this number was."""
    anew: bool = False
    """`blob` has only parts to compare: a pure loader on another topology begins an epoch as in a new stream."""

    def resume(self, name: str) -> records_pb2.Resume:
        return records_pb2.Resume(blob=name, same_topology=self.same_topology, anew=self.anew)


@dataclass
class SavedState:
    step: int
    input_fn: str
    methods: int
    """Number of state methods that the loader has: 4, 2 or 0."""
    num_boxes: int
    """0 before the first step, or if Penstock did not save the state: it fits any topology."""
    num_workers_per_box: int
    seed: int | None
    """None: unknown, in an older release's state of an unopened run, or if Penstock did not save it."""
    positions: list[Position] = field(default_factory=list)
    """By box number; empty at step 0."""
    full_digest: bool = False
    parts: list[WorkerPart] = field(default_factory=list)
    """In the order of global_worker_id. Empty at step 0, and after new_topology()."""
    aggregated: Any = None

    @property
    def by_rows(self) -> bool:
        """True with Appliance(digest="rows")."""
        return any(position.by_rows for position in self.positions)

    @property
    def cover(self) -> DigestCover:
        """A run that resumes from this state must make the same choice."""
        if self.by_rows:
            return DigestCover.ROWS
        return DigestCover.FULL if self.full_digest else DigestCover.SAMPLE

    is_pure: bool = False
    """Each epoch is a function of its number: between two epochs the state needs no parts."""
    by_hand: bool = False
    """The user or another system made the state, so that only the loader's own methods can read it."""
    is_changed: bool = False
    """The user's part was changed: digests after the resume are not compared with the saved run's."""
    title: str = ""
    """See CodeReference.title."""

    @property
    def label(self) -> str:
        return loader_name(self.input_fn, self.title)

    def counts_of(self, box: int, num_boxes: int) -> Rows:
        """Return the sample counts from which `box` continues after a resume on `num_boxes` boxes."""
        counts = self.aggregated.get(COUNTS) if isinstance(self.aggregated, Mapping) else None
        return counts_part(counts, box, num_boxes, 0) if isinstance(counts, Mapping) and "boxes" in counts else {}

    def to_dict(self) -> StateDict:
        made = StateDict(self._items())
        made.about = f"{self.label}, step {self.step}"
        return made

    def _items(self) -> dict[str, Any]:
        names = ("step", "input_fn", "methods", "num_boxes", "num_workers_per_box", "seed", "full_digest")
        record: dict[str, Any] = {
            **{name: getattr(self, name) for name in names},
            "wrapped": type(self.aggregated) is not dict,
            "positions": [position.to_proto().SerializeToString(deterministic=True) for position in self.positions],
            "parts": [part.to_dict() for part in self.parts],
        }
        if self.is_pure:
            record["pure"] = True
        if self.title:
            record["title"] = self.title
        if self.methods == 4:
            record["aggregated"] = self.aggregated
        envelope = encode_state(record)
        own_part = {KEY: {"format": FORMAT, "step": self.step, "record": envelope, "of": {_digest(envelope): {}}}}
        if self.methods != 4:
            return own_part
        if type(self.aggregated) is not dict:
            return {STATE: self.aggregated, **own_part}
        if KEY in self.aggregated:
            raise StateMismatchError(
                f"aggregate_state_dict of {self.label} must return a dict without the key {KEY!r}: rename it"
            )
        return {**self.aggregated, **own_part}

    def start(
        self, box: int, num_boxes: int, num_workers_per_box: int, *, strict: bool, layers: Layers = "keep"
    ) -> BoxStart:
        """Return where a box resumes on this topology. Raises StateMismatchError if it cannot."""
        restart: dict[str, Any] = {} if layers == "keep" else {"layers": layers}
        strict = strict and not restart  # other layers make other batches, which are not compared
        if self.positions and (num_boxes, num_workers_per_box) != (self.num_boxes, self.num_workers_per_box):
            other = self.new_topology(num_boxes, num_workers_per_box)
            carried = restart.copy()
            if strict and (records := self._records(box, num_boxes, num_workers_per_box)):
                carried["records"] = records
            if strict and (first := self._first):
                carried["first"] = first
            return other._start(box, num_workers_per_box, strict, carried)
        return self._start(box, num_workers_per_box, strict, restart)

    @property
    def slot_0_is_next(self) -> bool:
        """True if all slots have batches left in the epoch, slot 0's next: they keep their worker numbers."""
        workers = self.num_workers_per_box
        return all(len(position.live) == workers and position.live[position.cursor] == 0 for position in self.positions)

    @property
    def _first(self) -> int:
        """Digest of the run's first batch, with which a resume on another topology must not begin. 0: unknown, or due
        again, as at the end of an epoch or of a pass over the data."""
        if self.is_changed or not self.parts:
            return 0
        history = self.parts[0].restart.get("history", {})
        first = history.get("first", 0) if isinstance(history, dict) else 0
        due = {0 if part.next_epoch else part.next_digest for part in self.parts}
        return first if isinstance(first, int) and not due & {0, first} else 0

    def _start(self, box: int, num_workers_per_box: int, strict: bool, carried: dict[str, Any]) -> BoxStart:
        position = self.positions[box] if self.positions else Position.start(num_workers_per_box, step=self.step)
        if self.methods != 4 and not self.parts:
            values = {"aggregated": None, "strict": strict, "slots": {}, **carried}
            return BoxStart(position.to_proto(), encode_state(values) if carried else b"", False, anew=bool(carried))
        slots = {part.slot: self._resumed(part) for part in self.parts if part.box == box}
        blob = encode_state({"aggregated": self.aggregated, "strict": strict, "slots": slots, **carried})
        message = position.to_proto()
        for slot, part in slots.items():
            message.slots[slot].chain = part["chain"]
        return BoxStart(message, blob, bool(slots))

    def _resumed(self, part: WorkerPart) -> dict[str, Any]:
        names = ("user", "restart", "digest", "next_digest", "next_epoch", "chain", "samples")
        return {**{name: getattr(part, name) for name in names}, "changed": self.is_changed}

    def _records(self, box: int, num_boxes: int, num_workers_per_box: int) -> dict[int, dict[str, Any]]:
        """Return by slot the part that it compares before a resume on this topology, spread over all parts."""
        records: dict[int, dict[str, Any]] = {}
        slots = num_boxes * num_workers_per_box
        for slot in range(num_workers_per_box) if self.parts and not self.is_changed else ():
            number = (box * num_workers_per_box + slot) * max(1, len(self.parts) // slots)
            if number >= len(self.parts):
                break
            part = self.parts[number]
            position = self.positions[part.box].to_proto()
            position.slots[part.slot].chain = part.chain
            records[slot] = {
                "place": [part.box, part.slot, self.num_boxes, self.num_workers_per_box],
                "position": position.SerializeToString(),
                "part": self._resumed(part),
            }
        return records

    @property
    def _next_epoch(self) -> int | None:
        """Epoch at whose beginning all boxes of a pure loader are, so that any topology may resume; else None."""
        if not self.is_pure:
            return None
        ends = {(part.box, part.slot) for part in self.parts if part.next_epoch}
        epochs: set[int | None] = set()
        for box, position in enumerate(self.positions):
            ended = any(position.delivered) and all((box, slot) in ends for slot in position.live)
            epochs.add(position.epoch + 1 if ended else None if any(position.delivered) else position.epoch)
        return epochs.pop() if len(epochs) == 1 else None

    def new_topology(self, num_boxes: int, num_workers_per_box: int) -> SavedState:
        """Return this state without parts: deaggregate_state_dict divides the aggregated one on the new topology."""
        if self.methods != 4 and self._next_epoch is None:
            raise StateMismatchError(
                f"the state of {self.label} at step {self.step} was saved on {self.num_boxes} boxes with "
                f"{self.num_workers_per_box} workers each and cannot be resumed on {num_boxes} with "
                f"{num_workers_per_box}, because its loader has no aggregate_state_dict and deaggregate_state_dict"
            )
        epoch = max((position.epoch for position in self.positions), default=0)
        if self.methods != 4:
            epoch = self._next_epoch or 0
        positions = [Position.start(num_workers_per_box, step=self.step, epoch=epoch) for _ in range(num_boxes)]
        chains = [position.chain for position in self.positions]
        for box, position in enumerate(positions):
            position.by_rows = self.by_rows
            position.labels = dict(self.positions[0].labels) if self.positions else {}
            if num_boxes == self.num_boxes:  # the streams stay the same, only the workers change
                position.chain = chains[box]
            # one box continues the sum, because only the total over all boxes counts
            elif self.by_rows and None not in chains:
                position.chain = 0 if box else sum(cast(list[int], chains)) & MASK
            else:
                position.chain = None
        return replace(
            self, num_boxes=num_boxes, num_workers_per_box=num_workers_per_box, positions=positions, parts=[]
        )


def blank() -> dict[str, Any]:
    """Return a state for a library that loads in place: the keys that every saved state has suffice to resume."""
    return {KEY: {"format": 0, "step": 0, "record": b""}}


def is_to_be_filled() -> bool:
    """True if torch.distributed.checkpoint.load requests a state to fill. torch does not say why, so only the call
    stack tells; an unknown caller gets a whole state to fill."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict_loader":
            return True
    return False


def read(value: object) -> SavedState:
    """Read a result of DataLoader.state_dict(). Raises StateMismatchError, StateVersionError, StateCorruptError."""
    if not isinstance(value, Mapping) or KEY not in value:
        what = f"a {type(value).__qualname__}" if not isinstance(value, Mapping) else f"a dict without the key {KEY!r}"
        raise StateMismatchError(
            f"the state must be one that DataLoader.state_dict() returned, got {what}: pass that dict unchanged"
        )
    ours = value[KEY]
    if not isinstance(ours, Mapping) or not isinstance(ours.get("format"), int):
        raise _damaged(f"its entry {KEY!r} has no format number")
    if ours["format"] != FORMAT:
        raise StateVersionError(
            f"the format of a saved state must be {FORMAT}, got {ours['format']}: load it with the same Penstock"
        )
    if not isinstance(ours.get("record"), bytes | bytearray):
        raise _damaged(f"its entry {KEY!r} has no record")
    record = cast(dict[str, Any], decode_state(ours["record"]))
    try:
        saved, wrapped = _saved(record)
    except PenstockError as error:
        raise _damaged(error.message) from error
    except Exception as error:  # the checksum is right, so another program made these bytes
        raise _damaged(f"{type(error).__name__}: {error}") from error
    step = ours.get("step")
    if type(step) is not int or step != saved.step:
        raise _damaged(f"its entry {KEY!r} is of step {step!r:.80}, but the record in it of step {saved.step}")
    if saved.methods == 4 and "aggregated" in record and not _belongs(ours):
        saved.aggregated = record["aggregated"]
    elif saved.methods == 4:
        if wrapped and STATE not in value:
            raise _damaged(f"it has no key {STATE!r}")
        saved.aggregated = value[STATE] if wrapped else {key: item for key, item in value.items() if key != KEY}
        saved.is_changed = encode_state(saved.aggregated) != encode_state(record.get("aggregated"))
    return saved


def _damaged(what: str) -> StateCorruptError:
    return StateCorruptError(f"the saved state is damaged: {what}. Load an older state")


def _belongs(own: Mapping[str, Any]) -> bool:
    """True if Penstock's record and the user's part were saved together (see `of` above)."""
    marks = own.get("of")
    return isinstance(marks, Mapping) and _digest(own["record"]) in marks


def _digest(envelope: bytes | bytearray) -> str:
    return xxhash.xxh3_64_hexdigest(envelope)


def _saved(record: dict[str, Any]) -> tuple[SavedState, bool]:
    saved = SavedState(
        step=int(record["step"]),
        input_fn=str(record["input_fn"]),
        methods=int(record["methods"]),
        num_boxes=int(record["num_boxes"]),
        num_workers_per_box=int(record["num_workers_per_box"]),
        seed=None if record["seed"] is None else int(record["seed"]),
        positions=[Position.from_proto(records_pb2.BoxPosition.FromString(data)) for data in record["positions"]],
        full_digest=bool(record["full_digest"]),
        parts=[WorkerPart(**part) for part in record["parts"]],
        is_pure=record.get("pure") is True,
        title=str(record.get("title", "")),
    )
    if saved.positions:
        # The counts are compared before anything is computed from them, because the record's numbers may be wrong.
        owners, workers = [(part.box, part.slot) for part in saved.parts], saved.num_workers_per_box
        # no parts: the state was converted to this topology
        wanted = saved.num_boxes * workers if owners or saved.methods != 4 else 0
        if (len(saved.positions), len(owners)) != (saved.num_boxes, wanted):
            raise ValueError(
                f"its record must have {saved.num_boxes} positions (one a box) and {wanted} parts (one a worker), got "
                f"{len(saved.positions)} and {len(owners)}"
            )
        if owners and owners != [(box, slot) for box in range(saved.num_boxes) for slot in range(workers)]:
            raise ValueError(f"its record must have all workers in order, got the workers {str(owners)[:200]}")
        if any(len(position.total) != workers for position in saved.positions):
            raise ValueError(f"each position in its record must have the counts of {workers} workers")
    if saved.methods not in (0, 2, 4) or not 0 <= saved.step <= MOST or (saved.step > 0 and not saved.positions):
        raise ValueError(
            f"its record has {saved.methods} state methods, step {saved.step} and {len(saved.positions)} positions"
        )
    return saved, bool(record["wrapped"])
