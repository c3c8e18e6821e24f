"""Findings of `penstock doctor` about a machine or a cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from penstock.deploy.console.exit_codes import UNFIT
from penstock.deploy.console.tables import Table, show

__all__ = ["Finding", "ok", "problem", "show_findings", "warning"]


@dataclass(frozen=True)
class Finding:
    """Result of one check: what was found, whether it suffices, and the remedy."""

    check: str
    level: Literal["ok", "warning", "problem"]
    found: str
    remedy: str = ""
    """If possible a command to run; "" if none is needed."""


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """Penstock works, but perhaps not well or not for long."""
    return Finding(check, "warning", found, remedy)


def problem(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, "problem", found, remedy)


def show_findings(what: str, findings: Sequence[Finding], as_json: bool) -> int:
    """Print findings and return the exit code: UNFIT for a problem."""
    count = {level: sum(each.level == level for each in findings) for level in ("ok", "warning", "problem")}
    code = UNFIT if count["problem"] else 0
    if as_json:
        about = {"of": what, "ok": not code, "exit_code": code, "findings": [asdict(each) for each in findings]}
        print(json.dumps(about, indent=2))
        return code
    show([Table(what, ("check", "is", "found"), [(each.check, each.level, each.found) for each in findings])])
    for each in findings:
        if each.remedy:
            print(f"\n{each.check} ({each.level}): {each.found}\n  {each.remedy}")
    print()
    if not count["problem"] and not count["warning"]:
        print("All is well.")
    else:
        print(f"{_many(count['problem'], 'problem')}, {_many(count['warning'], 'warning')}.")
    return code


def _many(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"
