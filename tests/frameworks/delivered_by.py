"""Loaders of other libraries, in the interpreters that have these: what they deliver, and the state they save then.

    python delivered_by.py LIBRARY FOLDER < ARGUMENTS.json

Each process writes what it delivered into FOLDER/rows-RANK.json, and its state into FOLDER/state-RANK.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def streaming(folder: Path, shards: str, batch: int, epochs: list[int], loader: dict[str, Any], **options: Any) -> None:
    """Deliver `epochs[-1]` batches of the last epoch, after whole epochs."""
    import torch

    library = importlib.import_module("streaming")  # mypy would take an example of ours for it
    dataset = library.StreamingDataset(local=shards, batch_size=batch, **options)
    made = library.StreamingDataLoader(dataset, batch_size=batch, **loader)
    saved = folder / "before.json"
    if saved.is_file():
        made.load_state_dict(json.loads(saved.read_text()))
    rows: list[int] = []
    for batches in epochs:
        rows = []
        for number, got in enumerate(made, start=1):
            rows += got["number"].tolist()
            if number == batches:
                break
    (folder / f"state-{RANK}").write_text(json.dumps(made.state_dict()))
    (folder / f"rows-{RANK}.json").write_text(json.dumps(rows))
    made._iterator = None
    del made
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


class Numbers:
    """Source of records that say which they are."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> int:
        return int(number)

    def __repr__(self) -> str:
        return "Numbers"


def grain(
    folder: Path, rows: int, batch: int, steps: int, workers: int, kind: str, sharded: bool, drop: bool, seed: int
) -> None:
    import grain
    from absl import flags
    from grain import samplers, sharding

    flags.FLAGS(sys.argv[:1])  # the processes of its workers read them, and absl refuses those that nobody parsed
    options = sharding.ShardOptions(RANK, RANKS, drop) if sharded else sharding.NoSharding()
    if kind == "IndexSampler":
        sampler: Any = samplers.IndexSampler(rows, options, shuffle=True, seed=seed)
    else:
        sampler = samplers.SequentialSampler(rows, options)
    loader = grain.DataLoader(
        data_source=Numbers(rows), sampler=sampler, operations=[grain.transforms.Batch(batch)], worker_count=workers
    )
    passed = iter(loader)
    delivered = [next(passed).tolist() for _ in range(steps)]
    (folder / f"state-{RANK}").write_bytes(passed.get_state())
    (folder / f"rows-{RANK}.json").write_text(json.dumps([row for got in delivered for row in got]))


def energon(folder: Path, **arguments: Any) -> None:
    import torch

    loader = importlib.import_module("energon_resumed").loader(RANK, RANKS, **{**arguments, "steps": None})
    passed, rows = iter(loader), []
    for _ in range(arguments["steps"]):
        rows += [int(text) for text in next(passed).text]
    torch.save(loader.save_state_rank(), folder / f"state-{RANK}")
    (folder / f"rows-{RANK}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    libraries: dict[str, Any] = {"streaming": streaming, "grain": grain, "energon": energon}
    libraries[sys.argv[1]](Path(sys.argv[2]), **json.load(sys.stdin))
    sys.stdout.flush()
    os._exit(0)
