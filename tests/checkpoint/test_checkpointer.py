"""Saving from one process: what is saved is what was there, calls wait for no more than they must, faults are told."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import threading
import zoneinfo
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from census import held
from small_disk import small_disk_at
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from waiting import until

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.client.checkpoint.saving import writer_process
from penstock.proto.errors import CheckpointError, DeadlineError, InvalidArgumentError
from penstock.proto.state.checkpoint_files import checkpoints, leftovers, locked

MIB = 1 << 20


def tensors() -> dict[str, torch.Tensor]:
    """Values of all kinds that a state may hold."""
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "plain": base.clone(),
        "transposed": base.t(),
        "view": torch.arange(MIB)[10:20],
        "strided": base[::2, 1::3],
        "expanded": torch.tensor([1.5]).expand(3, 4),
        "bf16": torch.randn(5).bfloat16(),
        "float8": torch.randn(8).to(torch.float8_e4m3fn),
        "complex": torch.complex(torch.randn(3), torch.randn(3)),
        "conjugate": torch.complex(torch.randn(3), torch.randn(3)).conj(),
        "negative": torch.complex(torch.randn(3), torch.randn(3)).conj().imag,
        "bool": torch.tensor([True, False]),
        "int8": torch.arange(-3, 3, dtype=torch.int8),
        "number": torch.tensor(3.25),
        "empty": torch.empty(0, 3),
        "no dims, int": torch.tensor(7),
        "parameter": nn.Parameter(torch.randn(2, 2)),
    }


def zeros_like(values: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in values.items()}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare two states to the bit."""
    if one.dtype is torch.float8_e4m3fn:
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return one.dtype == other.dtype and torch.equal(one, other)


@contextmanager
def stopped(checkpointer: AsyncCheckpointer) -> Iterator[None]:
    """Its writer does nothing meanwhile."""
    pid = checkpointer._writer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_tensors_of_all_kinds_restore_bitwise(tmp_path: Path) -> None:
    """Restore with Penstock and with torch's own reader."""
    module, saved = nn.Linear(3, 4), tensors()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": module, "all": saved, "numbers": {"lr": 0.5, "names": ["a", "b"]}})
        path = checkpointer.result()
        assert path == tmp_path / "step-1"
        found = zeros_like(saved)
        assert checkpointer.restore({"all": found}) == 1
    assert [name for name in found if not same(saved[name], found[name])] == []
    # A view is saved, and not all of what it is a view of.
    assert sum(file.stat().st_size for file in path.iterdir()) < 64 << 10
    state: dict[str, Any] = {
        "model": {name: torch.zeros_like(value) for name, value in module.state_dict().items()},
        "all": zeros_like(saved),
        "numbers": {"lr": 0.0, "names": []},
    }
    load(state, checkpoint_id=path)
    assert state["numbers"] == {"lr": 0.5, "names": ["a", "b"]}
    assert all(torch.equal(state["model"][name], value) for name, value in module.state_dict().items())
    assert [name for name in saved if not same(saved[name], state["all"][name])] == []


def test_what_changes_after_the_call_is_not_in_it(tmp_path: Path) -> None:
    """The state is unchanged, even if the writer has not begun yet."""
    whole, view, numbers = torch.ones(MIB), torch.ones(MIB), {"list": [1, 2]}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        with stopped(checkpointer):
            checkpointer.save(1, {"whole": whole, "part": view[5:10], "numbers": numbers})
            whole.fill_(2)
            view.fill_(2)
            numbers["list"].append(3)
        state: dict[str, Any] = {"whole": torch.zeros(MIB), "part": torch.zeros(5), "numbers": {"list": None}}
        checkpointer.wait()
        checkpointer.restore(state)
    assert state["whole"].eq(1).all()
    assert state["part"].eq(1).all()
    assert state["numbers"] == {"list": [1, 2]}


def test_each_save_has_its_own_values(tmp_path: Path) -> None:
    """The shared memory is used again, shapes and objects change, keys come and go: no save has another's."""
    steps = range(8)

    def state(step: int) -> dict[str, Any]:
        return {
            "same": torch.full((1000,), float(step)),
            "grows": torch.full((1 + 1000 * (step // 3),), step),
            "note": {"text": "x" * (step * 40_000), "step": step, f"only-{step}": 0.0 if step % 2 else -0.0},
        }

    with AsyncCheckpointer(tmp_path, threads=1) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step))
        checkpointer.wait()
        for step in steps:
            expected = state(step)
            found: dict[str, Any] = {
                "same": torch.zeros(1000),
                "grows": torch.zeros_like(expected["grows"]),
                "note": dict.fromkeys(expected["note"]),
            }
            checkpointer.restore(found, step=step)
            assert torch.equal(found["same"], expected["same"])
            assert torch.equal(found["grows"], expected["grows"])
            assert repr(found["note"]) == repr(expected["note"])  # 0.0 and -0.0 differ in it


# ---- waiting


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    """The second save waits with one buffer, the third with two."""
    for buffers in (1, 2):
        with AsyncCheckpointer(tmp_path / str(buffers), buffers=buffers) as checkpointer:
            called: list[int] = []

            def train(checkpointer: AsyncCheckpointer = checkpointer, called: list[int] = called) -> None:
                for step in range(3):
                    checkpointer.save(step, {"x": torch.full((10,), step)})
                    called.append(step)

            with stopped(checkpointer):
                thread = threading.Thread(target=train)
                thread.start()
                until(lambda called=called, buffers=buffers: len(called) == buffers)  # type: ignore[misc]
                flying = [one for one in checkpointer._pending if not one.ended.is_set()]
                assert len(flying) == buffers
                thread.join(0.3)
                assert thread.is_alive()
                assert called == list(range(buffers))
            thread.join(30)
            assert called == [0, 1, 2]
            checkpointer.wait()
            assert [one.step for one in checkpoints(checkpointer.folder)] == [2, 1, 0]


def test_progress_and_a_wait_with_a_deadline(tmp_path: Path) -> None:
    with AsyncCheckpointer(tmp_path) as checkpointer:
        assert (checkpointer.progress.step, checkpointer.progress.total) == (None, 0)
        with stopped(checkpointer):
            checkpointer.save(4, {"x": torch.ones(MIB)})
            assert (checkpointer.progress.step, checkpointer.progress.written) == (4, 0)
            assert checkpointer.progress.total > 4 * MIB
            with pytest.raises(DeadlineError, match=r"waited 0.05 s for the writer of rank 0 to save step 4: 0 of"):
                checkpointer.wait(0.05)
        checkpointer.wait()
        assert checkpointer.progress.step is None


def test_two_jobs_in_one_folder_take_turns(tmp_path: Path) -> None:
    with AsyncCheckpointer(tmp_path, timeout_s=0.3) as checkpointer:
        with locked(tmp_path, 1):
            checkpointer.save(1, {"x": torch.ones(3)})
            with pytest.raises(
                CheckpointError,
                match=rf"waited \S+ s for process {os.getpid()} on .*, which holds the lock of {tmp_path}",
            ):
                checkpointer.wait()
        checkpointer._timeout_s = 30
        checkpointer.save(2, {"x": torch.ones(3)})
        checkpointer.wait()
    assert [one.step for one in checkpoints(tmp_path)] == [2]


# ---- faults of the writer


def test_the_save_after_a_killed_writer_raises_and_the_next_succeeds(tmp_path: Path) -> None:
    state = {"x": torch.ones(MIB)}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        first = checkpointer._writer.pid
        assert first is not None
        with stopped(checkpointer):
            checkpointer.save(2, state)
            os.kill(first, signal.SIGKILL)
            with pytest.raises(
                CheckpointError, match=r"step 2 was not saved into .*: rank 0: its writer .* \(killed by SIGKILL"
            ):
                checkpointer.save(3, state)
        assert checkpointer.latest() == 1
        checkpointer.save(3, {"x": torch.full((MIB,), 3.0)})
        assert checkpointer.result() == tmp_path / "step-3"
        assert checkpointer._writer.pid != first
        found = {"x": torch.zeros(MIB)}
        checkpointer.restore(found)
        assert found["x"].eq(3).all()
        assert not leftovers(tmp_path)


def test_a_hanging_writer_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_process, "GRACE_S", 0.1)
    with AsyncCheckpointer(tmp_path, timeout_s=0.2) as checkpointer:
        pid = checkpointer._writer.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        checkpointer.save(1, {"x": torch.ones(3)})
        with pytest.raises(CheckpointError, match=r"rank 0: its writer did not answer within 0.3 s, and was killed"):
            checkpointer.wait()
        assert not Path(f"/proc/{pid}").exists()
        checkpointer._timeout_s = 30
        checkpointer.save(2, {"x": torch.ones(3)})
        checkpointer.wait()
        assert checkpointer.latest() == 2


def test_a_full_disk_is_named_with_the_bytes(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "disk", 6 * MIB) as disk, AsyncCheckpointer(disk) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(MIB // 2)})
        checkpointer.wait()
        checkpointer.save(2, {"x": torch.ones(2 * MIB)})
        with pytest.raises(
            CheckpointError,
            match=r"rank 0: .*step-2.tmp-.*: No space left on device \(8,[0-9,]+ bytes to write, [0-9,]+ free",
        ):
            checkpointer.wait()
        assert [path.name for path in sorted(disk.iterdir())] == [".lock", "latest", "step-1"]
        checkpointer.save(3, {"x": torch.ones(MIB // 2)})
        checkpointer.wait()
        assert checkpointer.latest() == 3


def test_a_read_only_disk_can_be_restored_from(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "disk", 6 * MIB) as disk:
        with AsyncCheckpointer(disk) as checkpointer:
            checkpointer.save(1, {"x": torch.ones(4)})
            checkpointer.wait()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with AsyncCheckpointer(disk) as checkpointer:
            checkpointer.save(2, {"x": torch.ones(4)})
            with pytest.raises(CheckpointError, match=r"rank 0: .*Read-only file system"):
                checkpointer.wait()
            found = {"x": torch.zeros(4)}
            assert checkpointer.restore(found) == 1
            assert found["x"].eq(1).all()


# ---- what is left behind


def test_nothing_stays_behind(tmp_path: Path) -> None:
    def memory() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:penstock-checkpoint")

    gc.collect()
    before, others = held(), memory()  # those that an earlier test's traceback holds may go at any time
    for number in range(3):
        checkpointer = AsyncCheckpointer(tmp_path, buffers=2)
        for step in range(3):
            checkpointer.save(step, {"x": torch.ones(MIB + number)})
        until(lambda: memory() <= others + 2)
        checkpointer.close()
        checkpointer.close()
        with pytest.raises(RuntimeError, match="this AsyncCheckpointer is closed"):
            checkpointer.save(9, {})
    del checkpointer
    gc.collect()
    until(lambda: held() <= before)
    assert memory() <= others


def test_the_writer_has_no_torch_grpc_or_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", "secret")
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(4)})
        checkpointer.wait()
        place = Path(f"/proc/{checkpointer._writer.pid}")
        maps = (place / "maps").read_text()
        assert "memfd:penstock-checkpoint" in maps
        assert not [name for name in ("libtorch", "cygrpc", "numpy", "libcuda") if name in maps]
        assert b"secret" not in (place / "environ").read_bytes()
        assert b"secret" not in (place / "cmdline").read_bytes()


# ---- what cannot be meant


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_last": 0}, r"keep_last must be an int >= 1, got 0"),
        ({"keep_every": 5}, r"keep_every=5 needs keep_last"),
        ({"threads": 1.5}, r"threads must be an int >= 1, got 1\.5"),
        ({"buffers": 3}, "buffers must be 1 or 2, got 3"),
        ({"timeout_s": float("nan")}, "timeout_s must be in"),
        ({"on_exit": "wait"}, 'must be "finish" or "abandon"'),
    ],
)
def test_invalid_settings_are_errors(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        AsyncCheckpointer(tmp_path, **options)


def test_states_that_cannot_be_meant(tmp_path: Path) -> None:
    wrong: list[tuple[Any, Any, str]] = [
        (-1, {"x": 1}, r"step of save\(\) must be an int from 0 to .*, got -1"),
        (1, [1], "the state to save must be a dict of names and values, .* got list"),
        (1, {"a.b": 1, "a": {"b": 2}}, "two values under the name a.b"),
        (1, {"__penstock__": 1}, "must not have the key '__penstock__'"),
        (
            1,
            {"all": {"net": nn.Linear(1, 1)}},
            "'all.net' of the state to save is a Linear inside a dict or list: move",
        ),
    ]
    with AsyncCheckpointer(tmp_path) as checkpointer:
        for step, state, words in wrong:
            with pytest.raises(InvalidArgumentError, match=words):
                checkpointer.save(step, state)
        checkpointer.save(1, {"x": 1})
        checkpointer.wait()
        with pytest.raises(CheckpointError, match="result"):
            AsyncCheckpointer(tmp_path).result()


ZONE = b"TZif".ljust(36, b"\0") + bytes([0, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0]) + b"UTC\0"
"""A file of a time zone without a name."""


def test_what_cannot_be_saved_is_named(checkpointer: AsyncCheckpointer) -> None:
    wrong = [
        (lambda: 1, r"'x.y' of the state to save cannot be saved: .*(local object|pickle)"),
        (
            torch.eye(3).to_sparse(),
            r"'x.y' of the state to save is a sparse_coo tensor, which no checkpoint can restore",
        ),
        (
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "'x.y' .* is a nested tensor",
        ),
        (torch.ones(2, device="meta"), r"'x.y' of the state to save is on the meta device, and has no values"),
        (zoneinfo.ZoneInfo.from_file(io.BytesIO(ZONE)), r"'x.y' of the state to save cannot be saved: PicklingError"),
        (nn.LazyLinear(3).weight, r"'x.y' of the state to save has no values yet"),
        (
            {object(): 1},
            r"'x.y' of the state to save has a key of type object, <object .*, which would be restored as a str",
        ),
    ]
    for value, words in wrong:
        with pytest.raises(InvalidArgumentError, match=words):
            checkpointer.save(1, {"x": {"y": value}})
    checkpointer.save(2, {"x": torch.ones(3)})
    checkpointer.wait()
    assert checkpointer.latest() == 2


def test_nothing_to_save_is_a_checkpoint_too(checkpointer: AsyncCheckpointer) -> None:
    checkpointer.save(1, {})
    assert sorted(path.name for path in Path(checkpointer.result()).iterdir()) == [
        ".metadata",
        "index.json",
        "penstock.json",
    ]
    assert checkpointer.restore({}) == 1


def test_prepared_while_a_save_is_in_flight(tmp_path: Path) -> None:
    """The call waits: the memory that it fills is being written from."""
    with AsyncCheckpointer(tmp_path, buffers=2) as checkpointer:
        with stopped(checkpointer):
            checkpointer.save(1, {"x": torch.ones(MIB)})
            thread = threading.Thread(target=checkpointer.prepare, args=({"x": torch.zeros(MIB)},))
            thread.start()
            thread.join(0.3)
            assert thread.is_alive()
        thread.join(30)
        found = {"x": torch.zeros(MIB)}
        checkpointer.restore(found, verify=True)
        assert found["x"].eq(1).all()
