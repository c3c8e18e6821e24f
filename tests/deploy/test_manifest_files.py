"""Generated files of deploy/kubernetes: they are what `make manifests` writes, and kustomize makes of them what
penstock.deploy.engines.kubernetes_manifests says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import KUBERNETES, rendered

from penstock.deploy.engines.kubernetes_manifests import FleetSettings, Manifest, config_maps, manifests

WRITER = runpy.run_path(str(KUBERNETES / "write_manifests.py"))
FILES: dict[str, str] = WRITER["files"]()
BY_HAND = {"helm/Chart.yaml", "helm/values.yaml", "overlays/autoscaled-by-demand/autoscaler.yaml"}


@pytest.mark.parametrize("name", FILES)
def test_the_committed_file_is_current(name: str) -> None:
    assert (KUBERNETES / name).read_text() == FILES[name], 'run "make manifests" and commit the result'


def test_no_other_manifest_is_written_by_hand() -> None:
    """Patches are, and what kustomize itself reads."""
    found = {path.relative_to(KUBERNETES).as_posix() for path in KUBERNETES.rglob("*.yaml")}
    assert {name for name in found if Path(name).name not in ("kustomization.yaml", "names.yaml")} <= BY_HAND | set(
        FILES
    )


def by_name(documents: Any) -> dict[tuple[str, str], Manifest]:
    """Documents by kind and name. Without hashes and labels of ConfigMaps, tags of images, and empty variables."""
    text = re.sub(r"\b(penstock(?:-worker)?)-[a-z0-9]{10}\b", r"\1", yaml.safe_dump(list(documents)))
    text = re.sub(r"(image: penstock-\w+):0\.1\.0\b", r"\1", text)
    found = {(document["kind"], document["metadata"]["name"]): document for document in yaml.safe_load(text)}
    for document in found.values():
        if document["kind"] == "ConfigMap":
            document["metadata"].pop("labels", None)
        if "data" in document:
            document["data"] = {name: value for name, value in document["data"].items() if value}
    return found


@pytest.mark.parametrize(("folder", "tls"), [("base", True), ("overlays/insecure", False)])
def test_kustomize_makes_what_the_source_says(folder: str, tls: bool) -> None:
    assert by_name(rendered(folder)) == by_name(manifests(FleetSettings(tls=tls)))


def test_chart_values_default_to_the_base() -> None:
    values = yaml.safe_load((KUBERNETES / "helm" / "values.yaml").read_text())
    base = FleetSettings()
    assert values["coordinator"] == {
        "image": f"{base.coordinator_image}:0.1.0",
        "storage": base.storage,
        "storageClass": base.storage_class,
        "resources": base.coordinator_resources,
    }
    assert values["worker"] == {
        "image": f"{base.worker_image}:0.1.0",
        "replicas": base.workers,
        "runnerMemory": base.runner_memory,
        "resources": base.worker_resources,
    }
    assert (values["allow"], values["tls"]) == (base.allow, base.tls)
    roles = ("coordinator", "worker")
    assert values["secrets"] == {
        **{f"{role}Tokens": base.token_secrets[role] for role in roles},
        **{f"{role}Tls": base.tls_secrets[role] for role in roles},
    }


def test_a_comment_without_its_field_is_refused() -> None:
    (document, _) = config_maps(FleetSettings())
    with pytest.raises(ValueError, match="nowhere:"):
        WRITER["text"]([document], {"ConfigMap": {"nowhere:": "Why."}})
