"""A loader's state in a checkpoint: one object, which any number of ranks can load.

torch.distributed.checkpoint takes a nested state apart and saves each leaf under a name of its own, so a state whose
parts come and go, as a loader's may, can only be loaded into one that has the same parts. Here it is one value of bytes
(Penstock's own encoding, with a checksum), which has one name.

Which rank saves it: the state of a run with several boxes is that of all of them, so the rank with box 0 asks for it
and the others do not. Ranks with a run each (an embedded appliance each, say) have states of their own, under names
with the rank in them, and those can only be given to as many ranks again. A single one of them is that of a run with
one box, whose model was split over several ranks; it goes onto any.
"""

from __future__ import annotations

from penstock.client.api.data_loader import DataLoader
from penstock.client.api.lookahead import Lookahead
from penstock.proto.errors import StateMismatchError
from penstock.proto.state.codec import decode_state, encode_state

__all__ = ["Loader", "load_loader", "loader_leaves", "names_for"]

Loader = DataLoader | Lookahead

SHARED = "all"
"""Under a loader's key: the state of all boxes."""
UNIT = 4096
"""Bytes: states are filled up to a multiple of it. As long as lengths stay the same so does torch's index, and making
that anew would take as long as the rest of a save."""
LENGTH = 8


def _own(rank: int) -> str:
    return f"rank-{rank}"


def loader_leaves(loader: Loader, rank: int, ranks: int) -> dict[str, bytes]:
    """What this rank saves of a loader. For loaders of several boxes nothing, but for box 0."""
    box, num_boxes = loader.place
    if ranks == 1:
        return {SHARED: _filled_up(encode_state(loader.state_dict()))}
    if num_boxes > 1:
        return {SHARED: _filled_up(encode_state(loader.state_dict()))} if box == 0 else {}
    return {_own(rank): _filled_up(encode_state(loader.state_dict()))}


def names_for(loader: Loader, rank: int, names: set[str], key: str) -> str:
    """Which of the names that are saved under a loader's key this rank loads.

    Raises StateMismatchError where states of single ranks would have to go to others.
    """
    if SHARED in names:
        return SHARED
    if _own(rank) in names:
        return _own(rank)
    saved = sorted(names)
    if len(saved) == 1:
        return saved[0]
    raise StateMismatchError(
        f"{key!r} was saved by {len(saved)} ranks with a run of its own each, and rank {rank} was none of them: load "
        f"it on {len(saved)} ranks, or save with one run for all (Appliance(box=rank, num_boxes=ranks))"
    )


def load_loader(loader: Loader, data: bytes) -> None:
    """data: what `loader_leaves` made."""
    length = int.from_bytes(data[:LENGTH])
    loader.load_state_dict(decode_state(data[LENGTH : LENGTH + length]))  # type: ignore[arg-type]


def _filled_up(data: bytes) -> bytes:
    """The length, the bytes, and zeros."""
    framed = len(data).to_bytes(LENGTH) + data
    return framed.ljust(-(-len(framed) // UNIT) * UNIT, b"\0")
