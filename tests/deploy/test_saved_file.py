"""Files with saved states: what is found in them, and what is refused. Nothing in them is run."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.client.states.saved_state import SavedState, WorkerPart, read
from penstock.data import MapLoader
from penstock.deploy.operations.convert_state import convert
from penstock.deploy.operations.saved_file import SavedFile
from penstock.proto.errors import InvalidArgumentError, PenstockError, StateCorruptError, StateMismatchError
from penstock.proto.state.assignment import Assignment, assigned
from penstock.proto.state.codec import encode_state
from penstock.proto.state.position import Position


def state(input_fn: str = "m:f") -> dict[str, Any]:
    return SavedState(0, input_fn, 4, 0, 0, 7, aggregated={"at": 0}).to_dict()


class Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_state_is_found_wherever_it_is(tmp_path: Path) -> None:
    value = {"model": {"w": torch.zeros(2)}, "loaders": [state("m:train"), state("m:eval")]}
    (tmp_path / "a").write_bytes(encode_state(value))
    torch.save(value, tmp_path / "b")
    for name in ("a", "b"):
        file = SavedFile(tmp_path / name)
        assert [(found.name, found.saved.input_fn) for found in file.states] == [
            ("['loaders'][0]", "m:train"),
            ("['loaders'][1]", "m:eval"),
        ]
        assert file.the("m:eval").path == ("loaders", 1)
        with pytest.raises(
            StateMismatchError, match=r"must have one state for this run, got 2 \(\['loaders'\]\[0\] of m:train"
        ):
            file.the(None)
        with pytest.raises(StateMismatchError, match="no state of m:other"):
            file.the("m:other")


def test_state_of_no_run_fits_any_topology(tmp_path: Path) -> None:
    torch.save({"loader": state()}, tmp_path / "in")
    (done,) = convert(tmp_path / "in", tmp_path / "out", 5, 3)
    assert (done["from"], done["converted"]) == (None, False)
    assert read(torch.load(tmp_path / "out", weights_only=True)["loader"]).aggregated == {"at": 0}


def test_files_that_hold_none(tmp_path: Path) -> None:
    harm = tmp_path / "harm"
    (tmp_path / "text").write_text("hello")
    (tmp_path / "pickle").write_bytes(pickle.dumps({"a": Harmful(harm)}))
    torch.save({"a": Harmful(harm), "loader": state()}, tmp_path / "objects")
    (tmp_path / "cut").write_bytes(encode_state(state())[:-9])
    torch.save(state(), tmp_path / "whole")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole").read_bytes()[:300])
    (tmp_path / "none").write_bytes(encode_state({"model": 1}))
    wrong: dict[str, tuple[type[PenstockError], str]] = {
        "text": (StateCorruptError, "must be a file that encode_state"),
        "pickle": (StateCorruptError, "must be a file that encode_state"),
        "objects": (InvalidArgumentError, "because reading them would run code"),
        "cut": (StateCorruptError, "cut: the checksum"),
        "cut.pt": (StateCorruptError, "is damaged"),
        "none": (StateMismatchError, "no state of a DataLoader"),
        "nowhere": (InvalidArgumentError, "cannot be read"),
        ".": (InvalidArgumentError, "got a directory"),
    }
    for name, (error, says) in wrong.items():
        with pytest.raises(error, match=says):
            SavedFile(tmp_path / name)
    assert not harm.exists()


def of_positions(boxes: int, **options: Any) -> dict[str, Any]:
    """Return what a run of `boxes` boxes with a MapLoader saves at its beginning."""
    states = []
    for box in range(boxes):
        with assigned(Assignment(box, boxes, 0, 1, 0, 1)):
            loader = MapLoader(range(100), **options)
            states.append(loader.state_dict())
    positions = [Position.start(1) for _ in range(boxes)]
    parts = [WorkerPart(box, 0, 0, 0, 0, {}) for box in range(boxes)]
    aggregated = loader.aggregate_state_dict(states)
    return SavedState(0, "m:f", 4, boxes, 1, 7, positions, parts=parts, aggregated=aggregated).to_dict()


@pytest.mark.parametrize(
    ("options", "shape", "says"),
    [
        ({"batch_size": 2}, (0, 1), "--boxes must be at least 1, got 0"),
        ({"batch_size": 2}, (1, -1), "--workers must be at least 1, got -1"),
        ({"batch_size": 2}, (10_000, 10), "must be at most 16384, the workers of a run, got 10000 x 10 = 100000"),
        ({"global_batch_size": 5}, (6, 1), "--boxes must be at most 5, .* got 6"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(
    tmp_path: Path, options: dict[str, int], shape: tuple[int, int], says: str
) -> None:
    (tmp_path / "in").write_bytes(encode_state(of_positions(2, **options)))
    with pytest.raises(PenstockError, match=says):
        convert(tmp_path / "in", tmp_path / "out", *shape)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "boxes"),
    [
        ({"batch_size": 2}, 6),
        ({"global_batch_size": 5}, 5),
        ({"global_batch_size": 4}, 6),  # as 2 for each of the 2 boxes: the state is the same; loading it tells
    ],
)
def test_as_many_boxes_as_there_are_rows(tmp_path: Path, options: dict[str, int], boxes: int) -> None:
    (tmp_path / "in").write_bytes(encode_state(of_positions(2, **options)))
    (done,) = convert(tmp_path / "in", tmp_path / "out", boxes, 3)
    assert done["to"] == {"boxes": boxes, "workers": 3}


@pytest.mark.parametrize("own", [{"format": 3, "order": {}, "topology": {"boxes": 2, "batch": 5}}, [1], "text", None])
def test_custom_loader_state_omits_batch_counts(tmp_path: Path, own: Any) -> None:
    saved = replace(read(of_positions(2, global_batch_size=5)), aggregated=own)
    (tmp_path / "in").write_bytes(encode_state(saved.to_dict()))
    (done,) = convert(tmp_path / "in", tmp_path / "out", 6, 1)
    assert done["to"] == {"boxes": 6, "workers": 1}
