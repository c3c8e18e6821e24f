"""Report of benchmarks/streaming.py as Markdown, with verdicts on its targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.report import conditions, table
from benchmarks.targets import Verdict

__all__ = ["BEGIN", "END", "FLOORS", "LITDATA", "MOSAIC", "OURS", "judge", "markdown", "ratio", "same_values"]

BEGIN = "<!-- streaming: begin (written by benchmarks/streaming.py --write) -->"
END = "<!-- streaming: end -->"

OURS, MOSAIC, LITDATA = "Penstock", "mosaicml-streaming", "litdata"
FLOORS = ("pread", "memcpy")

Records = Sequence[dict[str, Any] | None]
"""Answers of a player (process of one reader), one for each round; None for a round in which it failed."""
Find = Callable[[dict[str, Any]], float]


def rate(record: dict[str, Any]) -> float:
    return float(record["samples"] / record["seconds"])


def values(records: Records, find: Find) -> list[float]:
    return [find(record) for record in records if record is not None]


def median(records: Records, find: Find) -> float | None:
    found = values(records, find)
    return statistics.median(found) if found else None


def ratio(above: Records, below: Records, find: Find = rate) -> float | None:
    """Return the median of a figure over the rounds of `above`, divided by the median over the rounds of `below`; None
    if one was not measured."""
    one, other = median(above, find), median(below, find)
    return one / other if one is not None and other else None


def _number(value: float | None, shape: str = "{:,.0f}") -> str:
    return "-" if value is None else shape.format(value)


def _spread(records: Records, find: Find = rate, shape: str = "{:,.0f}") -> str:
    found = values(records, find)
    if not found:
        return "-"
    return f"{shape.format(statistics.median(found))} ({shape.format(min(found))} - {shape.format(max(found))})"


def markdown(results: dict[str, Any]) -> str:
    parts = [_setting(results), _warm(results), _cold(results), _start(results), _order(results), _quality(results)]
    return "\n\n".join([*parts, _targets(results)])


def _setting(results: dict[str, Any]) -> str:
    lines = conditions(results, f"{results['rounds']} rounds")
    for name, versions in results["versions"].items():
        if versions:
            packages = ", ".join(f"{what} {which}" for what, which in versions.items())
            lines.append(f"{name} with {packages}.")
    lines += [f"The same values: {line}." for line in results["same"]]
    lines += [f"Not measured: {name} ({why})." for name, why in results["missing"].items()]
    lines += [f"Failed: {failure}." for failure in results["failures"]]
    return "\n".join(f"- {line}" for line in lines)


def _warm(results: dict[str, Any]) -> str:
    parts = []
    for shape, title in (
        ("samples", "Samples out of the iterator, one process, files in the page cache: samples/s (from - to)"),
        ("batches", "The same in batches of 32 through the loader, collated, one process"),
        ("workers", "The same with 2 worker processes of torch's DataLoader"),
    ):
        rows = []
        readers = [OURS, MOSAIC, LITDATA, *(FLOORS if shape == "samples" else ())]
        readers = [name for name in readers if name in results["versions"]]
        for case, by_reader in results["warm"].items():
            if case.endswith(f", {shape}"):
                row = [case.removesuffix(f", {shape}"), *(_spread(by_reader.get(name, [])) for name in readers)]
                against = ratio(by_reader[OURS], by_reader.get(MOSAIC, []))
                more = [_number(against, "{:.1f}x")]
                if shape == "samples":
                    more.append(_number(ratio(by_reader[OURS], by_reader.get("pread", [])), "{:.2f}"))
                rows.append([*row, *more])
        head = ["", *readers, f"to {MOSAIC}", *(["of pread"] if shape == "samples" else [])]
        parts.append(f"**{title}**\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def _cold(results: dict[str, Any]) -> str:
    rows = []
    for case, by_reader in results["cold"].items():
        for name, records in by_reader.items():
            first = _spread(records, lambda record: record["first_s"], "{:.2f}") if "plain" not in name else "-"
            floor = by_reader.get("one plain client")
            share = _number(ratio(records, floor), "{:.2f}") if floor else "-"
            rows.append([f"{case}: {name}", _spread(records), share, first])
    head = ("", "samples/s", "of one plain client", "first batch s")
    return "**A cold epoch, shuffled: 50,000 samples of 1 KiB in shards of 1 MiB, opening included**\n\n" + table(
        head, rows
    )


def _start(results: dict[str, Any]) -> str:
    rows = [
        [
            f"{case}: {name}",
            _spread(records, lambda record: record["seconds"], "{:.3f}"),
            _spread(records, lambda record: record["mib"], "{:,.1f}"),
        ]
        for case, by_reader in results["start"].items()
        for name, records in by_reader.items()
    ]
    title = "From a fresh process, everything imported, to the first batch of 32 of a shuffled epoch"
    return f"**{title}**\n\n" + table(("", "seconds", "memory grew by MiB, at the peak"), rows)


def _order(results: dict[str, Any]) -> str:
    rows = []
    for case, by_reader in results["order"].items():
        for name, records in by_reader.items():
            kept = median([r for r in records if r and "kept_mib" in r], lambda record: record["kept_mib"])
            rows.append(
                [
                    f"{case}: {name}",
                    _spread(records, lambda record: record["seconds"], "{:.4f}"),
                    _spread(records, lambda record: record["mib"], "{:,.1f}"),
                    _number(kept, "{:.2f}"),
                ]
            )
    title = "The order alone: made, and one batch of it looked up (theirs: the whole of it, as each start needs it)"
    return f"**{title}**\n\n" + table(("", "seconds", "memory at the peak MiB", "of it kept MiB"), rows)


def _quality(results: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{found['displacement']:.3f}",
            f"{found['neighbours']:.2f}",
            f"{found['window_shards']:.3f}",
            f"{found['chi_square']:,.2f}",
            f"{found['most_in_use']:.1%}",
            f"{found['mean_in_use']:.1%}",
        ]
        for name, found in results["quality"].items()
    ]
    head = (
        "mean displacement",
        "neighbours of one shard",
        "shards in 256",
        "chi-square",
        "shards in use, most",
        "mean",
    )
    title = f"The shuffle: {results['quality_of']}"
    return f"**{title}**\n\n" + table(("", *head), rows)


def _targets(results: dict[str, Any]) -> str:
    rows = [[v.what, v.wanted, v.found, v.word] for v in judge(results)]
    missed, open_ = (sum(row[3] == word for row in rows) for word in ("MISSED", "not measured"))
    summary = f"**Targets**: {len(rows) - missed - open_} of {len(rows)} met, {missed} missed, {open_} not measured"
    return f"{summary}\n\n" + table(("", "target", "found", ""), rows)


WARM_TARGET = 1.5
FLAT_TARGET = 1.5
KEPT_TARGET_MIB = 1.0


def judge(results: dict[str, Any]) -> list[Verdict]:
    verdicts = []
    for case, by_reader in results["warm"].items():
        if not case.endswith(", workers"):
            found = ratio(by_reader[OURS], by_reader.get(MOSAIC, []))
            verdicts.append(_verdict(f"{case}, to {MOSAIC}", WARM_TARGET, found, "{:.1f}x"))
    for size, records in _by_size(results["start"]).items():
        # The least of the rounds: other programs only make it longer.
        known = [min(times) for found in records if (times := values(found, lambda record: record["seconds"]))]
        flat = max(known) / min(known) if len(known) > 1 else None
        what = f"first batch of {size} samples: slowest position to fastest"
        verdicts.append(_verdict(what, FLAT_TARGET, flat, "{:.2f}", at_most=True))
    for case, by_reader in results["order"].items():
        if OURS in by_reader:
            kept = median(by_reader[OURS], lambda record: record["kept_mib"])
            verdicts.append(_verdict(f"order kept, {case}", KEPT_TARGET_MIB, kept, "{:.2f} MiB", at_most=True))
    return verdicts


def _by_size(start: dict[str, Any]) -> dict[str, list[Records]]:
    """Return the answers of Penstock's reader on starts, by the size of the dataset: one sequence for each position."""
    found: dict[str, list[Records]] = {}
    for case, by_reader in start.items():
        found.setdefault(case.partition(" samples")[0], []).append(by_reader[OURS])
    return found


def _verdict(what: str, wanted: float, found: float | None, shape: str, *, at_most: bool = False) -> Verdict:
    met = None if found is None else found <= wanted if at_most else found >= wanted
    bound = "at most" if at_most else "at least"
    return Verdict("streaming", what, f"{bound} {shape.format(wanted)}", _number(found, shape), met)


def same_values(checks: Iterable[tuple[str, dict[str, Any]]]) -> tuple[str, list[str]]:
    """Compare the checksums in the answers of all readers. Return a text on the values that all have read, and a list
    of failures."""
    found = list(checks)
    counts = {(record["samples"], record["checksum"]) for _, record in found}
    names = ", ".join(name for name, _ in found)
    if len(counts) == 1:
        return f"{found[0][1]['samples']:,} samples by {names}", []
    return "", [f"{name} read {record['samples']} samples of checksum {record['checksum']}" for name, record in found]
