"""gRPC that writes no line to standard error when a training process forks with calls under way, as a notebook does for
each `!command`. It reads the variable at its import alone, so child processes need not inherit it."""

from __future__ import annotations

import os

_given = os.environ.get("GRPC_VERBOSITY")
os.environ["GRPC_VERBOSITY"] = _given or "ERROR"
import grpc  # noqa: E402

if _given is None:
    del os.environ["GRPC_VERBOSITY"]

__all__ = ["grpc"]
