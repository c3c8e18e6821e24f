"""deploy/kubernetes: the chart and its options are strictly valid and mean what they say; its daemons really start so.

No cluster is asked: see docs/deploy.md for what that leaves open.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import kubernetes_validate
import pytest
from manifests import VARIANTS, Pod, pods, rendered, settings_of
from pki import Pki
from waiting import until

from penstock.appliance.limits import DISK_BUDGET, DISK_SHARE, GIB
from penstock.worker.processes.runner_user import _NEEDED

OLDEST, NEWEST = "1.30", "1.37"
"""Versions of Kubernetes whose schemas the manifests are held to. 1.30 is the first with all that they use stable."""
ROLES = ("coordinator", "worker", "client")
DOWNWARD = {
    "status.podIP": "127.0.0.1",
    "metadata.name": "penstock-worker-0",
    "metadata.annotations['batch.kubernetes.io/job-completion-index']": "0",
}
SECONDS_TO_LEAVE = {"coordinator": 2.0, "worker": 45.0, "trainer": 0.0}
"""Seconds that daemons need after SIGTERM at worst: a coordinator its STOP_GRACE_S and its journal; a worker 10 s to
hand its slots over and 2 to say good-bye, then KILL_S for runners, END_S for what they left and LAST_STATUS_S for fork
servers, some of it twice."""


def all_pods() -> list[tuple[str, Pod]]:
    return [(variant, pod) for variant in VARIANTS for pod in pods(rendered(variant))]


def daemons() -> list[tuple[str, Pod]]:
    return [(variant, pod) for variant, pod in all_pods() if pod.role != "trainer"]


# -------------------------------------------------------------------------------------------------------------- schemas


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_document_is_strictly_valid(variant: str, version: str) -> None:
    documents = rendered(variant)
    assert documents
    for document in documents:
        if document["kind"] == "JobSet":
            assert document["spec"].keys() <= {"network", "successPolicy", "failurePolicy", "replicatedJobs"}
            for job in document["spec"]["replicatedJobs"]:
                assert job.keys() <= {"name", "replicas", "template", "dependsOn"}
                made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
                kubernetes_validate.validate(made, version, strict=True)
        elif document["kind"] != "PodMonitor":  # the Prometheus operator's
            kubernetes_validate.validate(document, version, strict=True)


# ------------------------------------------------------------------------------------------------------- what they mean


@pytest.mark.parametrize("variant", VARIANTS)
def test_selectors_match_only_pods_of_their_role(variant: str) -> None:
    documents = rendered(variant)
    here = pods(documents)
    for document in documents:
        name, spec = document["metadata"]["name"], document.get("spec", {})
        for labels in _selectors(document["kind"], spec):
            found = {pod.role for pod in here if labels.items() <= pod.labels.items()}
            if labels == {"penstock-client": "true"}:
                assert found <= {"trainer"}
            else:
                assert found == {name.removeprefix("penstock-")}, (document["kind"], name, labels)


def _selectors(kind: str, spec: dict[str, Any]) -> list[dict[str, str]]:
    match kind:
        case "Service":
            return [spec["selector"]]
        case "Deployment" | "StatefulSet" | "PodDisruptionBudget" | "PodMonitor":
            return [spec["selector"]["matchLabels"]]
        case "NetworkPolicy":
            return [spec["podSelector"]["matchLabels"]]
    return []


@pytest.mark.parametrize("variant", VARIANTS)
def test_network_policy_admits_only_daemon_ports(variant: str) -> None:
    documents = rendered(variant)
    policies = {doc["metadata"]["name"]: doc["spec"] for doc in documents if doc["kind"] == "NetworkPolicy"}
    client = {"penstock-client": "true"}
    label = "app.kubernetes.io"
    worker = {f"{label}/name": "penstock", f"{label}/instance": "penstock", f"{label}/component": "worker"}
    for pod in pods(documents):
        if pod.role == "trainer":
            continue
        settings = settings_of(pod, documents, DOWNWARD)
        port = int(settings[f"PENSTOCK_{pod.role.upper()}_LISTEN"].rpartition(":")[2])
        assert port in [port["containerPort"] for port in pod.container["ports"]]
        ingress, *monitoring = policies[f"penstock-{pod.role}"]["ingress"]
        assert ingress["ports"] == [{"port": port}]
        allowed = [worker, client] if pod.role == "coordinator" else [client]
        assert [who["podSelector"]["matchLabels"] for who in ingress["from"]] == allowed
        assert sorted(policies[f"penstock-{pod.role}"]["policyTypes"]) == ["Egress", "Ingress"]
        http = settings.get(f"PENSTOCK_{pod.role.upper()}_HTTP", "").rpartition(":")[2]
        namespaces = {"namespaceSelector": {"matchLabels": {"penstock-monitoring": "true"}}}
        assert monitoring == ([{"from": [namespaces], "ports": [{"port": int(http)}]}] if http else [])
        for document in documents:
            if document["kind"] == "Service" and document["metadata"]["name"] == f"penstock-{pod.role}":
                reached = {port["targetPort"]: port["port"] for port in document["spec"]["ports"]}
                assert reached == {"grpc": port, **({"http": int(http)} if http else {})}
        if pod.role == "worker":
            coordinator = policies["penstock-coordinator"]["ingress"][0]["ports"]
            assert policies["penstock-worker"]["egress"][0]["ports"] == coordinator


def test_workers_and_boxes_find_the_coordinator() -> None:
    for variant, pod in all_pods():
        documents = rendered(variant)
        if pod.role == "coordinator":
            continue
        host, _, port = settings_of(pod, documents, DOWNWARD)["PENSTOCK_COORDINATOR"].rpartition(":")
        assert port == "7070"
        if pod.owner["kind"] == "JobSet":  # JOBSET-JOB-REPLICA-INDEX.SUBDOMAIN
            assert (
                host == f"{pod.owner['metadata']['name']}-coordinator-0-0.{pod.owner['spec']['network']['subdomain']}"
            )
        else:
            assert host in {doc["metadata"]["name"] for doc in documents if doc["kind"] == "Service"}


def test_containers_are_unprivileged_read_only() -> None:
    for variant, pod in all_pods():
        where, container = (variant, pod.name), pod.container
        user = dict(pod.spec["securityContext"])
        capabilities = {"drop": ["ALL"]}
        if where == ("separated", "penstock-worker"):
            assert user.keys() == {"runAsUser", "runAsGroup", "seccompProfile"}, "an fsGroup may read the Secrets"
            assert user["runAsUser"] == 0
            assert container["command"] == ["sh", "-c", "chmod 1777 /tmp && exec penstock worker"]
            assert settings_of(pod, rendered(variant), DOWNWARD)["PENSTOCK_WORKER_RUNNER_USER"] == "10001"
            capabilities["add"] = [name.removeprefix("CAP_") for name in _NEEDED]
        else:
            assert user["runAsNonRoot"] is True, where
            assert user["runAsUser"] >= 10000, where
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert pod.spec["automountServiceAccountToken"] is False, where
        assert pod.spec["enableServiceLinks"] is False, where
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": capabilities,
        }, where
        assert container["resources"]["limits"]["memory"], where
        assert all(volume.get("emptyDir", {"sizeLimit": "none"})["sizeLimit"] for volume in pod.spec["volumes"]), where
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        for path in _written(settings_of(pod, rendered(variant), DOWNWARD)):
            assert any(path.is_relative_to(mount) and "readOnly" not in mounts[mount] for mount in mounts), (
                where,
                path,
            )


def test_volumes_of_the_coordinator_hold_its_budget() -> None:
    """An emptyDir shows the size of the node's disk, not its limit."""
    limits = []
    for variant, pod in all_pods():
        if pod.role == "coordinator":
            volumes = [
                volume.get("emptyDir", {}).get("sizeLimit")
                for volume in pod.spec["volumes"]
                if volume["name"] == "state"
            ]
            claims = pod.owner["spec"].get("volumeClaimTemplates", [])
            limits += [
                (variant, limit)
                for limit in (*volumes, *(claim["spec"]["resources"]["requests"]["storage"] for claim in claims))
                if limit is not None
            ]
    assert {variant for variant, _ in limits} >= {variant for variant, pod in all_pods() if pod.role == "coordinator"}
    for variant, limit in limits:
        assert int(limit.removesuffix("Gi")) * GIB * DISK_SHARE >= DISK_BUDGET, variant


def _written(settings: dict[str, str]) -> list[Path]:
    names = ("PENSTOCK_COORDINATOR_STATE_DIR", "PENSTOCK_WORKER_LIVENESS_FILE", "HOME")
    return [Path("/tmp/any"), *(Path(settings[name]) for name in names if name in settings)]


def test_probe_and_termination_times_suffice() -> None:
    for variant, pod in daemons():
        container = pod.container
        for what, name in (("live", "startupProbe"), ("live", "livenessProbe"), ("ready", "readinessProbe")):
            probe = container[name]
            assert probe["exec"]["command"] == ["python", "-m", "penstock.deploy.probe", pod.role, what], variant
            own_s = 4 if what == "ready" else 15
            assert probe["timeoutSeconds"] > own_s, "more than the probe's own deadline, which says what is wrong"
        live = container["livenessProbe"]
        assert live["periodSeconds"] * live["failureThreshold"] >= 300, "an overloaded machine kills no daemon"
        assert pod.spec["terminationGracePeriodSeconds"] > SECONDS_TO_LEAVE[pod.role], variant
        assert "preStop" not in container.get("lifecycle", {}), "SIGTERM alone makes a daemon leave"


def test_pods_leave_a_lost_node_before_training_jobs_give_up() -> None:
    """Kubernetes' own five minutes are longer than jobs wait for a batch; a node counts as lost after 50 s."""
    for variant, pod in all_pods():
        seconds = {one["key"].partition("/")[2]: one["tolerationSeconds"] for one in pod.spec["tolerations"]}
        assert seconds.keys() == {"unreachable", "not-ready"}, (variant, pod.role)
        assert all(50 + each < 120 for each in seconds.values())


def test_autoscaler_follows_demand_and_drains() -> None:
    """Never by processors: what went then had slots, and the job ended with a NoWorkersError."""
    scalers = [
        (variant, document)
        for variant in VARIANTS
        for document in rendered(variant)
        if document["kind"] == "HorizontalPodAutoscaler"
    ]
    ((variant, scaler),) = scalers
    (metric,) = scaler["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == "penstock_workers_recommended"
    (worker,) = (document for document in rendered(variant) if document["kind"] == "Deployment")
    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": worker["apiVersion"],
        "kind": worker["kind"],
        "name": worker["metadata"]["name"],
    }
    assert "replicas" not in worker["spec"]
    pod = worker["spec"]["template"]["spec"]
    drain = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}["PENSTOCK_WORKER_DRAIN"]
    assert 60 <= int(drain) < pod["terminationGracePeriodSeconds"]


# ---------------------------------------------------------------------------------------------------- they really start


class Node:
    """Runs the containers of an variant as processes of this machine, with folders for their volumes."""

    def __init__(self, shell: Any, folder: Path, variant: str) -> None:
        self.shell, self.folder, self.documents = shell, folder, rendered(variant)
        self._port = socket.socket()  # nobody else is given it, and nobody listens on it, until the coordinator starts
        self._port.bind(("127.0.0.1", 0))
        self.port = self._port.getsockname()[1]
        pki = Pki(folder / "pki")
        self.mounts = {"coordinator": folder / "coordinator", "worker": folder / "worker"}
        for role, mount in self.mounts.items():
            for name in ("etc/penstock/tls", "etc/penstock/tokens", "tmp", "var/lib/penstock"):
                (mount / name).mkdir(parents=True)
            pair = pki.issue(role, f"DNS:{role}.penstock")
            for name, source in (("ca.crt", pki.ca), ("tls.crt", pair.cert), ("tls.key", pair.key)):
                (mount / "etc/penstock/tls" / name).write_bytes(Path(source).read_bytes())
            tokens = {"coordinator": "worker:w-secret\nadmin:a-secret\n", "worker": "worker:w-secret\n"}
            (mount / "etc/penstock/tokens/tokens").write_text(tokens[role])
            for file in mount.rglob("etc/penstock/*/*"):
                file.chmod(0o400)

    def close(self) -> None:
        self._port.close()

    def pod(self, role: str) -> Pod:
        (pod,) = (pod for pod in pods(self.documents) if pod.role == role)
        return pod

    def environment(self, role: str) -> dict[str, str | None]:
        """Its settings, with its paths below a folder, a port of this machine, and loopback for the Service's name."""
        settings = settings_of(self.pod(role), self.documents, DOWNWARD)
        mount = self.mounts[role]
        inside = {
            name: f"{mount}{value}" if value.startswith(("/etc/penstock", "/var/lib", "/tmp")) else value
            for name, value in settings.items()
        }
        places = (("0.0.0.0:7070", f"0.0.0.0:{self.port}"), ("penstock-coordinator:7070", f"127.0.0.1:{self.port}"))
        for cluster, machine in (*places, (":7071", ":0")):
            inside = {name: value.replace(cluster, machine) for name, value in inside.items()}
        return {**inside, "TMPDIR": str(mount / "tmp"), "PENSTOCK_TOKEN": None}

    def start(self, role: str, **more: str) -> Any:
        if role == "coordinator":
            self._port.close()
        return self.shell.begin(*self.pod(role).container["args"], **(self.environment(role) | more))

    def probe(self, role: str, kind: Literal["startupProbe", "livenessProbe", "readinessProbe"]) -> int:
        """The exit status of the probe's very command."""
        command = [sys.executable, *self.pod(role).container[kind]["exec"]["command"][1:]]
        environment = self.shell.env(self.environment(role))
        done = subprocess.run(command, env=environment, capture_output=True, timeout=30)
        assert b"Traceback" not in done.stderr
        return done.returncode


def test_daemons_of_the_chart_start_and_stop(shell: Any, tmp_path: Path) -> None:
    node = Node(shell, tmp_path, "default")
    worker = node.start("worker", PENSTOCK_WORKER_ALLOW="streams")
    until(lambda: node.probe("worker", "livenessProbe") == 0)  # and there is no coordinator yet
    assert node.probe("worker", "readinessProbe") == 1
    assert node.probe("coordinator", "startupProbe") == 1
    coordinator = node.start("coordinator")
    until(lambda: node.probe("coordinator", "startupProbe") == 0)
    assert node.probe("coordinator", "readinessProbe") == 0
    until(lambda: node.probe("worker", "readinessProbe") == 0)
    log = worker.log.read_text()
    assert "slots=4 (PENSTOCK_WORKER_SLOTS)" in log
    assert "name=penstock-worker-0 (PENSTOCK_WORKER_NAME)" in log
    os.kill(coordinator.process.pid, signal.SIGSTOP)
    assert node.probe("coordinator", "livenessProbe") == 1, "it exists, and answers nobody"
    os.kill(coordinator.process.pid, signal.SIGCONT)
    for role, started in (("worker", worker), ("coordinator", coordinator)):
        os.kill(started.process.pid, signal.SIGTERM)  # as a container's first process gets it
        assert started.process.wait(node.pod(role).spec["terminationGracePeriodSeconds"]) == 0
        assert started.log.read_text().endswith("stopped on request\n")
