"""`penstock coordinator` and `penstock worker` as processes: how they start, how they end, and what they refuse."""

from __future__ import annotations

import json
import re
import signal
import socket
import stat
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from penstock.proto.rpc.calls import CoordinatorClient

LOCAL = ("--listen", "127.0.0.1:0")


def test_coordinator_makes_a_private_hidden_token(shell: Any, tmp_path: Path) -> None:
    started = shell.start("coordinator", *LOCAL, "--state-dir", "state", "--ready-file", "ready", PENSTOCK_TOKEN=None)
    file = tmp_path / "state" / "token"
    token = file.read_text().strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(token) > 30
    assert (tmp_path / "ready").read_text() == f"{started.line}\n"
    with CoordinatorClient(started.line, token, insecure=True) as client:
        client.status()
    given = {"PENSTOCK_TOKEN": None, "PENSTOCK_TOKEN_FILE": str(file), "PENSTOCK_COORDINATOR": started.line}
    assert shell.call("status", **given).returncode == 0
    assert shell.call("status", "--token-file", str(file), PENSTOCK_COORDINATOR=started.line).returncode == 0
    assert started.stop() == 0
    log = started.log.read_text()
    assert f"the token is in state/token (made now); give workers and training jobs PENSTOCK_TOKEN_FILE={file}" in log
    assert "listen=127.0.0.1:0 (--listen)" in log
    assert log.endswith("stopped on request\n")
    assert token not in log
    again = shell.start("coordinator", *LOCAL, "--state-dir", "state", PENSTOCK_TOKEN=None)
    assert file.read_text().strip() == token
    with CoordinatorClient(again.line, token, insecure=True) as client:
        client.status()


def test_coordinator_in_memory_needs_a_token(shell: Any, tmp_path: Path) -> None:
    started = shell.start("coordinator", *LOCAL, "--state-dir", ":memory:", "--http", "off")
    found = json.loads(shell.call("status", "--json", "--coordinator", started.line).stdout)
    assert found["coordinator"]["dashboard"] is None
    assert not (tmp_path / ":memory:").exists()
    assert started.stop(signal.SIGINT) == 0
    assert "dashboard at" not in started.log.read_text()
    assert started.log.read_text().endswith("stopped on request\n")
    done = shell.call("coordinator", *LOCAL, "--state-dir", ":memory:", PENSTOCK_TOKEN=None)
    assert done.returncode == 2
    assert "Set PENSTOCK_TOKEN, or pass --token-file" in done.error


def test_budgets_are_of_names_that_tokens_have(shell: Any, tmp_path: Path) -> None:
    tokens = "client/team-a:a-token-of-a\nadmin/team-b:a-token-of-b"
    given = ("coordinator", *LOCAL, "--state-dir", ":memory:", "--http", "off", "--max-slots", "team-a=4")
    started = shell.start(*given, "--max-slots", "client=2", PENSTOCK_TOKEN=tokens)
    assert "max_slots=team-a=4,client=2 (--max-slots)" in started.log.read_text()
    for wrong, says in (("team-b=1", "no token has this name"), ("client", "NAME=N"), ("team-a=5", "only once")):
        done = shell.call(*given, "--max-slots", wrong, PENSTOCK_TOKEN=tokens)
        assert (done.returncode, says in done.error) == (2, True), done.error


def test_port_taken(shell: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        done = shell.run("coordinator", "--listen", address, "--state-dir", "state")
        assert done.returncode == 13
        assert done.error == (
            f"penstock: {address} is in use by another process: choose another port, or 0 for any free one"
        )
        assert "E0000" not in done.stderr  # gRPC's own report
        assert done.stdout == ""


@pytest.mark.parametrize("arguments", [("coordinator", "--state-dir", "state"), ("worker", "--slots=1", "--allow=x")])
def test_an_unsafe_bind_is_refused(shell: Any, arguments: tuple[str, ...]) -> None:
    done = shell.call(*arguments, "--listen", "192.0.2.1:0", PENSTOCK_INSECURE=None)
    assert done.returncode == 16
    assert "192.0.2.1:0 can be reached from other machines" in done.error
    assert "--insecure" in done.error


def test_a_state_directory_in_use(coordinator: Any) -> None:
    done = coordinator.call("coordinator", *LOCAL, "--state-dir", "state")
    assert done.returncode == 14
    assert "in use by another coordinator" in done.error


def test_worker_registers_and_leaves(coordinator: Any) -> None:
    started = coordinator.start(
        "worker", "--slots", "3", "--allow", "streams", "--allow", "other", "--name", "w-leaves"
    )
    assert started.line == "w-leaves"
    (worker,) = _workers(coordinator, "w-leaves")
    assert (worker["slots"], worker["slots_used"], worker["live"], worker["draining"]) == (3, 0, True, False)
    assert started.stop() == 0
    log = started.log.read_text()
    assert "allow=streams,other (--allow)" in log
    assert all(worker["draining"] or not worker["live"] for worker in _workers(coordinator, "w-leaves"))


def _workers(coordinator: Any, name: str) -> list[dict[str, Any]]:
    found = json.loads(coordinator.call("status", "--json").stdout)
    return [worker for worker in found["workers"] if worker["worker"] == name]


def test_worker_waits_for_coordinator_and_ends(shell: Any) -> None:
    started = shell.begin("worker", "--slots", "1", "--allow", "streams", PENSTOCK_COORDINATOR="127.0.0.1:1")
    until(lambda: "waiting for the coordinator" in started.log.read_text())
    assert started.process.poll() is None
    assert started.stop(signal.SIGINT) == 0
    assert "Traceback" not in started.log.read_text()


def test_unreachable_wrong_token_and_no_token(coordinator: Any) -> None:
    address = "127.0.0.1:1"
    done = coordinator.call("status", "--coordinator", address)
    assert done.returncode == 11
    assert done.error.startswith(f"penstock: the coordinator at {address} cannot be reached (Status): ")
    assert "penstock coordinator" in done.error
    assert "--coordinator or PENSTOCK_COORDINATOR" in done.error
    assert len(done.stderr.splitlines()) == 1
    wrong = coordinator.call("status", PENSTOCK_TOKEN="another-token")
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (12, 1)
    assert "the token is wrong" in wrong.error
    missing = coordinator.call("status", PENSTOCK_TOKEN=None)
    assert missing.returncode == 12
    assert "PENSTOCK_TOKEN_FILE" in missing.error


# ---- the dashboard's door


def dashboard(started: Any) -> str:
    """Its URL, as the log says."""
    found = re.search(r"dashboard at (http\S+)", started.log.read_text())
    assert found is not None
    return found.group(1)


def test_default_dashboard_port_is_a_free_one(shell: Any) -> None:
    run = {"PENSTOCK_COORDINATOR_HTTP": None}
    first = shell.start("coordinator", *LOCAL, "--state-dir", "a", **run)
    second = shell.start("coordinator", *LOCAL, "--state-dir", "b", **run)
    assert dashboard(first) != dashboard(second)
    for started in (first, second):
        says = "127.0.0.1:7071 is in use, so the dashboard takes a free port" in started.log.read_text()
        assert says is not dashboard(started).endswith(":7071")  # another test's may have had it


def test_reachable_dashboard_requires_the_token(shell: Any) -> None:
    done = shell.call("coordinator", *LOCAL, "--state-dir", "state", "--http", "0.0.0.0:0", PENSTOCK_INSECURE=None)
    assert done.returncode == 16
    started = shell.start("coordinator", *LOCAL, "--state-dir", "state", "--http", "0.0.0.0:0", "--insecure")
    url = f"http://127.0.0.1:{dashboard(started).rpartition(':')[2]}/api/status.json"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, timeout=30)
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {shell.environment['PENSTOCK_TOKEN']}"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        assert json.load(reply)["coordinator"]["address"] == started.line
