"""Process of embedded mode, which embedded.py starts: coordinator and worker daemon in one event loop.

Packages that both need are imported once, which saves 0.2 s of processor time. The fork server starts before anything
else is imported, because it imports torch, for which the first batch waits. The file is started by its path, because
`python -m` would import penstock.client, and with that torch. Its argument is a JSON object:

    address: Unix socket that the coordinator listens on.
    folder_fd: descriptor of the temporary folder, which is removed when this process ends.
    parent_pid: id of the training process.
    no_sandbox: true if runners have no sandbox.
    budget: largest size of all snapshots that the coordinator holds, such as "4GiB"; "": the default.

The credential token comes in PENSTOCK_TOKEN."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from penstock.runtime.process.lifetime import Parent
from penstock.worker.processes.interpreters import StartedForkServer, start_fork_server

SLOTS = 1024
"""The most that a coordinator accepts from one worker."""


def main() -> int:
    given = json.loads(sys.argv[1])
    try:
        parent = Parent(given["parent_pid"])
    except ProcessLookupError:
        return 0
    fork_server = start_fork_server(sandboxed=not given["no_sandbox"])
    return serve(given, parent, fork_server)


def serve(given: dict[str, Any], parent: Parent, fork_server: StartedForkServer) -> int:
    import asyncio
    import contextlib
    import faulthandler
    import logging

    from penstock.appliance.limits import Limits
    from penstock.appliance.server.server import IN_MEMORY
    from penstock.appliance.server.server import serve as serve_coordinator
    from penstock.proto.errors import PenstockError
    from penstock.proto.rpc.addresses import loopback
    from penstock.proto.rpc.credentials.tokens import read_token, read_tokens
    from penstock.runtime.config.sizes import bytes_of
    from penstock.runtime.files.private_folders import PrivateFolder
    from penstock.runtime.process.memory_secrecy import keep_memory_private
    from penstock.runtime.process.spare_memory import give_back_spare_memory
    from penstock.runtime.process.titles import name_process
    from penstock.runtime.telemetry.logs import log_lines
    from penstock.worker.daemon.serving import serve as serve_worker
    from penstock.worker.daemon.worker_settings import DaemonSettings

    async def run() -> None:
        """Run both until the parent ends or asks for their end, or until one ends; stop the worker first. Raises the
        error of a failed daemon."""
        listening, stop, leave = asyncio.Event(), asyncio.Event(), asyncio.Event()
        parent.on_end(leave.set)
        # Leases are long, so that an idle job wakes its processes seldom: the worker cannot be lost without the
        # coordinator, and the end of a rank is known by its socket.
        limits = Limits(
            budget=bytes_of(given["budget"]),
            worker_lease_s=30.0,
            client_lease_s=30.0,
            hung_up_s=10.0,
            idle_report_s=10.0,
        )
        coordinator = asyncio.create_task(
            serve_coordinator(
                given["address"],
                IN_MEMORY,
                read_tokens(),
                limits=limits,
                ready=lambda address: listening.set(),
                stop=stop,
                http_on_demand=True,
            )
        )
        settings = DaemonSettings(
            coordinator=given["address"],
            token=read_token("worker"),
            slots=SLOTS,
            allow=["*"],
            listen=f"{loopback()}:0",
            embedded=True,
            no_sandbox=given["no_sandbox"],
        )
        up = asyncio.create_task(listening.wait())
        await asyncio.wait([up, coordinator], return_when="FIRST_COMPLETED")
        up.cancel()
        worker = asyncio.create_task(serve_worker(settings, fork_server=fork_server, stop=leave))
        giving_back = asyncio.create_task(give_back_spare_memory())
        await asyncio.wait([worker, coordinator], return_when="FIRST_COMPLETED")
        if not worker.done():
            worker.cancel()
        giving_back.cancel()
        stop.set()
        for ended in await asyncio.gather(worker, coordinator, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    keep_memory_private()
    name_process("penstock-embed")
    faulthandler.enable()
    log_lines("penstock: %(message)s", logging.WARNING)
    logging.getLogger("penstock.user").setLevel(logging.INFO)
    logging.getLogger("penstock.appliance").setLevel(logging.ERROR)  # the training job itself warns about its slots
    try:
        with contextlib.closing(PrivateFolder.shared(given["folder_fd"])):
            asyncio.run(run())
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    status = 1
    try:
        status = main()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is closed: the interpreter's own shutdown would take 0.05 s of a processor for nothing. After an error, such
    # as a thread that could not be started, it may wait for ever.
    os._exit(status)
