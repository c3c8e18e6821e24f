"""Random histories over real processes, reproducible by seed: python -m proof --seed 1 --runs 5."""

from __future__ import annotations

import argparse
import sys

from proof.kinds import KINDS
from proof.mutations import MUTATIONS
from proof.suite import run


def main() -> int:
    parser = argparse.ArgumentParser(description="Random histories over real processes, by seed.")
    parser.add_argument("--seed", type=int, default=1, help="of the first history; the next ones count on from it")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--parallel", type=int, default=1, help="clusters that play histories at the same time")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="only such loaders")
    parser.add_argument("--mutation", default="", choices=["", *MUTATIONS], help="a fault of the product's own code")
    given = parser.parse_args()
    outcomes = run(
        range(given.seed, given.seed + given.runs),
        tuple(given.kind or KINDS),
        mutation=given.mutation,
        parallel=given.parallel,
        show=lambda outcome: print(outcome, flush=True),
    )
    return 1 if any(outcome.difference for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
