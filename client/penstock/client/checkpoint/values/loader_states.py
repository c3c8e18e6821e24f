"""State of a data loader in a checkpoint: one object, which any number of ranks can load.

torch.distributed.checkpoint saves each leaf of a nested state under a name of its own. So a state with changing parts,
such as a loader's, could only be loaded into a state with the same parts. Here the loader's state is one value of bytes
(Penstock's own encoding, with a checksum) under one name.

The state of a run with several boxes (data-parallel ranks) covers all boxes, so only the rank with box 0 fetches and
saves the state. If each rank has a run of its own (with an embedded appliance, for example), each rank saves a state
under a name that contains the rank. Such states can be loaded only on the same number of ranks. If only one rank has
saved such a state, the run had one box, whose model was split over several ranks, and any rank can load the state.
"""

from __future__ import annotations

from penstock.client.api.data_loader import DataLoader
from penstock.client.api.lookahead import Lookahead
from penstock.proto.errors import StateMismatchError
from penstock.proto.state.codec import decode_state, encode_state

__all__ = ["Loader", "load_loader", "loader_leaves", "names_for"]

Loader = DataLoader | Lookahead

SHARED = "all"
"""Key, below a loader's key, of a state that covers all boxes. That of a single rank is "rank-3"."""
UNIT = 4096
"""States are padded with zeros to a multiple of this number of bytes, so that their lengths rarely change: then the
index must be made again, which takes as long as the rest of a save."""
LENGTH = 8


def _own(rank: int) -> str:
    return f"rank-{rank}"


def loader_leaves(loader: Loader, rank: int, ranks: int) -> dict[str, bytes]:
    """Return what this rank saves of a loader: its state as bytes, by the key below the loader's key; {} on a rank that
    saves no state, because box 0 saves it for all boxes."""
    box, num_boxes = loader.box_and_num_boxes
    if ranks == 1:
        return {SHARED: _padded(encode_state(loader.state_dict()))}
    if num_boxes > 1:
        return {SHARED: _padded(encode_state(loader.state_dict()))} if box == 0 else {}
    return {_own(rank): _padded(encode_state(loader.state_dict()))}


def names_for(loader: Loader, rank: int, names: set[str], key: str) -> str:
    """Return the name of the saved state that this rank must load, of the `names` under the loader's key. Raises
    StateMismatchError if several ranks saved states of separate runs, and this rank did not."""
    if SHARED in names:
        return SHARED
    if _own(rank) in names:
        return _own(rank)
    saved = sorted(names)
    if len(saved) == 1:
        return saved[0]
    raise StateMismatchError(
        f"{key!r} was saved by {len(saved)} ranks, each with a run of its own, but not by rank {rank}: restore on "
        f"{len(saved)} ranks, or save with one run for all ranks"
    )


def load_loader(loader: Loader, data: bytes) -> None:
    length = int.from_bytes(data[:LENGTH])
    loader.load_state_dict(decode_state(data[LENGTH : LENGTH + length]))  # type: ignore[arg-type]


def _padded(data: bytes) -> bytes:
    """`data` with its length before it, and zeros after it up to a multiple of `UNIT` bytes."""
    framed = len(data).to_bytes(LENGTH) + data
    return framed.ljust(-(-len(framed) // UNIT) * UNIT, b"\0")
