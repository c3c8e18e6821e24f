"""Bad input gets a clear error that names the thing and the remedy; nothing hangs, and the appliance lives on."""

from __future__ import annotations

import time
import warnings
from typing import Any

import hazards
import pytest
import streams
import torch
from forked import Child
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto import errors
from penstock.proto.rpc.calls import CoordinatorClient


def drain(appliance: Appliance, loader: DataLoader, steps: int | None = None) -> list[Any]:
    return list(DataExecutor(loader, num_steps=steps, appliance=appliance))


def test_not_callable() -> None:
    with pytest.raises(TypeError, match="input_fn must be a callable or a dataset, got a int"):
        DataLoader(3)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("input_fn", "says"), [(streams.returns_none, "returned None"), (streams.returns_number, "returned a int")]
)
def test_input_fn_that_returns_no_iterable(appliance: Appliance, input_fn: Any, says: str) -> None:
    with pytest.raises(errors.InputFnError, match=says):
        drain(appliance, DataLoader(input_fn))


def test_raising_input_fn_shows_remote_traceback(appliance: Appliance) -> None:
    with pytest.raises(errors.InputFnError, match="no such dataset") as caught:
        drain(appliance, DataLoader(streams.raises))
    assert "in raises" in caught.value.remote_traceback
    assert "box 0" in str(caught.value)


def test_forked_child_cannot_act_for_its_runner(appliance: Appliance) -> None:
    loader = DataLoader(hazards.strays, 24)
    executor = DataExecutor(loader, num_steps=48, appliance=appliance)
    got = [batch["number"] for batch in executor]
    assert got == [number for n in range(1, 25) for number in (n, 1000 + n)]
    assert executor.stats.recoveries == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forked_child_of_a_trainer_gets_an_error(appliance: Appliance) -> None:
    loader = DataLoader(streams.counter, 40)
    executor = DataExecutor(loader, appliance=appliance)
    steps = iter(executor)
    first = next(steps)

    def use_it_all() -> None:
        for use in (
            lambda: next(steps),
            lambda: next(iter(DataExecutor(loader))),
            lambda: loader.state_dict(),
            lambda: next(iter(DataExecutor(DataLoader(streams.counter, 3), appliance=appliance))),
            lambda: CoordinatorClient("127.0.0.1:1", "another one"),
        ):
            with pytest.raises(errors.ForkedProcessError, match="spawn"):
                use()
        steps.close()  # type: ignore[attr-defined]
        loader.close()
        appliance.close()

    with Child(use_it_all) as child:
        child.join()
    rest = [batch["number"] for batch in steps]
    assert [first["number"], *rest] == [number for n in range(1, 41) for number in (n, 1000 + n)]
    assert loader.state_dict()["__penstock__"]["step"] == 80


def test_failing_state_dict_needs_replay(appliance: Appliance) -> None:
    """It counts as a loader without state methods: it may read a queue, which cannot be read again."""
    with beside(appliance, replay=False) as other:
        loader = DataLoader(streams.bad_state, 8)
        executor = DataExecutor(loader, num_steps=12, appliance=other)
        for _ in executor:
            if executor.step == 3:
                with pytest.raises(errors.NotRestartableError, match=r"cannot reach its server(.|\n)*replay=True"):
                    loader.state_dict()
        assert executor.step == 12


@pytest.mark.parametrize("input_fn", [streams.bad_state, streams.prefetches])
def test_wrong_states_of_a_pure_loader_do_no_harm(appliance: Appliance, input_fn: Any) -> None:
    """What is saved is a number of batches; a snapshot that leads elsewhere is refuted by what is made again."""

    def numbers(steps: int) -> list[int]:
        return [int(batch["x"][0]) for batch in DataExecutor(loader, num_steps=steps, appliance=other)]

    with beside(appliance, replay=True, replay_s=0) as other:
        loader = DataLoader(input_fn, 400)
        before = numbers(300)
        state = loader.state_dict()
        whole = [*before, *numbers(500)]
        loader = DataLoader(input_fn, 400)
        loader.load_state_dict(state)
        assert numbers(500) == whole[300:]


def test_unrepeatable_loader_is_named_at_its_resume(appliance: Appliance) -> None:
    loader = DataLoader(streams.unrepeatable, 100)
    drain(appliance, loader, steps=8)
    again = DataLoader(streams.unrepeatable, 100)
    again.load_state_dict(loader.state_dict())
    with pytest.raises(errors.ReplayMismatchError, match="not deterministic: run penstock doctor"):
        drain(appliance, again, steps=2)


def test_deaggregate_that_raises(appliance: Appliance) -> None:
    loader = DataLoader(streams.bad_deaggregate)
    drain(appliance, loader, steps=4)
    for workers in (2, 1):
        again = DataLoader(streams.bad_deaggregate)
        again.load_state_dict(loader.state_dict())
        with (
            beside(appliance, num_workers_per_box=workers) as other,
            pytest.raises(errors.InputFnError, match="no such worker in the state"),
        ):
            drain(other, again, steps=2)


def test_a_batch_above_the_limit(appliance: Appliance) -> None:
    with beside(appliance, max_batch_bytes=1 << 20) as small:
        got: list[int] = []
        loader = DataLoader(streams.growing, [10, 200_000, 2_000_000])
        with pytest.raises(errors.BatchTooLargeError, match=r"max_batch_bytes"):
            got.extend(len(batch) for batch in DataExecutor(loader, appliance=small))
        assert got == [10, 200_000]


def test_strict_structure_names_both(appliance: Appliance) -> None:
    with beside(appliance, strict_structure=True) as strict:
        got: list[Any] = []
        with pytest.raises(errors.StructureChangedError, match=r"int64.*float32"):
            got.extend(DataExecutor(DataLoader(streams.changing), appliance=strict))
        assert len(got) == 2


def test_state_of_an_unavailable_step_is_an_error(appliance: Appliance) -> None:
    with beside(appliance, retention_steps=8) as short:
        loader = DataLoader(streams.counter, 1000)
        executor = DataExecutor(loader, num_steps=300, appliance=short)
        for _ in executor:
            pass
        session = loader._session
        assert session is not None
        for step in (301, 5):
            with pytest.raises(errors.StateUnavailableError, match="steps"):
                session.run.fetch_state(step, 10.0)


def test_get_worker_state_outside_of_state_dict() -> None:
    from penstock.client import get_worker_state

    with pytest.raises(RuntimeError, match="state_dict"):
        get_worker_state()


def test_unsharded_input_of_workers_warns_once(appliance: Appliance) -> None:
    deadline, warned_at = time.monotonic() + 60.0, 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, _ in enumerate(DataExecutor(DataLoader(streams.unsharded, 3000), 10**9, appliance=appliance)):
            # What the workers know comes by way of the coordinator: how many steps later is no promise.
            warned_at = warned_at or (step if caught else 0)
            if time.monotonic() > deadline or (warned_at and step > warned_at + 10_000):
                break
    assert len([one for one in caught if "current_assignment" in str(one.message)]) == 1


def test_changed_structure_is_fine_without_strict(appliance: Appliance) -> None:
    dtypes = [batch["x"].dtype for batch in drain(appliance, DataLoader(streams.changing))]
    assert dtypes == [torch.float32] * 4 + [torch.int64] * 2


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt"),
        ("mute", "Mute"),
    ],
)
def test_any_user_error_is_one_bounded_error(appliance: Appliance, how: str, says: str) -> None:
    got: list[int] = []
    with pytest.raises(errors.InputFnError, match=says) as caught:
        got.extend(int(batch) for batch in DataExecutor(DataLoader(streams.leaves, how), appliance=appliance))
    assert got == [0, 0, 1, 1]
    assert "in leaves" in caught.value.remote_traceback
    assert len(str(caught.value)) < 200_000
