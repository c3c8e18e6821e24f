"""Report of benchmarks/checkpoint.py as Markdown, with verdicts on its targets."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.report import conditions, table
from benchmarks.targets import Verdict

__all__ = ["BEGIN", "END", "FLOOR", "MEANWHILE", "MODES", "PENSTOCK", "PLAIN", "THREAD", "judge", "markdown"]

BEGIN = "<!-- checkpoints: begin (written by benchmarks/checkpoint.py --write) -->"
END = "<!-- checkpoints: end -->"

PLAIN, THREAD, MEANWHILE, PENSTOCK = "dcp.save", "dcp.async_save, thread", "process, staged meanwhile", "Penstock"
COPYING = (PLAIN, THREAD, "thread, kept stager", "dcp.async_save, process", "process, shared stager")
"""Modes of torch in which the call that saves returns when the state has been copied, as Penstock's does."""
MODES = (*COPYING, MEANWHILE, PENSTOCK)
"""All modes (methods of saving) in the report, named as in benchmarks/checkpoint_modes.py. That module is not imported
here, because it imports torch: if this process had torch loaded too, the measured process would share torch's pages
with this one, and seem to use half as much memory for them."""
FLOOR = "floor"

STALL, EXCESS, TOTAL, COPIES = 1.0, 0.5, 1.2, 1.05
"""Targets of Penstock: largest ratio of its stall to that of torch's best mode; of the steps' excess to that of torch's
default asynchronous mode; of the total time to that of dcp.save; of its memory to the bytes that are saved."""
MIB = 1 << 20


def _values(results: dict[str, Any], mode: str, key: str) -> list[float]:
    """Return one figure of a mode for all saves of all rounds. For the key "first", the first save's, return one value
    for each round."""
    turns = [turn for turn in results["saves"].get(mode, []) if turn]
    if key == "first":
        return [turn[0]["first"] for turn in turns]
    saves = [save for turn in turns for save in turn]
    if key == "held":
        return [save["stall"] + save["excess"] for save in saves]
    return [save[key] for save in saves]


def _median(results: dict[str, Any], mode: str, key: str) -> float | None:
    found = _values(results, mode, key)
    return statistics.median(found) if found else None


def _worst(results: dict[str, Any], mode: str) -> dict[str, Any] | None:
    """Return the measurement of a mode's run that took the most memory, with a key "above": bytes above the memory
    before the first save. Return None if the memory was not measured."""
    turns = [{**turn, "above": turn["peak"] - turn["base"]} for turn in results["memory"].get(mode, [])]
    return max(turns, key=lambda turn: turn["above"], default=None)


def judge(results: dict[str, Any]) -> list[Verdict]:
    """Return the verdict on each target: whether Penstock has reached it."""
    stalls = {mode: stall for mode in COPYING if (stall := _median(results, mode, "stall")) is not None}
    best = min(stalls, key=lambda mode: stalls[mode], default="no mode of torch's")
    ratios = (
        ("stall, to the best of torch's modes whose call copies", STALL, "stall", best),
        ("stall, to torch's copying beside the loop, with the wait for it", STALL, "stall", MEANWHILE),
        (f"step excess, to that of {THREAD}", EXCESS, "excess", THREAD),
        (f"total, to that of {PLAIN}", TOTAL, "total", PLAIN),
    )
    verdicts = []
    for what, wanted, key, other in ratios:
        own, theirs = _median(results, PENSTOCK, key), _median(results, other, key)
        found, met = "-", None
        if own is not None and theirs is not None and theirs > 0:  # an excess may be 0 or less, because of noise
            met = own <= wanted * theirs
            found = f"{own / theirs:.2f}x ({_seconds(own)} s; {other}: {_seconds(theirs)} s)"
        verdicts.append(Verdict("checkpoints", what, f"<= {wanted:.2f}x", found, met))
    return [*verdicts, _memory_verdict(results)]


def _memory_verdict(results: dict[str, Any]) -> Verdict:
    worst, nbytes = _worst(results, PENSTOCK), results["nbytes"]
    found, met = "-", None
    if worst is not None:
        met = worst["above"] <= COPIES * nbytes
        without = (worst["above"] - worst["others"]) / nbytes
        found = f"{worst['above'] / nbytes:.3f}x ({without:.3f}x without the writer's own {_mib(worst['others'])} MiB)"
    what = "memory at most above its base, the writer's own included, to the bytes saved"
    return Verdict("checkpoints", what, f"<= {COPIES:.2f}x", found, met)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _span(values: list[float]) -> str:
    return f"{min(values):.3f} - {max(values):.3f}" if values else "-"


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.0f}"


def _times(value: float | None, other: float | None) -> str:
    return f"{value / other:.2f}x" if value is not None and other else "-"


def markdown(results: dict[str, Any]) -> str:
    """Return the whole report as Markdown: conditions of the run, tables and targets."""
    parts = [_setting(results), _times_table(results), _memory(results)]
    rows = [[one.what, one.wanted, one.found, one.word] for one in judge(results)]
    parts.append("**Targets**\n\n" + table(("", "wanted", "found", ""), rows))
    return "\n\n".join(parts)


def _setting(results: dict[str, Any]) -> str:
    settings, steal = results["settings"], results["noise"]["steal"]
    rounds = (
        f"{settings['rounds']} rounds of {settings['saves']} saves of {_mib(results['nbytes'])} MiB beside steps of "
        f"{settings['step_ms']:g} ms, {settings['memory_rounds']} rounds for memory"
    )
    meanwhile = (
        ", the kernel's writing of what dcp leaves in the page cache included; the hypervisor took "
        f"{steal:.1%} of the processors' time"
    )
    lines = conditions(results, rounds, meanwhile)
    floors = [save for turn in results["saves"].get(FLOOR, []) for save in turn]
    direct = "" if all(save["direct"] for save in floors) else ", which has no O_DIRECT"
    lines.append(f"torch {results['torch']}; saved to {results['filesystem']}{direct}.")
    lines += [f"Failed: {failure}." for failure in results["failures"]]
    return "\n".join(f"- {line}" for line in lines)


def _times_table(results: dict[str, Any]) -> str:
    copy, write = _median(results, FLOOR, "copy"), _median(results, FLOOR, "write")
    plain = _median(results, PLAIN, "total")
    rows = []
    for mode in MODES:
        stall, total = _median(results, mode, "stall"), _median(results, mode, "total")
        rows.append(
            [
                mode,
                _seconds(stall),
                _span(_values(results, mode, "stall")),
                _times(stall, copy),
                _seconds(_median(results, mode, "first")),
                _seconds(_median(results, mode, "excess")),
                _seconds(_median(results, mode, "held")),
                _seconds(total),
                _span(_values(results, mode, "total")),
                _times(total, write),
                _times(total, plain),
            ]
        )
    copies, writes = _span(_values(results, FLOOR, "copy")), _span(_values(results, FLOOR, "write"))
    rows.append(["floor: one copy", _seconds(copy), copies, "1.00x" if copy else "-", *["-"] * 7])
    last = [_seconds(write), writes, "1.00x" if write else "-", _times(write, plain)]
    rows.append(["floor: written past the page cache", *["-"] * 6, *last])
    head = ("stall s", "(from - to)", "of its floor", "of the first save", "step excess s", "stall and excess s")
    more = ("total s", "(from - to)", "of its floor", "to dcp.save")
    return "**Saves beside a training loop**\n\n" + table(("", *head, *more), rows)


def _memory(results: dict[str, Any]) -> str:
    nbytes, rows = results["nbytes"], []
    for mode in MODES:
        worst = _worst(results, mode)
        if worst is None:
            rows.append([mode, *["-"] * 7])
            continue
        above, others = worst["above"], worst["others"]
        sizes = [_mib(worst[name]) for name in ("base", "peak", "above", "files", "others")]
        rows.append([mode, *sizes, f"{above / nbytes:.3f}x", f"{(above - others) / nbytes:.3f}x"])
    head = ("base MiB", "peak MiB", "above base MiB", "of it files", "of it other processes' own", "to the bytes saved")
    return "**Memory of all processes (PSS)**\n\n" + table(("", *head, "without others' own"), rows)
