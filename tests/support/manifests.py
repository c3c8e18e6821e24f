"""Kubernetes manifests as tests want them: rendered by kubectl, taken apart, with the pods in them."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

__all__ = ["KUBERNETES", "OVERLAYS", "Pod", "pods", "rendered", "settings_of"]

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = ["base", *sorted(f"overlays/{path.name}" for path in (KUBERNETES / "overlays").iterdir())]


@functools.cache
def rendered(folder: str) -> tuple[dict[str, Any], ...]:
    """The documents that `kubectl kustomize` makes of a folder."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed, which renders the kustomizations")
    command = [kubectl, "kustomize", str(KUBERNETES / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


@dataclass(frozen=True)
class Pod:
    """The template of a pod, and what makes pods of it."""

    owner: Mapping[str, Any]
    name: str
    labels: Mapping[str, str]
    spec: Mapping[str, Any]

    @property
    def container(self) -> dict[str, Any]:
        """Container of the pod, which has exactly one."""
        (container,) = self.spec["containers"]
        assert isinstance(container, dict)
        return container

    @property
    def role(self) -> str:
        """ "coordinator", "worker", or what a pod that trains is called."""
        return str(self.container["name"])


def pods(documents: tuple[dict[str, Any], ...]) -> list[Pod]:
    """Return the pods of all documents."""
    return [pod for document in documents for pod in _pods(document)]


def _pods(document: dict[str, Any]) -> Iterator[Pod]:
    name = document["metadata"]["name"]
    if document["kind"] in ("Deployment", "StatefulSet"):
        template = document["spec"]["template"]
        yield Pod(document, name, template["metadata"]["labels"], template["spec"])
    if document["kind"] == "JobSet":
        for job in document["spec"]["replicatedJobs"]:
            template = job["template"]["spec"]["template"]
            yield Pod(document, f"{name}-{job['name']}", template["metadata"]["labels"], template["spec"])


def settings_of(pod: Pod, documents: tuple[dict[str, Any], ...], downward: Mapping[str, str]) -> dict[str, str]:
    """The environment of its container. `downward`: what the cluster would fill in, by field path."""
    maps = {document["metadata"]["name"]: document["data"] for document in documents if document["kind"] == "ConfigMap"}
    found: dict[str, str] = {}
    for source in pod.container.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]]
    for entry in pod.container.get("env", []):
        found[entry["name"]] = _value(entry, pod, downward, found)
    return found


def _value(entry: dict[str, Any], pod: Pod, downward: Mapping[str, str], before: Mapping[str, str]) -> str:
    if "value" in entry:
        value = str(entry["value"])
        for name, known in before.items():
            value = value.replace(f"$({name})", known)
        return value
    source = entry["valueFrom"]
    if "fieldRef" in source:
        return downward[source["fieldRef"]["fieldPath"]]
    reference = source["resourceFieldRef"]
    assert reference["containerName"] == pod.role
    kind, resource = reference["resource"].split(".")
    return str(pod.container["resources"][kind][resource])
