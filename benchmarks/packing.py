"""Speed of packing documents into lines of equal length, and the padding in these lines: Penstock's Packed, a
hand-written loop, and Grain if it is installed.

    python -m benchmarks.packing [--documents 4000] [--seconds 2]

All pack the same documents from memory, in one process, and make batches of 8 lines. They take turns, and the best of
three rounds counts.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from penstock.data import Chunked, LogicalShards, Packed, Repeated, ShardLoader, collate_packed

LINE, BATCH, PAD, BOS, EOS = 2048, 8, 0, 1, 2
FIELDS: dict[str, Any] = {"labels": True, "shift": True, "positions": True, "segments": True}


def documents(count: int) -> list[Any]:
    """Return `count` documents of 1 to 2,048 tokens, with lognormally distributed lengths."""
    random = np.random.default_rng(1)
    sizes = np.clip(random.lognormal(6, 1, count), 1, LINE).astype(int)
    return [random.integers(3, 50_000, size) for size in sizes]


def by_hand(texts: list[Any]) -> Iterator[torch.Tensor]:
    """Yield batches of lines that a hand-written loop packs, without a state and without shards."""
    random, lines, filled = np.random.default_rng(1), np.empty((BATCH, LINE), np.int64), 0
    flat = lines.reshape(-1)
    while True:
        for number in random.permutation(len(texts)):
            document = np.concatenate([[BOS], texts[number], [EOS]])
            while document.size:
                part = document[: flat.size - filled]
                flat[filled : filled + part.size] = part
                filled, document = filled + part.size, document[part.size :]
                if filled == flat.size:
                    yield torch.from_numpy(lines)
                    lines, filled = np.empty((BATCH, LINE), np.int64), 0
                    flat = lines.reshape(-1)


def ours(texts: list[Any], shards: int, window: int | None, **fields: Any) -> ShardLoader:
    source = LogicalShards([texts], shards=shards, shuffle=True)
    if window is None:
        lines = Packed(Repeated(Chunked(source, length=LINE, bos=BOS, eos=EOS)), length=LINE, **fields)
    else:
        lines = Packed(Repeated(source), length=LINE, pad=PAD, split=False, window=window, **fields)
    return ShardLoader(lines, batch_size=BATCH, seed=1, collate_fn=collate_packed if fields else default_collate)


def grain_packed(texts: list[Any], kind: str, bins: int) -> Iterator[Any]:
    import grain

    packer = getattr(grain.experimental, kind)
    source = grain.MapDataset.source([{"tokens": text} for text in texts]).shuffle(seed=1).repeat()
    read = source.to_iter_dataset(grain.ReadOptions(num_threads=0))  # faster than threads for data in memory
    packed = packer(read, length_struct={"tokens": LINE}, num_packing_bins=bins)
    return iter(packed.batch(BATCH))


def rate(batches: Iterable[Any], seconds: float) -> float:
    """Return the speed in millions of tokens, padding included, for each second of processor time of all threads."""
    source = iter(batches)
    for _ in range(5):
        next(source)
    begin, count = time.process_time(), 0
    while time.process_time() - begin < seconds:
        next(source)
        count += 1
    return count * BATCH * LINE / (time.process_time() - begin) / 1e6


def padding(batches: Iterable[Any], name: str, steps: int) -> float:
    """Return the share of the tokens that are padding, in per cent, over `steps` batches. The documents themselves have
    no token with the value PAD."""
    found = [np.asarray(batch[name]) == PAD for batch in itertools.islice(iter(batches), steps)]
    return 100 * float(np.mean(found))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--documents", type=int, default=4000)
    arguments.add_argument("--seconds", type=float, default=2.0)
    given = arguments.parse_args()
    texts = documents(given.documents)
    mean = float(np.mean([len(text) for text in texts]))
    cases: dict[str, Callable[[], Iterable[Any]]] = {"hand-written loop": lambda: by_hand(texts)}
    for shards in (1, 64):
        cases[f"Packed, {shards} shards"] = partial(ours, texts, shards, None)
        cases[f"Packed, {shards} shards, fields"] = partial(ours, texts, shards, None, **FIELDS)
        window = max(8, 1024 // shards)
        cases[f"Packed, {shards} shards, fields, window {window}"] = partial(ours, texts, shards, window, **FIELDS)
    try:
        import grain  # noqa: F401

        cases["Grain, best fit, 64 bins"] = lambda: grain_packed(texts, "BestFitPackIterDataset", 64)
    except ImportError:
        print("grain is not installed")
    best = dict.fromkeys(cases, 0.0)
    for _ in range(3):
        for name, make in cases.items():
            best[name] = max(best[name], rate(make(), given.seconds / 3))
    for name, found in best.items():
        print(f"{name:45} {found:8.1f} M tokens/CPU s")
    for bins in (16, 64, 256):
        window = int(bins * LINE / mean)
        shares = {"Penstock": padding(ours(texts, 1, window, segments=True), "tokens", 60)}
        if "Grain, best fit, 64 bins" in cases:
            shares["Grain"] = padding(grain_packed(texts, "BestFitPackIterDataset", bins), "tokens", 60)
        line = ", ".join(f"{name} {share:.2f}%" for name, share in shares.items())
        print(f"padding, {bins} bins or a window of {window} documents: {line}")


if __name__ == "__main__":
    main()
