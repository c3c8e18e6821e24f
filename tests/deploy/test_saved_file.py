"""Files with saved states: what is found in them, and what is refused. Nothing in them is run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.client.states.saved_state import SavedState
from penstock.deploy.operations.saved_file import read_state, read_states
from penstock.proto.errors import InvalidArgumentError, PenstockError, StateCorruptError, StateMismatchError
from penstock.proto.state.codec import encode_state


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
        assert [(found.name, found.saved.input_fn) for found in read_states(tmp_path / name)] == [
            ("['loaders'][0]", "m:train"),
            ("['loaders'][1]", "m:eval"),
        ]
        assert read_state(tmp_path / name, "m:eval").input_fn == "m:eval"
        with pytest.raises(StateMismatchError, match=r"one state of a loader, got 2 \(\['loaders'\]\[0\] of m:train"):
            read_state(tmp_path / name, None)
        with pytest.raises(StateMismatchError, match="one state of m:other, got 0"):
            read_state(tmp_path / name, "m:other")


def test_files_that_hold_none(tmp_path: Path) -> None:
    harm = tmp_path / "harm"
    (tmp_path / "text").write_text("hello")
    (tmp_path / "pickle").write_bytes(pickle.dumps({"a": Harmful(harm)}))
    torch.save({"a": Harmful(harm), "loader": state()}, tmp_path / "objects")
    torch.save(state(), tmp_path / "whole")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole").read_bytes()[:300])
    (tmp_path / "none").write_bytes(encode_state({"model": 1}))
    wrong: dict[str, tuple[type[PenstockError], str]] = {
        "text": (StateCorruptError, "must be a file that encode_state"),
        "pickle": (StateCorruptError, "must be a file that encode_state"),
        "objects": (InvalidArgumentError, "because reading them would run code"),
        "cut.pt": (StateCorruptError, "is damaged"),
        "none": (StateMismatchError, "got no value with the key"),
        "nowhere": (InvalidArgumentError, "cannot be read"),
        ".": (InvalidArgumentError, "got a directory"),
    }
    for name, (error, says) in wrong.items():
        with pytest.raises(error, match=says):
            read_states(tmp_path / name)
    assert not harm.exists()
