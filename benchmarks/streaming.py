"""Penstock's streaming datasets compared with mosaicml-streaming and litdata: speed of reading local files (warm) and
of files that must be downloaded first (cold), time to start, and the order of samples with its quality.

    python -m benchmarks.streaming --peers DIR [--rounds 3] [--quick] [--json FILE]

One run, one machine, the same data: MDS datasets written once by Penstock and read by both, litdata's own format
written by itself. Each reader is a process of its own (benchmarks/streaming_player.py), and they take turns within each
round; medians over the rounds are reported, and ratios of them. A checksum verifies that all read the same values, over
every byte. The cost of a start is measured in a new process each time. `--write` puts the tables into a document.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks import machine
from benchmarks.modes import ROOT, Mode, Player, PlayerError, PlayerGoneError
from benchmarks.processes import busy_cores, cpu_s, machine_s
from benchmarks.report import between
from benchmarks.streaming_data import BATCH, KINDS, TINY, Kind
from benchmarks.streaming_quality import quality
from benchmarks.streaming_report import BEGIN, END, FLOORS, LITDATA, MOSAIC, OURS, judge, markdown, same_values

__all__ = ["Players", "Size", "figures", "main", "run", "warm", "with_conditions"]

ANSWER_S = 90.0
"""Deadline of one request to a reader's process, in seconds."""
DELAY_S = 0.02
SHAPES = {"samples": 0, "batches": 0, "workers": 2}
"""Number of worker processes for each way to read an epoch, by name."""
POSITIONS = (0.0, 0.01, 0.5, 0.99)

MODES = {
    mode.name: mode
    for mode in (
        Mode(OURS, ("benchmarks.streaming_ours", "ours")),
        Mode(MOSAIC, ("benchmarks.peers.mosaic_streaming",), "streaming"),
        Mode(LITDATA, ("benchmarks.peers.litdata_streaming",), "litdata"),
        *(Mode(name, ("benchmarks.streaming_ours", name)) for name in FLOORS),
    )
}
NO_IMAGES = (LITDATA, "memcpy")


@dataclass(frozen=True)
class Size:
    """Sizes of the datasets of a run, and durations."""

    kinds: tuple[Kind, ...]
    tiny: Kind
    big_shards: int
    big_per_shard: int
    theirs: tuple[int, ...]
    """Numbers of samples of the datasets whose order mosaicml-streaming is measured to compute."""
    quality_shards: int
    quality_per_shard: int
    at_least_s: float = 0.4
    """Smallest number of seconds for which the speed of a reader is measured."""


FULL = Size(tuple(KINDS.values()), TINY, 10_000, 100_000, (1_000_000, 10_000_000, 100_000_000), 1000, 1000)
QUICK = Size(tuple(kind.fewer(50) for kind in KINDS.values()), TINY.fewer(100), 100, 1000, (10_000,), 100, 1000, 0.0)


class Players:
    """Players, the processes of the available readers. Each is started once; for measurements of a start a new one is
    made."""

    def __init__(self, peers: Path | None, logs: Path, modes: Mapping[str, Mode] = MODES) -> None:
        self._peers, self._logs, self._modes = peers, logs, modes
        self.failures: list[str] = []
        self.missing: dict[str, str] = {}
        """Reasons why readers are missing, by the name of the reader."""
        self.versions: dict[str, dict[str, str]] = {}
        self._players: dict[str, Player] = {}
        for name, mode in modes.items():
            if not self._python(mode).exists():
                self.missing[name] = "no such environment; make bench-peers makes it"
                continue
            self._players[name] = self._start(mode)
            hello = self.ask(name, do="hello")
            if hello is None:
                self.missing[name] = "it did not start"
                self._players.pop(name).kill()
            else:
                self.versions[name] = hello["versions"]

    def _python(self, mode: Mode) -> Path:
        if not mode.peer:
            return Path(sys.executable)
        return (self._peers or Path(".peers")) / mode.peer / "bin" / "python"

    def _start(self, mode: Mode) -> Player:
        return Player(mode, self._python(mode), self._logs / f"{'-'.join(mode.command)}.log")

    def ask(self, name: str, **request: Any) -> dict[str, Any] | None:
        """Send a request to the process of a reader, and return its answer. Return None if that failed; the reason is
        then in `failures`."""
        player = self._players.get(name)
        if player is None:
            return None
        try:
            return self._answer(name, player, request)
        except PlayerGoneError as error:
            self._failed(name, request, error)
            player.kill()
            self._players[name] = self._start(self._modes[name])
            return None

    def ask_fresh(self, name: str, **request: Any) -> dict[str, Any] | None:
        """Send a request to a new process of a reader, which has only imported its libraries. Return its answer as
        `ask` does."""
        if name not in self._players:
            return None
        player = self._start(self._modes[name])
        try:
            return self._answer(name, player, {"do": "hello"}) and self._answer(name, player, request)
        except PlayerGoneError as error:
            self._failed(name, request, error)
            return None
        finally:
            player.close()

    def _answer(self, name: str, player: Player, request: dict[str, Any]) -> dict[str, Any] | None:
        """Send a request to a player, and return its answer, or None if the request failed. Raises PlayerGoneError if
        the player has ended."""
        player.send(request)
        try:
            return player.receive(ANSWER_S)
        except PlayerGoneError:
            raise
        except PlayerError as error:
            self._failed(name, request, error)
            return None

    def _failed(self, name: str, request: dict[str, Any], error: PlayerError) -> None:
        what = " ".join(f"{key}={value}" for key, value in request.items() if key != "folder")
        self.failures.append(f"{name}, {what}: {error}")
        print(self.failures[-1], file=sys.stderr, flush=True)

    def close(self) -> None:
        for player in self._players.values():
            player.close()


class Bench:
    def __init__(self, size: Size, players: Players, folder: Path) -> None:
        self._size, self._players, self._folder = size, players, folder
        self.same: list[str] = []
        self.failures: list[str] = []
        self.warm: dict[str, dict[str, list[Any]]] = {}
        self.cold: dict[str, dict[str, list[Any]]] = {}
        self.start: dict[str, dict[str, list[Any]]] = {}
        self.order: dict[str, dict[str, list[Any]]] = {}

    def _data(self, kind: Kind, reader: str = OURS) -> str:
        own = "litdata" if reader == LITDATA else "mds"
        return str(self._folder / own / kind.name.replace(" ", "-"))

    def _readers(self, kind: Kind) -> list[str]:
        there = [name for name in MODES if name in self._players.versions and name not in FLOORS]
        return [name for name in there if kind.column != "image" or name not in NO_IMAGES]

    def prepare(self) -> None:
        """Write all datasets, and verify that all readers read the same values."""
        for kind in (*self._size.kinds, self._size.tiny):
            for name in {OURS, LITDATA} & set(self._readers(kind)):
                if name == OURS or kind.name not in ("cold", TINY.name):
                    what = {"kind": kind.name, "samples": kind.samples}
                    self._players.ask(name, do="write", folder=self._data(kind, name), **what)
        big = str(self._folder / "big")
        shape = {"shards": self._size.big_shards, "per_shard": self._size.big_per_shard}
        self._players.ask(OURS, do="synthetic", folder=big, **shape)
        for kind in self._size.kinds:
            checks = []
            for name in self._readers(kind) if kind.name != "cold" else ():
                found = self._players.ask(name, do="check", kind=kind.name, folder=self._data(kind, name), shuffle=True)
                if found is not None:
                    checks.append((name, found))
            if checks:
                same, failures = same_values(checks)
                self.same += [f"{kind.name}, {same}"] if same else []
                self.failures += failures

    def round(self) -> None:
        self._read_warm()
        self._read_cold()
        self._start_anew()
        self._make_orders()

    def _note(self, where: dict[str, dict[str, list[Any]]], case: str, reader: str, found: Any) -> None:
        where.setdefault(case, {}).setdefault(reader, []).append(found)

    def _read_warm(self) -> None:
        for kind in self._size.kinds:
            for shuffle in (False, True) if kind.name != "cold" else ():
                for shape, workers in SHAPES.items():
                    floors = [name for name in FLOORS if shape == "samples"]
                    for name in [*self._readers(kind), *floors]:
                        what = {"kind": kind.name, "folder": self._data(kind, name), "samples": kind.samples}
                        how = {"shuffle": shuffle, "shape": shape, "workers": workers}
                        span = {"at_least_s": self._size.at_least_s}
                        case = f"{kind.name}, {'shuffled' if shuffle else 'in sequence'}, {shape}"
                        warm(Path(self._data(kind, name)))
                        self._note(self.warm, case, name, self._players.ask(name, do="rate", **what, **how, **span))

    def _read_cold(self) -> None:
        kind = next(kind for kind in self._size.kinds if kind.name == "cold")
        data = Path(self._data(kind))
        with _server(data.parent, 0.0) as near, _server(data.parent, DELAY_S) as far:
            places = {
                "HTTP": f"{near}/cold",
                f"HTTP, {1e3 * DELAY_S:.0f} ms a request": f"{far}/cold",
                "a folder": str(data),
            }
            for case, remote in places.items():
                if remote.startswith("http"):
                    self._note(self.cold, case, "one plain client", self._download(remote))
                for workers in (0, 2):
                    for name in (OURS, MOSAIC):
                        who = f"{name}, {workers} workers" if workers else name
                        found = self._cold_epoch(name, remote, workers)
                        if found is not None and found["samples"] != kind.samples:
                            self.failures.append(f"{who}, {case}: {found['samples']} samples")
                        self._note(self.cold, case, who, found)

    def _download(self, remote: str) -> dict[str, Any] | None:
        return self._players.ask(OURS, do="download", remote=remote)

    def _cold_epoch(self, name: str, remote: str, workers: int) -> dict[str, Any] | None:
        local = tempfile.mkdtemp(dir=self._folder)
        try:
            return self._players.ask(name, do="cold", folder=local, remote=remote, workers=workers)
        finally:
            shutil.rmtree(local)

    def _start_anew(self) -> None:
        big = self._size.big_shards * self._size.big_per_shard
        for share in POSITIONS:
            for samples, readers in ((self._size.tiny.samples, (OURS, MOSAIC)), (big, (OURS,))):
                for name in readers:
                    tiny = self._data(self._size.tiny, name)
                    folder = tiny if len(readers) > 1 else str(self._folder / "big" / "whole")
                    position = int(samples * share) // BATCH * BATCH
                    found = self._players.ask_fresh(name, do="start", folder=folder, position=position)
                    if found is not None or name in self._players.versions:
                        self._note(self.start, f"{samples:,} samples, at {share:.0%}", name, found)

    def _make_orders(self) -> None:
        per_shard = self._size.big_per_shard
        for samples in (*self._size.theirs, self._size.big_shards * per_shard):
            shape = {"shards": max(1, samples // per_shard), "per_shard": per_shard}
            case = f"{samples:,} samples in {shape['shards']:,} shards"
            position = samples // 2
            self._note(self.order, case, OURS, self._players.ask_fresh(OURS, do="order", **shape, position=position))
            if samples in self._size.theirs and MOSAIC in self._players.versions:
                self._note(self.order, case, MOSAIC, self._players.ask_fresh(MOSAIC, do="order", **shape))

    def qualities(self) -> dict[str, Any]:
        shards, per_shard = self._size.quality_shards, self._size.quality_per_shard
        out = self._folder / "order.npy"
        found: dict[str, Any] = {}
        wanted: list[tuple[str, str, dict[str, Any]]] = [
            (f"{OURS}, block of 2^18 (default)", OURS, {"block": 1 << 18}),
            (f"{OURS}, block of 2^16", OURS, {"block": 1 << 16}),
            (f"{OURS}, all with all", OURS, {"block": None}),
        ]
        blocks = ((1 << 18, "2^18 (default from 16 nodes on)"), (4_000_000, "4,000,000 (default of 1 node)"))
        for algorithm in ("py1e", "py1br"):
            for block, why in blocks:
                more = {"algorithm": algorithm, "block": block}
                wanted.append((f"{MOSAIC}, {algorithm}, block of {why}", MOSAIC, more))
        wanted.append((f"{MOSAIC}, py1s", MOSAIC, {"algorithm": "py1s", "block": 0}))
        for title, name, more in wanted:
            answer = self._players.ask(name, do="shuffle", shards=shards, per_shard=per_shard, out=str(out), **more)
            if answer is not None:
                found[title] = asdict(quality(np.load(out), shards, per_shard))
        uniform = np.random.default_rng(0).permutation(shards * per_shard)
        found["a uniform permutation"] = asdict(quality(uniform, shards, per_shard))
        return found


def warm(folder: Path) -> None:
    """Read all files of a folder once, so that they are in the page cache, from which the kernel may have removed
    them."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


@contextmanager
def _server(folder: Path, delay_s: float) -> Iterator[str]:
    """Context manager that runs an HTTP server of a folder, which waits `delay_s` seconds before each answer. Its value
    is the server's address."""
    command = [sys.executable, "-m", "benchmarks.streaming_server", str(folder), "--delay", str(delay_s)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def figures(size: Size, rounds: int, players: Players, folder: Path) -> dict[str, Any]:
    """Run all measurements, and return their figures by name."""
    bench = Bench(size, players, folder)
    bench.prepare()
    for _ in range(rounds):
        bench.round()
    return {
        "rounds": rounds,
        "versions": players.versions,
        "same": bench.same,
        "warm": bench.warm,
        "cold": bench.cold,
        "start": bench.start,
        "order": bench.order,
        "quality_of": f"{size.quality_shards * size.quality_per_shard:,} samples in {size.quality_shards:,} shards",
        "quality": bench.qualities(),
        "missing": {**players.missing, f"{LITDATA} from a server": "it reads no plain HTTP"},
        "failures": players.failures + bench.failures,
    }


def run(size: Size, rounds: int, peers: Path | None, command: str) -> dict[str, Any]:
    """Run the benchmark, and return all results, which --json writes to a file. `peers`: folder with the Python
    environments of the other libraries."""

    def measured(folder: Path) -> dict[str, Any]:
        players = Players(peers, folder)
        try:
            return figures(size, rounds, players, folder)
        finally:
            players.close()

    return with_conditions(measured, command)


def with_conditions(measured: Callable[[Path], dict[str, Any]], command: str) -> dict[str, Any]:
    """Call `measured` with a temporary folder, and return the figures that it returns together with the conditions of
    the run (machine, command, other load)."""
    load, busy = os.getloadavg()[0], busy_cores(2.0)
    used, own, started = machine_s(), cpu_s(os.getpid()), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        found = measured(Path(folder))
    took = time.monotonic() - started
    spent = cpu_s(os.getpid()) - own  # including ended children that were waited for
    return {
        **found,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command,
        "commit": machine.commit(),
        "machine": machine.describe(),
        "noise": {"busy_before": busy, "load_before": load, "others": max(0.0, machine_s() - used - spent) / took},
        "took_s": took,
    }


def main(given: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return the exit status: 1 if a measurement failed, else 0. A missed target is reported, but
    does not change the status."""
    parser = argparse.ArgumentParser("python -m benchmarks.streaming", description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small data, to see that it runs")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--write", type=Path, help="also put the tables into this document")
    options = parser.parse_args(given)
    command = f"python -m benchmarks.streaming --rounds {options.rounds}{' --quick' if options.quick else ''}"
    results = run(QUICK if options.quick else FULL, options.rounds, options.peers, command)
    results["targets"] = [asdict(verdict) for verdict in judge(results)]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    text = markdown(results)
    print(text)
    if options.write:
        options.write.write_text(between(options.write.read_text(), text, BEGIN, END))
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
