"""A coordinator that keeps BUDGET bytes of snapshots at most: python -m small_coordinator."""

from __future__ import annotations

import argparse
import asyncio
import os
from dataclasses import replace

from penstock.appliance.limits import Limits
from penstock.appliance.server import announcer, serve
from penstock.proto.channel import read_tokens

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen")
    parser.add_argument("--state-dir")
    parser.add_argument("--ready-fd", type=int)
    given = parser.parse_args()
    limits = replace(Limits(), budget=int(os.environ["BUDGET"]))
    asyncio.run(serve(given.listen, given.state_dir, read_tokens(), ready=announcer(given.ready_fd), limits=limits))
