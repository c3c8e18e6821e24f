"""A coordinator with other limits, LIMITS=budget=1000,losses=9."""

from __future__ import annotations

import argparse
import asyncio
import os
from dataclasses import replace
from typing import Any

from fake_cluster import limited

from penstock.appliance.limits import Limits
from penstock.appliance.server.server import announcer, serve
from penstock.proto.rpc.credentials.tokens import read_tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen")
    parser.add_argument("--state-dir")
    parser.add_argument("--ready-fd", type=int)
    given = parser.parse_args()
    pairs = [each.split("=") for each in os.environ["LIMITS"].split(",")]
    changed: dict[str, Any] = {name: float(value) if "." in value else int(value) for name, value in pairs}
    flags = {name: changed.pop(name) for name in list(changed) if hasattr(Limits, name)}
    limits = replace(Limits(), **flags)
    with limited(**changed):
        asyncio.run(serve(given.listen, given.state_dir, read_tokens(), ready=announcer(given.ready_fd), limits=limits))
