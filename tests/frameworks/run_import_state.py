"""Positions of libraries that development does not install, imported: `make frameworks` runs this.

Each library runs in an interpreter of its own, see tests/support/foreign_loaders.py. It delivers rows and saves its
state there; `penstock import-state` and the job that goes on run here.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moved
import pytest
from documented import REPO, blocks
from foreign_loaders import deliver, importable_streaming, python_of
from moved_runs import TOPOLOGIES, each_row_once, import_state, refused, rest_of

from penstock.client import Appliance
from penstock.data import MDSWriter

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:.*was recovered")]

ROWS = 203


@pytest.fixture(scope="module", autouse=True)
def torchvision() -> Iterator[None]:
    with importable_streaming():
        yield


@pytest.fixture(scope="module")
def appliance() -> Iterator[Appliance]:
    with Appliance(num_workers_per_box=4, seed=7, timeout_s=60) as opened:
        yield opened


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for name, first, end in (("all", 0, ROWS), ("one", 0, 120), ("two", 120, ROWS)):
        with MDSWriter(folder / name, {"number": "int"}, size_limit=400) as writer:
            for number in range(first, end):
                writer.write({"number": number})
    return folder


# ---- mosaicml-streaming


def streaming_options(shards: Path, batch: int, **changed: Any) -> list[Any]:
    options: list[Any] = ["--from", "streaming", "--index", shards / "all", "--batch-size", batch]
    options += ["--python", python_of("streaming")]
    for name, value in changed.items():
        options += [f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", value]
    return options


@pytest.mark.parametrize(
    ("ranks", "workers", "epochs", "options", "flags"),
    [
        (1, 0, [5], {}, {}),
        (1, 2, [7], {"shuffle": True}, {"shuffle": True}),
        (1, 0, [0, 0, 11], {"shuffle": True, "shuffle_algo": "py1s"}, {"shuffle": True, "shuffle_algo": "py1s"}),
        (2, 1, [9], {"shuffle": True, "num_canonical_nodes": 4}, {"shuffle": True}),
        (
            2,
            0,
            [0, 12],
            {"shuffle": True, "shuffle_algo": "py1br", "shuffle_block_size": 40, "num_canonical_nodes": 2},
            {"shuffle": True, "shuffle_algo": "py1br", "shuffle_block_size": 40},
        ),
    ],
    ids=["plain", "workers", "later epoch", "ranks", "blocks"],
)
def test_streaming_goes_on(
    appliance: Appliance,
    tmp_path: Path,
    shards: Path,
    ranks: int,
    workers: int,
    epochs: list[int],
    options: dict[str, Any],
    flags: dict[str, Any],
) -> None:
    loader = {"num_workers": workers}
    rows = deliver(
        "streaming", tmp_path, ranks, shards=str(shards / "all"), batch=4, epochs=epochs, loader=loader, **options
    )
    given = streaming_options(shards, 4 * ranks, **flags)
    report = import_state(tmp_path / "new", tmp_path / "state-0", *given, input_fn="moved:shards")
    assert (report["epoch"], report["rows_seen"]) == (len(epochs) - 1, len(set(rows))), report
    order = report["order_file"]
    rest = rest_of(appliance, report, (2, 2), moved.shards, str(shards / "all"), 8, order)
    each_row_once(rows, rest, ROWS)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_streaming_on_any_topology(
    appliance: Appliance,
    tmp_path: Path,
    shards: Path,
    topology: tuple[int, int],
    streaming_state: tuple[Path, list[int]],
) -> None:
    """A runner is killed on the way."""
    state, rows = streaming_state
    report = import_state(tmp_path / "new", state, *streaming_options(shards, 4, shuffle=True))
    killing = tmp_path / "killing"
    killing.write_text(str(next(row for row in range(50, ROWS) if row not in rows)))
    rest = rest_of(appliance, report, topology, moved.rows, ROWS, 10, report["order_file"], str(killing))
    assert not killing.exists(), "a runner was killed"
    each_row_once(rows, rest, ROWS)


@pytest.fixture(scope="module")
def streaming_state(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> tuple[Path, list[int]]:
    folder = tmp_path_factory.mktemp("state")
    given: dict[str, Any] = {
        "shards": str(shards / "all"),
        "batch": 4,
        "epochs": [13],
        "loader": {"num_workers": 2},
        "shuffle": True,
    }
    rows = deliver("streaming", folder, **given)
    return folder / "state-0", rows


def test_streaming_errors(tmp_path: Path, shards: Path, streaming_state: tuple[Path, list[int]]) -> None:
    state, _ = streaming_state
    within = refused(tmp_path / "new", state, *streaming_options(shards, 5))
    assert "must be a multiple of 5, the rows of a step, got 52" in within
    other = refused(tmp_path / "new", state, *streaming_options(shards, 4), "--rows", 999)
    assert f"--rows must be {ROWS}, the rows of the dataset that the state is of, got 999" in other
    newer = tmp_path / "newer"
    newer.write_text(json.dumps({**json.loads(state.read_text()), "more": 1}))
    assert "unknown keys more" in refused(tmp_path / "new", newer, *streaming_options(shards, 4))
    nowhere = [*streaming_options(shards, 4)[:-1], sys.executable]
    if python_of("streaming") != sys.executable:
        assert "Pass --python, the interpreter" in refused(tmp_path / "new", state, *nowhere)


# ---- Grain


@pytest.mark.parametrize(
    ("ranks", "workers", "steps", "kind", "sharded", "drop"),
    [
        (1, 0, 6, "IndexSampler", False, False),
        (1, 2, 7, "IndexSampler", False, False),
        (1, 0, 60, "IndexSampler", False, False),
        (3, 0, 5, "IndexSampler", True, False),
        (2, 2, 9, "IndexSampler", True, True),
        (2, 0, 30, "IndexSampler", True, True),
        (2, 0, 5, "SequentialSampler", True, False),
        (1, 3, 8, "SequentialSampler", False, False),
    ],
)
def test_grain_goes_on(
    appliance: Appliance,
    tmp_path: Path,
    ranks: int,
    workers: int,
    steps: int,
    kind: str,
    sharded: bool,
    drop: bool,
) -> None:
    rows = deliver(
        "grain",
        tmp_path,
        ranks,
        rows=ROWS,
        batch=4,
        steps=steps,
        workers=workers,
        kind=kind,
        sharded=sharded,
        drop=drop,
        seed=3,
    )
    states = [tmp_path / f"state-{rank}" for rank in range(ranks)]
    given = ["--from", "grain", "--batch-size", 4 * ranks, "--python", python_of("grain")]
    report = import_state(tmp_path / "new", *states, *given)
    assert report["step"] == steps
    share = ROWS // ranks  # of a rank in an epoch; with drop_remainder all of them have as many
    assert report["epoch"] == 4 * steps // share
    of_rank = [rows[rank * 4 * steps : (rank + 1) * 4 * steps] for rank in range(ranks)]
    delivered = [row for own in of_rank for row in own[share * report["epoch"] :]]
    assert report["rows_seen"] == len(delivered)
    each_row_once(delivered, rest_of(appliance, report, (2, 2), moved.rows, ROWS, 8, report["order_file"]), ROWS)


def test_grain_errors(tmp_path: Path) -> None:
    deliver(
        "grain",
        tmp_path,
        2,
        rows=ROWS,
        batch=4,
        steps=3,
        workers=0,
        kind="IndexSampler",
        sharded=True,
        drop=True,
        seed=3,
    )
    given = ["--from", "grain", "--python", python_of("grain")]
    one, both = [tmp_path / "state-0"], [tmp_path / "state-0", tmp_path / "state-1"]
    assert "each of the 2 processes (shard_count) must be given, got those of the processes 0" in refused(
        tmp_path / "new", *one, *given, "--batch-size", 8
    )
    assert "must be a multiple of 7" in refused(tmp_path / "new", *both, *given, "--batch-size", 7)
    assert "--batch-size must be given" in refused(tmp_path / "new", *both, *given)
    state = json.loads(one[0].read_text())
    for changed, why in (
        ({"version": 3}, "must be 2, got 3"),
        ({"sampler": "Mine(3)"}, "must have an IndexSampler or a SequentialSampler"),
        ({"last_seen_indices": {"0": 3}}, "plus a multiple of"),
        ({"worker_count": 2}, "must name 2 workers"),
    ):
        (tmp_path / "changed").write_text(json.dumps({**state, **changed}))
        assert why in refused(tmp_path / "new", tmp_path / "changed", both[1], *given, "--batch-size", 8)


# ---- Energon

TAR_ROWS = 200


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight tar files, prepared; sample i is i."""
    folder = tmp_path_factory.mktemp("tars")
    for number in range(8):
        with tarfile.open(folder / f"{number:03}.tar", "w") as tar:
            for row in range(number * 25, (number + 1) * 25):
                info = tarfile.TarInfo(f"{row:05}.txt")
                info.size = len(str(row))
                tar.addfile(info, io.BytesIO(str(row).encode()))
    energon = Path(python_of("energon")).with_name("energon")
    options = ["--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset"]
    done = subprocess.run([energon, "prepare", folder, *options], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return folder


def test_energon_samples_have_the_documented_numbers(tars: Path) -> None:
    """The dataset in docs/migrate.md numbers samples as Energon does."""
    (block,) = (block for block in blocks(REPO / "docs/migrate.md") if "class Tars" in block.text)
    module: dict[str, Any] = {}
    exec(block.text, module)
    data = module["Tars"](tars)
    assert [int(data[number]["txt"]) for number in range(len(data))] == list(range(TAR_ROWS))


ENERGON = ["--from", "energon", "--loader", "energon_resumed:resumed"]


@pytest.mark.parametrize(
    ("ranks", "workers", "buffer", "every", "steps"),
    [
        (1, 0, 1, 0, 9),
        (1, 0, 9, 0, 70),
        (1, 2, 9, 0, 11),
        (1, 2, 9, 4, 17),
        (1, 2, 5, 4, 76),
        (2, 0, 9, 0, 7),
        (2, 2, 5, 4, 8),
    ],
)
def test_energon_goes_on(
    appliance: Appliance,
    tmp_path: Path,
    tars: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    workers: int,
    buffer: int,
    every: int,
    steps: int,
) -> None:
    given = {"tars": str(tars), "workers": workers, "buffer": buffer, "every": every, "steps": steps}
    rows = deliver("energon", tmp_path, ranks, **given)
    monkeypatch.chdir(Path(__file__).parent)
    states = [tmp_path / f"state-{rank}" for rank in range(ranks)]
    options = [*ENERGON, "--batch-size", 4 * ranks, "--python", python_of("energon")]
    report = import_state(tmp_path / "new", *states, *options)
    times = Counter(rows)
    assert (report["epoch"], report["step"]) == (len(rows) // TAR_ROWS, steps)
    assert {times[row] - report["epoch"] for row in range(TAR_ROWS)} <= {0, 1}
    delivered = [row for row in range(TAR_ROWS) if times[row] > report["epoch"]]
    assert report["rows_seen"] == len(delivered)
    each_row_once(
        delivered, rest_of(appliance, report, (1, 3), moved.rows, TAR_ROWS, 8, report["order_file"]), TAR_ROWS
    )


@pytest.mark.parametrize(("workers", "every", "steps"), [(0, 0, 50), (2, 0, 48), (2, 0, 52)])
def test_energon_ends_of_epochs_are_refused(
    tmp_path: Path, tars: Path, monkeypatch: pytest.MonkeyPatch, workers: int, every: int, steps: int
) -> None:
    """Where the shuffle buffer has samples of two epochs."""
    deliver("energon", tmp_path, tars=str(tars), workers=workers, buffer=20, every=every, steps=steps)
    monkeypatch.chdir(Path(__file__).parent)
    options = [*ENERGON, "--batch-size", 4, "--python", python_of("energon")]
    why = refused(tmp_path / "new", tmp_path / "state-0", *options)
    assert "Pass a state that was saved some steps before or after" in why
