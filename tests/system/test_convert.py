"""`penstock state convert`: a converted state goes on, on its topology, as the state itself would there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import streams
import torch
from neighbours import beside
from typer.testing import CliRunner

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.deploy.cli.main import app
from penstock.deploy.operations.convert_state import convert
from penstock.proto.errors import StateMismatchError
from penstock.proto.state.codec import decode_state, encode_state


@pytest.fixture(scope="module")
def other(appliance: Appliance) -> Iterator[Appliance]:
    """Three workers for the one box."""
    with beside(appliance, num_workers_per_box=3) as joined:
        yield joined


def saved(appliance: Appliance, input_fn: Any, steps: int, *args: Any) -> dict[str, Any]:
    loader = DataLoader(input_fn, *args)
    assert len(list(DataExecutor(loader, num_steps=steps, appliance=appliance))) == steps
    return loader.state_dict()


def goes_on(
    appliance: Appliance, state: Any, steps: int, input_fn: Any, *args: Any
) -> tuple[list[bytes], int, int | None]:
    """The batches, and where it stands then: step and stream digest."""
    loader = DataLoader(input_fn, *args)
    loader.load_state_dict(state)
    executor = DataExecutor(loader, num_steps=steps, appliance=appliance)
    return [encode_state(batch) for batch in executor], executor.step, executor.digest


@pytest.mark.parametrize("steps", [7, 30, 33])
def test_converted_stream_equals_the_states(appliance: Appliance, other: Appliance, tmp_path: Path, steps: int) -> None:
    """Convert states in the middle of an epoch, at its end, and in the next one, with randomness that no state
    contains."""
    state = saved(appliance, streams.shared_noisy, steps)
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(encode_state({"model": torch.arange(3), "loader": state}))
    (done,) = convert(source, target, 1, 3)
    assert (done["from"], done["to"]) == ({"boxes": 1, "workers": 2}, {"boxes": 1, "workers": 3})
    assert (done["where"], done["step"], done["converted"]) == ("['loader']", steps, True)
    assert done["epoch"] == (1 if steps > 30 else 0)
    found: Any = decode_state(target.read_bytes())
    assert found["model"].tolist() == [0, 1, 2]
    expected = goes_on(other, state, 40, streams.shared_noisy)
    assert goes_on(other, found["loader"], 40, streams.shared_noisy) == expected
    assert expected[1:2] == (steps + 40,)
    assert expected[2]


def test_uneven_workers_in_the_middle_of_a_pass(appliance: Appliance, other: Appliance, tmp_path: Path) -> None:
    """Convert a state in which one worker has reached its end: 31 batches over two workers, the second of which has
    15."""
    state = saved(appliance, streams.shared, 31, 31)
    torch.save(state, tmp_path / "in.pt")
    (done,) = convert(tmp_path / "in.pt", tmp_path / "out.pt", 1, 3)
    assert "the stream digest of each box" in done["kept"]
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert goes_on(other, found, 20, streams.shared, 31) == goes_on(other, state, 20, streams.shared, 31)


def test_the_same_shape_is_copied(appliance: Appliance, tmp_path: Path) -> None:
    state = saved(appliance, streams.stateful, 3)
    (tmp_path / "in").write_bytes(encode_state(state))
    (done,) = convert(tmp_path / "in", tmp_path / "out", 1, 2)
    assert not done["converted"]
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()


@pytest.mark.parametrize(("input_fn", "why"), [(streams.stateful, "only state_dict"), (streams.generator, "no state")])
def test_a_loader_that_cannot_change_its_shape(appliance: Appliance, tmp_path: Path, input_fn: Any, why: str) -> None:
    (tmp_path / "in").write_bytes(encode_state(saved(appliance, input_fn, 3)))
    with pytest.raises(StateMismatchError, match=f"{why}.*Without a state, the next epoch can start"):
        convert(tmp_path / "in", tmp_path / "out", 2, 2)
    done = CliRunner().invoke(
        app, ["state", "convert", str(tmp_path / "in"), str(tmp_path / "out"), "--boxes", "2", "--workers", "2"]
    )
    assert done.exit_code == 22
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_does(appliance: Appliance, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(encode_state(saved(appliance, streams.shared, 5)))
    arguments = ["state", "convert", str(tmp_path / "in"), str(tmp_path / "out"), "--boxes", "3", "--workers", "1"]
    shown = CliRunner().invoke(app, arguments).stdout
    for words in (
        "streams:shared (the whole file)",
        "1 x 2 workers",
        "3 x 1 workers",
        "the boxes differ",
        "Written",
    ):
        assert words in shown
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert found["states"][0]["to"] == {"boxes": 3, "workers": 1}
