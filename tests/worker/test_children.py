"""A child that reads nothing is ended all the same, in time."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time

from penstock.worker.children import Child
from penstock.worker.control import Channel


def test_a_stopped_child_with_a_full_socket_is_killed_after_its_grace() -> None:
    async def stop() -> float:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        read, write = os.pipe()
        os.close(write)
        with (
            theirs,
            subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, process_group=0) as process,
        ):
            child = Child(Channel(ours), read, "a child", lambda message: None, lambda: None)
            child.begun(process.pid, os.pidfd_open(process.pid))
            sending = asyncio.ensure_future(child.send("base", bytes(8 << 20)))
            await asyncio.sleep(0)
            began = time.monotonic()
            await child.stop(0.2)
            took = time.monotonic() - began
            child.gone(await asyncio.to_thread(process.wait))
            theirs.close()
            await sending
        return took

    assert asyncio.run(asyncio.wait_for(stop(), 10)) < 2
