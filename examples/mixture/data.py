"""Input: three sources of text that are on any Linux machine with Python, as packed lines of bytes.

code      the standard library's modules
help      the topics of Python's help()
licences  the licences of the operating system and of installed Python packages
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from penstock.data import Counts, LogicalShards, Mapped, Mixture, Packed, Schedule, ShardLoader

__all__ = ["LENGTH", "PAD", "SOURCES", "VOCABULARY", "WEIGHTS", "Weights", "digests", "input_fn"]

Weights = dict[int, dict[str, float]]
"""Weights of the sources by step: those given for a step apply from it on."""
WEIGHTS: Weights = {0: {"code": 0.7, "help": 0.2, "licences": 0.1}}
LENGTH = 256
"""Number of tokens in a line."""
PAD, VOCABULARY = 256, 257
"""Token ids: 0 to 255 are bytes."""
SEED = 1
SHARDS = 8
"""Number of shards of each source: at least the number of workers on all boxes, now and at any later resume."""


def input_fn(global_batch: int, weights: Weights) -> ShardLoader:
    """Return the loader; Penstock calls this in each worker.

    Batches are dicts of tensors with the rows of one box: tokens, labels, positions (int64) and segments (int32), each
    [rows, LENGTH]. global_batch: number of rows of all boxes together. weights: weights of the sources by step.
    """
    mixture = Mixture(
        {name: lines(source()) for name, source in SOURCES.items()},
        Schedule({step: _named(parts) for step, parts in weights.items()}, rows_per_step=global_batch),
    )
    return ShardLoader(
        mixture, global_batch_size=global_batch, partitions=2, seed=SEED, counts=Counts(tokens=tokens_in)
    )


def _named(parts: dict[str, float]) -> dict[str, float]:
    return {name: parts.get(name, 0.0) for name in SOURCES}


def lines(documents: LogicalShards) -> Packed:
    """Return documents packed into lines by best fit, with the fields that attention and the loss need beside the
    tokens."""
    as_bytes = Mapped(documents, to_tokens, name="bytes")
    return Packed(
        as_bytes,
        length=LENGTH,
        pad=PAD,
        split=False,
        window=200,
        labels=True,
        shift=True,
        segments=True,
        positions=True,
    )


def to_tokens(text: str) -> np.ndarray:
    """Return the bytes of a text as token ids: int64, shape (bytes,)."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64)


def tokens_in(line: dict[str, np.ndarray]) -> int:
    """Return the number of tokens in a packed line, without padding."""
    return int((np.asarray(line["segments"]) > 0).sum())


def digests(batch: dict[str, torch.Tensor]) -> list[str]:
    """Return a digest of the tokens of each row."""
    return [hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in batch["tokens"]]


# ---- the sources: paragraphs are documents, in an order that is shuffled anew in each epoch


def code() -> LogicalShards:
    """Return the source of the standard library's modules."""
    return _source(_read(path) for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))


def help_topics() -> LogicalShards:
    """Return the source of the topics of Python's help()."""
    tree = ast.parse(_read(Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"))
    return _source(str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant))


def licences() -> LogicalShards:
    """Return the source of licence texts."""
    folders = (Path("/usr/share/common-licenses"), Path(sysconfig.get_path("purelib")))
    found = {path.resolve() for folder in folders for path in folder.rglob("*") if _is_licence(path)}
    return _source(_read(path) for path in sorted(found))


SOURCES: dict[str, Callable[[], LogicalShards]] = {"code": code, "help": help_topics, "licences": licences}


def _source(texts: Iterable[str]) -> LogicalShards:
    paragraphs = [[part for part in text.split("\n\n") if part.strip()] for text in texts]
    return LogicalShards([found for found in paragraphs if found], shards=SHARDS, shuffle=True)


def _read(path: Path) -> str:
    return path.read_text(errors="replace")


def _is_licence(path: Path) -> bool:
    by_name = path.name.upper().startswith(("LICENSE", "LICENCE", "COPYING")) and path.suffix in ("", ".txt", ".md")
    return (by_name or path.parent.name == "common-licenses") and path.is_file()
