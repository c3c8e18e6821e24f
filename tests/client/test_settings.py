"""Settings: arguments over PENSTOCK_* variables over torchrun's over defaults; and what each wrong value is told."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from appliances import made

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.api import appliance_settings
from penstock.client.api.appliance_settings import ApplianceOptions, Launcher, attempt_key, resolve
from penstock.client.testing import FakeAppliance
from penstock.proto.errors import AuthenticationError, BoxOutOfRangeError, InvalidArgumentError
from penstock.proto.lane.compression import require
from penstock.runtime.config.job_settings import JobSettings
from penstock.runtime.moved_names import MOVED

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_arguments_are_declared_alike() -> None:
    assert set(inspect.signature(Appliance).parameters) < set(JobSettings.model_fields)
    source = inspect.getsource(appliance_settings)
    assert [name for name in get_type_hints(ApplianceOptions) if f"\n    {name}: " not in source] == []
    assert set(inspect.signature(FakeAppliance).parameters) - {"faults"} == ApplianceOptions.__optional_keys__


def test_what_operators_set_is_no_argument() -> None:
    options = inspect.signature(Appliance).parameters
    moved = MOVED["Appliance"].arguments
    assert len(options) == 11
    assert set(JobSettings.model_fields) | {"token"} == set(options) | set(moved)
    for name, remedy in moved.items():
        with pytest.raises(TypeError, match=f"^Appliance has no argument '{name}': set PENSTOCK_{name.upper()}"):
            Appliance(**{name: "x"})  # type: ignore[arg-type]
        place = JobSettings.place(name) if name != "token" else None
        assert place is None or f"{place[1]} in [{place[0]}] of the settings file" in remedy


def test_an_unknown_argument_is_named() -> None:
    made: Any = Appliance
    with pytest.raises(TypeError, match=r"'num_worker_per_box' is no option here: pass some of .*num_workers_per_box"):
        made(num_worker_per_box=2)
    made = FakeAppliance
    with pytest.raises(TypeError, match="'lane' is no option here"):
        made(lane="tcp")


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NUM_WORKERS_PER_BOX", "3")
    monkeypatch.setenv("PENSTOCK_COORDINATOR", "host:1")
    monkeypatch.setenv("PENSTOCK_SEED", "11")
    monkeypatch.setenv("PENSTOCK_JOB", "")
    settings = resolve(num_workers_per_box=2, seed=0)
    assert (settings.num_workers_per_box, settings.address, settings.seed, settings.job) == (2, "host:1", 0, "")
    assert resolve().num_workers_per_box == 3


def test_torchrun_stands_for_boxes(torchrun: pytest.MonkeyPatch) -> None:
    assert (resolve().box, resolve().num_boxes) == (3, 4)
    assert (resolve(box=1, num_boxes=2).box, resolve(box=1, num_boxes=2).num_boxes) == (1, 2)
    assert resolve(num_boxes=1).box == 0, "a loader of the rank's own"
    torchrun.setenv("PENSTOCK_BOX", "2")
    assert resolve().box == 2


def test_key_is_the_launch_s_without_each_machine_s_restarts(torchrun: pytest.MonkeyPatch) -> None:
    assert attempt_key(resolve(), Launcher()) == "none@10.0.0.1:29500"
    torchrun.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert attempt_key(resolve(), Launcher()) == "none@10.0.0.1:29500"
    assert attempt_key(resolve(attempt="mine"), Launcher()) == "mine"
    for name in TORCHRUN:
        torchrun.delenv(name)
    assert attempt_key(resolve(), Launcher()) == ""


@pytest.fixture
def distributed(tmp_path: Path) -> Iterator[None]:
    """torch.distributed is initialised, with this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ranks_that_variables_give_in_part_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidArgumentError, match="RANK must be set if WORLD_SIZE is, got WORLD_SIZE=2 alone"):
        resolve()
    assert resolve(box=1, num_boxes=2).box == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert resolve().num_boxes == 1


@pytest.mark.usefixtures("distributed")
def test_torch_distributed_has_a_say(torchrun: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match=r"RANK=3 and WORLD_SIZE=4 must be .*, got rank 0 of 1"):
        resolve()
    assert resolve(box=1, num_boxes=2).box == 1, "ranks that share a model pass their box"
    torchrun.delenv("RANK")
    assert (resolve().box, resolve().num_boxes) == (0, 1)


def test_a_rank_that_is_told_after_the_appliance_was_made(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Appliance(num_workers_per_box=0, seed=1) as own, Appliance(num_workers_per_box=0, num_boxes=1) as alone:
        request.getfixturevalue("distributed")
        with pytest.raises(InvalidArgumentError, match=r"must have box=0 and num_boxes=1, .*got box=1 and num_boxes=2"):
            iter(DataExecutor(DataLoader(range, 3), appliance=own))
        assert list(DataExecutor(DataLoader(range, 3), appliance=alone)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_workers_per_box": -1}, "num_workers_per_box=-1: .*greater than or equal to 0"),
        ({"lane": "udp"}, "lane='udp'"),
        ({"compression": "gzip"}, "compression='gzip': .*'lz4' or 'zstd'"),
        ({"timeout_s": float("inf")}, "timeout_s=inf"),
        ({"job": "a/b"}, "job='a/b'.*slash"),
        ({"job": "line\nbreak"}, "printable"),
        ({"job": "x" * 201}, "printable"),
        ({"poison": "drop"}, "poison='drop': .*'fail' or 'skip'"),
        ({"device": torch.device("xpu", 1)}, "device='xpu:1': .*, got 'xpu:1'"),
    ],
)
def test_values_that_cannot_be_meant(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        resolve(**given)


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NUM_BOXES", "two")
    with pytest.raises(InvalidArgumentError, match=r"num_boxes='two' \(from PENSTOCK_NUM_BOXES\)"):
        resolve()


def test_unusable_device_is_named_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve().device == "", "none of them is the default"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgumentError, match=r"Appliance: device='cuda:1': .*device='cuda:1' cannot be used"):
        resolve(device=torch.device("cuda", 1))
    monkeypatch.setenv("PENSTOCK_DEVICE", "cuda")
    with pytest.raises(InvalidArgumentError, match=r"device='cuda' \(from PENSTOCK_DEVICE\): .*'cuda' cannot be used"):
        Appliance()


def test_compression_without_package_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    require.cache_clear()
    monkeypatch.setitem(sys.modules, "lz4", None)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'penstock\[compression\]"):
        resolve(compression="lz4")
    assert resolve(compression="zstd").compression == "zstd"


def test_box_out_of_range_says_where_it_came_from(torchrun: pytest.MonkeyPatch) -> None:
    with pytest.raises(BoxOutOfRangeError, match=r"box must be .*\(num_boxes=2\), got 3 \(from RANK\)"):
        resolve(num_boxes=2)


# ---- what an appliance refuses before it starts anything


def test_several_boxes_are_not_embedded() -> None:
    with pytest.raises(
        InvalidArgumentError, match="over several processes needs a coordinator's address, got none: start"
    ):
        Appliance(box=0, num_boxes=2)


def test_boxes_of_a_coordinator_need_a_job_name() -> None:
    with pytest.raises(InvalidArgumentError, match="PENSTOCK_JOB"):
        made("localhost:1", box=0, num_boxes=2, token="t")


def test_a_remote_coordinator_needs_a_token() -> None:
    with pytest.raises(AuthenticationError, match="PENSTOCK_TOKEN"):
        Appliance("localhost:1")


def test_bare_names_are_other_peoples_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = resolve()
    for name in type(plain).model_fields:
        monkeypatch.setenv(name.upper(), "7")
    assert resolve() == plain


def test_settings_file_ranks_below_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text("[client]\nnum_workers_per_box = 3\ntimeout_s = 0\n")
    monkeypatch.setenv("PENSTOCK_CONFIG", str(path))
    with pytest.raises(InvalidArgumentError, match=rf"timeout_s=0 \(from {path}\)"):
        resolve()
    path.write_text('[client]\nnum_workers_per_box = 3\ntimeout_s = 9\n[cluster]\ncoordinator = "head:7070"\n')
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    settings = resolve(timeout_s=7.0)
    assert (settings.num_workers_per_box, settings.timeout_s, settings.box, settings.num_boxes) == (3, 7.0, 1, 2)
    assert settings.address == "head:7070"
    assert resolve(address="").address == ""
    path.write_text("[client]\nnum_boxes = 4\n")
    with pytest.raises(InvalidArgumentError, match="num_boxes must not be in"):
        resolve()
