"""`penstock dashboard`: prints the URL of a coordinator's dashboard."""

from __future__ import annotations

import json
import sys
from urllib.parse import urlsplit

from penstock.deploy.console.peer import Peer
from penstock.proto.errors import PenstockError
from penstock.proto.rpc.addresses import is_local
from penstock.runtime.telemetry.logs import printable


def show_dashboard(peer: Peer, *, as_json: bool) -> None:
    with peer.client() as client:
        url = client.open_dashboard()
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):  # a hostile coordinator may name any URL
        raise PenstockError(
            f"the coordinator's dashboard must have an http or https URL, got {printable(url)}. Check which program "
            f"answers at {printable(peer.address)}"
        )
    print(json.dumps({"url": url, "coordinator": peer.address}) if as_json else printable(url), flush=True)
    if is_local(parts.netloc) and not is_local(peer.address):
        port = parts.port
        print(
            f"penstock: the URL can be opened only on the coordinator's machine. From here: ssh -L "
            f"{port}:127.0.0.1:{port} {printable(peer.address.rpartition(':')[0])}",
            file=sys.stderr,
        )
