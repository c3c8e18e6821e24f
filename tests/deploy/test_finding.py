"""Commands without an address find what this user runs here: embedded appliances and fleets of `penstock up`."""

from __future__ import annotations

import json
import os
import stat
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import streams

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.deploy.console.peer import Peer
from penstock.deploy.console.settings import state_home
from penstock.deploy.engines.engine import Fleet
from penstock.deploy.engines.fleet_folder import FleetFolder
from penstock.deploy.operations.show_dashboard import show_dashboard
from penstock.proto.errors import InvalidArgumentError, NotPermittedError, PenstockError, SupersededError, TlsError
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.process.announcements import Announcement, announce, announced, withdraw
from penstock.runtime.process.identity import Identity

OTHER = 12_345


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of announcements of this test alone."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr("penstock.runtime.process.announcements._folders", lambda: [folder / "penstock"])
    return folder / "penstock"


def one(name: str = "lm", owner: Identity | None = None, **more: Any) -> Announcement:
    owner = owner or Identity.of(os.getpid())
    return Announcement("embedded", name, f"unix:/x/{name}", f"/x/{name}/token", f"/x/{name}", owner=owner, **more)


# ------------------------------------------------------------------------------------------------------- announcements


def test_announcement_is_read_back_and_withdrawn(runtime: Path) -> None:
    announce(one("b"))
    announce(one("a", tls={"tls_ca": "/ca"}))
    assert announced() == [one("a", tls={"tls_ca": "/ca"}), one("b")]
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in runtime.iterdir()} == {0o600}
    withdraw("/x/a")
    withdraw("/x/a")
    assert announced() == [one("b")]


def test_dead_process_is_ignored_and_removed(runtime: Path) -> None:
    me = Identity.of(os.getpid())
    announce(one("reused", owner=replace(me, started=me.started - 1)))
    announce(one("rebooted", owner=replace(me, boot="another")))
    announce(one("alive"))
    assert [found.name for found in announced()] == ["alive"]
    assert len(list(runtime.iterdir())) == 1


@pytest.mark.parametrize("content", [b"{", b'{"owner": {"pid": "1"}}'])
def test_invalid_file_is_skipped(runtime: Path, content: bytes) -> None:
    announce(one())
    (runtime / "newer.json").write_bytes(content)
    os.mkfifo(runtime / "fifo.json")
    (runtime / "link.json").symlink_to("/dev/zero")
    assert announced() == [one()]


@pytest.mark.parametrize("how", ["open to others", "a link", "another user's"])
def test_folder_of_others_is_not_trusted(runtime: Path, tmp_path: Path, how: str) -> None:
    announce(one())
    if how == "open to others":
        runtime.chmod(0o755)
    elif how == "a link":
        runtime.rename(tmp_path / "moved")
        runtime.symlink_to(tmp_path / "moved")
    elif os.geteuid() == 0:
        os.chown(runtime, OTHER, OTHER)
    else:
        pytest.skip("only root can make another user's folder")
    assert announced() == []
    with pytest.raises(OSError, match=r"alone|folder"):
        announce(one())


def test_remote_fleet_must_accept_connections() -> None:
    announce(Announcement("fleet", "f", "127.0.0.1:9", "/token", "/f"))
    assert announced() == []
    withdraw("/f")


# --------------------------------------------------------------------------------------------------------- the options


@pytest.fixture
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_COORDINATOR", "PENSTOCK_TOKEN", "PENSTOCK_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_settings")
def test_named_coordinator_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Peer().address == f"unix:{state_home()}/socket"
    announce(one())
    assert Peer().address == "unix:/x/lm"
    assert Peer(coordinator="head:1").address == "head:1"
    monkeypatch.setenv("PENSTOCK_COORDINATOR", "head:2")
    assert Peer().address == "head:2"
    assert Peer(job="lm").address == "unix:/x/lm"


@pytest.mark.usefixtures("_no_settings")
def test_several_coordinators_are_listed() -> None:
    with pytest.raises(InvalidArgumentError, match=r"no coordinator is known here: .* --coordinator ADDRESS"):
        Peer().token()
    announce(one("a"))
    announce(one("b"))
    with pytest.raises(
        InvalidArgumentError, match=r"because 2 are known here: embedded a, .*; embedded b, .*--job NAME"
    ):
        _ = Peer().address
    assert Peer(job="b").address == "unix:/x/b"
    with pytest.raises(InvalidArgumentError, match="got 'c'; running: embedded a"):
        _ = Peer(job="c").address
    with pytest.raises(InvalidArgumentError, match="only one of --coordinator and --job must be given"):
        _ = Peer(job="a", coordinator="head:1").token()


@pytest.mark.usefixtures("_no_settings")
def test_token_is_that_of_the_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text("announced")
    announce(replace(one(), token_file=str(tmp_path / "token")))
    monkeypatch.setenv("PENSTOCK_TOKEN", "mine")
    assert Peer().token() == "announced"
    assert Peer(coordinator="unix:/x/lm").token() == "announced"
    assert Peer(coordinator="head:1").token() == "mine"
    announce(replace(one("other"), address="head:2", token_file=str(tmp_path / "token")))
    assert Peer(coordinator="head:2").token() == "mine"


@pytest.mark.usefixtures("_no_settings")
def test_given_tls_files_take_precedence() -> None:
    """A coordinator that is named by its address gets no file of the announcement."""
    announce(one(tls={"tls_ca": "/announced.pem"}))
    for peer, says in ((Peer(), "/announced.pem"), (Peer(tls_ca="/mine.pem"), "/mine.pem")):
        with pytest.raises(TlsError, match=f"^tls_ca={says} cannot be read"):
            peer.tls()
    assert Peer(coordinator="unix:/x/lm").tls() is None


@pytest.mark.usefixtures("_no_settings")
def test_fleet_of_up_is_found(tmp_path: Path) -> None:
    folder = FleetFolder(tmp_path / "fleet")
    folder.make()
    folder.save(
        Fleet(
            engine="local",
            name="eval",
            dir=str(folder.path),
            coordinator="127.0.0.1:1",
            token_file="/x/token",
            tls={"tls_ca": "/ca"},
            supervisor=Identity.of(os.getpid()),
        )
    )
    (found,) = announced()
    assert (found.what, found.name, found.address, found.tls) == ("fleet", "eval", "127.0.0.1:1", {"tls_ca": "/ca"})
    assert Peer(job="eval").address == "127.0.0.1:1"
    folder.forget()
    assert announced() == []


# ------------------------------------------------------------------------------------------------------- the real thing


@pytest.fixture
def training(runtime: Path) -> Iterator[Any]:
    with Appliance(job="lm", num_workers_per_box=1, seed=1, timeout_s=60) as appliance:
        steps = iter(DataExecutor(DataLoader(streams.counter, 1000), num_steps=1000, appliance=appliance))
        next(steps)
        yield steps
    assert list(runtime.iterdir()) == []


def dashboard_of(job: str) -> str:
    with Peer(job=job).client() as client:
        return client.open_dashboard()


def test_embedded_run_is_found_without_settings(training: Any, shell: Any, runtime: Path) -> None:
    own = {"XDG_RUNTIME_DIR": str(runtime.parent), "PENSTOCK_TOKEN": None}
    found = json.loads(shell.call("status", "--json", **own).stdout)
    assert [run["run"] for run in found["runs"]] == ["lm/0"]
    assert found["coordinator"]["dashboard"] is None
    with ThreadPoolExecutor(4) as pool:
        (url,) = set(pool.map(dashboard_of, ["lm"] * 4))
    done = shell.call("dashboard", "--job", "lm", **own)
    assert (done.returncode, done.stdout) == (0, f"{url}\n")
    with urllib.request.urlopen(f"{url}/api/status.json", timeout=30) as reply:
        assert [run["run"] for run in json.load(reply)["runs"]] == ["lm/0"]
    assert shell.call("state", "lm", **own).returncode == 0
    (announcement,) = announced()
    text = next(runtime.iterdir()).read_text()
    secret = Path(announcement.token_file).read_text().strip().removeprefix("admin:")
    assert secret not in text
    with CoordinatorClient(announcement.address, secret, insecure=True) as client, pytest.raises(NotPermittedError):
        client.open_run(pb.OpenRunRequest())  # the token is an operator's, and runs no code
    assert shell.call("run", "close", "lm", **own).stdout == "run lm/0 is closed: attempt 1 was ended\n"
    with pytest.raises(SupersededError, match="was ended by an operator"):
        for _ in training:
            pass


@pytest.mark.parametrize("url", ["file:///etc/passwd", "javascript:alert(1)"])
def test_only_web_addresses_are_opened(url: str) -> None:
    client = SimpleNamespace(open_dashboard=lambda: url)
    peer: Any = SimpleNamespace(address="head:7070", client=lambda: nullcontext(client))
    with pytest.raises(PenstockError, match="must have an http or https URL"):
        show_dashboard(peer, as_json=False)
