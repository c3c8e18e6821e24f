"""Compressed lanes under the whole system: the same batches, whatever the worker can do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compressible
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader

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


def test_the_batches_are_the_same_compressed(appliance: Appliance) -> None:
    plain = stream(appliance)
    assert len(plain) == 7 + 2 * BATCHES
    assert stream(appliance, compression="zstd") == plain
