"""`penstock up` on Slurm and Kubernetes: what would be submitted, checked as far as that goes without either; and the
calls of sbatch, scancel and kubectl, recorded by programs of that name that come first on PATH.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from manifests import pods, settings_of
from waiting import until

KUBERNETES = ("up", "--engine", "kubernetes", "--allow", "streams", "--image", "registry/mine:1", "--dir", "fleet")
SLURM = ("up", "--engine", "slurm", "--allow", "streams", "--insecure", "--dir", "fleet", "--listen", "127.0.0.1:0")

RECORDER = f"""#!{sys.executable} -IS
import json, os, sys
name = os.path.basename(sys.argv[0])
piped = "-" in sys.argv or "fleet.sbatch" in sys.argv[-1]
text = sys.stdin.read() if "-" in sys.argv else open(sys.argv[-1]).read() if piped else ""
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps([name, *sys.argv[1:], text]), file=calls)
answers = json.load(open(os.environ["ANSWERS"]))
said, status = answers.get(f"{{name}} {{sys.argv[3] if name == 'kubectl' else ''}}".strip(), ["", 0])
print(said, end="", file=sys.stderr if status else sys.stdout)
sys.exit(status)
"""


class Recorded:
    """Programs that only note how they were called."""

    def __init__(self, shell: Any) -> None:
        self.shell, folder = shell, shell.folder
        (folder / "bin").mkdir()
        for name in ("sbatch", "scancel", "squeue", "kubectl"):
            program = folder / "bin" / name
            program.write_text(RECORDER)
            program.chmod(0o755)
        self._calls, self._answers = folder / "calls", folder / "answers"
        self.answer()
        path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
        shell.environment |= {"PATH": path, "CALLS": str(self._calls), "ANSWERS": str(self._answers)}

    def answer(self, **answers: tuple[str, int]) -> None:
        """Set their output and status: kubectl_get=("error", 1)."""
        self._answers.write_text(json.dumps({name.replace("_", " "): said for name, said in answers.items()}))

    def calls(self) -> list[list[str]]:
        """Return the calls since the last query."""
        found = [json.loads(line) for line in self._calls.read_text().splitlines()] if self._calls.exists() else []
        self._calls.unlink(missing_ok=True)
        return found


@pytest.fixture
def recorded(shell: Any) -> Recorded:
    return Recorded(shell)


# ---- Kubernetes


@pytest.mark.parametrize("safety", [("--tls-secret", "certificates"), ("--insecure",)])
def test_the_manifests_are_valid_and_careful(shell: Any, safety: tuple[str, ...]) -> None:
    done = shell.call(*KUBERNETES, *safety, "--render", "--workers", "3", "--slots", "6")
    assert done.returncode == 0, done.stderr
    items = json.loads(done.stdout)["items"]
    for item in items:
        kubernetes_validate.validate(item, "1.30", strict=True)
    by_kind = {item["kind"]: item for item in items}
    kinds = {"ConfigMap", "Service", "StatefulSet", "Deployment", "PodDisruptionBudget", "NetworkPolicy"}
    assert set(by_kind) == kinds
    assert {item["metadata"]["namespace"] for item in items} == {"default"}
    assert by_kind["Deployment"]["spec"]["replicas"] == 3
    for kind in ("StatefulSet", "Deployment"):  # the rest of them is in test_kubernetes.py
        pod = by_kind[kind]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        own = {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
        certificates = {f"certificates-{container['name']}"} if safety != ("--insecure",) else set()
        assert own == {f"penstock-tokens-{container['name']}", *certificates}
        assert container["command"] == ["penstock"], "the image's entry point may be another"


def test_pod_variables_are_daemon_settings(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.deploy.console.daemon_settings import CoordinatorSettings, PeerSettings, WorkerSettings, resolve

    items = tuple(json.loads(shell.call(*KUBERNETES, "--insecure", "--render").stdout)["items"])
    for pod in pods(items):
        downward = {"status.podIP": "10.0.0.7", "metadata.name": "penstock-worker-x"}
        for name, value in settings_of(pod, items, downward).items():
            monkeypatch.setenv(name, value)
    assert resolve(CoordinatorSettings).listen == "0.0.0.0:7070"
    assert resolve(PeerSettings).coordinator == "penstock-coordinator:7070"
    worker = resolve(WorkerSettings)
    assert (worker.listen, worker.slots, worker.allow, worker.insecure) == ("10.0.0.7:7071", 8, "streams", True)


@pytest.mark.parametrize(
    ("tokens", "of_workers"),
    [
        ("worker:w-0123456789\nclient:c-0123456789\nadmin:a-0123456789", "worker:w-0123456789"),
        ("bare-0123456789\nadmin:a-0123456789", "bare-0123456789"),
    ],
)
def test_workers_are_given_their_own_tokens(recorded: Recorded, tokens: str, of_workers: str) -> None:
    recorded.answer(kubectl_get=("Error from server (NotFound): secrets not found", 1))
    done = recorded.shell.call(*KUBERNETES, "--insecure", PENSTOCK_TOKEN=tokens)
    assert done.returncode == 0, done.stderr
    coordinator, worker, _ = (json.loads(call[-1]) for call in recorded.calls() if call[3] == "apply")
    names = [secret["metadata"]["name"] for secret in (coordinator, worker)]
    assert names == ["penstock-tokens-coordinator", "penstock-tokens-worker"]
    assert coordinator["stringData"]["tokens"].split() == tokens.split()
    assert worker["stringData"]["tokens"].split() == [of_workers]


def test_a_changed_setting_replaces_the_pods(shell: Any) -> None:
    def checksums(*more: str) -> set[str]:
        items = json.loads(shell.call(*KUBERNETES, "--insecure", "--render", *more).stdout)["items"]
        templates = [item["spec"]["template"] for item in items if "template" in item.get("spec", {})]
        return {template["metadata"]["annotations"]["checksum/settings"] for template in templates}

    (usual,) = checksums()
    assert checksums("--workers", "5") == {usual}
    assert usual not in checksums("--runner-memory", "3GiB")


def test_missing_worker_token_is_refused(recorded: Recorded) -> None:
    recorded.answer(kubectl_get=("Error from server (NotFound): secrets not found", 1))
    done = recorded.shell.call(*KUBERNETES, "--insecure", PENSTOCK_TOKEN="client:c-0123456789\nadmin:a-0123456789")
    assert done.returncode == 2
    assert (
        "must have a line worker:TOKEN or a token without a role, got tokens of the roles admin, client" in done.error
    )
    assert "0123456789" not in done.error
    assert "apply" not in [call[3] for call in recorded.calls()]


def test_up_and_down_call_kubectl_correctly(recorded: Recorded) -> None:
    recorded.answer(kubectl_get=("Error from server (NotFound): secrets not found", 1))
    done = recorded.shell.call(*KUBERNETES, "--insecure", "--namespace", "train", "--name", "lm", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["coordinator"] == "lm-coordinator.train:7070"
    calls = recorded.calls()
    assert all(call[:3] == ["kubectl", "--namespace", "train"] for call in calls)
    assert [call[3] for call in calls] == ["get", "get", "apply", "apply", "apply", "rollout", "rollout"]
    token = (recorded.shell.folder / "fleet" / "token").read_text()
    for secret in (json.loads(calls[2][-1]), json.loads(calls[3][-1])):
        kubernetes_validate.validate(secret, "1.30", strict=True)
        assert secret["stringData"] == {"tokens": token}, "a bare one, good for all roles"
    assert token.strip() not in str([call[:-1] for call in calls])  # by standard input alone
    assert token.strip() not in calls[4][-1]
    selector = "app.kubernetes.io/name=penstock,app.kubernetes.io/instance=lm"
    for item in json.loads(calls[4][-1])["items"]:
        assert {f"{name}={value}" for name, value in item["metadata"]["labels"].items()} >= set(selector.split(","))
    recorded.answer(kubectl_delete=("deployment.apps/lm-worker\n", 0))
    done = recorded.shell.call("down", "--dir", "fleet")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "ended: deployment.apps/lm-worker")
    deletes = recorded.calls()
    assert deletes[0][4] == "deployment"
    kinds = {item["kind"].lower() for item in json.loads(calls[4][-1])["items"]}
    assert set(deletes[1][4].split(",")) == kinds - {"deployment"}
    assert all(selector in call for call in deletes)


def test_down_names_an_engine_it_does_not_know(recorded: Recorded) -> None:
    assert recorded.shell.call(*KUBERNETES, "--insecure").returncode == 0
    record = recorded.shell.folder / "fleet" / "fleet.json"
    record.write_text(record.read_text().replace('"engine": "kubernetes"', '"engine": "later"'))
    done = recorded.shell.call("down", "--dir", "fleet")
    assert done.returncode == 2
    assert "the engine must be one of local, ray, slurm, kubernetes, got later" in done.error


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((*KUBERNETES, "--render"), 16, "--tls-secret"),
        ((*KUBERNETES[:5], "--insecure", "--render"), 2, "--image must be given"),
        ((*SLURM[:5], "--dir", "fleet"), 16, "--tls-cert"),
    ],
)
def test_what_is_missing_is_named(shell: Any, arguments: tuple[str, ...], code: int, says: str) -> None:
    done = shell.call(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.error


def test_a_tool_that_fails_or_is_not_there(recorded: Recorded) -> None:
    recorded.answer(kubectl_apply=("The connection to the server was refused", 1))
    done = recorded.shell.call(*KUBERNETES, "--insecure")
    assert done.returncode == 10
    assert (
        "kubectl --namespace default apply --filename failed with status 1: The connection to the server was refused"
        in done.error
    )
    done = recorded.shell.call(*SLURM, PATH="/nonexistent")
    assert done.returncode == 2
    assert "sbatch must be installed here" in done.error


# ---- Slurm


def test_the_job_script_keeps_what_it_is_given(recorded: Recorded, tmp_path: Path) -> None:
    """Submitted, waited for, cancelled; and the script has whatever a name may hold in it, quoted."""
    address = recorded.shell.folder / "fleet" / "slurm" / "address"
    recorded.answer(sbatch=("4711;cluster\n", 0), squeue=("PENDING\n", 0))
    done = recorded.shell.call(*SLURM, "--timeout", "1", "--sbatch", "--partition 'cpu nodes'", "--workers", "5")
    assert done.returncode == 17
    assert "Slurm job 4711 is still PENDING after 1 s" in done.error
    sbatch = next(call for call in recorded.calls() if call[0] == "sbatch")
    assert sbatch[1:4] == ["--parsable", "--partition", "cpu nodes"]
    script = sbatch[-1]
    assert "#SBATCH --ntasks=5\n" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    # the same command waits on for the same job
    address.parent.mkdir()
    address.write_text("node1:4000\n")
    recorded.answer(squeue=("RUNNING\n", 0))
    done = recorded.shell.call(*SLURM, "--sbatch", "--partition 'cpu nodes'", "--workers", "5")
    assert done.stdout.splitlines()[0] == "export PENSTOCK_COORDINATOR=node1:4000"
    assert "sbatch" not in [call[0] for call in recorded.calls()]
    recorded.answer(squeue=("slurm_load_jobs error: Invalid job id specified", 1))
    assert recorded.shell.call("down", "--dir", "fleet").returncode == 0


def test_slurm_job_is_kept_while_controller_is_down(recorded: Recorded) -> None:
    recorded.answer(sbatch=("4711\n", 0), squeue=("PENDING\n", 0))
    assert recorded.shell.call(*SLURM, "--timeout", "1").returncode == 17
    recorded.calls()
    recorded.answer(squeue=("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", 1))
    for command in (("down", "--dir", "fleet"), SLURM):
        done = recorded.shell.call(*command)
        assert done.returncode == 10
        assert "squeue --noheader --jobs 4711 --format failed with status 1: slurm_load_jobs" in done.error
    assert (recorded.shell.folder / "fleet" / "fleet.json").exists()
    assert {call[0] for call in recorded.calls()} == {"squeue"}


SRUN = """#!/bin/bash
trap : TERM # it ends with its tasks
while [[ $1 == --* ]]; do shift; done
for n in 0 1; do SLURM_PROCID=$n "$@" & done
while [ -n "$(jobs -pr)" ]; do wait; done
"""
"""Replace Slurm's srun: two tasks, here."""


def test_job_script_runs_and_ends_daemons(shell: Any, tmp_path: Path) -> None:
    """The real script and real daemons, but for srun. A killed worker comes back; SIGTERM ends all, as scancel does."""
    done = shell.call(*SLURM, "--render", "--slots", "1", "--state-dir", str(tmp_path / "my cluster state"))
    assert done.returncode == 0, done.stderr
    assert not (shell.folder / "fleet").exists()
    programs, fleet = tmp_path / "bin", shell.folder / "fleet"
    for folder in (programs, fleet):
        folder.mkdir(mode=0o700)
    script, srun, token, address = tmp_path / "job", programs / "srun", fleet / "token", fleet / "slurm" / "address"
    for path, text, mode in ((script, done.stdout, 0o755), (srun, SRUN, 0o755), (token, "a-token-0123456789", 0o600)):
        path.write_text(text)
        path.chmod(mode)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = shell.env({"PATH": path, "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "PENSTOCK_TOKEN": None})
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(
            ["bash", str(script)], env=environment, cwd=shell.folder, stderr=log, start_new_session=True
        )
    try:

        def workers() -> dict[str, str]:
            if not address.exists():
                return {}
            asked = ("status", "--json", "--coordinator", address.read_text().strip(), "--token-file", str(token))
            done = shell.call(*asked)
            found = json.loads(done.stdout)["workers"] if done.returncode == 0 else []
            return {one["worker"]: one["tcp_address"] for one in found if one["live"] and not one["draining"]}

        until(lambda: set(workers()) == {"penstock-1", "penstock-2"})
        before = workers()
        os.kill(_process(job.pid, "penstock-2"), signal.SIGKILL)
        until(lambda: set(now := workers()) == set(before) and now["penstock-2"] != before["penstock-2"])
        os.killpg(job.pid, signal.SIGTERM)
        assert job.wait(60) == 0, (tmp_path / "log").read_text()
        assert not _session(job.pid)
        assert (tmp_path / "my cluster state" / "journal.db").exists()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait(10)


def _session(leader: int) -> dict[int, list[str]]:
    """Command lines of the processes of a session."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == leader:
                found[int(entry.name)] = (entry / "cmdline").read_text().split("\0")
        except OSError:
            continue
    return found


def _process(session: int, worker: str) -> int:
    (pid,) = [pid for pid, command in _session(session).items() if worker in command and "--name" in command]
    return pid
