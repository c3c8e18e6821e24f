"""`penstock import-state`: what another library delivered does not come again, and all else comes once.

The libraries that development installs are here, torchdata and the Trainer; Grain, mosaicml-streaming and Energon are
in tests/frameworks/run_import_state.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moved
import numpy as np
import pytest
import torch
import torch.utils.data
from moved_runs import TOPOLOGIES, each_row_once, import_state, refused, rest_of
from torch.utils.data import DistributedSampler

from penstock.client import Appliance
from penstock.deploy.import_state.begun_epoch import BegunEpoch, imported, whole_steps
from penstock.proto.errors import StateMismatchError

pytestmark = pytest.mark.filterwarnings("ignore:.*was recovered")

ROWS, BATCH = 61, 4


@pytest.fixture(scope="module")
def appliance() -> Iterator[Appliance]:
    with Appliance(num_workers_per_box=4, seed=7, timeout_s=60) as opened:
        yield opened


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> int:
        return number


def stateful(path: Path, batches: int, **arguments: Any) -> list[int]:
    """Deliver batches by the StatefulDataLoader, save its state, and return the rows."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(Numbers(), batch_size=BATCH, **arguments)
    rows: list[int] = []
    for number, batch in enumerate(loader, start=1):
        rows += batch.tolist()
        if number == batches:
            torch.save({"model": torch.zeros(2), "loader": loader.state_dict()}, path)
            break
    else:
        torch.save({"loader": loader.state_dict()}, path)
    return rows


# ---- pure functions


def test_rows_left_out_come_at_the_end() -> None:
    epoch = imported(BegunEpoch(2, np.array([4, 1, 4, 0, 1, 3]), 3, 9), 7)
    assert epoch.order.tolist() == [4, 1, 0, 3, 2, 5, 6]
    assert (epoch.epoch, epoch.seen, epoch.step) == (2, 2, 9)


def test_rows_beyond_the_dataset_are_refused() -> None:
    with pytest.raises(StateMismatchError, match="at least 8 rows, as the state was saved with, got 7"):
        imported(BegunEpoch(0, np.array([7]), 1, 1), 7)


def test_state_within_a_step_is_refused() -> None:
    assert (whole_steps(8, 4), whole_steps(10, 4, 10)) == (2, 3)
    for length in (None, 12):
        with pytest.raises(StateMismatchError, match="must be a multiple of 4, the rows of a step, got 10"):
            whole_steps(10, 4, length)


# ---- StatefulDataLoader


@pytest.mark.parametrize(
    "arguments",
    [{}, {"shuffle": True}, {"shuffle": True, "num_workers": 2}, {"num_workers": 2, "snapshot_every_n_steps": 3}],
    ids=str,
)
@pytest.mark.parametrize("batches", [1, 7, 15, 16])
def test_stateful_rows_left(tmp_path: Path, arguments: dict[str, Any], batches: int) -> None:
    """The order that is written begins with the rows that were delivered, and goes on as the loader itself does."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    if batches > 7 and arguments.get("num_workers"):
        return  # they take seconds each
    delivered = stateful(tmp_path / "state", batches, **arguments)
    given = [tmp_path / "state", "--from", "stateful", "--rows", ROWS]
    if "snapshot_every_n_steps" in arguments and batches < 3:
        assert "--batch-size must be given" in refused(tmp_path / "new", *given)
        given += ["--batch-size", BATCH]
    report = import_state(tmp_path / "new", *given)
    assert (report["epoch"], report["step"], report["rows_seen"]) == (0, batches, len(delivered))
    order = np.fromfile(report["order_file"], "<u4", offset=64).tolist()
    assert order[: len(delivered)] == delivered
    loader = StatefulDataLoader(Numbers(), batch_size=BATCH, **arguments)
    if batches < 16:
        loader.load_state_dict(torch.load(tmp_path / "state")["loader"])
        assert order[len(delivered) :] == [row for batch in loader for row in batch.tolist()]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_stateful_goes_on(appliance: Appliance, tmp_path: Path, topology: tuple[int, int]) -> None:
    """On any topology, and though a runner is killed on the way."""
    delivered = stateful(tmp_path / "state", 5, shuffle=True)
    report = import_state(tmp_path / "new", tmp_path / "state", "--from", "stateful", "--rows", ROWS)
    order = np.fromfile(report["order_file"], "<u4", offset=64)
    killing = tmp_path / "killing"
    killing.write_text(str(order[40]))
    rest = rest_of(appliance, report, topology, moved.rows, ROWS, 6, report["order_file"], str(killing))
    assert not killing.exists(), "a runner was killed"
    each_row_once(delivered, rest, ROWS)


@pytest.mark.parametrize("shuffle", [False, True])
def test_stateful_of_several_ranks(appliance: Appliance, tmp_path: Path, shuffle: bool) -> None:
    delivered, files = [], []
    for rank in range(3):
        sampler: Any = DistributedSampler(Numbers(), 3, rank, shuffle=shuffle, seed=4)
        sampler.set_epoch(2)
        files.append(tmp_path / f"rank{rank}")
        delivered += stateful(files[-1], 2, sampler=sampler)
    options = ["--seed", 4, "--epoch", 2, *(["--shuffle"] if shuffle else [])]
    report = import_state(tmp_path / "new", *files, "--from", "stateful", "--rows", ROWS, *options)
    assert (report["epoch"], report["step"], report["rows_seen"]) == (2, 2 * 6 + 2, 24)
    each_row_once(delivered, rest_of(appliance, report, (2, 2), moved.rows, ROWS, 8, report["order_file"]), ROWS)


def test_ranks_of_other_steps_are_refused(tmp_path: Path) -> None:
    for rank, batches in enumerate((2, 3)):
        stateful(tmp_path / str(rank), batches, sampler=DistributedSampler(Numbers(), 2, rank))
    why = refused(tmp_path / "new", tmp_path / "0", tmp_path / "1", "--from", "stateful", "--rows", ROWS)
    assert "all states must be of the same step" in why


def test_ranks_with_own_shuffles_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        stateful(tmp_path / str(rank), 2, shuffle=True)
    why = refused(tmp_path / "new", tmp_path / "0", tmp_path / "1", "--from", "stateful", "--rows", ROWS)
    assert "the ranks repeat each other's rows" in why


@pytest.mark.parametrize("workers", [0, 1])
def test_stateful_streams_are_refused(tmp_path: Path, workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(ROWS))

    loader = StatefulDataLoader(Stream(), batch_size=BATCH, num_workers=workers)
    passed = iter(loader)
    next(passed)
    torch.save(loader.state_dict(), tmp_path / "state")
    why = refused(tmp_path / "new", tmp_path / "state", "--from", "stateful", "--rows", ROWS)
    assert "got one of an IterableDataset, which has no row numbers" in why


def test_other_files_are_refused(tmp_path: Path) -> None:
    given = ["--from", "stateful", "--rows", ROWS]
    assert "cannot be read: No such file" in refused(tmp_path / "new", tmp_path / "none", *given)
    (tmp_path / "text").write_text("hello")
    assert "must be JSON or a file that torch.save() wrote" in refused(tmp_path / "new", tmp_path / "text", *given)
    torch.save({"a": 1}, tmp_path / "other")
    assert "must have a state of torchdata's StatefulDataLoader" in refused(
        tmp_path / "new", tmp_path / "other", *given
    )
    old = {"_sampler_iter_yielded": 4, "_num_yielded": 4, "_sampler_iter_state": None}
    torch.save(old, tmp_path / "old")
    assert "as torchdata 0.10 and 0.11 write it" in refused(tmp_path / "new", tmp_path / "old", *given)
    assert "--rows must be given" in refused(tmp_path / "new", tmp_path / "old", "--from", "stateful")


# ---- the Trainer


def train(folder: Path, steps: int, **arguments: Any) -> list[int]:
    """Train with a checkpoint at the last step, and return the rows that the model saw."""
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.seen: list[int] = []

        def forward(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
            self.seen += number.tolist()
            return {"loss": self.weight * number.float().mean()}

    given = {"per_device_train_batch_size": BATCH, "max_steps": steps, "save_steps": steps, **arguments}
    model = Model()
    options = TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, remove_unused_columns=False, **given
    )
    data = [{"number": torch.tensor(number)} for number in range(ROWS)]
    Trainer(model, options, train_dataset=data).train()
    return model.seen


@pytest.mark.parametrize(
    ("steps", "arguments", "options"),
    [
        (5, {}, []),
        (21, {"seed": 5}, ["--seed", 5]),
        (7, {"data_seed": 9, "gradient_accumulation_steps": 3}, ["--seed", 9, "--accumulation", 3]),
        (19, {"dataloader_drop_last": True}, ["--drop-last"]),
    ],
)
def test_trainer_goes_on(
    appliance: Appliance, tmp_path: Path, steps: int, arguments: dict[str, Any], options: list[Any]
) -> None:
    """Within the first epoch and the second."""
    seen = train(tmp_path / "run", steps, **arguments)
    checkpoint = tmp_path / "run" / f"checkpoint-{steps}"
    report = import_state(tmp_path / "new", checkpoint, "--from", "trainer", "--rows", ROWS, *options)
    of_epoch = ROWS // BATCH * BATCH if "dataloader_drop_last" in arguments else ROWS
    delivered = seen[of_epoch * report["epoch"] :]
    assert report["rows_seen"] == len(delivered)
    assert report["epoch"] == len(seen) // of_epoch
    rest = rest_of(appliance, report, (1, 2), moved.rows, ROWS, BATCH, report["order_file"])
    each_row_once(delivered, rest, ROWS)


def test_trainer_with_another_dataset_is_refused(tmp_path: Path) -> None:
    state = {"global_step": 5, "epoch": 5 / 16, "train_batch_size": BATCH}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    given = [tmp_path, "--from", "trainer"]
    assert import_state(tmp_path / "new", *given, "--rows", ROWS)["rows_seen"] == 20
    (tmp_path / "new").unlink()
    why = refused(tmp_path / "new", *given, "--rows", ROWS + 20)
    assert "which was at epoch 0.3125 after step 5" in why
    assert "by which step 5 is at epoch 0.238095: 81 rows, batches of 4 on 1 ranks, 1 batches a step" in why
    few = refused(tmp_path / "new", *given, "--rows", ROWS, "--ranks", 20, "--drop-last")
    assert "--rows must be at least 80, a batch of 4 on each of 20 ranks" in few
    assert "--rows, --ranks, --accumulation and --drop-last must be those of the saved run" in refused(
        tmp_path / "new", *given, "--rows", ROWS, "--ranks", 2
    )
