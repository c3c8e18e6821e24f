"""Reading beside other libraries, each on its own format: `python -m benchmarks.readers --peers DIR`.

One run, one machine, the same samples, files in the page cache, one process a reader, batches of 32. Each library
writes its files as its documentation advises and reads them; Penstock reads the same files, where it knows the format.
The two readers of a pair take turns, A B A B. What is reported is the ratio of two turns that
follow each other: its median and its spread. A checksum over every byte shows that both have read the same samples.
`make bench-peers` makes the environment, and `--write` puts the tables into a document.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.readers.pairs import ORDERS, PAIRS, Pair
from benchmarks.readers.report import BEGIN, END, markdown
from benchmarks.report import between
from benchmarks.streaming import Players, warm, with_conditions
from benchmarks.streaming_data import KINDS, Kind
from benchmarks.streaming_report import OURS, same_values

__all__ = ["FULL", "QUICK", "compare", "figures", "main"]

FULL = tuple(
    replace(KINDS[name], samples=samples) for name, samples in (("1 KiB", 20_000), ("64 KiB", 4_000), ("tokens", 8_000))
)
"""Kinds of data, each with so many samples that the slowest reader reads an epoch in some seconds."""
IMAGES = (KINDS["JPEG"], KINDS["JPEG of 256"])
QUICK = tuple(kind.fewer(50) for kind in FULL)
AT_LEAST_S = 0.4
"""Smallest number of seconds for which a reader is measured at a time."""


def compare(pair: Pair, kind: Kind, players: Players, folder: Path, rounds: int, at_least_s: float) -> dict[str, Any]:
    """Compare the two readers of a pair with one kind of data. Return "checked" (True if both readers have read the
    same samples), "failures", and for each order the answers of each reader in each round."""
    what: dict[str, Any] = {"kind": kind.name, "folder": str(folder / "data"), "samples": kind.samples}
    for name in (pair.peer, OURS):
        players.ask(name, do="write", **what)
    found: dict[str, Any] = {"checked": True, "failures": [], **{order: {} for order in pair.orders}}
    for order in pair.orders:
        shuffle = ORDERS[order]
        answers = [(name, players.ask(name, do="check", shuffle=shuffle, **what)) for name in (pair.peer, OURS)]
        same, failures = same_values([(name, answer) for name, answer in answers if answer is not None])
        found["checked"] &= bool(same) and all(answer for _, answer in answers)
        found["failures"] += [f"{pair.name}, {kind.name}, {order}: {failure}" for failure in failures]
        how = {"shuffle": shuffle, "shape": "batches", "workers": 0, "at_least_s": at_least_s}
        for _ in range(rounds):
            for name in (pair.peer, OURS):
                warm(folder)
                found[order].setdefault(name, []).append(players.ask(name, do="rate", **what, **how))
    return found


def figures(
    pairs: Sequence[Pair],
    kinds: Sequence[Kind],
    images: Sequence[Kind],
    rounds: int,
    peers: Path | None,
    at_least_s: float,
    folder: Path,
) -> dict[str, Any]:
    """Compare all pairs of readers, each with new processes (players), and return their figures by name."""
    results: dict[str, Any] = {"rounds": rounds, "versions": {}, "pairs": {}, "missing": {}, "failures": []}
    for pair in pairs:
        players = Players(peers, folder, pair.modes)
        try:
            for kind in (*kinds, *(images if pair.images else ())):
                place = folder / pair.module / kind.name.replace(" ", "-")
                place.mkdir(parents=True)
                found = compare(pair, kind, players, place, rounds, at_least_s)
                results["failures"] += found.pop("failures")
                results["pairs"].setdefault(pair.name, {})[kind.name] = {**found, "peer": pair.peer}
                shutil.rmtree(place)
                print(f"{pair.name}, {kind.name}: measured", file=sys.stderr, flush=True)
        finally:
            players.close()
        shutil.rmtree(folder / pair.module)
        for versions in players.versions.values():
            results["versions"].update(versions)
        results["missing"].update(players.missing)
        results["failures"] += players.failures
    return results


def main(given: Sequence[str] | None = None) -> int:
    """Run the comparison. Return the exit status: 1 if a reader failed or two readers of the same files read different
    samples, else 0."""
    parser = argparse.ArgumentParser("python -m benchmarks.readers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("only", nargs="*", help=f"modules of {', '.join(sorted({pair.module for pair in PAIRS}))}")
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small data, to see that it runs")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--write", type=Path, help="also put the tables into this document")
    options = parser.parse_args(given)
    command = " ".join(["python -m benchmarks.readers", *options.only, f"--rounds {options.rounds}"])
    pairs = [pair for pair in PAIRS if not options.only or pair.module in options.only]
    kinds, at_least_s = (QUICK, 0.0) if options.quick else (FULL, AT_LEAST_S)
    images = [kind.fewer(50) for kind in IMAGES] if options.quick else IMAGES
    work = partial(figures, pairs, kinds, images, options.rounds, options.peers, at_least_s)
    results = with_conditions(work, command + (" --quick" if options.quick else ""))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    text = markdown(results)
    print(text)
    if options.write:
        options.write.write_text(between(options.write.read_text(), text, BEGIN, END))
    return 1 if results["failures"] or results["missing"] else 0


if __name__ == "__main__":
    sys.exit(main())
