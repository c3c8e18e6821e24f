"""Command `penstock demo`."""

from __future__ import annotations

from penstock.deploy.console.app import quiet_grpc


def demo() -> int:
    """Show what Penstock does, in under a minute.

    Streams, kills a worker, saves, resumes elsewhere, and compares. Starts a coordinator and two workers on this
    machine and ends them again. The exit code is 0 if the stream with faults equals the stream without faults, batch by
    batch, else 1.

    \b
    Examples:
      penstock demo
    """
    quiet_grpc()
    from penstock.deploy.demo.run_demo import run_demo

    return run_demo()
