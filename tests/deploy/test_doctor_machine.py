"""`penstock doctor machine`: what it says of values, and of a machine on which something is really broken."""

from __future__ import annotations

import datetime
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pki import Pki

from penstock.deploy.doctor import machine_findings, machine_probes
from penstock.deploy.doctor.findings import Finding
from penstock.deploy.doctor.machine_check import MachineRequest, check_machine
from penstock.runtime.files import filesystems

NOW = datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC)
GIB = 1 << 30


@pytest.mark.parametrize(
    ("finding", "level", "says"),
    [
        (machine_findings.check_python((3, 10, 2)), "problem", "3.10.2"),
        (machine_findings.check_python((3, 11, 0)), "ok", "3.11.0"),
        (machine_findings.check_python((3, 99, 0)), "warning", "newer than the tested releases"),
        (machine_findings.check_packages(["torch>=2.4"], {"torch": "2.13.0+cpu"})[0], "ok", "2.13.0"),
        (machine_findings.check_packages(["torch>=2.4"], {"torch": "2.3.1"})[0], "problem", "2.4 or newer"),
        (machine_findings.check_packages(["typer"], {})[0], "problem", "not installed"),
        (machine_findings.check_torch_build(0, 0), "ok", "without CUDA"),
        (machine_findings.check_torch_build(18, 8), "ok", "8 NVIDIA devices"),
        (machine_findings.check_torch_build(18, 0), "warning", "no NVIDIA device"),
        (machine_findings.check_kernel("6.1", {}), "ok", "pidfd"),
        (machine_findings.check_kernel("6.1", {"O_DIRECT": "no"}), "ok", "optional"),
        (
            machine_findings.check_kernel("4.4", {"pidfd_open": "Function not implemented"}),
            "problem",
            "without pidfd_open",
        ),
        (machine_findings.check_sandbox(""), "ok", "only what they have started"),
        (machine_findings.check_groups(""), "ok", "the kernel holds --runner-processes"),
        (
            machine_findings.check_groups("it is not its own"),
            "ok",
            "is checked once a second; --runner-processes needs --runner-user",
        ),
        (
            machine_findings.check_sandbox("the kernel has no Landlock"),
            "warning",
            "can signal and trace other processes",
        ),
        (machine_findings.check_runner_user("", "", as_root=True), "warning", "would run as root"),
        (machine_findings.check_runner_user("", "", as_root=False), "ok", "which is not root"),
        (machine_findings.check_runner_user("who", "", as_root=True), "ok", "runs as who"),
        (machine_findings.check_runner_user("who", "no such user", as_root=True), "problem", "no such user"),
        (machine_findings.check_memory(64 * GIB, None, 8), "ok", "64.0 GiB free"),
        (machine_findings.check_memory(64 * GIB, (3 * GIB, 2 * GIB), 8), "warning", "2.0 GiB free, 3.0 GiB at most"),
        (machine_findings.check_memory(GIB // 4, None, 1), "problem", "256.0 MiB free"),
        (machine_findings.check_files(-1, -1, 4096), "ok", "any number"),
        (machine_findings.check_files(256, 4096, 32), "problem", "256 at most (4096 after ulimit -n)"),
        (machine_findings.check_processes(-1, None, 64), "ok", "any number"),
        (machine_findings.check_processes(-1, (400, 100), 8), "problem", "100 more processes"),
        (machine_findings.check_locked_memory(8 << 20, "cuda"), "warning", "device=cuda locks its ring"),
        (machine_findings.check_locked_memory(8 << 20, ""), "ok", "matters with device=cuda only"),
        (machine_findings.check_clock("tsc", NOW, True), "ok", ", synchronised by NTP"),
        (machine_findings.check_clock("tsc", NOW, False), "warning", "not synchronised by NTP"),
        (machine_findings.check_clock("hpet", NOW, True), "warning", "hpet"),
        (machine_findings.check_clock("", datetime.datetime(1970, 1, 2, tzinfo=datetime.UTC), None), "problem", "1970"),
        (machine_findings.check_disk("/d", "ext4", False, 9 * GIB, 0.001), "ok", "1 ms an fsync"),
        (machine_findings.check_disk("/d", "nfs4", True, 9 * GIB, 0.001), "problem", "network filesystem (nfs4)"),
        (machine_findings.check_disk("/d", "ext4", False, GIB // 8, 0.001), "problem", "128.0 MiB free"),
        (machine_findings.check_disk("/d", "ext4", False, GIB // 2, 0.001), "warning", "512.0 MiB free"),
        (machine_findings.check_disk("/d", "ext4", False, 9 * GIB, 0.08), "warning", "80 ms an fsync"),
        (machine_findings.check_disk("/d", "tmpfs", False, 9 * GIB, 1e-5), "warning", "tmpfs"),
        (machine_findings.check_disk("/d", "ext4", False, 9 * GIB, None), "problem", "cannot be written to"),
        (machine_findings.check_tls("c.pem", NOW + datetime.timedelta(days=90), NOW), "ok", "90 days"),
        (machine_findings.check_tls("c.pem", NOW + datetime.timedelta(days=29), NOW), "warning", "29 days"),
    ],
)
def test_what_is_said_of_values(finding: Finding, level: str, says: str) -> None:
    assert (finding.level, says in finding.found) == (level, True), finding
    assert bool(finding.remedy) == (level != "ok")


def test_the_cgroup_that_leaves_the_least_counts(tmp_path: Path) -> None:
    assert machine_probes.cgroup_left("memory", tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert machine_probes.cgroup_left("memory", tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 500\n")
    assert machine_probes.cgroup_left("memory", tmp_path) == (1000, 600)
    (tmp_path / "pids.max").write_text("64\n")
    (tmp_path / "pids.current").write_text("60\n")
    assert machine_probes.cgroup_left("pids", tmp_path) == (64, 4)


def machine_of(done: Any) -> dict[str, dict[str, str]]:
    return {each["check"]: each for each in json.loads(done.stdout)["findings"]}


def test_machine_check_leaves_nothing(shell: Any) -> None:
    done = shell.call(
        "doctor", "machine", "--slots", "1", "--state-dir", "deep/state", "--listen", "127.0.0.1:0", "--json"
    )
    found = machine_of(done)
    assert {name for name, each in found.items() if each["level"] == "problem"} == set(), found
    assert done.returncode == 0
    for name in ("python", "torch", "grpcio", "protobuf", "kernel", "settings", "memory", "open files", "processes"):
        assert found[name]["level"] == "ok", found[name]
    assert {"locked memory", "clock", "state directory", "port of the worker", "TLS", "token"} <= set(found)
    assert {path.name for path in shell.folder.iterdir()} == {"called.out", "called.err"}  # what it said


def test_no_target_checks_the_machine(shell: Any) -> None:
    assert shell.call("doctor").stdout.startswith("This machine\ncheck ")
    assert json.loads(shell.call("doctor", "--json", "--slots", "1").stdout)["of"] == "This machine"
    assert shell.call("doctor", "nothing-like-this").returncode == 2
    assert "--args must be a JSON list" in shell.call("doctor", "--args", "x", "nowhere:fn").error
    found = json.loads(shell.call("doctor", "--json", "--debug", "--input-fn", "light:fn").stdout)
    assert found["findings"][-1]["check"] == "input_fn"


def test_a_broken_machine(shell: Any) -> None:
    """All at once: each is found, and none hides another."""
    folder = shell.folder
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl is not here to make certificates with")
    pki = Pki(folder / "pki")
    expired = pki.issue("expired", days=-1)
    (folder / "token").write_text("word\n")
    (folder / "token").chmod(0o644)
    (folder / "p.toml").write_text("[worker]\nslot = 3\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = shell.call(
            *("doctor", "machine", "--slots", "100000", "--listen", address, "--state-dir", "/proc/state", "--json"),
            *("--token-file", "token", "--tls-cert", expired.cert, "--tls-key", expired.key, "--config", "p.toml"),
        )
    found = machine_of(done)
    assert done.returncode == 32
    wrong = {name for name, each in found.items() if each["level"] == "problem"}
    assert {"settings", "port of the coordinator", "state directory", "TLS", "token"} <= wrong
    assert "did you mean slots?" in found["settings"]["found"]
    assert f"{address} is in use" in found["port of the coordinator"]["found"]
    assert "ss -ltnp" in found["port of the coordinator"]["remedy"]
    assert "has expired" in found["TLS"]["found"]
    assert f"chmod 600 {'token'}" in found["token"]["found"]
    assert "word" not in done.stdout
    assert found["memory"]["level"] in ("warning", "problem")


def test_certificates_are_looked_into(shell: Any) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl is not here to make certificates with")
    pki = Pki(shell.folder / "pki")
    late = pki.issue("late", days=60)
    found = machine_of(shell.call("doctor", "--json", "--tls-cert", late.cert, "--tls-key", late.key))
    assert (found["TLS"]["level"], "59 days" in found["TLS"]["found"]) == ("ok", True)
    both = pki.issue("both", "DNS:worker.penstock,DNS:client.penstock", days=60)
    for pair, level, told in ((both, "ok", "for the role client and worker"), (late, "problem", "names no role")):
        flags = ("--tls-ca", pki.ca, "--tls-cert", pair.cert, "--tls-key", pair.key, "--tls-name", "*.penstock")
        found = machine_of(shell.call("doctor", "--json", *flags))
        assert (found["TLS"]["level"], told in found["TLS"]["found"]) == (level, True)


def test_a_low_limit_of_open_files(shell: Any) -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

    done = subprocess.run(
        _command("--slots", "8"),
        env=shell.env({}),
        preexec_fn=lower,
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert done.returncode == 32
    assert found["open files"]["level"] == "problem"
    assert "200 at most" in found["open files"]["found"]
    assert "ulimit -n 65536" in found["open files"]["remedy"]


def _command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("penstock")), "doctor", "machine", "--json", *arguments]


def test_network_filesystem_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = filesystems.filesystem(tmp_path, Path("/proc/self/mountinfo").read_text())
    monkeypatch.setattr(filesystems, "NETWORK", {here})
    found = {each.check: each for each in check_machine(MachineRequest({"state_dir": tmp_path / "state"}))}
    assert found["state directory"].level == "problem"
    assert f"network filesystem ({here})" in found["state directory"].found


def test_running_coordinator_may_hold_its_port(coordinator: Any) -> None:
    address = coordinator.environment["PENSTOCK_COORDINATOR"]
    done = coordinator.call("doctor", "machine", "--listen", address, "--state-dir", "state", "--json")
    found = machine_of(done)["port of the coordinator"]
    assert (found["level"], found["found"]) == (
        "ok",
        f"{address} is in use by the coordinator that runs here (process {coordinator.started[0].process.pid})",
    )


@pytest.mark.parametrize(
    ("input_fn", "allow", "level", "says"),
    [
        ("light:fn", "light", "ok", "and a worker here may run it"),
        ("light:fn", "other", "problem", "a worker here may not run it: --allow is other"),
        ("nowhere.data:fn", "nowhere", "problem", "no module named 'nowhere'"),
        ("light:nothing", "light", "problem", "has no 'nothing'"),
        ("lacking:fn", "lacking", "problem", "ModuleNotFoundError: No module named 'not_installed_here'"),
        ("waiting_module:fn", "*", "problem", "took more than 1 s"),
        ("dying:fn", "*", "problem", "was killed by SIGKILL"),
        ("colon", "*", "problem", "must be MODULE:NAME"),
    ],
)
def test_user_code_is_imported_in_a_child_process(shell: Any, input_fn: str, allow: str, level: str, says: str) -> None:
    (shell.folder / "light.py").write_text("def fn(): ...\n")
    (shell.folder / "lacking.py").write_text("import not_installed_here\n")
    (shell.folder / "waiting_module.py").write_text("import time\ntime.sleep(600)\n")
    (shell.folder / "dying.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    deadline = "1" if input_fn.startswith("waiting") else "60"
    done = shell.call("doctor", "machine", "--json", "--input-fn", input_fn, "--allow", allow, "--deadline", deadline)
    found = machine_of(done)["input_fn"]
    assert (found["level"], says in found["found"]) == (level, True), found
    remedies = {
        "nowhere.data:fn": "pip install it on",
        "light:nothing": "Correct the name in --input-fn",
        "colon": "Correct --input-fn.",
    }
    assert remedies.get(input_fn, "") in found["remedy"]
    assert done.returncode == (32 if level == "problem" else 0)
    assert "Traceback" not in done.stderr


def test_import_traceback_is_shown_on_request(shell: Any) -> None:
    (shell.folder / "lacking.py").write_text("import not_installed_here\n")
    done = shell.call("doctor", "machine", "--input-fn", "lacking:fn", "--debug")
    assert "import not_installed_here" in done.stderr
    assert os.fspath(shell.folder / "lacking.py") in done.stderr


def test_an_address_that_is_none(shell: Any) -> None:
    done = shell.call("doctor", "machine", "--listen", "nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.error.startswith("penstock: --listen nonsense: ")
