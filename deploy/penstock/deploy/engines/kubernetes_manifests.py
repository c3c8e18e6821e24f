"""Kubernetes manifests as plain dicts, made by pure functions from `FleetSettings`.

They are the only source of three things: the objects that `penstock up` applies, the kustomizations below
deploy/kubernetes, and the templates of the Helm chart. `make manifests` writes the last two
(deploy/kubernetes/write_manifests.py), and a test compares them with this module. `REASONS` explains fields of the
manifests; the explanations become comments in the written files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "CLIENT_LABEL",
    "GRPC_PORT",
    "LANES_PORT",
    "REASONS",
    "FleetSettings",
    "Manifest",
    "budget",
    "config_maps",
    "confined",
    "daemon_pod",
    "deployment",
    "labels",
    "manifests",
    "pod",
    "policies",
    "service",
    "stateful_set",
]

Manifest = dict[str, Any]
"""Manifest of one Kubernetes object, or a part of it."""

GRPC_PORT, LANES_PORT = 7070, 7071
TOKENS, TLS, STATE = "/etc/penstock/tokens", "/etc/penstock/tls", "/var/lib/penstock"
USER = 10001
CLIENT_LABEL = {"penstock-client": "true"}
"""Label of the pods of training jobs, which may connect to the daemons."""
GRACE_S = {"coordinator": 30, "worker": 60}
"""Seconds that Kubernetes waits after SIGTERM before it kills a pod, for each daemon. REASONS explains the values."""
PROCESSES = ("coordinator", "worker", "client")


@dataclass(frozen=True)
class FleetSettings:
    """Settings of a fleet of one coordinator and some workers. The defaults are the same as in deploy/kubernetes/base
    and in the chart's values."""

    name: str = "penstock"
    """Prefix of the names of all objects, and value of a label in all selectors. It separates the fleets in one
    namespace."""
    coordinator_image: str = "penstock-coordinator"
    worker_image: str = "penstock-worker"
    entry_point: bool = True
    """True if the images' entry point is `penstock`. If False, the manifests name the command."""
    coordinator: str = ""
    """Address of the coordinator, HOST:PORT; "": the address of its Service."""
    workers: int = 2
    coordinator_resources: Mapping[str, Any] = field(
        default_factory=lambda: {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}
    )
    worker_resources: Mapping[str, Any] = field(
        default_factory=lambda: {"requests": {"cpu": "4", "memory": "8Gi"}, "limits": {"memory": "8Gi"}}
    )
    """Resources of a worker's container, as in a manifest. The worker has one slot for each CPU that it requests."""
    storage: str = "20Gi"
    """Size of the coordinator's volume, as in a manifest ("1Gi")."""
    storage_class: str = ""
    """Storage class of the coordinator's volume; "": the cluster's default."""
    allow: str = ""
    """Module prefixes whose input_fn may run, separated by commas."""
    runner_memory: str = ""
    tls: bool = True
    token_secrets: Mapping[str, str] = field(
        default_factory=lambda: {process: f"penstock-tokens-{process}" for process in PROCESSES}
    )
    """Name of the Secret with the tokens of each role, by role. The tokens are under the Secret's key `tokens`."""
    tls_secrets: Mapping[str, str] = field(
        default_factory=lambda: {process: f"penstock-tls-{process}" for process in PROCESSES}
    )
    """Name of the Secret with ca.crt, tls.crt and tls.key of each role, by role. The certificate must be for the name
    ROLE.penstock."""
    checksum: str = ""
    """Checksum of the ConfigMaps, written as an annotation of the pods, so that changed settings replace the pods; "":
    no annotation."""
    limit_egress: bool = True
    """True if the network policies limit outgoing connections. Workers may then connect only to the coordinator, to any
    DNS server (port 53) and to any HTTPS server (port 443). Coordinators may open no connections."""


def manifests(fleet: FleetSettings) -> list[Manifest]:
    """Return all objects of a fleet. The cluster must provide the Secrets and the coordinator's persistent volume."""
    return [
        *config_maps(fleet),
        service(fleet),
        stateful_set(fleet),
        deployment(fleet),
        budget(fleet),
        *policies(fleet),
    ]


def labels(fleet: FleetSettings, component: str = "") -> dict[str, str]:
    """Return the labels by which all objects of a fleet are selected; with `component`, the pods of one component."""
    names = {"name": "penstock", "instance": fleet.name, "component": component}
    return {f"app.kubernetes.io/{name}": value for name, value in names.items() if value}


def _metadata(fleet: FleetSettings, component: str) -> Manifest:
    return {"name": f"{fleet.name}-{component}", "labels": labels(fleet, component)}


def config_maps(fleet: FleetSettings) -> list[Manifest]:
    """Return the ConfigMaps with the settings as variables: one for both daemons, and one for workers only."""
    shared: dict[str, str] = {}
    if fleet.tls:
        files = {"CA": "ca.crt", "CERT": "tls.crt", "KEY": "tls.key"}
        shared |= {f"PENSTOCK_TLS_{name}": f"{TLS}/{file}" for name, file in files.items()}
        shared["PENSTOCK_TLS_NAME"] = "*.penstock"
    else:
        shared |= {"PENSTOCK_COORDINATOR_INSECURE": "true", "PENSTOCK_WORKER_INSECURE": "true"}
    shared["PENSTOCK_TOKEN_FILE"] = f"{TOKENS}/tokens"
    workers = {"PENSTOCK_WORKER_ALLOW": fleet.allow, "PENSTOCK_WORKER_RUNNER_MEMORY": fleet.runner_memory}
    both = {"name": fleet.name, "labels": labels(fleet)}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
        for metadata, data in ((both, shared), (_metadata(fleet, "worker"), workers))
    ]


def service(fleet: FleetSettings) -> Manifest:
    """Return the Service that gives the coordinator its name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(fleet, "coordinator"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels(fleet, "coordinator"),
            "ports": [{"name": "grpc", "port": GRPC_PORT, "targetPort": "grpc"}],
        },
    }


def stateful_set(fleet: FleetSettings) -> Manifest:
    """Return the StatefulSet that runs the coordinator, with its volume."""
    claim: Manifest = {
        "accessModes": ["ReadWriteOncePod"],
        "resources": {"requests": {"storage": fleet.storage}},
    }
    if fleet.storage_class:
        claim["storageClassName"] = fleet.storage_class
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(fleet, "coordinator"),
        "spec": {
            "replicas": 1,
            "serviceName": f"{fleet.name}-coordinator",
            "selector": {"matchLabels": labels(fleet, "coordinator")},
            "template": _template(fleet, "coordinator", daemon_pod(fleet, "coordinator")),
            "volumeClaimTemplates": [{"metadata": {"name": "state"}, "spec": claim}],
            "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"},
        },
    }


def deployment(fleet: FleetSettings) -> Manifest:
    """Return the Deployment that runs the workers."""
    selector = {"matchLabels": labels(fleet, "worker")}
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": selector,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(fleet, "worker"),
        "spec": {
            "replicas": fleet.workers,
            "selector": selector,
            "strategy": {"rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 0}},
            "template": _template(
                fleet, "worker", {"topologySpreadConstraints": [spread], **daemon_pod(fleet, "worker")}
            ),
        },
    }


def budget(fleet: FleetSettings) -> Manifest:
    """Return the disruption budget, which limits how many workers a node's drain may evict at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(fleet, "worker"),
        "spec": {
            "maxUnavailable": "25%",
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": labels(fleet, "worker")},
        },
    }


def policies(fleet: FleetSettings) -> list[Manifest]:
    """Return the network policies of both daemons."""
    worker = labels(fleet, "worker")
    names = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    calls = [
        {"to": [_pods(labels(fleet, "coordinator"))], "ports": [{"port": GRPC_PORT}]},
        {"ports": names},
        {"ports": [{"port": 443}]},
    ]
    return [
        _policy(fleet, "coordinator", GRPC_PORT, [worker, CLIENT_LABEL], []),
        _policy(fleet, "worker", LANES_PORT, [CLIENT_LABEL], calls),
    ]


def _policy(
    fleet: FleetSettings, component: str, port: int, callers: list[dict[str, str]], calls: list[Manifest]
) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(fleet, component),
        "spec": {
            **_pods(labels(fleet, component)),
            "policyTypes": ["Ingress", *(["Egress"] if fleet.limit_egress else [])],
            "ingress": [{"from": [_pods(caller) for caller in callers], "ports": [{"port": port}]}],
            **({"egress": calls} if fleet.limit_egress else {}),
        },
    }


def _pods(selected: dict[str, str]) -> Manifest:
    return {"podSelector": {"matchLabels": selected}}


def _template(fleet: FleetSettings, component: str, spec: Manifest) -> Manifest:
    annotations = {"annotations": {"checksum/settings": fleet.checksum}} if fleet.checksum else {}
    return {"metadata": {"labels": labels(fleet, component), **annotations}, "spec": spec}


def daemon_pod(fleet: FleetSettings, role: str) -> Manifest:
    """Return the spec of a daemon's pods, without the coordinator's volume `state`. `role`: "coordinator" or
    "worker"."""
    maps = [fleet.name] if role == "coordinator" else [fleet.name, f"{fleet.name}-worker"]
    container = {
        "name": role,
        "image": fleet.coordinator_image if role == "coordinator" else fleet.worker_image,
        **({} if fleet.entry_point else {"command": ["penstock"]}),
        "args": [role],
        "envFrom": [{"configMapRef": {"name": name}} for name in maps],
        "env": _coordinator_variables() if role == "coordinator" else _worker_variables(fleet),
        "ports": [
            {"name": "grpc", "containerPort": GRPC_PORT}
            if role == "coordinator"
            else {"name": "lanes", "containerPort": LANES_PORT}
        ],
        **_probes(role),
        "resources": fleet.coordinator_resources if role == "coordinator" else fleet.worker_resources,
    }
    state = [{"name": "state", "mountPath": STATE}] if role == "coordinator" else []
    return pod(fleet, role, confined(fleet, container, state), GRACE_S[role])


def _coordinator_variables() -> list[Manifest]:
    return [
        {"name": "PENSTOCK_COORDINATOR_LISTEN", "value": f"0.0.0.0:{GRPC_PORT}"},
        {"name": "PENSTOCK_COORDINATOR_STATE_DIR", "value": f"{STATE}/state"},
    ]


def _worker_variables(fleet: FleetSettings) -> list[Manifest]:
    cpus = {"containerName": "worker", "resource": "requests.cpu", "divisor": "1"}
    return [
        {
            "name": "POD_IP",
            "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
        },  # must come before the variables that refer to it
        {"name": "PENSTOCK_COORDINATOR", "value": fleet.coordinator or f"{fleet.name}-coordinator:{GRPC_PORT}"},
        {"name": "PENSTOCK_WORKER_LISTEN", "value": f"$(POD_IP):{LANES_PORT}"},
        {"name": "PENSTOCK_WORKER_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "PENSTOCK_WORKER_SLOTS", "valueFrom": {"resourceFieldRef": cpus}},
        {"name": "PENSTOCK_WORKER_LIVENESS_FILE", "value": "/tmp/liveness"},
        {"name": "HOME", "value": "/tmp"},
    ]


def _probes(role: str) -> Manifest:
    """Return a daemon's three probes (startup, live, ready). They run a command, because Kubernetes' own gRPC probes do
    not support TLS."""

    def probe(what: str, period_s: int, timeout_s: int, failures: int) -> Manifest:
        command = ["python", "-m", "penstock.deploy.probe", role, what]
        times = {"periodSeconds": period_s, "timeoutSeconds": timeout_s, "failureThreshold": failures}
        return {"exec": {"command": command}, **times}

    return {
        "startupProbe": probe("live", 2, 20, 150),
        "livenessProbe": probe("live", 30, 20, 10),
        "readinessProbe": probe("ready", 10, 5, 3),
    }


def confined(fleet: FleetSettings, container: Manifest, mounts: list[Manifest]) -> Manifest:
    """Return the container with all privileges removed, and with its mounts: `mounts`, and the volumes that every pod
    of this module has (tokens, certificates, /tmp; see the function `pod`)."""
    read_only = {"tokens": TOKENS, **({"tls": TLS} if fleet.tls else {})}
    return {
        **container,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            *mounts,
            *({"name": name, "mountPath": path, "readOnly": True} for name, path in read_only.items()),
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def pod(fleet: FleetSettings, role: str, container: Manifest, grace_s: int) -> Manifest:
    """Return the spec of a pod without privileges, with the certificate and the tokens of one role.

    Args:
        fleet: settings of the fleet.
        role: "coordinator", "worker" or "client".
        container: the pod's container.
        grace_s: seconds from SIGTERM to SIGKILL.
    """
    secrets = {"tokens": fleet.token_secrets[role], **({"tls": fleet.tls_secrets[role]} if fleet.tls else {})}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # variables for Services would look like settings
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
        "volumes": [
            *(
                {"name": name, "secret": {"defaultMode": 0o400, "secretName": secret}}
                for name, secret in secrets.items()
            ),
            {"name": "tmp", "emptyDir": {}},
        ],
    }


REASONS: Mapping[str, Mapping[str, str]] = {
    "Service": {
        "clusterIP:": "Headless: callers reach the pod itself, and a connection to a pod that is gone fails quickly.",
        "publishNotReadyAddresses:": "The name resolves before the pod is ready: a worker that starts first waits.",
    },
    "StatefulSet": {
        "replicas:": "Always one: the journal has one writer. A StatefulSet never starts a second pod before the first "
        "is known to be gone.",
        "fsGroupChangePolicy:": "Only an empty volume gets the group: later starts leave the modes of the state "
        "directory unchanged.",
        "terminationGracePeriodSeconds:": "The coordinator needs 2 s.",
        "startupProbe:": "Reading a long journal takes a while.",
        "livenessProbe:": "A daemon that hangs is restarted within five minutes; one on a busy machine is not.",
        "defaultMode:": "0400; with fsGroup 0440, owned by root, readable by the group.",
        "volumeClaimTemplates:": "A block device or a local disk. SQLite's write-ahead log is not safe on network file "
        "systems such as NFS, which the coordinator refuses.",
        "checksum/settings:": "A changed setting replaces the pods.",
    },
    "Deployment": {
        "maxUnavailable:": "Slots migrate to new workers before the old ones end.",
        "terminationGracePeriodSeconds:": "On SIGTERM a worker migrates its slots for at most 10 s "
        "(PENSTOCK_WORKER_DRAIN), and then ends user code, which takes at most 10 s a runner.",
        "name: PENSTOCK_WORKER_LISTEN": "Address at which training jobs connect to the worker's lanes.",
        "name: PENSTOCK_WORKER_SLOTS": "One runner for each CPU that is requested below.",
        "startupProbe:": "A worker waits for the coordinator without limit, and is live meanwhile.",
        "livenessProbe:": "A daemon that hangs is restarted within five minutes; one on a busy machine is not.",
        "resources:": "Rings count as memory too: they are memfds, not files below /dev/shm.",
        "emptyDir:": "Include the temporary files of your loader.",
        "checksum/settings:": "A changed setting replaces the pods.",
    },
    "PodDisruptionBudget": {
        "maxUnavailable:": "Draining nodes evicts at most a quarter of the workers at a time. The coordinator has no "
        "budget, because with one replica a budget could only forbid to drain its node.",
        "unhealthyPodEvictionPolicy:": "Without the coordinator no worker is ready, but nodes must still be drainable.",
    },
    "NetworkPolicy": {
        "policyTypes:": 'Training pods have the label `penstock-client: "true"`. All others are refused by both '
        "daemons, if the cluster's network enforces policies.",
        "egress: []": "The coordinator makes no calls.",
        "port: 53": "DNS.",
        "port: 443": "Data over HTTPS; add the ports of your storage.",
    },
}
"""Reason for the value of a field, by the kind of object, and by the beginning of the field's line in YAML."""
