"""Generator of most files below deploy/kubernetes, from penstock.deploy.engines.kubernetes_manifests.

`make manifests` runs it; tests/deploy/test_manifest_files.py compares. The kustomizations and the chart's
values are written by hand, because operators change them.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from penstock.deploy.engines import kubernetes_manifests as source
from penstock.deploy.engines.kubernetes_manifests import FleetSettings, Manifest

__all__ = ["files"]

HERE = Path(__file__).parent
HEADER = "# Written by `make manifests` from penstock/deploy/engines/kubernetes_manifests.py: change that, not this.\n"
JOBSET_HEADER = (
    "# Written by `make manifests` from deploy/kubernetes/write_manifests.py: change that, or a copy of this.\n"
)
WIDTH = 120


def files() -> dict[str, str]:
    """Return the text of each generated file, by its path below deploy/kubernetes."""
    base = FleetSettings()
    return {
        "base/coordinator.yaml": HEADER + text([source.service(base), source.stateful_set(base)]),
        "base/worker.yaml": HEADER + text([source.deployment(base), source.budget(base)]),
        "common/network.yaml": HEADER + text(source.policies(base)),
        "common/kustomization.yaml": HEADER + text([common(base)], COMMON_REASONS),
        "overlays/jobset/jobset.yaml": JOBSET_HEADER + text([jobset()], JOBSET_REASONS),
        "overlays/monitored-by-operator/pod-monitors.yaml": JOBSET_HEADER + text(pod_monitors(base)),
        "certificates/cert-manager.yaml": JOBSET_HEADER + text(certificates(), CERTIFICATE_REASONS),
        **{f"helm/templates/{name}": HEADER + template for name, template in chart().items()},
    }


# ---- YAML


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    """Represent a list of short words on one line, as [a, b]."""
    short = all(isinstance(item, str) and "=" not in item for item in items) and len(" ".join(items)) < 60
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=short)


_Dumper.add_representer(list, _list)


def text(documents: list[Manifest], reasons: Mapping[str, Mapping[str, str]] = source.REASONS) -> str:
    """Return documents as YAML, with the comments of `reasons`. Raises ValueError if a field that has a reason does not
    occur in the documents."""
    kinds = {document["kind"] for document in documents}
    left = {kind: dict(fields) for kind, fields in reasons.items() if kind in kinds}
    parts = []
    for document in documents:
        lines = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000).splitlines()
        parts.append("\n".join(_commented(lines, left.get(document["kind"], {}))) + "\n")
    for kind, fields in left.items():
        if missing := fields.keys() - OPTIONAL:
            raise ValueError(
                f"a {kind} must have the fields that comments are for, got none of: {', '.join(missing)}. "
                "Correct REASONS"
            )
    return "---\n".join(parts)


def _commented(lines: list[str], left: dict[str, str]) -> Iterator[str]:
    """Yield the lines, with each comment of `left` before the first occurrence of its field. Comments that were written
    are removed from `left`."""
    for line in lines:
        for beginning in [one for one in left if line.lstrip(" -").startswith(one)]:
            indent = line[: len(line) - len(line.lstrip())] + "# "
            yield from textwrap.wrap(left.pop(beginning), WIDTH, initial_indent=indent, subsequent_indent=indent)
        yield line


OPTIONAL = {"checksum/settings:"}
"""Reasons for fields that only the chart has, as REASONS in kubernetes_manifests.py."""


# ---- kustomize


def common(fleet: FleetSettings) -> Manifest:
    """Return the kustomization with the ConfigMaps, whose names kustomize makes from their content."""
    maps = [
        {"name": one["metadata"]["name"], "literals": [f"{name}={value}" for name, value in one["data"].items()]}
        for one in source.config_maps(fleet)
    ]
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["network.yaml"],
        "configMapGenerator": maps,
    }


COMMON_REASONS = {
    "Kustomization": {
        "apiVersion:": "Common to the base and the JobSet: settings, and the network policies.",
        "configMapGenerator:": "A changed value changes the name, which replaces the pods.",
        "PENSTOCK_TLS_NAME": "The * is the role of the other end: coordinator, worker, client.",
        "PENSTOCK_WORKER_ALLOW": "Set this: a worker without it ends with an error.",
    }
}


def pod_monitors(fleet: FleetSettings) -> list[Manifest]:
    """Return the PodMonitors (kustomize component `monitored`), by which the Prometheus operator finds the daemons'
    metrics."""
    return [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PodMonitor",
            "metadata": {"name": f"{fleet.name}-{role}", "labels": source.labels(fleet)},
            "spec": {
                "selector": {"matchLabels": source.labels(fleet, role)},
                "podMetricsEndpoints": [
                    {
                        "port": "http",
                        "scheme": "https",
                        "tlsConfig": {
                            "ca": {"secret": {"name": "penstock-tls-admin", "key": "ca.crt"}},
                            "cert": {"secret": {"name": "penstock-tls-admin", "key": "tls.crt"}},
                            "keySecret": {"name": "penstock-tls-admin", "key": "tls.key"},
                            "serverName": f"{role}.penstock",
                        },
                        "authorization": {"credentials": {"name": "penstock-tokens-monitoring", "key": role}},
                    }
                ],
            },
        }
        for role in ("coordinator", "worker")
    ]


# ---- cert-manager


def certificates() -> list[Manifest]:
    """Return a certificate authority for the namespace alone, and a certificate for each role."""

    def issuer(name: str, spec: Manifest) -> Manifest:
        return {"apiVersion": "cert-manager.io/v1", "kind": "Issuer", "metadata": {"name": name}, "spec": spec}

    def certificate(name: str, by: str, spec: Manifest) -> Manifest:
        signed = {"privateKey": {"algorithm": "ECDSA", "size": 256}, "issuerRef": {"name": by, "kind": "Issuer"}}
        kind = {"apiVersion": "cert-manager.io/v1", "kind": "Certificate"}
        return {**kind, "metadata": {"name": f"penstock-{name}"}, "spec": {**spec, **signed}}

    def of_role(role: str) -> Manifest:
        times = {"duration": "2160h", "renewBefore": "720h"}
        usages = ["digital signature", "server auth", "client auth"]
        names = {"secretName": f"penstock-tls-{role}", "dnsNames": [f"{role}.penstock"]}
        return certificate(role, "penstock", {**names, **times, "usages": usages})

    ca = {"isCA": True, "commonName": "penstock-ca", "secretName": "penstock-ca", "duration": "87600h"}
    return [
        issuer("penstock-bootstrap", {"selfSigned": {}}),
        certificate("ca", "penstock-bootstrap", ca),
        issuer("penstock", {"ca": {"secretName": "penstock-ca"}}),
        *(of_role(role) for role in ("coordinator", "worker", "client", "admin")),
    ]


CERTIFICATE_REASONS = {
    "Issuer": {
        "apiVersion:": "Makes and renews the Secrets penstock-tls-ROLE with cert-manager: `kubectl apply` "
        "it beside the base, with your cluster's Issuer or the one below. Daemons load renewed certificates "
        "while they run (docs/security.md)."
    }
}


# ---- JobSet


def jobset() -> Manifest:
    """Return a JobSet: coordinator, workers and boxes that start and end with one training job."""
    name = "penstock-job"
    fleet = FleetSettings(coordinator=f"{name}-coordinator-0-0.{name}:{source.GRPC_PORT}")
    coordinator = source.daemon_pod(fleet, "coordinator")
    coordinator["volumes"].append({"name": "state", "emptyDir": {"sizeLimit": fleet.storage}})
    trainers = _job("trainers", 2, 0, source.CLIENT_LABEL, "Never", _trainer(fleet, name))
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["trainers"]},
            "failurePolicy": {"maxRestarts": 3},
            "replicatedJobs": [
                _job("coordinator", 1, 20, source.labels(fleet, "coordinator"), "OnFailure", coordinator),
                _job(
                    "workers", 4, 100, source.labels(fleet, "worker"), "OnFailure", source.daemon_pod(fleet, "worker")
                ),
                {"name": "trainers", "dependsOn": [{"name": "coordinator", "status": "Ready"}], **trainers},
            ],
        },
    }


def _job(name: str, pods: int, retries: int, labels: Mapping[str, str], restart: str, pod: Manifest) -> Manifest:
    template = {"metadata": {"labels": labels}, "spec": {"restartPolicy": restart, **pod}}
    counts = {"parallelism": pods, "completions": pods, "completionMode": "Indexed", "backoffLimit": retries}
    return {"name": name, "replicas": 1, "template": {"spec": {**counts, "template": template}}}


def _trainer(fleet: FleetSettings, job: str) -> Manifest:
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    container = {
        "name": "trainer",
        "image": "penstock-trainer",
        "command": ["torchrun"],
        "args": [
            "--nnodes=2",
            "--nproc-per-node=1",
            "--node-rank=$(NODE_RANK)",
            f"--master-addr={job}-trainers-0-0.{job}",
            "--master-port=29500",
            "-m",
            "ourpackage.train",
        ],
        "envFrom": [{"configMapRef": {"name": fleet.name}}],
        "env": [
            {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
            {"name": "PENSTOCK_COORDINATOR", "value": fleet.coordinator},
            {"name": "PENSTOCK_JOB", "value": job},
            {"name": "HOME", "value": "/tmp"},
        ],
        "resources": {"requests": {"cpu": "8", "memory": "32Gi"}, "limits": {"memory": "32Gi"}},
    }
    return source.pod(fleet, "client", source.confined(fleet, container, []), 60)


JOBSET_REASONS = {
    "JobSet": {
        "apiVersion:": "The pods of coordinator and workers are those of ../../base, which explains them; here they "
        "end with the job.",
        "network:": "Makes the name penstock-job-coordinator-0-0.penstock-job, which is the same after restarts.",
        "successPolicy:": "Complete when the boxes have completed; the controller then ends workers and coordinator.",
        "sizeLimit:": "The state outlives the container, not the pod: a restarted job resumes from its own checkpoint.",
        "name: trainers": "One pod for each box. If one fails, the set restarts: all boxes resume from the same "
        "checkpoint.",
        "image: penstock-trainer": "Replace it: your training job, with penstock installed; add its volumes, with your "
        "checkpoints.",
        "name: PENSTOCK_JOB": "The same after a restart.",
        "memory: 32Gi": 'Add your accelerators, below limits: nvidia.com/gpu: "1".',
    }
}


# ---- Helm


VALUES = {
    "name": ".Release.Name",
    "coordinator_image": ".Values.coordinator.image | quote",
    "worker_image": ".Values.worker.image | quote",
    "workers": ".Values.worker.replicas",
    "coordinator_resources": "toYaml .Values.coordinator.resources | nindent INDENT",
    "worker_resources": "toYaml .Values.worker.resources | nindent INDENT",
    "storage": ".Values.coordinator.storage",
    "storage_class": ".Values.coordinator.storageClass",
    "allow": ".Values.allow | quote",
    "runner_memory": ".Values.worker.runnerMemory | quote",
    "checksum": 'include (print $.Template.BasePath "/settings.yaml") . | sha256sum',
    "coordinator_tokens": ".Values.secrets.coordinatorTokens",
    "worker_tokens": ".Values.secrets.workerTokens",
    "coordinator_tls": ".Values.secrets.coordinatorTls",
    "worker_tls": ".Values.secrets.workerTls",
}
"""The chart's value for a setting, by the setting's placeholder in a manifest."""
CONDITIONS: dict[str, tuple[str, Any]] = {
    "tls": (".Values.tls", False),
    "storage_class": (".Values.coordinator.storageClass", ""),
}
"""By setting: the chart's condition under which the setting has its default value in the chart, and its value
otherwise."""


def chart() -> dict[str, str]:
    """Return the Helm chart's templates by file name: the manifests, with Helm's notation in place of each setting's
    value."""
    marks: dict[str, Any] = {name: f"HELM-{name}-" for name in VALUES}
    for setting, kind in (("token_secrets", "tokens"), ("tls_secrets", "tls")):
        marks[setting] = {role: marks.pop(f"{role}_{kind}") for role in ("coordinator", "worker")}
    fleet = FleetSettings(**marks)
    made: dict[str, Callable[[FleetSettings], list[Manifest]]] = {
        "settings.yaml": source.config_maps,
        "coordinator.yaml": lambda fleet: [source.service(fleet), source.stateful_set(fleet)],
        "worker.yaml": lambda fleet: [source.deployment(fleet), source.budget(fleet)],
        "network.yaml": source.policies,
    }
    return {
        name: "".join(f"{_spliced(line)}\n" for line in _either(make, fleet, list(CONDITIONS)))
        for name, make in made.items()
    }


def _either(make: Callable[[FleetSettings], list[Manifest]], fleet: FleetSettings, conditions: list[str]) -> list[str]:
    """Return the lines of the manifests, where lines that depend on a condition are between {{if}} and {{end}}.

    For all values of the conditions, Helm's output is line by line the text of the manifests with those settings.
    """
    if not conditions:
        return text(make(fleet)).splitlines()
    setting, *rest = conditions
    condition, otherwise = CONDITIONS[setting]
    there = _either(make, fleet, rest)
    absent = _either(make, replace(fleet, **{setting: otherwise}), rest)
    found: list[str] = []
    for _, here, to_here, gone, to_gone in difflib.SequenceMatcher(None, there, absent, False).get_opcodes():
        if there[here:to_here] == absent[gone:to_gone]:
            found += there[here:to_here]
            continue
        for word, branch in (("", there[here:to_here]), ("not ", absent[gone:to_gone])):
            if branch:
                found += [f"{{{{- if {word}{condition} }}}}", *branch, "{{- end }}"]
    return found


def _spliced(line: str) -> str:
    """Return the line with Helm's notation in place of its placeholder. A block of YAML starts on a line of its own."""
    inner = len(line) - len(line.lstrip()) + 2
    for name, value in VALUES.items():
        opening = "{{-" if "INDENT" in value else "{{"
        line = line.replace(f"HELM-{name}-", f"{opening} {value.replace('INDENT', str(inner))} }}}}")
    return line


def main() -> None:
    """Write all generated files below deploy/kubernetes."""
    for name, made in files().items():
        (HERE / name).write_text(made)


if __name__ == "__main__":
    main()
