"""Report of full_path.py as Markdown, which is put into a document between two marker comments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import figures as fig
from benchmarks.figures import RECEIVING, cpu_us, median, rate, ratio, values
from benchmarks.modes import ALONE, DATALOADER, MEMCPY, PENSTOCK, RAW_TCP, STATEFUL, TCP, TF
from benchmarks.targets import judge

__all__ = ["BEGIN", "END", "IDLE_CORES", "between", "conditions", "markdown", "table"]

BEGIN = "<!-- figures: begin (written by benchmarks/full_path.py --write) -->"
END = "<!-- figures: end -->"
IDLE_CORES = 0.2
"""Largest number of busy cores with which the machine counts as idle."""
OVER_TCP = (TCP, TF, RAW_TCP)
"""Modes that are compared with plain TCP as their limit (floor). All others are compared with memcpy."""


def between(document: str, text: str, first: str = BEGIN, last: str = END) -> str:
    """Return the document with `text` in place of what is between the markers `first` and `last`. Raises ValueError if
    a marker is missing."""
    head, begin, rest = document.partition(first)
    _, end, tail = rest.partition(last)
    if not begin or not end:
        raise ValueError(
            f"the document must contain the markers {first!r} and {last!r}, got one without them: add the two lines "
            "where the report belongs"
        )
    return f"{head}{first}\n\n{text.strip()}\n\n{last}{tail}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose first column is text and whose others are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, shape: str = "{:,.0f}") -> str:
    return "-" if value is None else shape.format(value)


def _close(value: float | None) -> str:
    """Return a number as text with about three digits; "-" if it is None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(results: dict[str, Any]) -> str:
    """Return the report as Markdown, without the plot. `results`: results of full_path.py."""
    parts = [_setting(results)]
    if "path" in results:
        parts += [_path(results["path"], results["sizes"], results["missing"])]
    if "slow" in results:
        parts += [_slow(results["slow"])]
    if "snapshots" in results:
        parts += [_snapshots(results["snapshots"])]
    if "slots" in results:
        parts += [_slots(results["slots"]), _startup(results["slots"].get("1", []))]
    parts += [_targets(results)]
    return "\n\n".join(parts)


def conditions(results: dict[str, Any], rounds: str, meanwhile: str = "") -> list[str]:
    """Return lines that describe the conditions of a run: machine, command, and other load. `rounds`: text on the
    number of rounds."""
    machine, noise = results["machine"], results["noise"]
    lines = [
        (
            f"Machine: {machine['cores']} cores of {machine['processor']} ({machine['caches']}), "
            f"{machine['memory_gib']} GiB, Linux {machine['kernel']}, Python {machine['python']}."
        ),
        (
            f"Command: `{results['command']}`, {results['date']}, commit {results['commit'] or 'unknown'}; "
            f"{rounds}, {results['took_s'] / 60:.1f} minutes."
        ),
        (
            f"Others: {noise['busy_before']:.2f} cores were busy before the run began (load "
            f"{noise['load_before']:.1f}); other programs used {noise['others']:.2f} cores meanwhile{meanwhile}."
        ),
    ]
    if max(noise["busy_before"], noise["others"]) > IDLE_CORES:
        lines.append("**The machine was not idle: do not read levels, and ratios with care.**")
    return lines


def _setting(results: dict[str, Any]) -> str:
    settings, steal = results["settings"], results["noise"]["steal"]
    rounds = (
        f"{settings['rounds']} rounds of {settings['times']['span_s']:g} s ({settings['state_rounds']} in the suite of "
        "snapshots)"
    )
    lines = conditions(results, rounds, f"; the hypervisor took {steal:.1%} of the processors' time")
    for name, versions in sorted(results["versions"].items()):
        packages = ", ".join(f"{what} {which}" for what, which in sorted(versions.items()))
        lines.append(f"Environment {name}: {packages}.")
    lines += [f"Not measured: {name} ({why})." for name, why in results["missing"].items()]
    lines += [f"Failed: {failure}." for failure in results["failures"]]
    return "\n".join(f"- {line}" for line in lines)


def _path(figures: fig.Figures, sizes: dict[str, int], missing: dict[str, str]) -> str:
    parts = []
    for case, modes in figures.items():
        rows = [_path_row(figures, case, mode, sizes[case], missing) for mode in modes]
        head = ("batches/s", "(from - to)", "GB/s", "to DataLoader", "of its floor", "receiving CPU-s/GB")
        more = ("sending CPU-s/GB", "loop thread us", "next() p50 us", "p99 us", "memory MiB", "of it files")
        parts.append(f"**Ready batches of {case}**\n\n" + table(("", *head, *more), rows))
    parts.append(_by_process(figures, sizes))
    return "\n\n".join(parts)


def _path_row(figures: fig.Figures, case: str, mode: str, nbytes: int, missing: dict[str, str]) -> list[str]:
    place, floor = (case, mode), (case, RAW_TCP if mode in OVER_TCP else MEMCPY)
    found = [value for value in values(figures, place, fig.record_rate) if value is not None]
    if not found:
        return [mode, f"not measured: {missing.get(mode, 'failed')}", *["-"] * 11]
    per_second = rate(figures, place)

    def of(what: Any) -> float | None:
        return median(values(figures, place, what))

    def per_gb(roles: Iterable[str] | None) -> str:
        spent = of(cpu_us(roles))
        return "-" if spent is None else _close(spent * 1e3 / nbytes)

    return [
        mode,
        number(per_second),
        f"{min(found):,.0f} - {max(found):,.0f}",
        _close(None if per_second is None else per_second * nbytes / 1e9),
        number(ratio(figures, place, (case, DATALOADER)), "{:.1f}x"),
        number(ratio(figures, place, floor), "{:.2f}"),
        per_gb(RECEIVING),
        per_gb(None),
        number(of(lambda record: 1e6 * record["thread_s"] / record["batches"]), "{:.1f}"),
        number(of(lambda record: record["latency_us"]["p50"]), "{:.1f}"),
        number(of(lambda record: record["latency_us"]["p99"]), "{:.0f}"),
        number(of(fig.memory_mib)),
        number(of(fig.shared_files_mib)),
    ]


def _by_process(figures: fig.Figures, sizes: dict[str, int]) -> str:
    """Return the table of the processor time for each batch, by the role of the process, of Penstock's two lanes and of
    the tf.data service."""
    rows = []
    for mode in (PENSTOCK, TCP, TF, RAW_TCP):
        for case in sizes:
            records = figures.get(case, {}).get(mode, [])
            shares = [
                f"{role} {_close(median(values(figures, (case, mode), cpu_us([role]))))}"
                for role in fig.roles_in(records)
            ]
            if shares:
                rows.append([f"{mode}, {case}", ", ".join(shares)])
    return "**Processor microseconds a batch, by process**\n\n" + table(("", "process and microseconds"), rows)


def _slow(figures: fig.Figures) -> str:
    rows = []
    for case, modes in figures.items():
        for mode in modes:
            kept = ratio(figures, (case, mode), (case, ALONE))
            rows.append([f"{mode}, {case}", number(rate(figures, (case, mode)), "{:.1f}"), number(kept, "{:.3f}")])
    head = ("", "batches/s", "of the source alone")
    return "**A source of 2 ms of pure Python a batch, 1 MiB**\n\n" + table(head, rows)


def _snapshots(figures: fig.Figures) -> str:
    rows = []
    for mode in (PENSTOCK, STATEFUL):
        for case, modes in figures.items():
            if mode not in modes:
                continue
            base = "no state, 2 ms" if case.endswith("2 ms") else "no state"
            lost = fig.loss(figures, (case, mode), (base, mode)) if case != base else None
            taken = median(values(figures, (case, mode), lambda r: r["states"] / r["batches"]))
            rows.append(
                [
                    f"{mode}, {case}",
                    number(rate(figures, (case, mode))),
                    number(lost, "{:.1%}"),
                    "-" if case == base else number(taken, "{:.3f}"),
                ]
            )
    head = ("", "batches/s", "loss against no state", "states taken a batch")
    return "**Snapshots: batches of 1 MiB from sources with a state**\n\n" + table(head, rows)


def _slots(figures: dict[str, list[dict[str, Any] | None]]) -> str:
    rows = []
    for count, records in figures.items():
        if count != "1":

            def of(what: Any, records: Any = records) -> float | None:
                return median(None if record is None else what(record) for record in records)

            rows.append(
                [
                    f"{count} slots",
                    number(of(lambda r: r["rate"])),
                    number(of(lambda r: r["share"]), "{:.3f}"),
                    "exact" if any(records) else "-",
                    number(of(lambda r: r["first_batch_s"]), "{:.2f}"),
                    number(of(lambda r: r["last_slot_s"]), "{:.2f}"),
                    number(of(lambda r: r["memory"]["runner"]["pss"] / r["memory"]["runner"]["processes"]), "{:.1f}"),
                    number(of(lambda r: sum(e["pss"] for e in r["memory"].values()))),
                    number(of(lambda r: sum(r["rings"]) / (1 << 20)), "{:.1f}"),
                    number(of(lambda r: r["ready"])),
                ]
            )
    head = ("batches/s", "of the sum of the sources", "order", "first batch s", "last slot's first s")
    more = ("PSS a runner MiB", "memory of all MiB", "rings MiB", "ready batches")
    return "**Many slots, each asleep for 20 ms a batch**\n\n" + table(("", *head, *more), rows)


def _startup(records: list[dict[str, Any] | None]) -> str:
    def of(key: str) -> str:
        return number(median(None if record is None else record[key] for record in records), "{:.2f}")

    rows = [
        ["`Appliance()`", of("appliance_s")],
        ["`iter` to the first batch, coordinator and worker starting meanwhile", of("first_batch_s")],
        ["`iter` of a second loader to its first batch", of("second_loader_s")],
    ]
    return "**Start-up, embedded, one slot, a source that takes 20 ms a batch**\n\n" + table(("", "seconds"), rows)


def _targets(results: dict[str, Any]) -> str:
    rows = [[v.what, v.wanted, v.found, v.word] for v in judge(results)]
    missed = sum(row[3] == "MISSED" for row in rows)
    open_ = sum(row[3] == "not measured" for row in rows)
    summary = f"**Targets**: {len(rows) - missed - open_} of {len(rows)} met, {missed} missed, {open_} not measured"
    return f"{summary}\n\n" + table(("", "target", "found", ""), rows)
