"""`penstock up` for other machines: its authority, and one file for each role, which is good for this role alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from documented import REPO, blocks
from hosts import Network, why_not
from waiting import until

from penstock.client import Appliance
from penstock.deploy.console.exit_codes import CommandError
from penstock.deploy.console.peer import Peer
from penstock.deploy.console.settings import CoordinatorSettings, UpSettings, WorkerSettings, resolve
from penstock.deploy.engines import up_down
from penstock.deploy.engines.authority import Authority
from penstock.deploy.engines.engine import FleetPlan
from penstock.deploy.engines.fleet_folder import FleetFolder
from penstock.deploy.engines.supervisor import supervise
from penstock.proto.errors import InvalidArgumentError, NotPermittedError, PenstockError, TlsError
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.rpc.credentials.tokens import Tokens, read_token, read_tokens
from penstock.proto.rpc.tls import Tls, load_tls
from penstock.proto.v1 import coordinator_pb2 as pb

ROLES = ("admin", "client", "coordinator", "worker")
TRAIN = """
import streams
from penstock.client import Appliance, DataExecutor, DataLoader

with Appliance(job="job", num_workers_per_box=2, seed=1, timeout_s=60) as appliance:
    steps = DataExecutor(DataLoader(streams.counter, 10), num_steps=20, appliance=appliance)
    print(sorted(int(batch["number"]) for batch in steps))
"""


# ----------------------------------------------------------------------------------------------------- two machines


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := why_not():
        pytest.skip(reason)
    network = Network("head", "node")
    try:
        yield network
    finally:
        network.close()


def test_other_machine_needs_one_file(network: Network, shell: Any, tmp_path: Path) -> None:
    """It runs what `penstock up` prints, in a folder with only the files of the roles; they stay valid after `down`."""
    environment = shell.env(
        {
            "PENSTOCK_TOKEN": None,
            "PENSTOCK_INSECURE": None,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
    )
    node = tmp_path / "node"
    node.mkdir()
    (node / "train.py").write_text(TRAIN)

    def command(host: str, text: str) -> list[str]:
        return [*network.inside(host), "bash", "-c", f"exec env {text}"]

    def run(host: str, text: str, says: str = "") -> subprocess.CompletedProcess[str]:
        folder = node if host == "node" else tmp_path
        done = subprocess.run(command(host, text), env=environment, cwd=folder, capture_output=True, text=True)
        assert bool(done.returncode) == bool(says), done.stderr
        assert says in done.stderr
        return done

    def live() -> set[str]:
        workers = json.loads(run("node", f"{status} --json").stdout)["workers"]
        return {worker["worker"] for worker in workers if worker["live"]}

    up = "penstock up --detach --dir fleet --name two --workers 1 --slots 1 --allow streams"
    up += f" --listen {network.addresses['head']}:7070"
    started = run("head", up)
    folder = FleetFolder(tmp_path / "fleet")
    try:
        assert f"PENSTOCK_CREDENTIALS='{folder.credentials}'" in started.stdout
        assert "PENSTOCK_TOKEN" not in started.stdout
        told = [line.partition(": ")[2].strip() for line in started.stderr.splitlines()]
        worker, train, status = (line for line in told if "pem " in line and "copy" not in line)
        for file in [folder.authority, *(folder.credentials.with_name(f"{role}.pem") for role in ROLES)]:
            assert file.stat().st_mode & 0o777 == 0o600
        for role in ("worker", "client", "admin"):
            shutil.copy(folder.credentials.with_name(f"{role}.pem"), node)
        worker = worker.replace("ADDRESS", network.addresses["node"]).replace("--slots N", "--slots 1 --name far")
        with subprocess.Popen(command("node", worker), env=environment, cwd=node, stdout=subprocess.PIPE) as far:
            try:
                assert far.stdout is not None
                assert far.stdout.readline() == b"far\n"
                assert run("node", train).stdout == f"{[*range(1, 11), *range(1001, 1011)]}\n"
                for role in ("client", "worker"):  # they are no operator's
                    run("node", status.replace("admin", role), "penstock: ")
                assert "two-1" in run("head", "penstock status --job two").stdout
                run("head", "penstock down --dir fleet")
                run("head", f"PENSTOCK_CREDENTIALS='{folder.credentials}' {up}")  # in the same shell
                until(lambda: live() == {"far", "two-1"}, 30, "the far worker does not come back")
            finally:
                far.terminate()
    finally:
        run("head", "penstock down --dir fleet")


# ------------------------------------------------------------------------------------------------ one running fleet

LIFE_S = 5.0
SUPERVISE = f"""
import sys
from datetime import timedelta
from pathlib import Path
from penstock.deploy.engines.engine import FleetPlan
from penstock.deploy.engines.fleet_folder import FleetFolder
from penstock.deploy.engines.supervisor import supervise

plan, folder = FleetPlan.model_validate_json(sys.argv[1]), FleetFolder(Path(sys.argv[2]))
supervise(plan, folder, lambda fleet: print("ready", flush=True), life=timedelta(seconds={LIFE_S}))
"""


def plan_of(folder: FleetFolder) -> FleetPlan:
    """A plan with the fleet's own authority, on this machine alone: `penstock up` makes it for an address beyond."""
    folder.make()
    given = {"workers": 1, "slots": 1, "allow": "streams", "listen": "127.0.0.1:0"}
    tokens = str(folder.token_file(None))
    return FleetPlan.model_validate({**given, "credentials": str(folder.credentials), "token_file": tokens})


@pytest.fixture
def folder(shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetFolder]:
    """That of a running fleet whose certificates are valid for LIFE_S."""
    monkeypatch.setenv("PENSTOCK_CONFIG", os.devnull)
    folder = FleetFolder(tmp_path / "fleet")
    command = [sys.executable, "-c", SUPERVISE, plan_of(folder).model_dump_json(), str(folder.path)]
    environment = shell.env({"PENSTOCK_TOKEN": None, "PENSTOCK_INSECURE": None})
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield folder
        process.terminate()


def tls_of(file: Path) -> Tls:
    tls = load_tls(str(file), str(file), str(file), "*.penstock")
    assert tls is not None
    return tls


def test_certificates_are_renewed_and_are_for_one_role(folder: FleetFolder, tmp_path: Path) -> None:
    fleet = folder.fleet()
    assert fleet is not None
    files = {role: folder.credentials.with_name(f"{role}.pem") for role in ROLES}
    authority = folder.authority.read_bytes()
    old = Path(shutil.copy(files["admin"], tmp_path / "old.pem"))

    def client(file: Path, token: str) -> CoordinatorClient:
        return CoordinatorClient(fleet.coordinator, token, tls=tls_of(file))

    with client(files["admin"], read_token("admin", file=files["admin"])) as held:
        (worker,) = held.status().workers
        assert worker.live

        # A worker's file is no admin's, client's or coordinator's: neither its token is, nor its certificate.
        calls: dict[str, Callable[[CoordinatorClient], object]] = {
            "admin": lambda client: client.status(),
            "client": lambda client: client.open_run(pb.OpenRunRequest()),
        }
        own = read_token("worker", file=files["worker"])
        assert own not in files["client"].read_text() + files["admin"].read_text()
        for role, call in calls.items():
            stolen = read_token(role, file=files["coordinator"])  # type: ignore[arg-type]
            for file, token in ((files["worker"], own), (files["worker"], stolen), (files[role], own)):
                with pytest.raises(NotPermittedError), client(file, token) as another:
                    call(another)
        with pytest.raises(TlsError, match=r"must be for the name coordinator\.penstock"):
            tls_of(files["worker"]).check_own("coordinator")

        def expired() -> bool:
            try:
                tls_of(old)
            except TlsError as error:
                return "has expired" in error.message
            return False

        until(expired, 30, "the first certificate does not expire")
        assert folder.authority.read_bytes() == authority
        held.close()
    with client(files["admin"], read_token("admin", file=files["admin"])) as later:
        assert later.status().workers[0].live
    assert "loaded the new certificates" in (folder.logs / "coordinator.log").read_text()


def test_only_what_is_due_is_written_again(tmp_path: Path) -> None:
    folder = FleetFolder(tmp_path / "fleet")
    plan, life = plan_of(folder), timedelta(days=9)

    def renewed(life: timedelta) -> set[str]:
        before = {file: file.read_bytes() for file in folder.credentials.parent.glob("*")}
        Authority(folder.authority, folder.credentials, plan.token_file, life).renew()
        return {file.stem for file in folder.credentials.parent.iterdir() if before.get(file) != file.read_bytes()}

    assert renewed(life) == set(ROLES)
    assert renewed(life) == renewed(3 * life - timedelta(minutes=1)) == set()
    assert renewed(3 * life) == set(ROLES), "a third is left"
    folder.token.write_text(re.sub("(?<=client:).*", "another", folder.token.read_text()))
    assert renewed(life) == {"client", "coordinator"}
    assert read_token("client", file=folder.credentials.with_name("client.pem")) == "another"
    folder.authority.unlink()
    assert renewed(life) == set(ROLES)


# ------------------------------------------------------------------------------------------------------ the setting


@pytest.fixture
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PENSTOCK_CONFIG", os.devnull)


@pytest.mark.usefixtures("_no_settings")
def test_star_is_the_own_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CREDENTIALS", "/x/*.pem")
    assert resolve(CoordinatorSettings, state_dir="s").credentials == "/x/coordinator.pem"
    worker = resolve(WorkerSettings, slots=1, allow="m")
    assert worker.credentials == worker.tokens_in() == "/x/worker.pem"
    with pytest.raises(TlsError, match=r"^credentials=/x/admin\.pem cannot be read"):
        Peer(coordinator="head:1").tls()
    with pytest.raises(PenstockError, match=r"/x/client\.pem cannot be read"):
        Appliance("head:1")


@pytest.mark.usefixtures("_no_settings")
def test_credentials_stand_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = {"slots": 1, "allow": "m"}
    with pytest.raises(InvalidArgumentError, match=r"^--credentials w\.pem: .*got tls_ca too\. Leave one out"):
        resolve(WorkerSettings, credentials="w.pem", tls_ca="ca", **own)
    with pytest.raises(InvalidArgumentError, match=r"^credentials=w\.pem .*got /tokens too"):
        resolve(WorkerSettings, credentials="w.pem", **own).tokens_in("/tokens")
    monkeypatch.setenv("PENSTOCK_TOKEN", "t")
    assert resolve(WorkerSettings, credentials="w.pem", **own).tokens_in() == "w.pem", "a flag precedes variables"
    monkeypatch.setenv("PENSTOCK_CREDENTIALS", "w.pem")
    with pytest.raises(InvalidArgumentError, match="got PENSTOCK_TOKEN too"):
        resolve(WorkerSettings, **own).tokens_in()
    monkeypatch.setenv("PENSTOCK_INSECURE", "true")
    with pytest.raises(PenstockError, match=r"w\.pem"):
        Appliance("head:1")
    for name in ("PENSTOCK_TOKEN", "PENSTOCK_CREDENTIALS"):
        monkeypatch.delenv(name)
    file = tmp_path / "config.toml"
    file.write_text('[cluster]\ncredentials = "*.pem"\ntoken_file = "token"\n')
    monkeypatch.setenv("PENSTOCK_CONFIG", str(file))
    with pytest.raises(InvalidArgumentError, match=rf"credentials={tmp_path}/worker\.pem .*got token_file too"):
        resolve(WorkerSettings, **own).tokens_in()


def test_page_makes_the_same_files_by_openssl(tmp_path: Path) -> None:
    (block,) = [block.text for block in blocks(REPO / "docs/security.md") if block.text.startswith("openssl req")]
    subprocess.run(["bash", "-euo", "pipefail"], input=block, cwd=tmp_path, check=True, capture_output=True, text=True)
    tokens = Tokens((tmp_path / "tokens").read_text())
    for role in ROLES:
        file = tmp_path / f"{role}.pem"
        tls_of(file).check_own(role)
        held = Tokens(read_tokens(file))
        assert held.roles == {token: of for token, of in tokens.roles.items() if role in ("coordinator", *of)}


@pytest.mark.usefixtures("_no_settings")
@pytest.mark.parametrize(
    ("given", "credentials"),
    [
        ({}, ""),
        ({"listen": "10.0.0.1:0"}, "fleet/credentials/*.pem"),
        ({"listen": "10.0.0.1:0", "insecure": True}, ""),
        ({"listen": "10.0.0.1:0", "tls_cert": "c"}, ""),
        ({"listen": "10.0.0.1:0", "credentials": "c.pem"}, "c.pem"),
    ],
)
@pytest.mark.parametrize("exported", [False, True])
def test_fleets_that_others_reach_have_an_authority(
    given: dict[str, Any], credentials: str, exported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a shell that has the variables of the same folder's last fleet."""
    monkeypatch.chdir(tmp_path)
    folder = FleetFolder(Path("fleet"))
    folder.make()
    if exported and "tls_cert" not in given:
        monkeypatch.setenv("PENSTOCK_CREDENTIALS", str(folder.credentials))
    plan = up_down._plan_of(resolve(UpSettings, allow="m", **given), None, folder)
    assert plan.credentials == (credentials and str(tmp_path / credentials))
    assert "PENSTOCK_CREDENTIALS" not in os.environ or "credentials" in given
    assert plan.token_file == (plan.credentials if "credentials" in given else str(folder.token))


@pytest.mark.usefixtures("_no_settings")
def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "penstock.deploy.engines.authority", None)
    folder = FleetFolder(tmp_path / "fleet")
    with pytest.raises(CommandError, match=r"pip install 'penstock\[tls\]'"):
        supervise(plan_of(folder), folder, lambda fleet: None, life=timedelta(days=1))
