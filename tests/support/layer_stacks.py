"""Layers and stacks of them over lists of documents, for whoever checks what holds for any source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from given_shards import Given

from penstock.data import (
    Chunked,
    Filtered,
    Grouped,
    Mapped,
    Mixture,
    Packed,
    Repeated,
    ShardedSource,
    SkipSample,
    WindowShuffled,
)

__all__ = ["STACKS", "add", "documents", "keep", "parity", "pick"]


def documents(*lengths: int, first: int = 0, **options: Any) -> Given:
    """So many documents in each shard, of 1 to 9 tokens, no two alike."""
    shards = [
        [
            list(range(10 * (100 * (first + shard) + at), 10 * (100 * (first + shard) + at) + 1 + (7 * at + shard) % 9))
            for at in range(length)
        ]
        for shard, length in enumerate(lengths)
    ]
    return Given(shards, shuffled=True, **options)


def add(document: Any, generator: np.random.Generator) -> Any:
    """Another number to each token."""
    return np.asarray(document, np.int64) + generator.integers(0, 1 << 40, len(document))


def keep(document: Any, generator: np.random.Generator) -> bool:
    return len(document) > 1 or bool(generator.random() < 0.5)


def pick(document: Any, generator: np.random.Generator) -> Any:
    """Some are not wanted."""
    if generator.random() < 0.3:
        raise SkipSample
    return document


def _language_model() -> ShardedSource:
    corpora = [documents(9, 4, 7, first=first) for first in (0, 10)]
    pieces = [Chunked(Repeated(corpus), length=6, bos=-1, eos=-2, min_length=2) for corpus in corpora]
    packed = [Packed(source, length=8, bos=-1, eos=-2) for source in pieces]
    return Mixture([WindowShuffled(lines, 5) for lines in packed], [0.7, 0.3])


def parity(document: Any) -> int:
    return len(document) % 2


STACKS: dict[str, Callable[[], ShardedSource]] = {
    "repeated": lambda: Repeated(documents(5, 1, 3)),
    "mapped": lambda: Mapped(documents(5, 0, 3), add, random=True),
    "mapped, skipping": lambda: Mapped(documents(9, 0, 7), pick, random=True, skip_failures=1),
    "filtered": lambda: Filtered(documents(9, 0, 7, known=False), keep, random=True),
    "chunked": lambda: Chunked(documents(5, 0, 3), length=4, bos=-1, eos=-2),
    "packed": lambda: Packed(documents(9, 0, 3), length=7),
    "packed and padded": lambda: Packed(documents(9, 0, 3), length=7, pad=-3),
    "shuffled in windows": lambda: WindowShuffled(documents(9, 0, 8), 4),
    "grouped": lambda: Grouped(documents(9, 0, 8), parity, 2, window=5),
    "grouped, rests dropped": lambda: Grouped(documents(9, 0, 8, known=False), parity, 3, window=4, drop_rest=True),
    "mixture": lambda: Mixture([documents(9, 2), documents(3, 4, first=5)], [2, 1]),
    "mixture to the first end": lambda: Mixture([documents(9, 0), documents(3, 4, first=5)], [2, 1], stop="first"),
    "mixture to the last end": lambda: Mixture([documents(9, 0), documents(3, 4, first=5)], [2, 1], stop="last"),
    "mixture by tokens": lambda: Mixture([documents(9, 2), documents(3, 4, first=5)], [2, 1], stop="last", by="tokens"),
    "language model": _language_model,
    "language model, one epoch": lambda: WindowShuffled(
        Packed(Chunked(Mapped(documents(20, 0, 15), add, random=True), length=6, eos=-2), length=8, pad=-3), 5
    ),
}
"""Name -> a new source each time."""
