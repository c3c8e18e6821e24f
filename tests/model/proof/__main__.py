"""Random histories over real processes, reproducible by seed: python -m proof --seed 1 --runs 5."""

from __future__ import annotations

import argparse
import sys

from proof.driver import Outcome
from proof.kinds import KINDS
from proof.mutations import MUTATIONS
from proof.suite import again, run, table


def main() -> int:
    parser = argparse.ArgumentParser(description="Random histories over real processes, by seed.")
    parser.add_argument("--seed", type=int, default=1, help="of the first history; the next ones count on from it")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--parallel", type=int, default=1, help="clusters that play histories at the same time")
    parser.add_argument(
        "--against",
        choices=["model", "undisturbed"],
        default="model",
        help="what is compared with: the model, or the product's own batches without a fault",
    )
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="only such loaders")
    parser.add_argument("--mutation", default="", choices=["", *MUTATIONS], help="a fault of the product's own code")
    parser.add_argument("--keep-going", action="store_true", help="go on after a difference")
    given = parser.parse_args()
    kinds = tuple(given.kind or KINDS)
    arguments = [f"--kind '{kind}'" for kind in given.kind or ()]
    arguments += [f"--against {given.against}"] if given.against != "model" else []
    arguments += [f"--mutation '{given.mutation}'"] if given.mutation else []

    def show(outcome: Outcome) -> None:
        print(outcome.line, flush=True)
        if outcome.difference:
            print(outcome.told, f"again: {again(outcome.plan.seed, arguments)}", sep="\n  ", flush=True)

    outcomes = run(
        range(given.seed, given.seed + given.runs),
        kinds,
        against=given.against,
        mutation=given.mutation,
        parallel=given.parallel,
        stops=not given.keep_going,
        show=show,
    )
    print(table(outcomes), flush=True)
    return 1 if any(outcome.difference for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
