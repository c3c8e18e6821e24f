"""Command `penstock dashboard`."""

from __future__ import annotations

from penstock.deploy.console.options import AsJson
from penstock.deploy.console.peer import Peer


def dashboard(
    peer: Peer,
    as_json: AsJson = False,
) -> None:
    """Print the URL of the dashboard.

    An embedded run (`Appliance()` without an address) starts it now, on this machine only. Every user of this machine
    can then read it, until the run ends.

    \b
    Examples:
      penstock dashboard                  of the run or the fleet that runs here
      penstock dashboard --job lm
      penstock dashboard --coordinator head:7070
    """
    from penstock.deploy.operations.show_dashboard import show_dashboard

    show_dashboard(peer, as_json=as_json)
