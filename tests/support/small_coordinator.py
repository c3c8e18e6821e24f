"""A coordinator that keeps BUDGET bytes of snapshots at most: python -m small_coordinator, arguments as ever."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

from penstock.appliance import __main__ as program
from penstock.appliance.limits import Limits

if __name__ == "__main__":

    def small(**given: Any) -> Limits:
        return replace(Limits(**given), budget=int(os.environ["BUDGET"]))

    program.Limits = small  # type: ignore[assignment, misc]
    program.replace = lambda limits, **changes: replace(limits, **(changes | {"budget": limits.budget}))  # type: ignore[assignment]
    sys.exit(program.main())
