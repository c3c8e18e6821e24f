"""Costs and savings of compression on the TCP lane, by content, size and codec; and the speed of the network below
which compression is of use.

    python benchmarks/compression.py [--seconds 0.5] [--rounds 3] [--only codecs,levels,small,lane]

codecs: packing and unpacking as sender and receiver do it (pieces, the copy, the lengths), in processor time of one
thread, so that other work on the machine disturbs little; the fastest round counts. Two network speeds are given, in
Gbit/s for one lane: *faster below*, where the slower of the two sides keeps up with the network, so that a stream is
faster compressed than not, if both have a core to spare; and *worth it below*, where a second of processor time (both
sides together) saves at least a second of network. levels: the reason for these levels, on bare pieces. small: the
reason why batches below 2 KiB are not compressed. lane: batches a second over the whole TCP lane (runner, sender,
receiver, consumer) on the loopback, which is faster than any network: it shows the cost. Processor time per batch of
runner, sender, receiver, consumer.

Content: `noise` (uint8, incompressible), `tokens` (int64, uniform below 50,000), `image` (float32, smooth, quantised to
256 levels as decoded images are), `sensor` (float32, smooth with noise in the low bits).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from lz4 import block

from penstock.proto.lane import compression
from penstock.proto.lane.compression import MOST_SKIPPED, NAMES, PIECE, Packer, Unpacker

sys.path.insert(0, str(Path(__file__).parent))
from lanes import remote  # type: ignore[import-not-found]

SIZES = (64 << 10, 1 << 20, 8 << 20)


def contents(size: int) -> dict[str, memoryview]:
    rng = np.random.default_rng(7)
    side = int((size / 4) ** 0.5)
    down, across = np.linspace(0, 9, side)[:, None], np.linspace(0, 6, side)[None, :]
    smooth = np.sin(down) + np.cos(across) / 2 + rng.normal(0, 0.01, (side, side))
    made: dict[str, np.ndarray[Any, Any]] = {
        "noise": rng.integers(0, 256, size, dtype=np.uint8),
        "tokens": rng.integers(0, 50_000, size // 8, dtype=np.int64),
        "image": np.round((smooth + 2) * 60).astype(np.uint8) / np.float32(255),
        "sensor": smooth.astype(np.float32),
    }
    return {name: memoryview(bytearray(array.tobytes().ljust(size, b"\0")[:size])) for name, array in made.items()}


def processor_s(work: Callable[[], object], seconds: float, rounds: int) -> float:
    """Return the processor seconds of one call of `work`: the mean of the fastest of `rounds` rounds, which take
    `seconds` seconds together."""
    work()
    best = float("inf")
    for _ in range(rounds):
        calls, started = 0, time.thread_time()
        while (used := time.thread_time() - started) < seconds / rounds:
            work()
            calls += 1
        best = min(best, used / calls)
    return best


def unpack(unpacker: Unpacker, slot: memoryview, wire: memoryview) -> None:
    target: memoryview | None = unpacker.begin(slot, len(wire))
    at = 0
    while target is not None:
        target[:] = wire[at : at + len(target)]
        at += len(target)
        target = unpacker.step()


def loaded(name: str) -> compression.Codec:
    codec = compression.load(NAMES[name])
    assert codec is not None
    return codec


def pack(packer: Packer, data: memoryview) -> None:
    packer._skip = 0  # compress again, although the last batch was skipped as incompressible
    packer.pack(data)


def codecs(seconds: float, rounds: int) -> None:
    print("| batch | content | codec | ratio | pack MB/s | unpack MB/s | CPU-s/GB | faster below | worth it below |")
    print("|---|---|---|---|---|---|---|---|---|")
    for size in SIZES:
        for content, data in contents(size).items():
            for name in NAMES:
                row = f"| {size >> 10} KiB | {content} | {name} |"
                packer, unpacker = Packer(loaded(name)), Unpacker(loaded(name))
                packed = packer.pack(data)
                cost = processor_s(partial(pack, packer, data), seconds, rounds)
                if packed is None:
                    tried = f"{size / cost / 1e6:.0f}, 1 batch in {MOST_SKIPPED + 1}"
                    print(f"{row} as it is | {tried} | | {cost / size * 1e9 / (MOST_SKIPPED + 1):.3f} | | |")
                    continue
                slot, wire = memoryview(bytearray(size)), memoryview(b"".join(packed[1]))
                back = processor_s(partial(unpack, unpacker, slot, wire), seconds, rounds)
                faster = size / max(cost, back) * 8 / 1e9
                worth = (size - len(wire)) / (cost + back) * 8 / 1e9
                print(
                    f"{row} {size / len(wire):.2f} | {size / cost / 1e6:.0f} | {size / back / 1e6:.0f} | "
                    f"{(cost + back) / size * 1e9:.2f} | {faster:.1f} Gbit/s | {worth:.1f} Gbit/s |",
                    flush=True,
                )


def levels(seconds: float, rounds: int) -> None:
    ways: dict[str, Callable[[memoryview], bytes]] = {
        "lz4": lambda piece: bytes(block.compress(piece, store_size=False)),
        "lz4 acceleration 8": lambda piece: bytes(block.compress(piece, mode="fast", acceleration=8, store_size=False)),
        **{f"zstd {level}": zstandard.ZstdCompressor(level=level).compress for level in (-3, -1, 1, 2, 3, 5)},
    }
    made = {name: data for name, data in contents(8 << 20).items() if name != "noise"}
    skewed = np.random.default_rng(7).zipf(1.3, 1 << 20).clip(0, 49_999)
    made["tokens, skewed as words are"] = memoryview(skewed.astype(np.int64).tobytes())
    print("| level | " + " | ".join(f"{name}: ratio, MB/s" for name in made) + " |")
    print("|---|" + "---|" * len(made))
    for name, compress in ways.items():
        cells = []
        for data in made.values():
            pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
            small = sum(len(compress(piece)) for piece in pieces)
            cost = processor_s(lambda: [compress(piece) for piece in pieces], seconds, rounds)  # noqa: B023
            cells.append(f"{len(data) / small:.2f}, {len(data) / cost / 1e6:.0f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def small(seconds: float, rounds: int) -> None:
    print("| batch of tokens | codec | pack us | unpack us | saved us of 1 Gbit/s |")
    print("|---|---|---|---|---|")
    compression.SMALLEST = 0
    for size in (512, 1 << 10, 2 << 10, 4 << 10, 16 << 10):
        data = contents(size)["tokens"]
        for name in NAMES:
            packer, unpacker, slot = Packer(loaded(name)), Unpacker(loaded(name)), memoryview(bytearray(size))
            packed = packer.pack(data)
            if packed is None:
                continue
            wire = memoryview(b"".join(packed[1]))
            cost = processor_s(partial(pack, packer, data), seconds, rounds)
            back = processor_s(partial(unpack, unpacker, slot, wire), seconds, rounds)
            print(f"| {size} B | {name} | {cost * 1e6:.1f} | {back * 1e6:.1f} | {(size - len(wire)) * 0.008:.1f} |")


def lane(seconds: float, rounds: int) -> None:
    print("| batch | content | codec | batches/s | CPU us a batch: runner, sender, receiver, consumer |")
    print("|---|---|---|---|---|")
    for size in SIZES:
        for content, data in contents(size).items():
            best: dict[str, tuple[float, list[float]]] = {}
            for _ in range(rounds):
                for name in ("none", *NAMES):
                    found = remote(size, seconds, data, [NAMES[name]] if name in NAMES else [])
                    best[name] = max(found, best.get(name, found))
            for name, (rate, used) in best.items():
                costs = ", ".join(f"{one:.0f}" for one in used)
                print(f"| {size >> 10} KiB | {content} | {name} | {rate:,.0f} | {costs} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds; the fastest counts")
    parser.add_argument("--only", default="codecs,levels,small,lane")
    given = parser.parse_args()
    parts = {"codecs": codecs, "levels": levels, "small": small, "lane": lane}
    for part in given.only.split(","):
        print(f"\n{part} (load average {Path('/proc/loadavg').read_text().split()[0]})\n")
        parts[part](given.seconds, given.rounds)


if __name__ == "__main__":
    main()
