"""deploy/kubernetes/helm, linted by Helm's own code, which makes of it what the tests of the chart take it for.

`make helm` installs what is needed for that, and runs this: Helm as a library is large, and not for every environment.
"""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml
from manifests import CHART, JOBSET, VARIANTS, chart_files

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make helm")
ALLOW = {"allow": "ourpackage.data"}
SECRETS = {"coordinatorTls": "t", "workerTls": "u", "coordinatorTokens": "c", "workerTokens": "w"}
RESOURCES = {"requests": {"cpu": "3", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
OTHERS = {
    "coordinator": {"storage": "5Gi", "storageClass": "local", "image": "a:1", "resources": RESOURCES},
    "worker": {
        "replicas": 9,
        "runnerMemory": "3GiB",
        "runnerUser": "",
        "temporary": "1Gi",
        "image": "b:1",
        "resources": RESOURCES,
    },
    "secrets": SECRETS,
}


def by_name(documents: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """Documents by kind and name, with a constant for the settings' checksum."""
    found = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    for document in found.values():
        template = document.get("spec", {}).get("template", {})
        if annotations := template.get("metadata", {}).get("annotations"):
            assert annotations["checksum/settings"]
            annotations["checksum/settings"] = "any"
    return found


def documents_of(files: dict[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
    return by_name([document for text in files.values() for document in yaml.safe_load_all(text) if document])


def test_helm_finds_no_fault() -> None:
    report = helm.lint(str(CHART), ALLOW, strict=True, kube_version="v1.30.0")
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("values", [*(values for name, values in VARIANTS.items() if name != JOBSET), OTHERS])
def test_helm_renders_what_the_other_tests_check(values: dict[str, Any]) -> None:
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema({**ALLOW, **values})
        made = documents_of(chart.render({**ALLOW, **values}, name="penstock"))
    assert made == documents_of(chart_files({**ALLOW, **values}))
    for document in made.values():
        if document["kind"] != "PodMonitor":
            kubernetes_validate.validate(document, "1.30", strict=True)


@pytest.mark.parametrize(
    "values", [{"allow": ""}, {"alow": "x"}, {"worker": {"replicas": "two"}}, {"worker": {"runnerUser": "0"}}]
)
def test_values_that_cannot_be_meant_are_refused(values: dict[str, Any]) -> None:
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmValuesError):
        chart.validate_schema({**ALLOW, **values})
