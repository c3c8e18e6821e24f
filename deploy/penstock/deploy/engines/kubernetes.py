"""Kubernetes: a coordinator with a volume and a Deployment of workers, handed to kubectl.

What is rendered is the least that runs safely: one coordinator, TLS from a Secret for each role, no root, nothing
writable but what must be. The repository's deploy/kubernetes has more: an autoscaler, job-scoped fleets. The manifests
are JSON, which kubectl takes as well as YAML, so that nothing is needed to write them.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from penstock.deploy.console.exit_codes import USAGE, CommandError
from penstock.deploy.engines.engine import Fleet, FleetPlan
from penstock.deploy.engines.external_commands import called
from penstock.proto.errors import PenstockError, UnsafeBindError
from penstock.proto.rpc.credentials.tokens import Tokens

__all__ = ["KubernetesEngine", "manifests", "render"]

PORT, LANES = 7070, 7071
TOKENS, TLS, STATE = "/etc/penstock/tokens", "/etc/penstock/tls", "/var/lib/penstock"
USER = 10001
CLIENT = {"penstock-client": "true"}
"""Label of pods that train: they may reach the daemons."""
DRAIN_S = 60
"""A worker hands its slots on and ends within 20 s."""


def manifests(plan: FleetPlan) -> list[dict[str, Any]]:
    """What kubectl is given. The Secret with the token is not in it."""
    return [
        _service(plan),
        _coordinator(plan),
        _workers(plan),
        _policy(plan, "coordinator", PORT, [_labels(plan, "worker"), CLIENT]),
        _policy(plan, "worker", LANES, [CLIENT]),
    ]


def render(plan: FleetPlan) -> str:
    """The same as text for `kubectl apply -f -`."""
    _check(plan)
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests(plan)}, indent=2) + "\n"


def _check(plan: FleetPlan) -> None:
    if not plan.options["image"]:
        raise CommandError("--image is missing: the image that has Penstock and your code in it", USAGE)
    if not plan.options["tls_secret"] and not plan.insecure:
        raise UnsafeBindError(
            "pods talk to each other over the network: give --tls-secret NAME, with Secrets NAME-coordinator and "
            "NAME-worker of ca.crt, tls.crt and tls.key for the names coordinator.penstock and worker.penstock, or say "
            "--insecure on a network that you trust"
        )


def _labels(plan: FleetPlan, component: str = "") -> dict[str, str]:
    labels = {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": plan.name}
    return labels | ({"app.kubernetes.io/component": component} if component else {})


def _meta(plan: FleetPlan, component: str) -> dict[str, Any]:
    return {
        "name": f"{plan.name}-{component}",
        "namespace": plan.options["namespace"],
        "labels": _labels(plan, component),
    }


def _service(plan: FleetPlan) -> dict[str, Any]:
    labels = _labels(plan, "coordinator")
    # Headless: callers reach the pod itself. Also before it is ready: workers wait by themselves.
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}
    ports = [{"name": "grpc", "port": PORT, "targetPort": PORT}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(plan, "coordinator"),
        "spec": {**spec, "ports": ports},
    }


def _coordinator(plan: FleetPlan) -> dict[str, Any]:
    labels = _labels(plan, "coordinator")
    environment = {
        "PENSTOCK_COORDINATOR_LISTEN": f"0.0.0.0:{PORT}",
        "PENSTOCK_COORDINATOR_STATE_DIR": f"{STATE}/state",
        **({"PENSTOCK_COORDINATOR_INSECURE": "true"} if plan.insecure else {}),
    }
    container = _container(plan, "coordinator", environment, PORT)
    container["resources"] = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}
    container["volumeMounts"].append({"name": "state", "mountPath": STATE})
    claim = {
        "metadata": {"name": "state"},
        # A block device: SQLite's write-ahead log is not safe on NFS, and the coordinator refuses it.
        "spec": {
            "accessModes": ["ReadWriteOncePod"],
            "resources": {"requests": {"storage": plan.options["storage"]}},
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _meta(plan, "coordinator"),
        "spec": {
            "replicas": 1,  # always: the journal has one writer
            "serviceName": f"{plan.name}-coordinator",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": _pod(plan, container, grace_s=30)},
            "volumeClaimTemplates": [claim],
        },
    }


def _workers(plan: FleetPlan) -> dict[str, Any]:
    labels = _labels(plan, "worker")
    environment = {
        "PENSTOCK_COORDINATOR": f"{plan.name}-coordinator:{PORT}",
        "PENSTOCK_WORKER_LISTEN": f"$(POD_IP):{LANES}",
        "PENSTOCK_WORKER_SLOTS": str(plan.slots),
        "PENSTOCK_WORKER_ALLOW": plan.allow,
        "PENSTOCK_WORKER_PULSE_FILE": "/tmp/pulse",
        "HOME": "/tmp",
        **({"PENSTOCK_WORKER_RUNNER_MEMORY": plan.runner_memory} if plan.runner_memory else {}),
        **({"PENSTOCK_WORKER_INSECURE": "true"} if plan.insecure else {}),
    }
    container = _container(plan, "worker", environment, LANES)
    fields = {"POD_IP": "status.podIP", "PENSTOCK_WORKER_NAME": "metadata.name"}
    own = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
    container["env"] = own + container["env"]  # POD_IP before the variable that refers to it
    container["resources"] = {"requests": {"cpu": str(plan.slots), "memory": f"{2 * plan.slots}Gi"}}
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(plan, "worker"),
        "spec": {
            "replicas": plan.workers,
            "selector": {"matchLabels": labels},
            "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},  # slots move before a worker goes
            "template": {
                "metadata": {"labels": labels},
                "spec": _pod(plan, container, grace_s=DRAIN_S) | {"topologySpreadConstraints": [spread]},
            },
        },
    }


def _container(plan: FleetPlan, component: str, environment: dict[str, str], port: int) -> dict[str, Any]:
    shared = {"PENSTOCK_TOKEN_FILE": f"{TOKENS}/token"}
    mounts = [
        {"name": "tokens", "mountPath": TOKENS, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if plan.options["tls_secret"]:
        files = {"CA": "ca.crt", "CERT": "tls.crt", "KEY": "tls.key"}
        shared |= {f"PENSTOCK_TLS_{name}": f"{TLS}/{file}" for name, file in files.items()}
        shared["PENSTOCK_TLS_NAME"] = "*.penstock"
        mounts.append({"name": "tls", "mountPath": TLS, "readOnly": True})
    return {
        "name": component,
        "image": plan.options["image"],
        "command": ["penstock", component],
        "env": [{"name": name, "value": value} for name, value in (shared | environment).items()],
        "ports": [{"containerPort": port}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
        **_probes(component),
    }


def _probes(component: str) -> dict[str, Any]:
    """By a command, for gRPC's own probes speak no TLS. Both daemons take a while to start: long cluster state, a new
    image."""

    def probe(what: str, period_s: int, failures: int, timeout_s: int = 20) -> dict[str, Any]:
        command = ["python", "-m", "penstock.deploy.probe", component, what]
        rhythm = {"periodSeconds": period_s, "timeoutSeconds": timeout_s, "failureThreshold": failures}
        return {"exec": {"command": command}, **rhythm}

    return {
        "startupProbe": probe("live", 2, 150),
        "livenessProbe": probe("live", 30, 10),  # one that hangs; a machine that is busy is no reason to kill it
        "readinessProbe": probe("ready", 10, 3, 5),
    }


def _pod(plan: FleetPlan, container: dict[str, Any], *, grace_s: int) -> dict[str, Any]:
    role = container["name"]
    tokens = {"secretName": f"{plan.name}-token", "items": [{"key": role, "path": "token"}]}
    volumes: list[dict[str, Any]] = [
        # 0400 becomes root's 0440 with fsGroup: the group alone may read it.
        {"name": "tokens", "secret": {**tokens, "defaultMode": 0o400}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if plan.options["tls_secret"]:
        own = f"{plan.options['tls_secret']}-{role}"
        volumes.append({"name": "tls", "secret": {"secretName": own, "defaultMode": 0o400}})
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # its variables would look like settings of ours
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }


def _policy(plan: FleetPlan, component: str, port: int, callers: list[dict[str, str]]) -> dict[str, Any]:
    """Who may call: nobody else. What the workers may call is left open, for their data may be anywhere."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _meta(plan, component),
        "spec": {
            "podSelector": {"matchLabels": _labels(plan, component)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {
                    "from": [{"podSelector": {"matchLabels": labels}} for labels in callers],
                    "ports": [{"port": port}],
                }
            ],
        },
    }


class KubernetesEngine:
    """Applies the manifests with kubectl, and deletes by label."""

    def up(self, plan: FleetPlan, folder: Path) -> Fleet:
        """Returns when the roll-out is done. What is there already is changed to what the plan says.

        Raises PenstockError with what kubectl said; CommandError, UnsafeBindError.
        """
        text = render(plan)
        space = str(plan.options["namespace"])
        kubectl = ["kubectl", "--namespace", space]
        secret = f"{plan.name}-token"
        try:
            called([*kubectl, "get", "secret", secret, "--output", "name"])
        except PenstockError:  # there is none: an old one is kept, for pods have it
            called([*kubectl, "apply", "--filename", "-"], stdin=_secret(plan))
        called([*kubectl, "apply", "--filename", "-"], stdin=text)
        wait = f"--timeout={plan.timeout_s:g}s"
        for what in (f"statefulset/{plan.name}-coordinator", f"deployment/{plan.name}-worker"):
            called([*kubectl, "rollout", "status", what, wait], deadline_s=plan.timeout_s + 30)
        return Fleet(
            engine="kubernetes",
            name=plan.name,
            folder=str(folder),
            coordinator=f"{plan.name}-coordinator.{space}:{PORT}",
            token_file=plan.token_file,
            tls=plan.tls,
            about={"namespace": space, "token_secret": secret},
        )

    def down(self, fleet: Fleet, timeout_s: float) -> list[str]:
        """Delete the daemons. The volume with the cluster state and the token's Secret stay, for the next `up`."""
        kubectl = ["kubectl", "--namespace", fleet.about["namespace"]]
        label = f"app.kubernetes.io/name=penstock,app.kubernetes.io/instance={fleet.name}"
        ended = []
        for kinds in ("deployment", "statefulset,service,networkpolicy"):  # workers first
            said = called(
                [*kubectl, "delete", kinds, "--selector", label, "--output", "name", f"--timeout={timeout_s:g}s"],
                deadline_s=timeout_s + 30,
            )
            ended += said.split()
        return ended


def _secret(plan: FleetPlan) -> str:
    token = ""
    with contextlib.suppress(OSError):
        token = Path(plan.token_file).read_text().strip()
    if not token:
        raise CommandError(f"the token file {plan.token_file} cannot be read, or is empty", USAGE)
    found = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{plan.name}-token", "namespace": plan.options["namespace"], "labels": _labels(plan)},
        "type": "Opaque",
        "stringData": {"coordinator": token + "\n", "worker": _of_workers(token, plan.token_file) + "\n"},
    }
    return json.dumps(found)


def _of_workers(tokens: str, file: str) -> str:
    """Return what workers need of a token file's text: the lines of their role, or without any the bare tokens.

    Raises CommandError if there are neither: the lines of other roles are not for pods that run user code.
    """
    lines = [line.strip() for line in tokens.splitlines()]
    own = [line for line in lines if line.startswith("worker:")] or [line for line in lines if line and ":" not in line]
    if not own:
        raise CommandError(
            f"the token file {file} must hold a line worker:TOKEN or a bare token, got tokens of the roles "
            f"{Tokens(tokens).about}: add one, or no worker could register",
            USAGE,
        )
    return "\n".join(own)
