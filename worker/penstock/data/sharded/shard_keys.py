"""Restore keys of a ShardLoader: epoch.shard.index.order.more

`order` is a digest of what decides the order; `more` encodes the cursor's saved position before the sample, unless it
is large, and an endless order's block. A batch that is made again, perhaps by another worker, must be identical to the
bit, so a key depends only on the sample's position, and not on when a stream's state was taken.
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

LARGEST = 4096
"""Largest encoded saved position in a key, in bytes. Without it, all samples before are skipped."""


@dataclass(frozen=True)
class KeyStage:
    """Samples from one change of weights by `penstock mix` to the next. A key depends on its stage, and not on later
    changes: the sample may have been delivered before those were ordered."""

    position: int
    source: ShardedSource
    order: str
    """Digest of its order."""
    sources: int
    """Number of the mixture's sources; 0 if no change was ordered."""
    phases: bool
    """False if saved positions of a mixture by tokens have no phase here, because its weights are constant."""


def as_made_before(saved: SavedPosition, stage: KeyStage) -> SavedPosition:
    if not isinstance(saved, Mapping):
        return saved
    if "sources" not in saved:
        return {**saved, "source": as_made_before(saved["source"], stage)} if "source" in saved else saved
    found = {name: value for name, value in saved.items() if name != "piece" or stage.phases}
    return {name: value[: stage.sources] if name in ("sources", "given") else value for name, value in found.items()}


@dataclass(frozen=True)
class SampleKey:
    epoch: int
    shard: int
    index: int
    order: str
    at: int
    """Index at which the cursor is opened: `index` with a saved position, otherwise 0."""
    saved: SavedPosition
    block: int | None

    @staticmethod
    def text(
        epoch: int, shard: int, index: int, order: str, saved: SavedPosition, block: int | None, *, alone: bool = True
    ) -> str:
        """`alone`: the layers lead from the shard's beginning to the sample. Not if others yielded what is before."""
        more = {} if block is None else {"block": block}
        encoded = encode_state({"saved": without_snapshots(saved), **more})
        if len(encoded) > LARGEST and alone:
            encoded = encode_state(more)
        return f"{epoch}.{shard}.{index}.{order}.{base64.urlsafe_b64encode(encoded).decode()}"

    @staticmethod
    def of(text: str) -> SampleKey:
        """Raises InvalidArgumentError if the text is no key, StateCorruptError if it is damaged."""
        parts = text.split(".") if isinstance(text, str) else []
        if len(parts) != 5 or not all(part.isdecimal() and len(part) < 19 for part in parts[:3]):
            raise InvalidArgumentError(f"a restore key must be the text that keys= put into a batch, got {text!r:.200}")
        epoch, shard, index = (int(part) for part in parts[:3])
        try:
            more: Any = decode_state(base64.b64decode(parts[4], altchars=b"-_", validate=True))
            block = more.get("block")
            if block is not None and (type(block) is not int or block < 1):
                raise ValueError(f"block must be an int >= 1, got {block!r:.100}")
            return SampleKey(epoch, shard, index, parts[3], index if "saved" in more else 0, more.get("saved"), block)
        except (AttributeError, TypeError, ValueError, binascii.Error, StateCorruptError) as error:
            raise StateCorruptError(f"the restore key is damaged: {text!r:.200}") from error


def digest_of(order: Mapping[str, Any]) -> str:
    """Digest a loader's order, without what does not decide which sample is at an index (`tail`)."""
    decisive = {name: value for name, value in order.items() if name != "tail"}
    return xxhash.xxh3_64_hexdigest(json.dumps(decisive, sort_keys=True).encode())
