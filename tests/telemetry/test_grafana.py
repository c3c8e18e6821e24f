"""The dashboard and the alerts ask for metrics and labels that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.runtime.telemetry.metric_catalogue import BY_NAME, Metric

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""
_NAME = re.compile(r"\b(penstock_[a-z_]+)(\{[^}]*\})?")
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
_MATCHER = re.compile(r'([a-z_]+)\s*(?:=~|!~|!=|=)\s*"')


def metric_named(name: str) -> tuple[Metric, set[str]]:
    """The metric of a series, and the labels that the series has."""
    if name in BY_NAME:
        metric = BY_NAME[name]
        assert metric.kind != "histogram", f"{name} is a histogram: ask for its _bucket, _sum or _count"
        return metric, set(metric.labels)
    whole, _, part = name.rpartition("_")
    assert whole in BY_NAME, f"there is no metric {name}"
    assert BY_NAME[whole].kind == "histogram"
    assert part in ("bucket", "sum", "count")
    return BY_NAME[whole], {*BY_NAME[whole].labels, *(["le"] if part == "bucket" else [])}


def check(expression: str, legend: str = "") -> None:
    """Names and labels of an expression of PromQL, and of what is written of its result."""
    assert expression.count("(") == expression.count(")")
    found = _NAME.findall(expression)
    assert found, f"no metric of ours: {expression}"
    there = set(SCRAPED)
    for name, matchers in found:
        metric, labels = metric_named(name)
        there |= labels
        assert set(_MATCHER.findall(matchers)) <= labels | SCRAPED, f"{name} has no such label: {matchers}"
        if metric.kind == "counter":
            asked = re.search(rf"(rate|increase)\({name}(\{{[^}}]*\}})?\[", expression)
            plain = "skipped_batches" in name
            assert asked or plain, f"a counter is asked for by its rate: {expression}"
    for group in _GROUPING.findall(expression):
        assert {label.strip() for label in group.split(",")} <= there, f"no such labels: {group}"
    assert set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", legend)) <= there, legend


@pytest.mark.parametrize(
    "expression",
    [
        "penstock_box_step_total",
        'penstock_box_step{slot="0"}',
        "penstock_box_wait_seconds_total",
    ],
)
def test_the_check_sees_a_mistake(expression: str) -> None:
    with pytest.raises(AssertionError):
        check(expression)


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GRAFANA / "penstock.json").read_text())
    return found


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (panel for panel in dashboard["panels"] if panel["type"] != "row")


def test_panels_ask_for_what_there_is(dashboard: dict[str, Any]) -> None:
    for panel in panels(dashboard):
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            check(target["expr"], target["legendFormat"])


def test_alerts_ask_for_what_there_is() -> None:
    (group,) = yaml.safe_load((GRAFANA / "alerts.yml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(names) == len(set(names))
    for rule in group["rules"]:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        check(rule["expr"], rule["annotations"]["summary"])
