"""Settings: flags over variables over a file over defaults, errors that say where a value came from, and `penstock
config`, as a user runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.deploy.console.settings import (
    CoordinatorSettings,
    PeerSettings,
    UpSettings,
    WorkerSettings,
    describe,
    resolve,
    state_home,
)
from penstock.proto.errors import InvalidArgumentError

CLUSTER = '[cluster]\ncoordinator = "head:7070"\ntls_ca = "pki/ca.pem"\n'


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A settings file, in PENSTOCK_CONFIG; the test writes it."""
    path = tmp_path / "penstock.toml"
    monkeypatch.setenv("PENSTOCK_CONFIG", str(path))
    return path


def test_flag_beats_variable_beats_file(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written.write_text(CLUSTER + '[worker]\nslots = 4\nallow = ["mypackage", "other.data"]\nname = "of-file"\n')
    settings = resolve(WorkerSettings)
    assert (settings.slots, settings.allow) == (4, "mypackage,other.data")
    monkeypatch.setenv("PENSTOCK_WORKER_SLOTS", "5")
    flags = {"name": "of-flag"}
    settings = resolve(WorkerSettings, **flags)
    assert (settings.slots, settings.name) == (5, "of-flag")
    about = describe(settings, **flags)
    for part in (
        "slots=5 (PENSTOCK_WORKER_SLOTS)",
        f"allow=mypackage,other.data ({written})",
        "name=of-flag (--name)",
        "listen=127.0.0.1:0 (default)",
    ):
        assert part in about
    assert resolve(PeerSettings).coordinator == "head:7070"
    monkeypatch.setenv("PENSTOCK_COORDINATOR", "")  # as if it were not set
    assert resolve(PeerSettings).coordinator == "head:7070"
    monkeypatch.setenv("PENSTOCK_COORDINATOR", "node1:7070")
    assert resolve(PeerSettings).coordinator == "node1:7070"
    written.unlink()
    monkeypatch.delenv("PENSTOCK_COORDINATOR")
    monkeypatch.setenv("PENSTOCK_CONFIG", "")
    assert resolve(PeerSettings).coordinator == f"unix:{state_home()}/socket"


def test_paths_in_a_file_are_relative_to_it(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written.write_text(CLUSTER + '[coordinator]\nstate_dir = "state"\n')
    monkeypatch.chdir("/")
    assert resolve(PeerSettings).tls_ca == str(written.parent / "pki" / "ca.pem")
    assert resolve(CoordinatorSettings).state_dir == written.parent / "state"
    written.write_text('[coordinator]\nstate_dir = ":memory:"\n')
    assert str(resolve(CoordinatorSettings).state_dir) == ":memory:"
    monkeypatch.setenv("HOME", "/home/someone")
    written.write_text(
        '[coordinator]\nstate_dir = "~/penstock"\n[up]\ndir = "fleet"\nallow = ["a", "b"]\n'
        '[worker]\nslots = 1\nallow = "a"\nliveness_file = "~/p"\n'
    )
    assert resolve(CoordinatorSettings).state_dir == Path("/home/someone/penstock")
    assert (resolve(UpSettings).dir, resolve(UpSettings).allow) == (str(written.parent / "fleet"), "a,b")
    assert resolve(WorkerSettings).liveness_file == "/home/someone/p"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[worker]\nslot = 4\n", r"penstock.toml: \[worker\] has no setting 'slot'; did you mean slots\?"),
        (
            '[worker]\ncoordinator = "h:1"\n',
            r"penstock.toml: coordinator must not be in \[worker\]: .*\[cluster\]",
        ),
        ("[worker]\n\nslots = 0\n", r"penstock.toml: slots = 0: it should be greater than or equal to 1"),
        ("[coordinator]\nleas = 3\n", r"\[coordinator\] has no setting 'leas'; did you mean lease\?"),
    ],
)
def test_mistakes_are_named(written: Path, text: str, says: str) -> None:
    written.write_text(text)
    with pytest.raises(InvalidArgumentError, match=says):
        resolve(WorkerSettings, allow="a")


def test_config_shows_values_and_their_sources(shell: Any) -> None:
    file = shell.folder / "p.toml"
    file.write_text(CLUSTER + "[worker]\nslots = 4\n")
    done = shell.call("config", "worker", "--config", "p.toml", PENSTOCK_WORKER_NAME="w1")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line}
    assert rows["slots"] == ["4", str(file)]
    assert rows["name"] == ["w1", "PENSTOCK_WORKER_NAME"]
    assert rows["coordinator"] == ["head:7070", str(file)]
    assert rows["allow"] == ["missing", "required"]
    assert rows["listen"] == ["127.0.0.1:0", "default"]
    assert f"Settings file: {file}" in done.stdout
    assert "Token: the variable PENSTOCK_TOKEN" in done.stdout


def test_config_json_has_sources_and_no_secret(shell: Any) -> None:
    done = shell.call("config", "--json", PENSTOCK_TOKEN="s3cret-s3cret", PENSTOCK_WORKER_SLOTS="none")
    found = json.loads(done.stdout)
    assert done.returncode == 2
    assert set(found) == {"file", "token", "settings"}
    assert list(found["settings"]) == ["coordinator", "worker", "client", "up"]
    slots = next(each for each in found["settings"]["worker"] if each["name"] == "slots")
    assert (slots["value"], slots["source"]) == ("none", "PENSTOCK_WORKER_SLOTS")
    assert "valid integer" in slots["problem"]
    assert "s3cret" not in done.stdout
    assert "token" not in {each["name"] for each in found["settings"]["client"]}


def test_the_commands_take_the_file(shell: Any) -> None:
    """Run it: `status` asks the coordinator that the file names, with the token file that it names."""
    (shell.folder / "p.toml").write_text('[cluster]\ncoordinator = "127.0.0.1:1"\ntoken_file = "t"\n')
    (shell.folder / "t").write_text("x\n")
    done = shell.call("status", "--config", "p.toml", PENSTOCK_TOKEN=None)
    assert (done.returncode, "can be read by others" in done.error) == (12, True)
    (shell.folder / "t").chmod(0o600)
    for arguments in (("status", "--config", "p.toml"), ("--config", "p.toml", "status")):
        done = shell.call(*arguments, PENSTOCK_TOKEN=None)
        assert (done.returncode, "127.0.0.1:1 " in done.error) == (11, True)
    assert shell.call("worker", "--config", "no.toml").returncode == 2
    (shell.folder / "p.toml").write_text("[wroker]\n")
    done = shell.call("status", "--config", "p.toml", "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert json.loads(done.error)["error"]["name"] == "InvalidArgumentError"
    assert "did you mean worker?" in json.loads(done.error)["error"]["message"]


@pytest.mark.parametrize("line", ["slots = true", 'slots = "8"', "no_sandbox = 1"])
def test_a_value_of_another_type_is_not_taken(written: Path, line: str) -> None:
    written.write_text(f'[worker]\nallow = "x"\n{line}\n' + ("" if "slots" in line else "slots = 2\n"))
    with pytest.raises(InvalidArgumentError, match=rf"{written}: .* it should be a valid "):
        resolve(WorkerSettings)
    written.write_text('[worker]\nallow = "x"\nslots = 2\ndrain = 3\nno_sandbox = true\n')
    assert resolve(WorkerSettings).drain == 3.0  # an integer is a number of seconds too


def test_config_refuses_what_the_daemon_refuses(shell: Any) -> None:
    for of in (("worker",), ()):
        done = shell.call("config", *of, PENSTOCK_WORKER_SLOTZ="1")
        assert (done.returncode, done.stdout) == (2, "")
        assert "PENSTOCK_WORKER_SLOTZ is not a setting; did you mean PENSTOCK_WORKER_SLOTS?" in done.error
    assert shell.call("config", "client", PENSTOCK_WORKER_SLOTZ="1").returncode == 0


# ---- without a file


@pytest.mark.parametrize(
    ("section", "flags", "says"),
    [
        (PeerSettings, {"coordinator": "node1:70700"}, '--coordinator node1:70700: an address must be "HOST:PORT"'),
        (PeerSettings, {"coordinator": "node1:0"}, "with the port that the coordinator printed"),
        (PeerSettings, {"coordinator": "http://node1:7070"}, 'an address must be "HOST:PORT"'),
        (PeerSettings, {"coordinator": "::1:7070"}, '"[::1]:PORT" for IPv6'),
        (CoordinatorSettings, {}, "--state-dir (or the variable PENSTOCK_COORDINATOR_STATE_DIR) must be given"),
        (CoordinatorSettings, {"state_dir": "x", "lease": float("nan")}, "--lease nan: it should be a finite number"),
        (WorkerSettings, {"slots": 0, "allow": "a"}, "--slots 0: it should be greater than or equal to 1"),
        (WorkerSettings, {"slots": 1, "allow": " ,"}, "at least one module prefix must be given"),
        (WorkerSettings, {"slots": 1, "allow": "my-package"}, "or '*' for all, got 'my-package'"),
        (WorkerSettings, {"slots": 1, "allow": "a", "listen": "0.0.0.0:0"}, "can connect to, got 0.0.0.0"),
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


def test_kubernetes_service_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_7070_TCP", "PORT_7070_TCP_ADDR"):
        monkeypatch.setenv(f"PENSTOCK_COORDINATOR_{name}", "tcp://10.0.0.1:7070")
    assert resolve(CoordinatorSettings, state_dir="x").listen == f"unix:{state_home()}/socket"
