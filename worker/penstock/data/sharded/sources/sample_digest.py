"""Chained digest of a stream's samples, to check that reading the stream again yields the same samples.

A stream without a state can only be read again from its beginning, and may then yield other samples: a file was written
again, or a shuffle took its seed from the clock. So each sample's digest is added to a chain. A saved position contains
the chain's value, and reading again must reach the same value.

A sample's digest is the checksum of its encoding as a state, which covers every byte. A document of 1,000 Python
integers takes 22 us. The digest of batches (penstock.proto.batch.digest) would take 480 us, because each integer is a
leaf; for small samples and tensors both take 2 to 6 us. A sample that a batch can contain but a state cannot, such as a
named tuple or a dataclass, has the batch's digest. For any other sample, such as an image object, only its existence
enters the chain, and not its content.
"""

from __future__ import annotations

import struct
from typing import Any

from xxhash import xxh3_64_intdigest

from penstock.proto.batch.digest import DigestCover
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import UnsupportedLeafError, UnsupportedStateError
from penstock.proto.state.codec import encode_state

__all__ = ["BEGINNING", "SampleDigests"]

BEGINNING = 0
"""Value of a stream's chained digest before the first sample."""

_WORD = struct.Struct("<Q")
_UNKNOWN = bytes(8)


class SampleDigests:
    """Calculator of chained digests of samples. Each thread needs an instance of its own."""

    def __init__(self) -> None:
        self._replay_digest: ReplayDigest | None = None

    def __reduce__(self) -> tuple[type[SampleDigests], tuple[()]]:
        return SampleDigests, ()  # instances contain only scratch memory

    def after(self, chain: int, sample: Any) -> int:
        """Return the chained digest of a stream after one more sample, as an unsigned 64-bit integer. `chain`: the
        digest before the sample."""
        return xxh3_64_intdigest(self._digest(sample), chain)

    def _digest(self, sample: Any) -> bytes:
        try:
            return encode_state(sample)[-8:]
        except UnsupportedStateError:
            pass
        if self._replay_digest is None:
            self._replay_digest = ReplayDigest(cover=DigestCover.FULL)
        try:
            return _WORD.pack(self._replay_digest.take(sample)[0])
        except UnsupportedLeafError:
            return _UNKNOWN
