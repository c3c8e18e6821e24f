"""A loader that vouches for its states makes the last delivered batch again on every resume, and a difference is an
error: with other data of the same length, with other code, and with a generator that its states lack. The loaders are
slow, so no batch is ahead of the loop that a resume could compare instead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import vouched
from chains import plain
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance
from penstock.data import MDSWriter
from penstock.proto.errors import ReplayMismatchError
from penstock.proto.state.codec import decode_state, encode_state

STEP = 7


def folder(path: Any, shift: int) -> str:
    with MDSWriter(out=str(path), columns={"n": "int"}, size_limit=2000) as writer:
        for number in range(600):
            writer.write({"n": number + shift})
    return str(path)


def saved_at(appliance: Appliance, *loader: Any) -> Any:
    data = DataLoader(*loader)
    for _ in islice(DataExecutor(data, STEP, appliance=appliance), STEP):
        pass
    return decode_state(encode_state(data.state_dict()))


def resumed(appliance: Appliance, state: Any, *loader: Any, strict: bool = True, steps: int = 2) -> list[Any]:
    data = DataLoader(*loader)
    data.load_state_dict(state, strict=strict)
    return [plain(batch) for batch in DataExecutor(data, steps, appliance=appliance)]


@pytest.fixture
def two() -> Iterator[Appliance]:
    """Two workers in this process, where no batch is ahead of the loop."""
    with FakeAppliance(num_workers_per_box=2, seed=7) as fake:
        yield fake


def test_other_data_are_an_error_of_worker_processes(appliance: Appliance) -> None:
    state = saved_at(appliance, vouched.Own)
    assert len(resumed(appliance, state, vouched.Own)) == 2
    with pytest.raises(ReplayMismatchError, match="Own"):
        resumed(appliance, state, vouched.Own, 1000)


@pytest.mark.parametrize(("kind", "workers"), [("mapped", 2), ("streaming", 3), ("sharded", 3), ("Own", 2)])
def test_other_data_are_an_error(kind: str, workers: int, tmp_path: Any, two: Appliance) -> None:
    """On the same topology, and on another one."""
    make = getattr(vouched, kind)
    ours: Any = (make, folder(tmp_path / "a", 0)) if kind == "streaming" else (make,)
    others: Any = (make, folder(tmp_path / "b", 1000)) if kind == "streaming" else (make, 1000)
    with FakeAppliance(num_workers_per_box=workers, seed=7) as here:
        state = saved_at(two, *ours)
        assert len(resumed(here, state, *ours)) == 2
        with pytest.raises(ReplayMismatchError, match=r"MapLoader over Images|StreamingLoader|ShardLoader|Own"):
            resumed(here, state, *others)
        assert len(resumed(here, state, *others, strict=False)) == 2


@pytest.mark.parametrize("kind", ["mapped", "sharded"])
@pytest.mark.parametrize(("workers", "then"), [(1, 3), (2, 3), (1, 1), (2, 2)])
def test_another_global_batch(kind: str, workers: int, then: int) -> None:
    """Frameworks that pass the batch of a rank, times the ranks, have another one on other ranks: the rows continue,
    and what the saved run delivered is not compared."""
    make = getattr(vouched, kind)
    with (
        FakeAppliance(num_workers_per_box=workers, seed=7) as before,
        FakeAppliance(num_workers_per_box=then, seed=7) as here,
    ):
        data = DataLoader(make, 0, 4)
        whole = [plain(batch) for batch in DataExecutor(data, STEP + 6, appliance=before)]
        state = decode_state(encode_state(data.state_at(STEP)))
        assert rows(resumed(here, state, make, 0, 8, steps=3)) == rows(whole[STEP:])


def rows(batches: list[Any]) -> list[int]:
    return [row for batch in batches for row in (batch["number"] if isinstance(batch, dict) else batch)]


def test_generator_of_the_dataset_depends_on_the_position_alone(two: Appliance) -> None:
    """On any topology, and whatever state input_fn left it in."""
    with FakeAppliance(num_workers_per_box=3, seed=7) as other:
        data = DataLoader(vouched.seeded)
        whole = [plain(batch) for batch in DataExecutor(data, STEP + 4, appliance=two)]
        state = data.state_at(STEP)
        for here in (two, other):
            assert resumed(here, state, vouched.seeded, True, 5, steps=4) == whole[STEP:]


def test_generator_that_a_state_lacks_is_named(appliance: Appliance) -> None:
    state = saved_at(appliance, vouched.Drawing)
    with pytest.raises(ReplayMismatchError, match=r"Drawing, which holds the random generators Drawing\.rng"):
        resumed(appliance, state, vouched.Drawing)


def test_generators_that_a_loader_does_not_seed_are_saved(two: Appliance) -> None:
    data = DataLoader(vouched.unseeded)
    whole = [plain(batch) for batch in DataExecutor(data, STEP + 4, appliance=two)]
    assert resumed(two, data.state_at(STEP), vouched.unseeded, steps=4) == whole[STEP:]


def test_generator_of_a_pure_loader_that_is_seeded_from_entropy(appliance: Appliance) -> None:
    """At the beginning of an epoch, too, there is a name for it and not another stream."""
    with beside(appliance, num_workers_per_box=2, replay=True) as here:
        data = DataLoader(vouched.entropic)
        assert len(list(DataExecutor(data, 4, appliance=here))) == 4
        state = data.state_at(1)
        with pytest.raises(ReplayMismatchError, match=r"input_fn has left Drawn\.rng in another state"):
            resumed(here, state, vouched.entropic)
