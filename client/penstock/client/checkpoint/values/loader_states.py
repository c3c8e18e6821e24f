"""State of a data loader in a checkpoint: one value of bytes under one name, which any number of ranks can load.

torch.distributed.checkpoint saves each leaf under a name of its own, so a state with changing parts could only be
loaded into one with the same parts. With several boxes the state covers all, so only the rank with box 0 saves it. If
each rank has a run of its own, each saves a state under a name with its rank, to be loaded on the same number of ranks.
If only one rank has saved such a state, the run had one box on several ranks, and any rank can load it."""

from __future__ import annotations

from typing import Any

from penstock.client.api.data_loader import DataLoader
from penstock.client.api.lookahead import Lookahead
from penstock.proto.errors import StateMismatchError
from penstock.proto.state.codec import decode_state, encode_state

Loader = DataLoader | Lookahead

SHARED = "all"
"""Key, below a loader's key, of a state that covers all boxes. That of a single rank is "rank-3"."""
UNIT = 4096
"""States are padded to multiples of this: a changed length means a new index, half the time of a save."""
LENGTH = 8


def _own(rank: int) -> str:
    return f"rank-{rank}"


def loader_leaves(loader: Loader, rank: int, ranks: int) -> dict[str, bytes]:
    """Return this rank's part of a loader's state, by the key below the loader's; {} if box 0 saves it for all."""
    box, num_boxes = loader.box_and_num_boxes
    if ranks == 1:
        return {SHARED: _padded(encode_state(loader.state_dict()))}
    if num_boxes > 1:
        return {SHARED: _padded(encode_state(loader.state_dict()))} if box == 0 else {}
    return {_own(rank): _padded(encode_state(loader.state_dict()))}


def names_for(loader: Loader, rank: int, names: set[str], key: str) -> str:
    """Return the saved state for this rank. Raises StateMismatchError if only other ranks saved separate runs."""
    if SHARED in names:
        return SHARED
    if _own(rank) in names:
        return _own(rank)
    saved = sorted(names)
    if len(saved) == 1:
        return saved[0]
    raise StateMismatchError(
        f"{key!r} was saved by {len(saved)} ranks with a run each, not by rank {rank}: restore on {len(saved)}"
    )


def loader_state(loader: Loader, data: bytes) -> Any:
    """Return a saved state for `loader.load_state_dict`, whose errors this raises."""
    length = int.from_bytes(data[:LENGTH])
    state: Any = decode_state(data[LENGTH : LENGTH + length])
    (loader if isinstance(loader, DataLoader) else loader._loader)._loadable(state)
    return state


def _padded(data: bytes) -> bytes:
    """Put the length before `data`, and zeros after it up to a multiple of `UNIT` bytes."""
    framed = len(data).to_bytes(LENGTH) + data
    return framed.ljust(-(-len(framed) // UNIT) * UNIT, b"\0")
