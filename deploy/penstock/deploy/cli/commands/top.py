"""Commands `penstock top` and `penstock dashboard`: the same view of a coordinator, in a terminal and in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.deploy.console.coordinator_options import Peer
from penstock.deploy.console.options import AsJson, Debug

__all__ = ["dashboard", "top"]


def top(
    peer: Peer,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.2, max=3600, help="Time between two updates.")
    ] = 1.0,
    count: Annotated[
        int | None,
        typer.Option("-n", "--count", metavar="N", min=1, help="Show N updates, then end. Default: until q or Ctrl-C."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one update as lines: the same as -n 1.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Watch runs: their rates, their waits, and the workers that hold them up.

    On a terminal, shows a screen, refreshed every second: the bottleneck in one sentence, the slots that boxes wait
    for, faults. Elsewhere, or with -n, prints one line for each run and each event; with --json one object a line. If
    the coordinator stops answering, the command waits. q or Ctrl-C ends the command.

    \b
    Examples:
      penstock top
      penstock top --once                                   one look, for scripts and bug reports
      penstock top --json -n 60 --interval 10 >> runs.jsonl     ten minutes on record
    """
    from penstock.deploy.operations.show_top import run_top

    run_top(peer, interval_s=interval, count=1 if once else count, as_json=as_json)


def dashboard(
    peer: Peer,
    browser: Annotated[bool, typer.Option("--open", help="Also open the URL in a browser.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Print the URL of the dashboard: runs, their rates and waits, and the workers that hold them up, in a browser.

    An embedded run (`Appliance()` without an address) starts its dashboard now, on this machine only. Every user of
    this machine can then read it, until the run ends.

    \b
    Examples:
      penstock dashboard                  of the run or the fleet that runs here
      penstock dashboard --job lm --open
      penstock dashboard --coordinator head:7070
    """
    from penstock.deploy.operations.show_dashboard import show_dashboard

    show_dashboard(peer, browser=browser, as_json=as_json)
