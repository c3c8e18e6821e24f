"""Settings: flags over variables over defaults; what cannot be meant is an error that says where it came from."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.deploy.console.daemon_settings import CoordinatorSettings, PeerSettings, WorkerSettings, describe, resolve
from penstock.proto.errors import InvalidArgumentError


def test_flag_over_variable_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(PeerSettings).coordinator == "127.0.0.1:7070"
    monkeypatch.setenv("PENSTOCK_COORDINATOR", "node1:7070")
    assert resolve(PeerSettings).coordinator == "node1:7070"
    assert resolve(PeerSettings, coordinator="node2:7070").coordinator == "node2:7070"
    monkeypatch.setenv("PENSTOCK_COORDINATOR", "")  # as if it were not set
    assert resolve(PeerSettings).coordinator == "127.0.0.1:7070"


def test_description_says_where_each_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_WORKER_SLOTS", "4")
    flags = {"allow": "mypackage", "slots": None}
    assert describe(resolve(WorkerSettings, **flags), **flags) == (
        "slots=4 (PENSTOCK_WORKER_SLOTS), allow=mypackage (--allow), listen=127.0.0.1:0 (default), "
        "runner_memory=- (default), starts=0 (default), start_timeout=600.0 (default), liveness_file=- (default), "
        "http=- (default), name=- (default), "
        "drain=10.0 (default), runner_user=- (default), runner_processes=0 (default), no_cage=False (default), "
        "no_groups=False (default), insecure=False (default)"
    )


@pytest.mark.parametrize(
    ("section", "flags", "says"),
    [
        (PeerSettings, {"coordinator": "node1"}, '--coordinator node1: an address must be "HOST:PORT"'),
        (PeerSettings, {"coordinator": "node1:70700"}, '--coordinator node1:70700: an address must be "HOST:PORT"'),
        (PeerSettings, {"coordinator": "node1:0"}, "with the port that the coordinator printed"),
        (PeerSettings, {"coordinator": "::1:7070"}, "[::1]:7070"),
        (PeerSettings, {"coordinator": "http://node1:7070"}, "without a scheme"),
        (PeerSettings, {"coordinator": "a\0b:1"}, "a host must be printable text"),
        (CoordinatorSettings, {}, "--state-dir (or the variable PENSTOCK_COORDINATOR_STATE_DIR) must be given"),
        (CoordinatorSettings, {"state_dir": "x", "lease": 0.1}, "--lease 0.1: it should be greater than or equal"),
        (CoordinatorSettings, {"state_dir": "x", "lease": float("nan")}, "--lease nan: it should be a finite number"),
        (WorkerSettings, {"slots": 0, "allow": "a"}, "--slots 0: it should be greater than or equal to 1"),
        (WorkerSettings, {"slots": 1}, "--allow (or the variable PENSTOCK_WORKER_ALLOW) must be given"),
        (WorkerSettings, {"slots": 1, "allow": " ,"}, "at least one module prefix must be given"),
        (WorkerSettings, {"slots": 1, "allow": "my-package"}, "or '*' for all, got 'my-package'"),
        (WorkerSettings, {"slots": 1, "allow": "a/b.py"}, "or '*' for all, got 'a/b.py'"),
        (WorkerSettings, {"slots": 1, "allow": "a", "listen": "0.0.0.0:0"}, "can connect to, got 0.0.0.0"),
        (WorkerSettings, {"slots": 1, "allow": "a", "listen": "[::]:0"}, "can connect to, got ::"),
        (WorkerSettings, {"slots": 1, "allow": "a", "name": " w"}, "a name must be printable text"),
    ],
)
def test_bad_values_are_named(section: Any, flags: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(says)):
        resolve(section, **flags)


def test_a_bad_variable_is_named_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_WORKER_SLOTS", "many")
    with pytest.raises(InvalidArgumentError, match="PENSTOCK_WORKER_SLOTS=many: it should be a valid integer"):
        resolve(WorkerSettings, allow="a")


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(InvalidArgumentError, match=r"--slots 0: .*; --allow \(or .* must be given"):
        resolve(WorkerSettings, slots=0)


def test_unknown_variable_suggests_the_likely_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_WORKER_SLOT", "4")
    with pytest.raises(
        InvalidArgumentError, match=r"PENSTOCK_WORKER_SLOT is not a setting; did you mean PENSTOCK_WORKER_SLOTS"
    ):
        resolve(WorkerSettings, slots=1, allow="a")
    assert resolve(CoordinatorSettings, state_dir="x").lease == 3.0


def test_an_unknown_key_is_an_error() -> None:
    with pytest.raises(InvalidArgumentError, match="--color blue: Extra inputs are not permitted"):
        resolve(PeerSettings, color="blue")


def test_kubernetes_service_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_7070_TCP", "PORT_7070_TCP_ADDR"):
        monkeypatch.setenv(f"PENSTOCK_COORDINATOR_{name}", "tcp://10.0.0.1:7070")
    assert resolve(CoordinatorSettings, state_dir="x").listen == "127.0.0.1:7070"
