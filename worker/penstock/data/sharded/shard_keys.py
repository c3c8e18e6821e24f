"""Restore keys: texts with the place of a sample, and with the saved position from which to read it again.

    epoch.shard.index.order.more

`order` is a digest of everything that decides the order. `more` is an encoded state (penstock.proto.state.codec) in
base64. The state contains the cursor's saved position before the sample, unless that is large, and for an endless
source the block, which determines the sample's position.

A key is part of its batch. A batch that is made again, for example by another worker after the first one died, must be
identical to the bit. So a key depends only on the sample's position, and not on when a stream's state was taken.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from penstock.data.sharded.protocol import SavedPosition, ShardedSource
from penstock.data.sharded.sources.opaque import without_snapshots
from penstock.proto.errors import InvalidArgumentError, StateCorruptError
from penstock.proto.state.codec import decode_state, encode_state

__all__ = ["KeyStage", "SampleKey", "as_made_before", "digest_of"]

LARGEST = 4096
"""Largest size in bytes of an encoded saved position in a key. A key leaves a larger one out; the sample is then found
by skipping from the shard's beginning."""


@dataclass(frozen=True)
class KeyStage:
    """Stage of an order: the part between two changes of a mixture's weights that were ordered in mid-run.

    A key must not depend on changes that come after its sample, because the sample may have been delivered before they
    were ordered.
    """

    position: int
    """Position of the stage's first sample in the stream."""
    source: ShardedSource
    """Source with the changes of weights up to the stage's beginning."""
    order: str
    """Digest of the order with the changes of weights up to the stage's beginning."""
    sources: int
    """Number of sources that the mixture has in this stage."""
    pieces: bool
    """True if the mixture's saved positions in this stage contain a piece (mixture_order.Piece), because its weights
    change."""


def as_made_before(saved: SavedPosition, stage: KeyStage) -> SavedPosition:
    """Return a saved position as a loader would make it that knows only the changes up to this stage."""
    if not isinstance(saved, Mapping):
        return saved
    if "sources" not in saved:
        return {**saved, "source": as_made_before(saved["source"], stage)} if "source" in saved else saved
    found = {name: value for name, value in saved.items() if name != "piece" or stage.pieces}
    return {name: value[: stage.sources] if name in ("sources", "given") else value for name, value in found.items()}


@dataclass(frozen=True)
class SampleKey:
    """Content of a restore key: the place of a sample, and where to begin to read it again."""

    epoch: int
    shard: int
    index: int
    order: str
    at: int
    """Index of the sample at which reading begins: the key's own sample if the key has a saved position, otherwise
    0."""
    saved: SavedPosition | None
    block: int | None
    """Block size of an endless source's order; None for a finite source."""

    @staticmethod
    def text(epoch: int, shard: int, index: int, order: str, saved: SavedPosition, block: int | None) -> str:
        more = {} if block is None else {"block": block}
        encoded = encode_state({"saved": without_snapshots(saved), **more})
        if len(encoded) > LARGEST:
            encoded = encode_state(more)
        return f"{epoch}.{shard}.{index}.{order}.{base64.urlsafe_b64encode(encoded).decode()}"

    @staticmethod
    def of(text: str) -> SampleKey:
        """Return the content of a restore key. Raises InvalidArgumentError if the text is not a key, StateCorruptError
        if it is a damaged key."""
        parts = text.split(".") if isinstance(text, str) else []
        if len(parts) != 5 or not all(part.isdecimal() and len(part) < 19 for part in parts[:3]):
            raise InvalidArgumentError(
                f"a restore key must be a text that a ShardLoader with keys= put into a batch, got {text!r:.200}. Copy "
                "the text from the batch's field"
            )
        epoch, shard, index = (int(part) for part in parts[:3])
        try:
            more: Any = decode_state(base64.b64decode(parts[4], altchars=b"-_", validate=True))
            block = more.get("block")
            if block is not None and (type(block) is not int or block < 1):
                raise ValueError(f"block must be an int >= 1, got {block!r:.100}")
            return SampleKey(epoch, shard, index, parts[3], index if "saved" in more else 0, more.get("saved"), block)
        except (AttributeError, TypeError, ValueError, binascii.Error, StateCorruptError) as error:
            raise StateCorruptError(
                f"the restore key must be the unchanged text from a batch, got {text!r:.200}. Copy it again"
            ) from error


def digest_of(order: Mapping[str, Any]) -> str:
    """Return a digest of a loader's order: of everything that decides which sample stands at an index of a shard."""
    decisive = {name: value for name, value in order.items() if name != "tail"}
    return xxhash.xxh3_64_hexdigest(json.dumps(decisive, sort_keys=True).encode())
