"""Findings of `penstock doctor` about a machine or a cluster."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from penstock.deploy.console.exit_codes import UNFIT
from penstock.deploy.console.tables import Table, show


@dataclass(frozen=True)
class Finding:
    """Result of one check: what was found, whether it suffices, and the remedy."""

    check: str
    level: Literal["ok", "warning", "problem"]
    """With a warning Penstock works, but perhaps not well or not for long."""
    found: str
    remedy: str = ""
    """If possible a command to run; "" if none is needed."""


def show_findings(what: str, findings: Sequence[Finding], as_json: bool) -> int:
    """Print findings and return the exit code: UNFIT for a problem."""
    count = Counter(each.level for each in findings)
    code = UNFIT if count["problem"] else 0
    if as_json:
        about = {"of": what, "ok": not code, "exit_code": code, "findings": [asdict(each) for each in findings]}
        print(json.dumps(about, indent=2))
        return code
    show([Table(what, ("check", "is", "found"), [(each.check, each.level, each.found) for each in findings])])
    for each in findings:
        if each.remedy:
            print(f"\n{each.check} ({each.level}): {each.found}\n  {each.remedy}")
    print(f"\nProblems: {count['problem']}, warnings: {count['warning']}.")
    return code
