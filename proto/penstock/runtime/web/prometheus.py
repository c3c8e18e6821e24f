"""Metrics of a process for Prometheus, under the names in metric_catalogue. A scrape reads values that the process
keeps anyway; prometheus-client is imported only if metrics are requested."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.proto.errors import DeadlineError, InvalidArgumentError
from penstock.proto.rpc.version import VERSION
from penstock.runtime.process.watch import stat_of
from penstock.runtime.telemetry.counters import Histogram
from penstock.runtime.telemetry.metric_catalogue import BY_NAME, Process
from penstock.runtime.web.http_server import Page, Route

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client import Metric as Family

LOOP_DEADLINE_S = 8.0
"""Seconds within which the process's event loop must answer. Prometheus itself waits 10 s."""
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_TICKS = os.sysconf("SC_CLK_TCK")

_Result = TypeVar("_Result")


def require_prometheus() -> None:
    """Raises InvalidArgumentError, with the remedy, if prometheus-client is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise InvalidArgumentError("metrics need a package: pip install 'penstock[metrics]'") from error


class MetricReadings:
    def __init__(self, process: Process) -> None:
        self._process = process
        self._found: defaultdict[str, list[tuple[list[str], float | Histogram]]] = defaultdict(list)
        self.add("penstock_build_info", 1, process=process, version=VERSION)

    def add(self, name: str, value: float | Histogram, **labels: object) -> None:
        """Add the value of a metric of the catalogue, with exactly its labels."""
        metric = BY_NAME[name]
        assert self._process in metric.processes, f"{name} is of another process"
        assert set(labels) == set(metric.labels), f"{name} has other labels"
        self._found[name].append(([str(labels[label]) for label in metric.labels], value))

    def families(self) -> Iterator[Family]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for name, samples in self._found.items():
            metric = BY_NAME[name]
            if metric.kind == "histogram":
                histograms = HistogramMetricFamily(name, metric.help, labels=metric.labels)
                for labels, value in samples:
                    assert isinstance(value, Histogram)
                    bounds = [*(f"{bound:g}" for bound in value.bounds), "+Inf"]
                    histograms.add_metric(labels, list(zip(bounds, value.cumulative, strict=True)), value.sum)
                yield histograms
                continue
            make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = make(name, metric.help, labels=metric.labels)
            for labels, value in samples:
                assert not isinstance(value, Histogram)
                family.add_metric(labels, value)
            yield family


class Collector:
    """Collector for a registry of prometheus-client. It calls `read` at each scrape, on the scrape's thread."""

    def __init__(self, read: Callable[[], MetricReadings]) -> None:
        self._read = read

    def collect(self) -> Iterable[Family]:
        return self._read().families()

    def describe(self) -> Iterable[Family]:
        """Without this method a registry would make a scrape to learn the names of the metrics."""
        return ()


def metrics_route(collector: Collector) -> Route:
    """Return a function that makes the page of metrics. Raises InvalidArgumentError without prometheus-client."""
    require_prometheus()
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import generate_latest

    registry: CollectorRegistry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    return lambda: Page(_TEXT, generate_latest(registry))


def in_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine on a loop's thread, which alone may read its data. Raises DeadlineError after LOOP_DEADLINE_S, or
    if the loop has ended."""
    try:
        answer = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError as error:
        work.close()
        raise DeadlineError("this process is ending, and answers no requests for pages") from error
    try:
        return answer.result(LOOP_DEADLINE_S)
    except (TimeoutError, CancelledError) as error:
        answer.cancel()
        raise DeadlineError(f"this process did not answer a request for a page in {LOOP_DEADLINE_S:g} s") from error


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time of some processes, with that of the children that they have waited for, in seconds."""
    return sum(sum(map(int, stat_of(pid)[11:15])) for pid in pids) / _TICKS  # utime, stime, cutime, cstime
