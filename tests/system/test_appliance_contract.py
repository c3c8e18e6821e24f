"""Contract of every appliance, with daemons and worker processes or in this process alone: the same tests on both, and
states that go from one to the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import dealt
import four_methods
import mapped
import numpy as np
import pytest
import streams
import third_party
import torch
from chains import plain
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance
from penstock.proto.errors import (
    InputFnError,
    NotRestartableError,
    StateMismatchError,
    StateUnavailableError,
    UnsupportedLeafError,
)

Make = Callable[..., Appliance]
KINDS = ("real", "fake")


@pytest.fixture
def makes(appliance: Appliance) -> Iterator[dict[str, Make]]:
    """Kind -> what makes an appliance of it; two workers and seed 7, if nothing else is said."""
    opened: list[Appliance] = []

    def made(kind: Make) -> Make:
        def make(**settings: Any) -> Appliance:
            opened.append(kind(**{"num_workers_per_box": 2, "seed": 7, **settings}))
            return opened[-1]

        return make

    yield {
        "real": made(lambda **settings: beside(appliance, **settings)),
        "fake": made(FakeAppliance),
        "no workers": made(lambda **settings: Appliance(**{**settings, "num_workers_per_box": 0})),
    }
    for each in opened:
        each.close()


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, makes: dict[str, Make]) -> Make:
    return makes[request.param]


LOADERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "two methods": (streams.counter, {"batches": 9}),
    "four methods and noise": (streams.shared_noisy, {"batches": 23}),
    "four methods, a shard for each": (four_methods.shard_per_worker, {"rows": 40}),
    "shuffled by torch's generator": (third_party.shuffled, {"noisy": True}),
    "shards of ours": (dealt.listed, {"lengths": [9, 4, 11, 6, 8], "batch_size": 3}),
    "everything that travels": (streams.mixed, {"batches": 8}),
    "of unequal lengths": (streams.uneven, {"lengths": [5, 8]}),
}


def loader_of(name: str) -> DataLoader:
    input_fn, kwargs = LOADERS[name]
    return DataLoader(input_fn, **kwargs)


def take(loader: DataLoader, steps: int, appliance: Appliance, **options: Any) -> tuple[list[Any], int | None]:
    """Batches, and the stream digest after them."""
    executor = DataExecutor(loader, num_steps=steps, appliance=appliance, **options)
    return [plain(batch) for batch in executor], executor.digest


# ---- the same stream, and states that fit both


@pytest.mark.parametrize(
    "name", ["four methods, a shard for each", "shuffled by torch's generator", "everything that travels"]
)
def test_each_is_resumed_by_the_other(makes: dict[str, Make], name: str) -> None:
    """The same batches, digests and workers' records over the ends of epochs; the same part of a state that the user's
    own code made; and each one's states resume on the other."""
    runs = {kind: saved_run(name, makes[kind]()) for kind in KINDS}
    assert runs["fake"][:3] == runs["real"][:3]
    batches, digest, _, real = runs["real"]
    if name == "four methods, a shard for each":
        assert list(map(visible, runs["fake"][3].values())) == list(map(visible, real.values()))
    for saver, resumer, step in (*(("real", "fake", step) for step in list(real)[1::2]), ("fake", "real", 18)):
        again = loader_of(name)
        again.load_state_dict(runs[saver][3][step])
        assert again.step == step
        assert take(again, 25 - step, makes[resumer]()) == (batches[step:], digest), (saver, step)


def saved_run(name: str, appliance: Appliance) -> tuple[list[Any], int | None, Any, dict[int, Any]]:
    """25 batches, the digest and the workers' records after them, and states of some of the steps."""
    loader, batches, states = loader_of(name), [], {}
    executor = DataExecutor(loader, num_steps=25, appliance=appliance)
    for batch in executor:
        batches.append(plain(batch))
        if loader.step in (1, 7, 10, 18, 19):  # 18 and 19 are ends of epochs
            states[loader.step] = loader.state_dict()
    records = loader.checkpoints() if name == "four methods, a shard for each" else None
    return batches, executor.digest, records, states


def visible(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a state that the user's own code made."""
    return {key: value for key, value in state.items() if key != "__penstock__"}


def test_no_workers_give_the_stream_of_one(makes: dict[str, Make]) -> None:
    """The same batches, and states that resume on a worker and back."""
    name = "shuffled by torch's generator"
    kinds = {"real": makes["real"], "no workers": makes["no workers"]}
    whole = {kind: take(loader_of(name), 15, make(num_workers_per_box=1)) for kind, make in kinds.items()}
    assert whole["no workers"] == whole["real"]
    batches, digest = whole["real"]
    for saver, resumer in (("real", "no workers"), ("no workers", "real")):
        loader, again = loader_of(name), loader_of(name)
        take(loader, 6, kinds[saver](num_workers_per_box=1))
        again.load_state_dict(loader.state_dict())
        assert take(again, 9, kinds[resumer](num_workers_per_box=1)) == (batches[6:], digest)


@pytest.mark.parametrize("name", ["of unequal lengths", "four methods and noise"])
def test_a_loop_that_breaks_begins_the_next_epoch(makes: dict[str, Make], name: str) -> None:
    """Check that the batches of the next epoch are the same on both appliances, also from a state after the break."""
    streams_of = {}
    for kind in KINDS:
        loader, appliance = loader_of(name), makes[kind]()
        got = []
        for length in (3, 2):
            for count, batch in enumerate(DataExecutor(loader, appliance=appliance), 1):
                got.append(plain(batch))
                if count == length:
                    break
        more, digest = take(loader, 2, appliance)
        state = loader.state_dict()
        rest, last = take(loader, 5, appliance)
        again = loader_of(name)
        again.load_state_dict(state)
        assert take(again, 5, makes["fake"]()) == (rest, last)
        streams_of[kind] = [*got, *more, digest]
    assert streams_of["fake"] == streams_of["real"]


def test_two_boxes_save_one_state(makes: dict[str, Make]) -> None:
    """Save with two boxes. In the fake each box makes the other's slots itself; the real ones run in lockstep."""
    name = "shards of ours"
    found = {}
    for kind in KINDS:
        job = f"two-{random.getrandbits(40)}"
        here = {"attempt": "1"} if kind == "real" else {}
        boxes = [makes[kind](box=box, num_boxes=2, job=job, **here) for box in (0, 1)]
        loaders = [loader_of(name) for _ in boxes]
        executors = [DataExecutor(loader, 4, appliance=box) for loader, box in zip(loaders, boxes, strict=True)]
        batches = [[*map(plain, pair)] for pair in zip(*executors, strict=True)]
        states = [loader.state_dict() for loader in loaders]
        assert visible(states[0]) == visible(states[1])
        found[kind] = batches, visible(states[0]), [executor.digest for executor in executors], states[0]
    assert found["fake"][:3] == found["real"][:3]
    rest = {}
    for kind in KINDS:
        again = loader_of(name)
        again.load_state_dict(found[kind][3])
        one_box = DataExecutor(again, appliance=makes["fake"](num_workers_per_box=1))
        rest[kind] = [plain(batch) for batch in one_box]
    assert rest["fake"] == rest["real"] != [], "one box goes on where the two were"


# ---- one contract


def test_steps_batches_and_states_of_a_run(make: Make) -> None:
    """The last step counts. Each batch is the loop's to keep. Earlier steps can be saved, as Lookahead does for loops
    that get their batches from something that reads ahead. Another topology is refused by name."""
    loader = loader_of("two methods")
    with make() as appliance:
        executor = DataExecutor(loader, num_steps=9, checkpoint_steps=2, appliance=appliance)
        assert len(executor) == 9
        marks, kept, batches = [], [], []
        for batch in executor:
            marks.append((executor.step, executor.on_checkpoint_step, executor.on_final_iteration))
            kept.append(batch)
            batches.append(plain(batch))
        assert marks == [*((step, step % 2 == 0, False) for step in range(1, 9)), (9, True, True)]
        assert [plain(batch) for batch in kept] == batches
        kept[0]["x"].fill_(-1)
        assert kept[1]["x"][0] != -1
        assert loader.is_restartable
        assert len(loader) == 18
        assert loader.batch_size == 4
        assert executor.stats.steps == 9
        state = loader.state_at(4)
        with pytest.raises(StateUnavailableError):
            loader.state_at(10)
        again = loader_of("two methods")
        again.load_state_dict(state)
        assert take(again, 5, appliance) == (batches[4:], executor.digest)
    again = loader_of("two methods")
    again.load_state_dict(state)
    with pytest.raises(StateMismatchError, match="2 workers"):
        take(again, 1, make(num_workers_per_box=3))


def test_a_failing_input_is_named_with_its_step(make: Make) -> None:
    """Raise the error after all batches that came before it; the run is over then."""
    with make(num_workers_per_box=1):
        loader = DataLoader(mapped.mapped, broken=40, shuffle=False, batch_size=10)
        got: list[Any] = []
        with pytest.raises(InputFnError, match=r"(?s)batch 5.*no such pixel.*slot 0, step 5\]"):
            got.extend(loader)
        assert len(got) == 4
        with pytest.raises(InputFnError):
            next(iter(loader))


def test_what_cannot_travel_or_be_saved_is_named(make: Make) -> None:
    with make(num_workers_per_box=1) as appliance:
        with pytest.raises(UnsupportedLeafError):
            next(iter(DataLoader(list, [{1, 2}])))
        loader = DataLoader(list, [torch.arange(3)] * 4)
        take(loader, 2, appliance)
        assert not loader.is_restartable
        with pytest.raises(NotRestartableError):
            loader.state_dict()


def test_the_loops_generators_stay_its_own(make: Make) -> None:
    """The loop draws what it would draw without the loader, and does not disturb it."""

    def draws() -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(()))]

    def seed() -> None:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)

    seed()
    alone = [draws() for _ in range(6)]
    seed()
    loader, noisy = loader_of("four methods and noise"), []
    got = []
    for batch in DataExecutor(loader, num_steps=6, appliance=make()):
        noisy.append(plain(batch))
        got.append(draws())
        if loader.step == 4:
            loader.state_dict()
    assert got == alone
    assert noisy == take(loader_of("four methods and noise"), 6, make())[0]
