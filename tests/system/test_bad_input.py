"""Bad input gets a clear error that names the thing and the remedy; nothing hangs, and the appliance lives on."""

from __future__ import annotations

import re
import time
import warnings
from typing import Any

import hazards
import pytest
import streams
import torch
from forked import Child
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader, DataLoaderCheckpoint
from penstock.proto import errors
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.state.codec import decode_state, encode_state


def drain(appliance: Appliance, loader: DataLoader, steps: int | None = None) -> list[Any]:
    return list(DataExecutor(loader, num_steps=steps, appliance=appliance))


def still_works(appliance: Appliance) -> None:
    assert len(drain(appliance, DataLoader(streams.counter, 3))) == 6


def test_not_callable() -> None:
    with pytest.raises(TypeError, match="callable"):
        DataLoader(3)  # type: ignore[call-overload]


def test_lambda_has_no_name_to_import() -> None:
    loader = DataLoader(lambda: [1])
    elsewhere = Appliance("unix:/nowhere", token="t", job="j", seed=1)
    with pytest.raises(errors.InvalidArgumentError, match=r"is a lambda.*write a def at the top level.*workers of its"):
        drain(elsewhere, loader)


@pytest.mark.parametrize(
    ("input_fn", "says"), [(streams.returns_none, "returned None"), (streams.returns_number, "returned a int")]
)
def test_input_fn_that_returns_no_iterable(appliance: Appliance, input_fn: Any, says: str) -> None:
    with pytest.raises(errors.InputFnError, match=says):
        drain(appliance, DataLoader(input_fn))
    still_works(appliance)


def test_raising_input_fn_shows_remote_traceback(appliance: Appliance) -> None:
    with pytest.raises(errors.InputFnError, match="no such dataset") as caught:
        drain(appliance, DataLoader(streams.raises))
    assert "in raises" in caught.value.remote_traceback
    assert "box 0" in str(caught.value)
    still_works(appliance)


def test_error_comes_after_the_batches_before_it(appliance: Appliance) -> None:
    got: list[int] = []
    with pytest.raises(errors.InputFnError, match="broken sample") as caught:
        got.extend(int(batch) for batch in DataExecutor(DataLoader(streams.raises_at, 4), appliance=appliance))
    assert got == [0, 0, 1, 1, 2, 2]
    text = str(caught.value)
    assert "batch 4" in text
    assert "slot 0" in text
    assert "step 7" in text
    assert "in raises_at" in caught.value.remote_traceback


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


def test_unsupported_leaf_names_path_and_type(appliance: Appliance) -> None:
    with pytest.raises(errors.UnsupportedLeafError, match=r"\['meta'\]\['when'\].*set"):
        drain(appliance, DataLoader(streams.odd_leaf))


def test_empty_input(appliance: Appliance) -> None:
    with pytest.raises(errors.EmptyInputError, match="streams:empty yielded no batch"):
        drain(appliance, DataLoader(streams.empty))
    with pytest.raises(errors.EmptyInputError):
        drain(appliance, DataLoader(streams.empty), steps=5)


def test_stateless_loader_needs_replay_to_save(appliance: Appliance) -> None:
    with beside(appliance) as plain:
        loader = DataLoader(streams.shuffled, 24)
        executor = DataExecutor(loader, num_steps=4, appliance=plain)
        for _ in executor:
            pass
        with pytest.raises(RuntimeError, match=r"replay=True"):
            loader.state_dict()
        assert not loader.is_restartable


def test_persistent_workers_are_refused_by_name(appliance: Appliance) -> None:
    loader = DataLoader(streams.persistent)
    drain(appliance, loader, steps=3)
    with pytest.raises(errors.NotRestartableError, match="persistent_workers"):
        loader.state_dict()


@pytest.mark.parametrize(
    ("input_fn", "says"),
    [(streams.bad_state, "cannot reach its server"), (streams.odd_state, r"\['lock'\]")],
)
def test_failed_state_fails_only_the_save(appliance: Appliance, input_fn: Any, says: str) -> None:
    loader = DataLoader(input_fn, 8)
    executor = DataExecutor(loader, num_steps=12, appliance=appliance)
    for _ in executor:
        if executor.step == 3:
            with pytest.raises(errors.PenstockError, match=says):
                loader.state_dict()
    assert executor.step == 12


@pytest.mark.parametrize("input_fn", [streams.counts_late, streams.prefetches])
def test_wrongly_restoring_loader_is_counted(
    appliance: Appliance, input_fn: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its states are not used, which is said once; and what is saved is exact."""
    loader = DataLoader(input_fn, 400)
    steps = DataExecutor(loader, num_steps=800, appliance=appliance)
    whole, said = [], ""
    warning = re.compile(rf"{input_fn.__name__}: restored from .* Such states are not used")
    for batch in steps:
        whole.append(int(batch["x"][0]))
        if steps.step == 300:
            deadline = time.monotonic() + 60
            while not warning.search(said):
                assert time.monotonic() < deadline, said
                said += capfd.readouterr().err
                time.sleep(0.02)
            state = loader.state_dict()
    assert len(warning.findall(said + capfd.readouterr().err)) == 1
    again = DataLoader(input_fn, 400)
    again.load_state_dict(state)
    assert [int(batch["x"][0]) for batch in DataExecutor(again, num_steps=500, appliance=appliance)] == whole[300:]


def test_unrepeatable_loader_is_named_early(appliance: Appliance) -> None:
    """Its stream goes on; its states are refused as soon as that was found out, and that is soon."""
    loader = DataLoader(streams.unrepeatable, 10**7)
    deadline, refused = time.monotonic() + 60, ""
    for _ in DataExecutor(loader, num_steps=10**7, appliance=appliance):
        assert time.monotonic() < deadline
        try:
            loader.state_dict()
        except errors.ReplayMismatchError as error:
            refused = error.message
            break
    assert "must yield the same batches each time" in refused


@pytest.fixture(scope="module")
def saved(appliance: Appliance) -> dict[str, Any]:
    """A state of streams.counter at step 5."""
    loader = DataLoader(streams.counter, 10)
    drain(appliance, loader, steps=5)
    return loader.state_dict()


def test_a_state_of_another_loader(saved: dict[str, Any]) -> None:
    with pytest.raises(errors.StateMismatchError, match=r"streams:counter.*streams:shared"):
        DataLoader(streams.shared).load_state_dict(saved)


def test_a_state_of_another_shape(appliance: Appliance, saved: dict[str, Any]) -> None:
    loader = DataLoader(streams.counter, 10)
    loader.load_state_dict(saved)
    with (
        beside(appliance, num_workers_per_box=3) as three,
        pytest.raises(errors.StateMismatchError, match=r"2 workers.*3 workers"),
    ):
        drain(three, loader)


def test_a_damaged_state(saved: dict[str, Any]) -> None:
    ours = dict(saved["__penstock__"])
    record = bytearray(ours["record"])
    record[len(record) // 2] ^= 1
    with pytest.raises(errors.StateCorruptError, match="checksum"):
        DataLoader(streams.counter, 10).load_state_dict({"__penstock__": {**ours, "record": bytes(record)}})


def test_a_newer_state(saved: dict[str, Any]) -> None:
    newer = {"__penstock__": {**saved["__penstock__"], "format": 99}}
    with pytest.raises(errors.StateVersionError, match="99"):
        DataLoader(streams.counter, 10).load_state_dict(newer)


def test_a_dict_that_is_no_state() -> None:
    with pytest.raises(errors.StateMismatchError, match="__penstock__"):
        DataLoader(streams.counter, 10).load_state_dict({"epoch": 3})


def test_another_seed_than_the_states(appliance: Appliance, saved: dict[str, Any]) -> None:
    loader = DataLoader(streams.counter, 10)
    loader.load_state_dict(saved)
    with (
        beside(appliance, num_workers_per_box=2, seed=8) as other,
        pytest.raises(errors.StateMismatchError, match="seed 7"),
    ):
        drain(other, loader)


def test_loading_while_an_executor_iterates(appliance: Appliance, saved: dict[str, Any]) -> None:
    loader = DataLoader(streams.counter, 10)
    for _ in DataExecutor(loader, num_steps=3, appliance=appliance):
        with pytest.raises(RuntimeError, match="iterat"):
            loader.load_state_dict(saved)
    loader.load_state_dict(saved)
    assert loader.state_dict() == saved


def test_deaggregate_that_raises(appliance: Appliance) -> None:
    """On the same shape the stream is counted and replayed; nothing else can tell what comes next on another one."""
    loader = DataLoader(streams.bad_deaggregate)
    drain(appliance, loader, steps=4)
    again = DataLoader(streams.bad_deaggregate)
    again.load_state_dict(loader.state_dict())
    went_on = drain(appliance, again, steps=2)
    whole = drain(appliance, DataLoader(streams.bad_deaggregate), steps=6)
    assert list(map(repr, went_on)) == list(map(repr, whole[4:]))
    again = DataLoader(streams.bad_deaggregate)
    again.load_state_dict(loader.state_dict())
    with (
        Appliance(num_workers_per_box=1, seed=7, timeout_s=60) as other,
        pytest.raises(errors.InputFnError, match="no such worker in the state"),
    ):
        drain(other, again, steps=2)


def test_strict_on_one_method_only(appliance: Appliance) -> None:
    with pytest.raises((TypeError, errors.PenstockError), match="strict"):
        drain(appliance, DataLoader(streams.half_strict), steps=2)


@pytest.mark.parametrize("bad", [{"num_steps": -1}, {"num_steps": 3, "checkpoint_steps": -2}])
def test_steps_below_one(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="steps"):
        DataExecutor(DataLoader(streams.counter), **bad)


def test_box_out_of_range() -> None:
    with pytest.raises(ValueError, match="box"):
        Appliance("127.0.0.1:1", box=2, num_boxes=2)


def test_a_loader_that_is_not_wrapped() -> None:
    with pytest.raises(TypeError, match=r"DataLoader\(input_fn\)"):
        DataExecutor([torch.zeros(1)])  # type: ignore[arg-type]


def test_coordinator_unreachable() -> None:
    appliance = Appliance("127.0.0.1:9", token="t" * 32, timeout_s=1.0)
    with appliance, pytest.raises(errors.CoordinatorUnavailableError, match=r"127\.0\.0\.1:9"):
        drain(appliance, DataLoader(streams.counter))


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


def test_first_state_is_a_local_instances(appliance: Appliance) -> None:
    loader = DataLoader(streams.shared, 30)
    state = loader.state_dict()
    assert state["start"] == 0
    again = DataLoader(streams.shared, 30)
    again.load_state_dict(decode_state(encode_state(state)))  # type: ignore[arg-type]
    assert [b["number"] for b in drain(appliance, again, steps=4)] == [0, 1, 2, 3]


def test_two_executors_on_one_loader(appliance: Appliance) -> None:
    loader = DataLoader(streams.counter, 10)
    for _ in DataExecutor(loader, num_steps=2, appliance=appliance):
        with pytest.raises(RuntimeError, match="another executor"):
            iter(DataExecutor(loader, appliance=appliance))


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


def test_sharding_by_torchs_worker_info_is_a_look(appliance: Appliance) -> None:
    rows = [row for batch in drain(appliance, DataLoader(streams.sharded_by_torch)) for row in batch.tolist()]
    assert sorted(rows) == list(range(24))


def test_records_of_a_state(appliance: Appliance) -> None:
    checkpoint = DataLoaderCheckpoint(1, 2, 3, 2, 10, 5, 20)
    assert checkpoint.global_worker_id == 5
    assert checkpoint.total_num_workers == 6


def test_changed_structure_is_fine_without_strict(appliance: Appliance) -> None:
    dtypes = [batch["x"].dtype for batch in drain(appliance, DataLoader(streams.changing))]
    assert dtypes == [torch.float32] * 4 + [torch.int64] * 2


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt"),
        ("surrogate", "bad "),
        ("long", "yyy"),
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
