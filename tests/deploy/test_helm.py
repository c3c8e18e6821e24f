"""deploy/kubernetes/helm, rendered and linted by Helm's own code: it makes what its source says with those settings.

`make helm` installs what is needed for that, and runs this: Helm as a library is large, and not for every environment.
"""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml
from manifests import KUBERNETES

from penstock.deploy.engines.kubernetes_manifests import FleetSettings, manifests

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make helm")
CHART = KUBERNETES / "helm"
ALLOW = {"allow": "ourpackage.data"}


def made(**values: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """The documents of a release named penstock, by kind and name."""
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema({**ALLOW, **values})
        files = chart.render({**ALLOW, **values}, name="penstock")
    return by_name([document for text in files.values() for document in yaml.safe_load_all(text) if document])


def by_name(documents: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """Replace the settings' checksum by a constant."""
    found = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    for document in found.values():
        template = document.get("spec", {}).get("template", {})
        if annotations := template.get("metadata", {}).get("annotations"):
            assert annotations["checksum/settings"]
            annotations["checksum/settings"] = "any"
    return found


def test_helm_finds_no_fault() -> None:
    report = helm.lint(str(CHART), ALLOW, strict=True, kube_version="v1.30.0")
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


SECRETS = {"coordinatorTls": "t", "workerTls": "u", "coordinatorTokens": "c", "workerTokens": "w"}
RESOURCES = {"requests": {"cpu": "3", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize(
    ("values", "settings"),
    [
        (
            {},
            {"coordinator_image": "penstock-coordinator:0.1.0", "worker_image": "penstock-worker:0.1.0"},
        ),
        (
            {
                "coordinator": {"storage": "5Gi", "storageClass": "local", "image": "a:1", "resources": RESOURCES},
                "worker": {"replicas": 9, "runnerMemory": "3GiB", "image": "b:1", "resources": RESOURCES},
                "secrets": SECRETS,
            },
            {
                "storage": "5Gi",
                "storage_class": "local",
                "coordinator_image": "a:1",
                "worker_image": "b:1",
                "workers": 9,
                "runner_memory": "3GiB",
                "coordinator_resources": RESOURCES,
                "worker_resources": RESOURCES,
                "token_secrets": {"coordinator": "c", "worker": "w"},
                "tls_secrets": {"coordinator": "t", "worker": "u"},
            },
        ),
    ],
)
def test_every_value_is_a_setting(tls: bool, values: dict[str, Any], settings: dict[str, Any]) -> None:
    documents = made(tls=tls, **values)
    for document in documents.values():
        kubernetes_validate.validate(document, "1.30", strict=True)
    fleet = FleetSettings(allow=ALLOW["allow"], checksum="any", tls=tls, **settings)
    assert documents == by_name(manifests(fleet))


@pytest.mark.parametrize("values", [{"allow": ""}, {"alow": "x"}, {"worker": {"replicas": "two"}}])
def test_values_that_cannot_be_meant_are_refused(values: dict[str, Any]) -> None:
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmValuesError):
        chart.validate_schema({**ALLOW, **values})
