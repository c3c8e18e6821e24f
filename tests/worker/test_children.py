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

    assert asyncio.run(asyncio.wait_for(stop(), 30)) < 10


STARTED = """
import asyncio
from penstock.worker import children
from penstock.worker.tempdirs import TempDirs

start = asyncio.create_subprocess_exec


async def slowly(*args, **kwargs):
    process = await start(*args, **kwargs)
    await asyncio.sleep(0.3)  # the event loop does other things before it goes on here
    return process


async def main():
    asyncio.create_subprocess_exec = slowly
    ending = asyncio.ensure_future(children.end_orphans(1.0))
    zygote = children.Zygote(TempDirs())
    await zygote.start(1, main_script=False)
    await ending
    print("up", zygote.dead)
    zygote.close()
    await zygote.wait()


asyncio.run(main())
"""


def test_a_zygote_that_is_being_started_is_no_orphan() -> None:
    run = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.returncode) == ("up False\n", 0), run.stderr
