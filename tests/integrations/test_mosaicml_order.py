"""What is imported from mosaicml-streaming goes on in its own order, over the shards that it wrote.

It is not among what development installs: without an interpreter that has it (tests/support/foreign_loaders.py) the
tests are skipped. That both read the same values of all encodings is in tests/datasets/test_live.py.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moved
import pytest
from foreign_loaders import deliver, importable_streaming, python_of
from moved_runs import import_state, rest_of

from penstock.client import Appliance
from penstock.data import StreamingDataset

pytestmark = pytest.mark.timeout(300)

ROWS, BATCH, BATCHES = 203, 4, 13
WRITE = """
import sys, streaming
with streaming.MDSWriter(out=sys.argv[1], columns={"number": "int", "text": "str"}, size_limit=600) as writer:
    for number in range(int(sys.argv[2])):
        writer.write({"number": number, "text": f"text {number}"})
"""


@pytest.fixture(scope="module", autouse=True)
def torchvision() -> Iterator[None]:
    with importable_streaming():
        yield


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, torchvision: None) -> Path:
    folder = tmp_path_factory.mktemp("written") / "shards"
    subprocess.run([python_of("streaming"), "-c", WRITE, str(folder), str(ROWS)], check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def appliance() -> Iterator[Appliance]:
    with Appliance(num_workers_per_box=2, seed=7, timeout_s=60) as opened:
        yield opened


def test_shards_it_writes_are_read(shards: Path) -> None:
    dataset = StreamingDataset(local=shards)
    assert dataset[:] == [{"number": number, "text": f"text {number}"} for number in range(ROWS)]


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("algorithm", [None, "naive", "py1s", "py2s", "py1br", "py1e"])
def test_its_order_goes_on(
    appliance: Appliance, shards: Path, tmp_path: Path, algorithm: str | None, nodes: int
) -> None:
    """The rows that are left come in the order in which it would have delivered them, in its batches."""
    (tmp_path / "whole").mkdir()
    options: dict[str, Any] = {"shards": str(shards), "batch": BATCH, "loader": {"num_workers": 0}}
    options["num_canonical_nodes"] = nodes
    flags: list[Any] = []
    if algorithm is not None:
        options |= {"shuffle": True, "shuffle_algo": algorithm, "shuffle_block_size": 40}
        flags = ["--shuffle", "--shuffle-algo", algorithm, "--shuffle-block-size", 40]
    whole = deliver("streaming", tmp_path / "whole", epochs=[0], **options)
    begun = deliver("streaming", tmp_path, epochs=[BATCHES], **options)
    assert begun == whole[: BATCHES * BATCH]
    given = ["--from", "streaming", "--index", shards, "--batch-size", BATCH, "--python", python_of("streaming")]
    report = import_state(tmp_path / "new", tmp_path / "state-0", *given, *flags, input_fn="moved:shards")
    rest, _ = rest_of(appliance, report, (1, 2), moved.shards, str(shards), BATCH, report["order_file"])
    # its last batch is filled up with rows that came before
    assert rest == [row for row in dict.fromkeys(whole) if row not in begun]
