"""Counts of a run's samples and tokens, by source and key (such as a language), for `penstock state` and `replay`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.deploy.console.tables import Table
from penstock.proto.state.counts import COUNTS, Rows, SampleCounts, by_key, by_source, merged_rows, saved_rows


def rows_of_workers(states: Iterable[Any]) -> Rows:
    """Return the sum of the workers' counts, a row for each source and key."""
    counts = [state.get(COUNTS) for state in states if isinstance(state, Mapping)]
    return merged_rows(saved_rows(saved["rows"]) for saved in counts if isinstance(saved, Mapping) and "rows" in saved)


def counts_as_dict(rows: Rows) -> dict[str, Any]:
    return {
        "sources": {name: counts.plain() for name, counts in by_source(rows).items()},
        "keys": {name: counts.plain() for name, counts in by_key(rows).items()},
    }


def count_tables(rows: Rows) -> list[Table]:
    tables = [_table("Counts by source", "source", by_source(rows)), _table("Counts by key", "key", by_key(rows))]
    lengths = Table("Samples by number of tokens", ("tokens", "samples>"))
    total = merged_rows([{("", ""): row} for row in rows.values()])
    for row in total.values():
        for length, count in SampleCounts.of(row).lengths.items():
            lengths.rows.append((str(length) if length < 2 else f"{length} to {2 * length - 1}", str(count)))
    return [*tables, lengths]


def _table(title: str, what: str, found: Mapping[str, SampleCounts]) -> Table:
    table = Table(title, (what, "samples>", "share>", "tokens>", "share>", "wanted>", "truncated>", "skipped>"))
    samples, tokens = (sum(getattr(counts, name) for counts in found.values()) for name in ("samples", "tokens"))
    for name, counts in found.items():
        wanted = "" if counts.wanted is None else f"{counts.wanted[0]:.4f} of {counts.wanted[1]}"
        table.rows.append(
            (
                name,
                str(counts.samples),
                _share(counts.samples, samples),
                str(counts.tokens),
                _share(counts.tokens, tokens),
                wanted,
                str(counts.truncated),
                str(counts.skipped),
            )
        )
    return table


def _share(count: int, total: int) -> str:
    return f"{count / total:.4f}" if total else ""
