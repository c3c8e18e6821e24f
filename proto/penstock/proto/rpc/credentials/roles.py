"""Roles of tokens (worker, client, admin), and the roles that may call each method of the coordinator.

A training job's token cannot register a worker, which would receive other jobs' loaders; a worker's cannot open a run,
which would run code on other workers; an operator's can read, drain workers, end runs, change mixtures and open the
dashboard. Roles do not separate tenants: who may open runs may open, read and supersede all of them."""

from __future__ import annotations

from typing import Literal, get_args

Role = Literal["client", "worker", "admin"]
ROLES: frozenset[Role] = frozenset(get_args(Role))

_CLIENT: frozenset[Role] = frozenset(("client",))
_WORKER: frozenset[Role] = frozenset(("worker",))
_BOTH: frozenset[Role] = frozenset(("client", "worker"))

METHODS: dict[str, frozenset[Role]] = {
    "OpenRun": _CLIENT,
    "WatchRun": _CLIENT,
    "CloseRun": _CLIENT,
    "FetchState": frozenset(("client", "admin")),
    "RegisterWorker": _WORKER,
    "Heartbeat": _WORKER,
    "PutSnapshot": _WORKER,
    "GetSnapshots": _WORKER,
    "PutState": _WORKER,
    "DeregisterWorker": _WORKER,
    "DrainWorker": frozenset(("admin",)),
    "PutBlob": _BOTH,
    "GetBlob": frozenset(("client", "worker", "admin")),
    "Status": frozenset(("admin",)),
    "FetchHistory": frozenset(("admin",)),
    "EndRun": frozenset(("admin",)),
    "ChangeMixture": frozenset(("admin",)),
    "OpenDashboard": frozenset(("admin",)),
}
"""Method of coordinator.proto -> roles that may call it. Nobody may call another one."""

READ_ONLY: frozenset[str] = frozenset(("FetchState", "FetchHistory", "Status"))
"""Methods that only read, answered for any protocol number. Their messages keep their meaning in every release
(tests/proto/test_compatibility.py), so a program in any language keeps working."""
