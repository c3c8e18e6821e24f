"""Who may call what: the three roles, and the one map from each method of the coordinator to those that may call it.

A role is what a token is good for. A token in the hands of a training job cannot register a worker, and so be handed
other jobs' loaders; a worker's cannot open a run, and so have code run elsewhere; an operator's looks, and
drains workers. Roles are not tenants: who may open runs may open, read and supersede all of them.
"""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["METHODS", "READ_ONLY", "ROLES", "Role"]

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
}
"""Method of coordinator.proto -> the roles that may call it. A method that is missing here cannot be called."""

READ_ONLY: frozenset[str] = frozenset(("FetchState", "FetchHistory", "Status"))
"""Methods that only tell, and are answered whatever protocol number the caller sends, or none. What their messages say
today they say in every release of the package penstock.proto.v1 (tests/proto/test_compatibility.py), so a program in
any language goes on reading when the daemons change what they say to each other."""
