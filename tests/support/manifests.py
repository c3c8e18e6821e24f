"""Kubernetes manifests as tests want them: the chart rendered, taken apart, with the pods in them."""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["CHART", "JOBSET", "KUBERNETES", "VARIANTS", "Pod", "chart_files", "pods", "rendered", "settings_of"]

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
CHART = KUBERNETES / "helm"
JOBSET = "examples/jobset.yaml"
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "insecure": {"tls": False},
    "monitored": {"monitoring": {"enabled": True, "podMonitors": True}},
    "separated": {"worker": {"runnerUser": "10001"}},
    "autoscaled": {"monitoring": {"enabled": True}, "autoscaling": {"enabled": True}},
    JOBSET: {},
}
"""Values of the chart by name, and the example that is no chart."""


@functools.cache
def rendered(variant: str) -> tuple[dict[str, Any], ...]:
    """Documents of the chart with the values of a variant, or of the example of this name."""
    if variant == JOBSET:
        return tuple(yaml.safe_load_all((KUBERNETES / JOBSET).read_text()))
    files = chart_files(VARIANTS[variant])
    return tuple(document for text in files.values() for document in yaml.safe_load_all(text) if document)


def chart_files(values: Mapping[str, Any]) -> dict[str, str]:
    """Text of each template of the chart, of a release named penstock, with the few words of Helm's language that the
    templates use; test_helm.py compares it with what Helm itself makes of them."""
    merged = _merged(yaml.safe_load((CHART / "values.yaml").read_text()), values)
    return {path.name: _text(path.read_text(), merged) for path in sorted((CHART / "templates").iterdir())}


def _merged(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _merged(default, values.get(name, {})) if isinstance(default, dict) else values.get(name, default)
        for name, default in defaults.items()
    }


def _text(template: str, values: Mapping[str, Any]) -> str:
    lines, shown = [], [True]
    for line in template.splitlines():
        words = line.strip(" {}-").split()
        match words[0] if line.startswith("{{-") else "":
            case "if":
                holds = bool(_value_of(words[-1], values))
                shown.append(shown[-1] and holds is (words[1] != "not"))
            case "else":
                shown[-1] = shown[-2] and not shown[-1]
            case "end":
                shown.pop()
            case _:
                if shown[-1]:
                    lines.append(re.sub(r" ?\{\{-? (.*?) \}\}", lambda found: _filled(found, values), line))
    return "\n".join(lines) + "\n"


def _filled(found: re.Match[str], values: Mapping[str, Any]) -> str:
    space = " " if found[0].startswith(" ") else ""
    expression, *filters = found[1].split(" | ")
    if expression.startswith("include "):
        return f"{space}checksum"
    if expression.startswith("toYaml "):
        (indent,) = (int(one.removeprefix("nindent ")) for one in filters)
        text = yaml.safe_dump(_value_of(expression.removeprefix("toYaml "), values)).rstrip()
        return "\n" + textwrap.indent(text, " " * indent)
    value = _value_of(expression, values)
    return space + (json.dumps(value) if filters == ["quote"] else str(value))


def _value_of(path: str, values: Mapping[str, Any]) -> Any:
    if path == ".Release.Name":
        return "penstock"
    return functools.reduce(lambda found, name: found[name], path.removeprefix(".Values.").split("."), values)


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
