"""Implementation of `penstock import-state`: reads a position of another library, and writes a state of Penstock.

Two files are written: the order of the epoch that the other library began (penstock.data.ordering.order_file), and a
saved state at a position in this order. A loader that is given the order file continues there, on any topology.
"""

from __future__ import annotations

import io
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.client.states.saved_state import SavedState
from penstock.data.ordering.order_file import write_order
from penstock.data.ordering.order_states import ORDER_FILE, OrderProgress, Topology, state_of
from penstock.deploy.console.tables import Table, show
from penstock.deploy.import_state.begun_epoch import BegunEpoch, ImportedEpoch, imported
from penstock.proto.errors import InvalidArgumentError, StateMismatchError
from penstock.proto.state.position import Position
from penstock.runtime.files.atomic_files import write_whole

__all__ = ["SOURCES", "Request", "import_state"]


@dataclass(frozen=True)
class Request:
    """Request for an import: the files, and values that the states do not contain. None: the option was not given."""

    library: str
    states: Sequence[Path]
    out: Path
    order_file: Path
    input_fn: str
    rows: int | None
    batch: int | None
    epoch: int
    shuffle: bool
    seed: int | None
    ranks: int
    accumulation: int
    drop_last: bool
    index: Sequence[Path]
    algorithm: str
    block: int | None
    loader: str | None
    python: str
    run_seed: int | None

    def the_state(self) -> Path:
        """Return the path of the only state. Raises InvalidArgumentError if several are given."""
        if len(self.states) > 1:
            raise InvalidArgumentError(
                f"--from {self.library} must be given one STATE, which is valid for all ranks, got {len(self.states)}. "
                "Pass one file"
            )
        return self.states[0]

    def needs(self, flag: str, value: Any) -> Any:
        """Return `value`, the value of option `flag`. Raises InvalidArgumentError if the option was not given."""
        if value is None or value == []:
            raise InvalidArgumentError(
                f"{flag} must be given with --from {self.library}, because the states do not contain this value. "
                "`penstock import-state --help` says what to pass"
            )
        return value


def _stateful(request: Request) -> tuple[BegunEpoch, int]:
    from penstock.deploy.import_state.from_torchdata import torchdata_epoch

    rows = request.needs("--rows", request.rows)
    seed = request.seed or 0  # DistributedSampler's own default
    begun = torchdata_epoch(
        request.states, rows, request.epoch, batch=request.batch, shuffle=request.shuffle, seed=seed
    )
    return begun, rows


def _trainer(request: Request) -> tuple[BegunEpoch, int]:
    from penstock.deploy.import_state.from_trainer import SEED, trainer_epoch

    rows = request.needs("--rows", request.rows)
    begun = trainer_epoch(
        request.the_state(),
        rows,
        seed=SEED if request.seed is None else request.seed,
        ranks=request.ranks,
        accumulation=request.accumulation,
        drop_last=request.drop_last,
    )
    return begun, rows


def _streaming(request: Request) -> tuple[BegunEpoch, int]:
    from penstock.deploy.import_state.from_mosaicml import mosaicml_epoch, shard_sizes

    sizes = shard_sizes(request.needs("--index", list(request.index)))
    begun = mosaicml_epoch(
        request.the_state(),
        sizes,
        batch=request.needs("--batch-size", request.batch),
        shuffle=request.shuffle,
        algorithm=request.algorithm,
        block=request.block,
        python=request.python,
    )
    return begun, sum(sizes)


def _grain(request: Request) -> tuple[BegunEpoch, int]:
    from penstock.deploy.import_state.from_grain import grain_epoch

    return grain_epoch(request.states, request.needs("--batch-size", request.batch), request.python)


def _energon(request: Request) -> tuple[BegunEpoch, int]:
    from penstock.deploy.import_state.from_energon import energon_epoch

    batch, loader = request.needs("--batch-size", request.batch), request.needs("--loader", request.loader)
    return energon_epoch(request.states, batch, loader, request.python)


SOURCES: dict[str, Callable[[Request], tuple[BegunEpoch, int]]] = {
    "stateful": _stateful,
    "trainer": _trainer,
    "streaming": _streaming,
    "grain": _grain,
    "energon": _energon,
}
"""Function that reads the states of a library, by the value of --from. It returns the epoch and the number of rows of
the dataset."""


def import_state(request: Request, as_json: bool) -> None:
    """Read a position of another library, write both files, and print what was read."""
    begun, rows = SOURCES[request.library](request)
    if request.rows not in (None, rows):
        raise StateMismatchError(
            f"--rows must be {rows}, the rows of the dataset that the state is of, got {request.rows}. Omit --rows, or "
            "pass a state of this dataset"
        )
    epoch = imported(begun, rows)
    _write(request, epoch)
    report = {
        "library": request.library,
        "epoch": epoch.epoch,
        "step": epoch.step,
        "rows_seen": epoch.seen,
        "rows_left": rows - epoch.seen,
        "state": str(request.out),
        "order_file": str(request.order_file),
    }
    if as_json:
        print(json.dumps(report, indent=2))
        return
    show(
        [
            Table(
                f"position of {request.library}",
                ("what", "value"),
                [(k.replace("_", " "), str(v)) for k, v in report.items()],
            )
        ]
    )
    print()
    print(f"Pass order_file={str(request.order_file)!r} to the loader, and load the state.")


def _write(request: Request, epoch: ImportedEpoch) -> None:
    try:
        file = write_order(request.order_file, epoch.epoch, epoch.order)
        progress = OrderProgress(epoch.epoch, epoch.seen, 0, Topology(1, 1, 1))
        position = Position.start(1, step=epoch.step, epoch=epoch.epoch)
        position.chain = None  # digests of the other library's batches are unknown
        saved = SavedState(
            epoch.step,
            request.input_fn,
            4,
            1,
            1,
            secrets.randbits(63) if request.run_seed is None else request.run_seed,
            [position],
            aggregated=state_of(progress, {ORDER_FILE: file.described}),
        )
        data = io.BytesIO()
        torch.save(saved.to_dict(), data)
        write_whole(request.out, data.getvalue())
    except OSError as error:
        raise InvalidArgumentError(
            f"{request.out} or {request.order_file} cannot be written: {error.strerror}. Pass other paths by --out and "
            "--order-file"
        ) from error
