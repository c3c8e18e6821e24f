"""Metrics of the training job, for Prometheus.

A job that already exports metrics registers `collector()` in addition:

    REGISTRY.register(penstock.client.metrics.collector())

Any other job sets PENSTOCK_HTTP=127.0.0.1:9400: a small server for all appliances of the process. A scrape, on its own
thread, reads only figures that the training loop keeps anyway."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from penstock.client.stream import open_streams
from penstock.client.stream.streams import Reader
from penstock.proto.errors import InvalidArgumentError, PortTakenError, UnsafeBindError
from penstock.proto.rpc.addresses import check_address, is_local
from penstock.proto.rpc.tls import Tls
from penstock.proto.state.counts import SampleCounts, by_source, imbalance_of
from penstock.runtime.web.http_server import WebServer
from penstock.runtime.web.prometheus import Collector, MetricReadings, cpu_seconds, metrics_route, require_prometheus

__all__ = ["collector", "open_web"]

_log = logging.getLogger("penstock.client")


def collector() -> Collector:
    """Return a collector for a registry of prometheus-client. It reads all loaders and checkpointers of this process,
    so register only one. Raises InvalidArgumentError if prometheus-client is not installed."""
    require_prometheus()
    return Collector(_readings)


def _readings() -> MetricReadings:
    readings = MetricReadings("client")
    # If a run was opened again in this process, only its newest attempt is an open stream.
    newest = {
        (reader.run.name, reader.run.box): reader
        for reader in sorted(open_streams.readers.all(), key=lambda reader: reader.run.attempt)
        if not reader.run.closed
    }
    for reader in newest.values():
        _count_reader(readings, reader)
    pids = [receiver.pid for receiver in open_streams.receivers.all()]
    receivers = [pid for pid in pids if pid is not None]
    if receivers:
        readings.add("penstock_client_receiver_cpu_seconds_total", cpu_seconds(receivers))
        readings.add("penstock_client_receiver_memory_bytes", sum(map(_resident, receivers)))
    saves = open_streams.saves
    readings.add("penstock_checkpoint_saves_total", saves.ok, status="ok")
    readings.add("penstock_checkpoint_saves_total", saves.failed, status="error")
    readings.add("penstock_checkpoint_in_flight", saves.in_flight)
    readings.add("penstock_checkpoint_stall_seconds_total", saves.stalled_s)
    readings.add("penstock_checkpoint_last_stall_seconds", saves.last_stall_s)
    readings.add("penstock_checkpoint_last_write_seconds", saves.last_write_s)
    readings.add("penstock_checkpoint_written_bytes_total", saves.written_bytes)
    readings.add("penstock_checkpoint_last_step", saves.last_step)
    return readings


def _count_reader(readings: MetricReadings, reader: Reader) -> None:
    run, stats, step = reader.run, reader.stats, reader.position.step
    labels = {"run": run.name, "box": run.box}
    readings.add("penstock_client_step", step, **labels)
    readings.add("penstock_client_steps_total", step - reader.began_at, **labels)
    readings.add("penstock_client_wait_seconds_total", stats.waited_s, **labels)
    for slot, seconds in enumerate(list(run.progress.waited_by_slot)):
        if seconds:
            readings.add("penstock_client_slot_wait_seconds_total", seconds, slot=slot, **labels)
    # Copied in one step, because the loop may add another worker meanwhile.
    for worker, seconds in stats.waited_by_worker.copy().items():
        readings.add("penstock_client_worker_wait_seconds_total", seconds, worker=worker, **labels)
    readings.add("penstock_client_copied_batches_total", reader.copies, **labels)
    readings.add("penstock_client_staged_batches_total", stats.ahead, **labels)
    readings.add("penstock_client_recoveries_total", stats.recoveries, **labels)
    readings.add("penstock_client_skipped_batches_total", stats.skipped, **labels)
    readings.add("penstock_client_corrupt_total", stats.corrupt, **labels)
    _count_sources(readings, reader, labels)
    lanes = Counter(reader.open_lanes())
    for lane in ("local", "tcp"):
        readings.add("penstock_client_lanes", lanes[lane], lane=lane, **labels)
    readings.add("penstock_client_held_batches", reader.held, **labels)
    away = run.away_since
    readings.add("penstock_client_coordinator_away_seconds", 0 if away is None else time.monotonic() - away, **labels)


def _count_sources(readings: MetricReadings, reader: Reader, labels: dict[str, Any]) -> None:
    rows = reader.counts.rows()
    for (source, key), row in rows.items():
        counts, group = SampleCounts.of(row), {"source": source, "key": key, **labels}
        readings.add("penstock_client_source_samples", counts.samples, **group)
        readings.add("penstock_client_source_tokens", counts.tokens, **group)
        readings.add("penstock_client_source_truncated_samples", counts.truncated, **group)
        readings.add("penstock_client_source_skipped_samples", counts.skipped, **group)
    for source, counts in by_source(rows).items():
        if counts.wanted is not None:
            share, unit = counts.wanted
            readings.add("penstock_client_source_wanted_ratio", share, source=source, of=unit, **labels)
    imbalance = imbalance_of(rows)
    if imbalance is not None:
        readings.add("penstock_client_cost_imbalance_ratio", imbalance, **labels)


def _resident(pid: int) -> int:
    """Return the RSS of a process in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


# ---- the server


_lock = threading.Lock()
_servers: dict[str, WebServer] = {}
"""At most one, by its address."""


def open_web(listen: str, local_rank: int, tokens: str, tls: Tls | None) -> str:
    """Start this process's metrics server, unless it runs. Return the URL of its page.

    `listen`: "host:port", where ranks of one host take port + local rank; port 0: a free one. `tokens`: one of them
    readers on other machines must send.

    Raises InvalidArgumentError (no address, another one than the running server's, or no prometheus-client),
    PortTakenError, or UnsafeBindError: beyond loopback without a certificate."""
    check_address(listen)
    with _lock:
        if not _servers:
            _servers[listen] = _opened(listen, local_rank, tokens, tls)
            _log.info("this process serves its metrics at %s/metrics", _servers[listen].url)
        if listen not in _servers:
            raise InvalidArgumentError(
                f"http must be {min(_servers)!r}, where this process serves its metrics, got {listen!r}"
            )
        return f"{_servers[listen].url}/metrics"


def _opened(listen: str, local_rank: int, tokens: str, tls: Tls | None) -> WebServer:
    if not is_local(listen) and (tls is None or not tls.cert):
        raise UnsafeBindError(
            f"http={listen!r} can be reached from other machines, and without TLS the token would be in "
            "clear text: listen on 127.0.0.1, or set PENSTOCK_TLS_CERT and PENSTOCK_TLS_KEY, or PENSTOCK_CREDENTIALS"
        )
    routes = {"/metrics": metrics_route(collector())}
    host, _, first = listen.rpartition(":")
    port = int(first) + local_rank if int(first) else 0
    try:
        return WebServer(f"{host}:{port}", routes, tokens=tokens, tls=None if is_local(listen) else tls)
    except PortTakenError as error:
        raise PortTakenError(
            f"http={listen!r}: port {port} of {host} is in use: pass another one (under torchrun a process "
            "takes PORT + LOCAL_RANK), or port 0 for any"
        ) from error
