"""Engine for Kubernetes: makes the manifests of `kubernetes_manifests` from a plan's settings and applies them with
kubectl.

deploy/kubernetes has the same manifests as a kustomization and as a Helm chart. Here, both daemons have the same image.
kubectl gets the manifests as JSON, so that no YAML writer is needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.deploy.console.exit_codes import USAGE, CommandError
from penstock.deploy.engines.engine import Fleet, FleetPlan
from penstock.deploy.engines.external_commands import called
from penstock.deploy.engines.kubernetes_manifests import GRPC_PORT, FleetSettings, config_maps, labels, manifests
from penstock.proto.errors import PenstockError, UnsafeBindError
from penstock.proto.rpc.credentials.tokens import Tokens

__all__ = ["KubernetesEngine", "fleet_settings", "render"]

ROLES = ("coordinator", "worker")
MEMORY_GIB = 2
"""Memory that a worker's pod requests for each of its slots, in GiB."""


def fleet_settings(plan: FleetPlan) -> FleetSettings:
    """Return the settings from which the manifests of a plan are made. Pods of workers have no memory limit. They may
    connect to all hosts, because their data may be on any of them."""
    fleet = FleetSettings(
        name=plan.name,
        coordinator_image=plan.options["image"],
        worker_image=plan.options["image"],
        entry_point=False,
        workers=plan.workers,
        worker_resources={"requests": {"cpu": str(plan.slots), "memory": f"{MEMORY_GIB * plan.slots}Gi"}},
        storage=plan.options["storage"],
        allow=plan.allow,
        runner_memory=plan.runner_memory,
        tls=bool(plan.options["tls_secret"]),
        token_secrets={role: f"{plan.name}-tokens-{role}" for role in ROLES},
        tls_secrets={role: f"{plan.options['tls_secret']}-{role}" for role in ROLES},
        limit_egress=False,
    )
    return replace(fleet, checksum=hashlib.sha256(json.dumps(config_maps(fleet)).encode()).hexdigest())


def render(plan: FleetPlan, folder: Path) -> str:
    """Return the manifests as text for `kubectl apply -f -`, without the Secrets of the tokens.

    `folder` is not used: the text contains nothing from the fleet's folder. Raises CommandError if no image is given,
    UnsafeBindError if neither --tls-secret nor --insecure is given.
    """
    if not plan.options["image"]:
        raise CommandError(
            "--image must be given: a container image that has Penstock and your code. Pass its name, such as "
            "registry/penstock:1",
            USAGE,
        )
    if not plan.options["tls_secret"] and not plan.insecure:
        raise UnsafeBindError(
            "--tls-secret must be given, because pods connect to each other over the network. The Secrets "
            "NAME-coordinator and NAME-worker must have ca.crt, tls.crt and tls.key for the names coordinator.penstock "
            "and worker.penstock. On a network that you trust, pass --insecure instead"
        )
    items = manifests(fleet_settings(plan))
    for item in items:
        item["metadata"]["namespace"] = plan.options["namespace"]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2) + "\n"


class KubernetesEngine:
    """Engine that applies the manifests of a plan with kubectl, and deletes a fleet's objects by their label."""

    def up(self, plan: FleetPlan, folder: Path) -> Fleet:
        """Apply the manifests with kubectl and return when all pods are ready. Objects that exist already are changed
        to the plan, except the Secrets with tokens, which are kept.

        Raises PenstockError with kubectl's message; CommandError if no image or token is given, UnsafeBindError if
        there are no certificates.
        """
        text = render(plan, folder)
        space = str(plan.options["namespace"])
        kubectl = ["kubectl", "--namespace", space]
        secrets = fleet_settings(plan).token_secrets
        missing = []
        for role, secret in secrets.items():
            try:
                called([*kubectl, "get", "secret", secret, "--output", "name"])
            except PenstockError:  # there is no Secret yet; an old one is kept, because pods use it
                missing.append(_secret(plan, role, secret))
        for applied in (*missing, text):
            called([*kubectl, "apply", "--filename", "-"], stdin=applied)
        wait = f"--timeout={plan.timeout_s:g}s"
        for what in (f"statefulset/{plan.name}-coordinator", f"deployment/{plan.name}-worker"):
            called([*kubectl, "rollout", "status", what, wait], deadline_s=plan.timeout_s + 30)
        return Fleet(
            engine="kubernetes",
            name=plan.name,
            folder=str(folder),
            coordinator=f"{plan.name}-coordinator.{space}:{GRPC_PORT}",
            token_file=plan.token_file,
            tls=plan.tls,
            about={"namespace": space, "token_secrets": dict(secrets)},
        )

    def down(self, fleet: Fleet, timeout_s: float) -> list[str]:
        """Delete the daemons and the other objects of the fleet. Only the volume with the cluster state and the Secrets
        with the tokens stay, for the next `penstock up`."""
        kubectl = ["kubectl", "--namespace", fleet.about["namespace"]]
        selected = labels(FleetSettings(name=fleet.name))
        label = ",".join(f"{name}={value}" for name, value in selected.items())
        ended = []
        for kinds in ("deployment", "statefulset,service,networkpolicy,poddisruptionbudget,configmap"):  # workers first
            output = called(
                [*kubectl, "delete", kinds, "--selector", label, "--output", "name", f"--timeout={timeout_s:g}s"],
                deadline_s=timeout_s + 30,
            )
            ended += output.split()
        return ended


def _secret(plan: FleetPlan, role: str, name: str) -> str:
    token = ""
    with contextlib.suppress(OSError):
        token = Path(plan.token_file).read_text().strip()
    if not token:
        raise CommandError(
            f"the token file {plan.token_file} must be readable and must have a token. Correct the file, or pass "
            "another by --token-file",
            USAGE,
        )
    own = token if role == "coordinator" else _of_workers(token, plan.token_file)
    found: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "namespace": plan.options["namespace"],
            "labels": labels(fleet_settings(plan), role),
        },
        "type": "Opaque",
        "stringData": {"tokens": own + "\n"},
    }
    return json.dumps(found)


def _of_workers(tokens: str, file: str) -> str:
    """Return the lines of a token file that workers need: those of the role worker, or the tokens without a role if the
    file has no line of the role worker. Lines of other roles are never returned, because pods that run user code must
    not have them.

    Args:
        tokens: content of the token file.
        file: path of the token file, for the error.

    Raises CommandError if the file has no such line.
    """
    lines = [line.strip() for line in tokens.splitlines()]
    own = [line for line in lines if line.startswith("worker:")] or [line for line in lines if line and ":" not in line]
    if not own:
        raise CommandError(
            f"the token file {file} must have a line worker:TOKEN or a token without a role, got tokens of the roles "
            f"{Tokens(tokens).about}. Add a line worker:TOKEN, so that workers can register",
            USAGE,
        )
    return "\n".join(own)
