"""`penstock dashboard`: the URL of a coordinator's dashboard, which an embedded run starts on demand."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import streams

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.deploy.console.peer import Peer
from penstock.deploy.operations import show_dashboard
from penstock.proto.errors import PenstockError


def test_embedded_run_starts_its_dashboard(shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    own = {"XDG_RUNTIME_DIR": str(tmp_path), "PENSTOCK_TOKEN": None}
    with Appliance(job="lm", num_workers_per_box=1, seed=1, timeout_s=60) as appliance:
        steps = iter(DataExecutor(DataLoader(streams.counter, 100), num_steps=100, appliance=appliance))
        next(steps)
        assert json.loads(shell.call("status", "--json", **own).stdout)["coordinator"]["dashboard"] is None
        with ThreadPoolExecutor(4) as pool:
            (url,) = set(pool.map(url_of, ["lm"] * 4))
        done = shell.call("dashboard", "--job", "lm", **own)
        assert (done.returncode, done.stdout) == (0, f"{url}\n")
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{url}/api/status.json", timeout=30) as reply:
            assert [run["run"] for run in json.load(reply)["runs"]] == ["lm/0"]
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
            assert b"penstock_" in reply.read()
        assert json.loads(shell.call("status", "--json", **own).stdout)["coordinator"]["dashboard"] == url
        next(steps)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=30)


def url_of(job: str) -> str:
    with Peer(job=job).client() as client:
        return client.open_dashboard()


def test_coordinator_without_dashboard_says_so(shell: Any) -> None:
    started = shell.start("coordinator", "--listen", "127.0.0.1:0", "--state-dir", "state", "--http", "off")
    done = shell.call("dashboard", PENSTOCK_COORDINATOR=started.line)
    assert done.returncode == 2
    assert done.error == "penstock: the coordinator has no dashboard: start it with --http HOST:PORT"


class Remote:
    """Peer of a coordinator that answers with `url`."""

    address = "head:7070"

    def __init__(self, url: str) -> None:
        self.url = url

    def client(self) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def open_dashboard(self) -> str:
        return self.url


def test_dashboard_elsewhere_names_a_tunnel(capsys: pytest.CaptureFixture[str]) -> None:
    show_dashboard.show_dashboard(Remote("http://127.0.0.1:7071"), browser=False, as_json=False)  # type: ignore[arg-type]
    assert "ssh -L 7071:127.0.0.1:7071 head" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["file:///etc/passwd", "javascript:alert(1)", ""])
def test_only_web_addresses_are_opened(url: str) -> None:
    with pytest.raises(PenstockError, match="must have an http or https URL"):
        show_dashboard.show_dashboard(Remote(url), browser=True, as_json=False)  # type: ignore[arg-type]
