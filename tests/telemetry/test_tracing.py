"""A process that is traced ends in time, whatever became of the collector."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

PROGRAM = """
from penstock.proto.rpc import tracing
tracing.start("test")
tracing._provider.get_tracer("test").start_span("last").end()
print("ended", flush=True)
"""


def test_process_ends_in_time_without_collector() -> None:
    """OpenTelemetry would try for 7 s where nobody listens, and for 10 s where nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                env=os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{sock.getsockname()[1]}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for sock in (silent, taken)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ended\n"
            begun = time.monotonic()
            _, said = process.communicate(timeout=60)
            assert time.monotonic() - begun < 6.5
            assert process.returncode == 0
            assert "Traceback" not in said
