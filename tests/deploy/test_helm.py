"""deploy/kubernetes/helm, rendered and linted by Helm's own code: it makes what the kustomizations make.

`make helm` installs what is needed for that, and runs this: Helm as a library is large, and not for every environment.
"""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml
from manifests import KUBERNETES, rendered

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make helm")
CHART = KUBERNETES / "helm"
ALLOW = {"allow": "ourpackage.data"}


def made(**values: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """The documents of a release named penstock, by kind and name."""
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema({**ALLOW, **values})
        files = chart.render({**ALLOW, **values}, name="penstock")
    documents = [document for text in files.values() for document in yaml.safe_load_all(text) if document]
    return by_name(documents)


def by_name(documents: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """Without what differs on purpose: kustomize hashes ConfigMaps into their names, Helm into an annotation."""
    hashed = {doc["metadata"]["name"]: doc["metadata"]["name"].rpartition("-")[0] for doc in documents if "data" in doc}
    text = yaml.safe_dump(list(documents))
    for name, plain in hashed.items():
        if len(name.rpartition("-")[2]) == 10:
            text = text.replace(name, plain)
    found = {(doc["kind"], doc["metadata"]["name"]): doc for doc in yaml.safe_load(text)}
    for document in found.values():
        template = document.get("spec", {}).get("template", {})
        template.get("metadata", {}).pop("annotations", None)
        for name in [name for name, value in document.get("data", {}).items() if not value]:
            del document["data"][name]  # an empty variable counts as none
    return found


def test_helm_finds_no_fault() -> None:
    report = helm.lint(str(CHART), ALLOW, strict=True, kube_version="v1.30.0")
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize(
    ("overlay", "values"),
    [("base", {}), ("overlays/insecure", {"tls": False})],
)
def test_the_chart_makes_what_the_kustomization_makes(overlay: str, values: dict[str, Any]) -> None:
    chart, kustomized = made(**values), by_name(rendered(overlay))
    assert chart["ConfigMap", "penstock-worker"]["data"].pop("PENSTOCK_WORKER_ALLOW") == ALLOW["allow"]
    assert chart == kustomized


def test_every_value_has_an_effect_and_the_outcome_is_valid() -> None:
    documents = made(
        coordinator={"storage": "5Gi", "storageClass": "local", "image": "a:1"},
        worker={"replicas": 9, "runnerMemory": "3GiB", "image": "b:1"},
        secrets={"coordinatorTls": "t", "workerTls": "u", "coordinatorTokens": "c", "workerTokens": "w"},
    )
    for document in documents.values():
        kubernetes_validate.validate(document, "1.30", strict=True)
    coordinator = documents["StatefulSet", "penstock-coordinator"]["spec"]
    worker = documents["Deployment", "penstock-worker"]["spec"]
    claim = coordinator["volumeClaimTemplates"][0]["spec"]
    assert (claim["storageClassName"], claim["resources"]["requests"]["storage"]) == ("local", "5Gi")
    pods = (coordinator["template"]["spec"], worker["template"]["spec"])
    assert [pod["containers"][0]["image"] for pod in pods] == ["a:1", "b:1"]
    secrets = [volume["secret"]["secretName"] for pod in pods for volume in pod["volumes"] if "secret" in volume]
    assert secrets == ["c", "t", "w", "u"]
    assert worker["replicas"] == 9
    assert documents["ConfigMap", "penstock-worker"]["data"]["PENSTOCK_WORKER_RUNNER_MEMORY"] == "3GiB"


@pytest.mark.parametrize("values", [{"allow": ""}, {"alow": "x"}, {"worker": {"replicas": "two"}}])
def test_values_that_cannot_be_meant_are_refused(values: dict[str, Any]) -> None:
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmValuesError):
        chart.validate_schema({**ALLOW, **values})
