"""Compressed lanes under the whole system: the same batches, whatever the worker can do."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cluster as clusters
import compressible
import pytest
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto import errors
from penstock.proto.lane import compression

BATCHES = 12


def digests(batches: Any) -> Iterator[str]:
    """Yield a digest of each batch, in order."""
    for batch in batches:
        digest = hashlib.sha256()
        for name, tensor in batch.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.numpy().tobytes())
        yield digest.hexdigest()


def stream(running: Appliance, **options: Any) -> list[str]:
    """Two epochs, the first left in the middle, over the TCP lane; then the same again, resumed after a few steps."""
    loader = DataLoader(compressible.various, BATCHES)
    with beside(running, num_workers_per_box=2, lane="tcp", **options) as appliance:
        found = []
        for number, digest in enumerate(digests(DataExecutor(loader, appliance=appliance))):
            found.append(digest)
            if number == 6:
                break
        found += digests(DataExecutor(loader, appliance=appliance))
        receiver = appliance._receiver.pid
        loaded = Path(f"/proc/{receiver}/maps").read_text()
    packages = {"lz4": "/lz4/", "zstd": "/zstandard/"}
    asked = options.get("compression")
    assert {name for name, package in packages.items() if package in loaded} == ({asked} if asked else set())
    return found


def test_the_batches_are_the_same_with_each_codec(appliance: Appliance) -> None:
    plain = stream(appliance)
    assert len(plain) == 7 + 2 * BATCHES
    assert stream(appliance, compression="lz4") == plain
    assert stream(appliance, compression="zstd") == plain


def test_worker_without_package_sends_it_plain(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The package is hidden from the worker's daemon, not from the training job."""
    hidden = tmp_path / "hidden"
    (hidden / "lz4").mkdir(parents=True)
    (hidden / "lz4" / "__init__.py").write_text("raise ImportError('not on this worker')")
    with clusters.running(tmp_path / "state") as cluster:
        path = cluster.environment["PYTHONPATH"]
        cluster.environment["PYTHONPATH"] = os.pathsep.join([str(hidden), path, os.environ.get("PYTHONPATH", "")])
        cluster.add_worker(2, allow="compressible")
        found = []
        for codec in (None, "lz4"):
            with cluster.box(f"job-{codec}", compression=codec, lane="tcp") as appliance:
                loader = DataLoader(compressible.various, BATCHES)
                found.append(list(digests(DataExecutor(loader, appliance=appliance))))
    assert found[0] == found[1]
    assert len(found[0]) == 2 * BATCHES
    assert capfd.readouterr().err.count("asks for batches compressed with lz4") == 1


def test_job_without_the_package_fails_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)  # what an import then meets is an ImportError
    compression.require.cache_clear()
    try:
        with pytest.raises(errors.InvalidArgumentError, match=r"pip install 'penstock\[compression\]'"):
            Appliance(compression="zstd")
    finally:
        compression.require.cache_clear()
