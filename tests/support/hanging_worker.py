"""A worker whose event loop hangs from SIGUSR1 on. Its other threads go on."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

from penstock.worker import __main__ as worker
from penstock.worker.daemon.daemon import Daemon

HANGS_S = 40.0


def main() -> int:
    run = Daemon.run

    async def hang(daemon: Daemon, ready: Any = None) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, time.sleep, HANGS_S)
        await run(daemon, ready)

    Daemon.run = hang  # type: ignore[method-assign, assignment]
    return worker.main()
