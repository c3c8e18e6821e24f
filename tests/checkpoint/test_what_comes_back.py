"""What goes into a checkpoint comes out, as torch.save and torch.load give it back, or is refused at the save."""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import threading
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from around import Around
from quantised import Rows8
from torch import nn

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.proto.errors import CheckpointError, InvalidArgumentError


class Colour(enum.Enum):
    RED = (1, 2)


class Flags(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass
class Config:
    width: int
    kinds: list[Any]
    where: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    name: str


def test_parts_of_the_user_s_classes(checkpointer: AsyncCheckpointer) -> None:
    config = Config(3, [Colour.RED, Flags.A | Flags.B], Point(1, (Fixed("n"), {"a": 2})))
    config.extra = {"set"}  # type: ignore[attr-defined]
    state: dict[str, Any] = {"config": config, "one": Colour.RED, "in": {"it": [Point(0, None)]}}
    checkpointer.save(1, state)
    found: dict[str, Any] = {"config": None, "one": None, "in": None}
    checkpointer.restore(found)
    assert found == state
    assert vars(found["config"]) == vars(config)
    assert type(found["in"]["it"][0]) is Point


def test_a_class_that_is_gone_is_named(checkpointer: AsyncCheckpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer.save(1, {"config": {"a": Config(1, [])}})
    checkpointer.wait()
    monkeypatch.delattr(f"{__name__}.Config")
    with pytest.raises(CheckpointError, match=r"'config.a': .* the class .*Config: import it before the restore"):
        checkpointer.restore({"config": {}})


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4"])
def test_arrays_of_ml_dtypes(checkpointer: AsyncCheckpointer, dtype: str) -> None:
    kind = getattr(ml_dtypes, dtype)
    values = np.arange(6).reshape(2, 3).astype(kind)
    checkpointer.save(1, {"x": {"array": values, "scalar": values[1, 2]}})
    found: dict[str, Any] = {"x": {}}
    checkpointer.restore(found)
    array = found["x"]["array"]
    assert (array.dtype, array.shape, array.tobytes()) == (values.dtype, values.shape, values.tobytes())
    assert type(found["x"]["scalar"]) is kind
    assert found["x"]["scalar"] == values[1, 2]


def test_metadata_of_a_dtype(checkpointer: AsyncCheckpointer) -> None:
    values = np.arange(3, dtype=np.dtype(np.int32, metadata={"unit": "m"}))
    checkpointer.save(1, {"x": {"array": values}})
    found: dict[str, Any] = {"x": {}}
    checkpointer.restore(found)
    assert found["x"]["array"].dtype.metadata == {"unit": "m"}


# ---- containers


@pytest.mark.parametrize(
    ("saved", "present"),
    [
        ([{"a": 1}, {"b": 2}, {"c": 3}], [{"a": 0}]),
        ([{"a": 1}], []),
        ([{"a": 1}], [{"a": 0}, {"z": 9}]),
        ({"a": {"b": [1, 2]}}, None),
        ({"a": {"b": [1, 2]}}, {"a": None, "grown": 3}),
        ({"a": torch.ones(3)}, {"a": torch.zeros(2)}),
        ({"a": torch.ones(3)}, {"a": torch.zeros(3), "b": torch.ones(1)}),
        (collections.OrderedDict(z=1, a=2), collections.OrderedDict(a=0)),
        (collections.Counter("aab"), collections.Counter("c")),
        (collections.Counter("aab"), {"c": 1}),
        (collections.defaultdict(list, a=[1]), {"a": [2]}),
        ((torch.ones(2), np.float32(3), Colour.RED), None),
        ([1, (torch.ones(2), {Point(1, torch.ones(1))})], []),
        ((1, [torch.ones(1)]), None),
        ([], [{"a": 1}]),
        ({}, {"a": 1}),
    ],
)
def test_containers_become_what_was_saved(checkpointer: AsyncCheckpointer, saved: Any, present: Any) -> None:
    checkpointer.save(1, {"x": saved})
    state = {"x": present}
    checkpointer.restore(state)
    assert repr(state["x"]) == repr(saved)
    assert isinstance(saved, tuple | list) or list(state["x"]) == list(saved)
    if type(present) is type(saved):
        assert state["x"] is present


def test_tensors_are_filled_where_they_fit(checkpointer: AsyncCheckpointer) -> None:
    checkpointer.save(1, {"x": {"in": [torch.ones(3), torch.ones(3)]}})
    fits, other = torch.zeros(3), torch.zeros(2)
    inner = [fits, other]
    checkpointer.restore({"x": {"in": inner}})
    assert inner[0] is fits
    assert fits.eq(1).all()
    assert inner[1] is not other
    assert other.eq(0).all()


def test_one_list_at_two_places_becomes_two(checkpointer: AsyncCheckpointer) -> None:
    checkpointer.save(1, {"x": {"a": [{"n": 1}], "b": [{"n": 2}]}})
    one = [{"n": 0}]
    state = {"x": {"a": one, "b": one}}
    checkpointer.restore(state)
    assert state["x"] == {"a": [{"n": 1}], "b": [{"n": 2}]}
    assert state["x"]["a"] is one


def test_what_contains_itself_is_refused(checkpointer: AsyncCheckpointer) -> None:
    ring: dict[str, Any] = {}
    ring["in"] = {"again": ring}
    with pytest.raises(InvalidArgumentError, match=r"'x' of the state contains itself"):
        checkpointer.save(1, {"x": ring})


def test_dicts_of_one_name_are_refused(checkpointer: AsyncCheckpointer) -> None:
    with pytest.raises(InvalidArgumentError, match=r"two values under the name x\.a\.b: rename a key"):
        checkpointer.save(1, {"x": {"a.b": {1: 2}, "a": {"b": {"c": 3}}}})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_torch_s_own_quantized_tensors_are_refused(checkpointer: AsyncCheckpointer) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    for tensor in (quantized, torch.empty(2, dtype=torch.uint4)):  # type: ignore[attr-defined]
        with pytest.raises(InvalidArgumentError, match=r"'x.q' of the state to save is of torch.* save plain tensors"):
            checkpointer.save(1, {"x": {"q": tensor}})


def test_a_state_that_cannot_take_it(checkpointer: AsyncCheckpointer) -> None:
    checkpointer.save(1, {"step": 5})
    checkpointer.wait()
    with pytest.raises(CheckpointError, match=r"'step' .*: the state to restore must be a dict .*, got mappingproxy"):
        checkpointer.restore(MappingProxyType({"step": 0}))


# ---- tensors of classes of their own


def quantised(seed: int, rows: int = 8) -> Rows8:
    return Rows8.of(torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed)))


def test_quantised_tensors_come_back_whole(checkpointer: AsyncCheckpointer) -> None:
    saved = quantised(1)
    checkpointer.save(1, {"free": {"q": saved}, "top": saved, "model": Holder(saved)})
    state: dict[str, Any] = {"free": {}, "top": quantised(2), "model": Holder(quantised(3))}
    top = state["top"]
    checkpointer.restore(state)
    assert state["top"] is top
    for one in (state["free"]["q"], top, state["model"].weight.data):
        assert type(one) is Rows8
        assert torch.equal(one.codes, saved.codes)
        assert torch.equal(one.scale, saved.scale)


class Named(torch.Tensor):
    """A tensor of a class that torch.load does not know."""


def test_a_class_that_torch_load_does_not_know_is_refused(checkpointer: AsyncCheckpointer) -> None:
    state = {"x": {"named": torch.ones(2).as_subclass(Named)}}
    for _ in range(2):
        with pytest.raises(
            InvalidArgumentError, match=r"'x.named' .* not know, .*Named: pass it to .*add_safe_globals"
        ):
            checkpointer.save(1, state)
    with torch.serialization.safe_globals([Named]):
        checkpointer.save(1, state)
        found: dict[str, Any] = {"x": {}}
        checkpointer.restore(found)
    assert type(found["x"]["named"]) is Named
    assert found["x"]["named"].tolist() == [1, 1]


def test_conjugated_and_negated_tensors(checkpointer: AsyncCheckpointer) -> None:
    """They are views that cannot be filled like others."""

    def made(value: complex) -> dict[str, Any]:
        conjugated = torch.full((2,), value).conj()
        return {"top": conjugated, "nested": {"c": conjugated.clone(), "i": conjugated.imag, "r": conjugated.real}}

    saved, present = made(1 + 2j), made(3 + 4j)
    top = present["top"]
    checkpointer.save(1, saved)
    checkpointer.restore(present)
    assert top.tolist() == [1 - 2j] * 2
    assert {name: value.tolist() for name, value in present["nested"].items()} == {
        "c": [1 - 2j] * 2,
        "i": [-2] * 2,
        "r": [1] * 2,
    }
    assert checkpointer.check(saved) == []
    assert repr(saved) == repr(made(1 + 2j))


class Holder(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


class Momentum8(torch.optim.Optimizer):
    """An optimizer whose momentum is quantised, as torchao's are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                before = self.state[one].get("momentum")
                moment = one.grad + (0.9 * before.dequantize() if before is not None else 0)
                self.state[one]["momentum"] = Rows8.of(moment)
                one -= group["lr"] * moment


def test_an_optimizer_with_quantised_state_goes_on(checkpointer: AsyncCheckpointer) -> None:
    def made() -> tuple[nn.Linear, Momentum8]:
        torch.manual_seed(0)
        module = nn.Linear(16, 8, bias=False)
        return module, Momentum8(module.parameters())

    def step(module: nn.Linear, optimizer: Momentum8) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(module(torch.ones(4, 16)).square().mean())
        optimizer.step()

    module, optimizer = made()
    for _ in range(3):
        step(module, optimizer)
    checkpointer.save(1, {"model": module, "optimizer": optimizer})
    file = io.BytesIO()
    torch.save([module.state_dict(), optimizer.state_dict()], file)
    ours, theirs = made(), made()
    checkpointer.restore({"model": ours[0], "optimizer": ours[1]})
    file.seek(0)
    states = torch.load(file, weights_only=False)
    theirs[0].load_state_dict(states[0])
    theirs[1].load_state_dict(states[1])
    for _ in range(3):
        for pair in ((module, optimizer), ours, theirs):
            step(*pair)
    assert type(ours[1].state[ours[0].weight]["momentum"]) is Rows8
    assert torch.equal(theirs[0].weight, module.weight)
    assert torch.equal(ours[0].weight, module.weight)


class Elsewhere(torch.optim.SGD):
    """An optimizer whose state_dict keeps its tensors under another key than its state, as bitsandbytes does."""

    def state_dict(self) -> Any:
        plain = super().state_dict()
        both = torch.ones(1)
        state = {number: {"packed": dict(value), "both": both} for number, value in plain["state"].items()}
        return {**plain, "state": state}

    def load_state_dict(self, state_dict: Any) -> None:
        state = {number: value["packed"] for number, value in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state})


class Wrapped(torch.optim.SGD):
    """An optimizer whose state_dict has none of torch's keys, as pytorch_optimizer's Lookahead."""

    def state_dict(self) -> Any:
        return {"base": super().state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict["base"])


class Casts(torch.optim.SGD):
    """An optimizer that keeps its state in another dtype than it is saved in."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].double()


@pytest.mark.parametrize("kind", [Elsewhere, Wrapped, Around.of, Casts])
@pytest.mark.filterwarnings("ignore:'optimizer.base' of the state:UserWarning")
def test_state_dicts_of_other_shapes(checkpointer: AsyncCheckpointer, kind: Any) -> None:
    def made() -> tuple[nn.Linear, Any]:
        torch.manual_seed(0)
        module = nn.Linear(4, 4).to(torch.bfloat16)
        return module, kind(module.named_parameters(), lr=0.1, momentum=0.9)

    def step(module: nn.Linear, optimizer: Any) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(module(torch.ones(2, 4, dtype=torch.bfloat16)).sum())
        optimizer.step()

    module, optimizer = made()
    step(module, optimizer)
    checkpointer.save(1, {"model": module, "optimizer": optimizer})
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    _, judge = made()
    judge.load_state_dict(torch.load(file, weights_only=False))
    again, fresh = made()
    checkpointer.restore({"model": again, "optimizer": fresh})
    assert repr([*fresh.state.values()]) == repr([*judge.state.values()])
    if kind is not Casts:
        for pair in ((module, optimizer), (again, fresh)):
            step(*pair)
        assert torch.equal(again.weight, module.weight)


def test_a_step_is_of_the_type_that_the_optimizer_takes(checkpointer: AsyncCheckpointer) -> None:
    def made(fused: bool) -> dict[str, Any]:
        module = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(module.parameters(), fused=fused)
        torch.autograd.backward(module(torch.ones(1, 2)).sum())
        optimizer.step()
        return {"model": module, "optimizer": optimizer}

    saved, present = made(False), made(True)
    for state in saved["optimizer"].state.values():
        state["step"] = state["step"].double()  # as torch makes it where float64 is the default
    saved["optimizer"].param_groups[0]["fused"] = True
    checkpointer.save(1, saved)
    checkpointer.restore(present)
    assert {state["step"].dtype for state in present["optimizer"].state.values()} == {torch.float32}


# ---- modules


class Renamed(nn.Module):
    """A module that has renamed its parameter in version 2, and loads the old name."""

    _version = 2

    def __init__(self, name: str = "new") -> None:
        super().__init__()
        self.seen: Any = None
        self.register_parameter(name, nn.Parameter(torch.rand(3)))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        self.seen = local_metadata.get("version")
        if f"{prefix}old" in state_dict:
            state_dict[f"{prefix}new"] = state_dict.pop(f"{prefix}old")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Before(Renamed):
    _version = 1


def test_modules_load_what_older_versions_saved(checkpointer: AsyncCheckpointer) -> None:
    old, new = Before("old"), Renamed()
    checkpointer.save(1, {"model": nn.Sequential(old)})
    checkpointer.restore({"model": nn.Sequential(new)})
    assert list(map(torch.equal, new.parameters(), old.parameters())) == [True]
    assert new.seen == 1


class Constant(nn.Module):
    """A module whose extra state is a tensor of all modules until it is loaded."""

    NONE = torch.zeros(2)

    def __init__(self) -> None:
        super().__init__()
        self.extra = Constant.NONE

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state


def test_an_extra_state_is_not_filled(checkpointer: AsyncCheckpointer) -> None:
    saved, present = Constant(), Constant()
    saved.extra = torch.ones(2)
    checkpointer.save(1, {"model": saved})
    checkpointer.restore({"model": present})
    assert present.extra.tolist() == [1, 1]
    assert Constant.NONE.tolist() == [0, 0]


class Attributes:
    """An object whose methods are attributes, as an adapter's that has those of another object, or a module's own."""

    def __init__(self, value: int) -> None:
        self.values = {"value": value}
        self.state_dict = self.values.copy
        self.load_state_dict = self.values.update


def test_methods_that_are_attributes(checkpointer: AsyncCheckpointer) -> None:
    """A module's and an optimizer's are asked in place of their classes' functions."""

    def renamed(state_dict: Any) -> Any:
        return {name.removeprefix("old_"): value for name, value in state_dict.items()}

    def made(value: int) -> dict[str, Any]:
        module = nn.Linear(2, 2)
        nn.init.constant_(module.weight, value)
        optimizer = Casts([("one", nn.Parameter(torch.ones(1)))], 0.1 * value)
        return {"other": Attributes(value), "module": module, "optimizer": optimizer}

    saved, present = made(1), made(2)
    saved["module"].register_parameter("old_bias", saved["module"].bias)
    del saved["module"].bias
    present["module"].load_state_dict = lambda state, *_: nn.Linear.load_state_dict(present["module"], renamed(state))
    present["optimizer"].load_state_dict = lambda state: present["optimizer"].param_groups[0].update(lr=7)
    checkpointer.save(1, saved)
    assert checkpointer.restore(present) == 1
    assert present["other"].values == {"value": 1}
    assert torch.equal(present["module"].weight, saved["module"].weight)
    assert torch.equal(present["module"].bias, saved["module"].old_bias)
    assert present["optimizer"].param_groups[0]["lr"] == 7


class Moved(nn.Module):
    """A module that has renamed one inside it, and finds its old version."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.BatchNorm1d(2))
        self.seen: Any = None
        module: Any = self
        module.register_load_state_dict_pre_hook(Moved.rename)

    def load_state_dict(self, state_dict: Any, *options: Any) -> Any:
        self.seen = state_dict._metadata["old"]["version"]
        return super().load_state_dict(state_dict, *options)

    def rename(self, state_dict: Any, prefix: str, *_: Any) -> None:
        for name in [name for name in state_dict if name.startswith(f"{prefix}old.")]:
            state_dict[f"{prefix}new{name.removeprefix(f'{prefix}old')}"] = state_dict.pop(name)


def test_hooks_that_rename(checkpointer: AsyncCheckpointer) -> None:
    old, new = Moved("old"), Moved("new")
    old.get_submodule("old").running_mean.add_(1)  # type: ignore[operator]
    checkpointer.save(1, {"model": old})
    checkpointer.restore({"model": new})
    assert new.get_buffer("new.running_mean").tolist() == [1, 1]
    assert new.seen == 2


def test_observers_that_resize_themselves(checkpointer: AsyncCheckpointer) -> None:
    seen = torch.ao.quantization.PerChannelMinMaxObserver()
    seen(torch.randn(4, 5))
    fresh = torch.ao.quantization.PerChannelMinMaxObserver()
    checkpointer.save(1, {"model": nn.Sequential(seen)})
    checkpointer.restore({"model": nn.Sequential(fresh)})
    assert torch.equal(fresh.min_val, seen.min_val)
    assert fresh.min_val.shape == (4,)


def test_modules_without_values(checkpointer: AsyncCheckpointer) -> None:
    checkpointer.save(1, {"loss": nn.CrossEntropyLoss()})
    assert checkpointer.restore({"loss": nn.CrossEntropyLoss()}) == 1


def test_an_attribute_named_as_a_wrapper_s_is_none(checkpointer: AsyncCheckpointer) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = nn.Linear(2, 2)
            self.sibling = nn.Linear(2, 2)

    own, other = Own(), Own()
    checkpointer.save(1, {"model": own})
    checkpointer.restore({"model": other})
    assert torch.equal(other.sibling.weight, own.sibling.weight)
    assert torch.equal(other._orig_mod.weight, own._orig_mod.weight)


# ---- the way back


class Refusing:
    """An object whose `load_state_dict` raises, after it has changed itself."""

    def __init__(self) -> None:
        self.value = {"n": torch.zeros(2)}

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value["n"].copy_(state["n"])
        if state["n"].any():
            raise ValueError("not this one")


def test_a_restore_that_fails_changes_nothing(checkpointer: AsyncCheckpointer) -> None:
    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Renamed())
        optimizer = Around(torch.optim.AdamW(module[:2].parameters(), lr=seed / 10))
        torch.autograd.backward(module[:2](torch.randn(4, 3)).sum())
        optimizer.step()
        half = torch.full((2,), float(seed), dtype=torch.float64)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, seed)
        plain = {"list": [seed, {"t": half}], "gone": seed}
        return {
            "model": module,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "plain": plain,
            "step": seed,
            "refusing": Refusing(),
        }

    saved, present = made(1), made(2)
    del saved["plain"]["gone"]
    saved["plain"]["list"][1]["t"] = saved["plain"]["list"][1]["t"].float()
    saved["refusing"].value["n"] += 1
    checkpointer.save(1, saved)
    checkpointer.wait()

    def states() -> str:
        return repr([value.state_dict() if hasattr(value, "state_dict") else value for value in present.values()])

    held = present["plain"]["list"][1]["t"], present["model"][0].weight, present["optimizer"].param_groups[0]
    before = states()
    with pytest.raises(CheckpointError, match=r"'refusing' cannot be restored .*: ValueError: not this one"):
        checkpointer.restore(present)
    assert states() == before
    assert held[0] is present["plain"]["list"][1]["t"]
    assert held[1] is present["model"][0].weight
    assert held[2] is present["optimizer"].param_groups[0]
    present["refusing"] = Refusing()
    present["refusing"].load_state_dict = lambda _: None
    checkpointer.restore(present)
    assert present["step"] == 1
    assert present["model"][0].weight.equal(saved["model"][0].weight)


class Copies(nn.Module):
    """A module whose state are copies of its tensors, with a buffer that is not saved and follows from another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.register_buffer("twice", self.weight.detach() * 2, persistent=False)
        module: Any = self
        module.register_load_state_dict_post_hook(Copies.follow)
        module.register_state_dict_post_hook(Copies.copy)

    def copy(self, state: Any, prefix: str, _: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].clone()

    def follow(self, _: Any) -> None:
        self.twice.copy_(self.weight.detach() * 2)  # type: ignore[operator]


def test_a_failing_hook_of_an_optimizer_changes_nothing(checkpointer: AsyncCheckpointer) -> None:
    def made(lr: float) -> tuple[Copies, nn.Linear, torch.optim.SGD]:
        linear = nn.Linear(2, 2)
        return Copies(), linear, torch.optim.SGD(linear.parameters(), lr=lr)

    names = ("copies", "linear", "optimizer")
    checkpointer.save(1, dict(zip(names, made(1.0), strict=True)))
    present = made(2.0)
    hook = present[2].register_load_state_dict_post_hook(refuse)
    before = repr((*present[0].parameters(), *present[0].buffers(), *present[1].parameters(), present[2].state_dict()))
    state = dict(zip(names, present, strict=True))
    with pytest.raises(CheckpointError, match=r"'optimizer' cannot be restored .*: ValueError: no"):
        checkpointer.restore(state)
    after = (*present[0].parameters(), *present[0].buffers(), *present[1].parameters(), present[2].state_dict())
    assert repr(after) == before
    hook.remove()
    mask = torch.ones(1).expand(4)  # nothing can be written to it
    assert checkpointer.check({"aux": {"mask": mask}, **state}) == []
    assert repr(after) == before


class Keeps(nn.Module):
    """A module whose own code changes it, and then may raise, at a load."""

    def __init__(self, seed: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.extra, self.seen = torch.full((2,), seed), [seed]

    def get_extra_state(self) -> Any:
        return {"t": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra.copy_(state["t"])
        self.seen.append(0)
        self.loaded = True
        if state["t"].eq(1).all():
            raise ValueError("no")


def refuse(*_: Any) -> None:
    raise ValueError("no")


class InPlace(torch.optim.SGD):
    """An optimizer that loads into its tensors, and then raises."""

    def load_state_dict(self, state_dict: Any) -> None:
        for number, state in enumerate(self.state.values()):
            state["momentum_buffer"].copy_(state_dict["state"][number]["momentum_buffer"])
        raise ValueError("no")


class Strict(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise ValueError("no")


def raising(what: str, seed: int) -> dict[str, Any]:
    """A state, with one thing in it that cannot be loaded into that of another seed."""
    torch.manual_seed(seed)
    fresh = seed > 1
    module: Any = Keeps(float(seed)) if what == "module" else nn.Linear(3, 3)
    if what == "observer":  # it takes the shape that was saved
        module = nn.Sequential(torch.ao.quantization.PerChannelMinMaxObserver(), Keeps(float(seed)))
        module[0](torch.ones(seed, 5))
    if what == "hook" and fresh:
        module.register_load_state_dict_post_hook(refuse)
    if what == "inference":
        with torch.inference_mode():
            module.register_buffer("fixed", torch.rand(2))
    if what == "another optimizer" and fresh:
        optimizer: Any = torch.optim.Adam(module.parameters())
    else:
        kind: Any = InPlace if what == "in place" else torch.optim.SGD
        optimizer = kind(module.parameters(), lr=0.1 * seed, momentum=0.9)
    for parameter in module.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    tensor = torch.rand(2, dtype=torch.float64 if fresh else torch.bfloat16)
    state: dict[str, Any] = {"tensor": tensor, "model": module, "optimizer": optimizer, "n": seed}
    if what == "observer":
        state["whole"] = quantised(seed)
    elif what == "scheduler":
        state["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 3) if fresh else Listed()
    return Strict(state) if what == "container" else state


class Sees:
    """An object that looks at the rest of the state when it is loaded."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self.seen: Any = None

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, _: Any) -> None:
        self.seen = self.state["n"], *self.state["model"].bias.tolist()


def test_own_code_runs_last(checkpointer: AsyncCheckpointer) -> None:
    def made(seed: int) -> dict[str, Any]:
        state: dict[str, Any] = {}
        module = nn.Linear(2, 2)
        state.update(sees=Sees(state), n=seed, model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
        return state

    saved, present, hooked = made(1), made(2), []
    present["optimizer"].register_load_state_dict_post_hook(lambda one: hooked.append((one, present["n"])))
    checkpointer.save(1, saved)
    checkpointer.restore(present)
    assert present["sees"].seen == (1, *saved["model"].bias.tolist())
    assert hooked == [(present["optimizer"], 1)]


class Listed:
    def state_dict(self) -> Any:
        return [1, 2]

    def load_state_dict(self, state: Any) -> None:
        pass


WHAT = ["module", "observer", "hook", "in place", "another optimizer", "inference", "scheduler", "container"]


@pytest.mark.parametrize("what", WHAT)
def test_one_that_raises_alone_changes_nothing(checkpointer: AsyncCheckpointer, what: str) -> None:
    checkpointer.save(1, raising(what, 1))
    checkpointer.wait()
    state = raising(what, 2)
    optimizer = state["optimizer"]
    modules = [vars(one) for one in state["model"].modules()]
    held = [state, modules, *state["model"].buffers(), optimizer.param_groups, *optimizer.state.values()]
    before, tensors = repr(held), [value for one in optimizer.state.values() for value in one.values()]
    with pytest.raises(CheckpointError, match="cannot be restored"):
        checkpointer.restore(state)
    assert repr(held) == before
    assert list(map(id, tensors)) == [id(value) for one in optimizer.state.values() for value in one.values()]


def test_what_cannot_be_copied_is_restored(checkpointer: AsyncCheckpointer) -> None:
    present = Refusing()
    present.value["lock"] = threading.Lock()  # type: ignore[assignment]
    state: dict[str, Any] = {"x": present, "n": 2}
    checkpointer.save(1, {"x": Refusing(), "n": 1})
    checkpointer.restore(state)
    assert state["n"] == 1


def test_what_is_on_the_meta_device_is_named(checkpointer: AsyncCheckpointer) -> None:
    def made(device: str) -> dict[str, Any]:
        module = nn.Linear(2, 2, device=device)
        return {
            "model": module,
            "hooked": module,
            "optimizer": torch.optim.SGD(module.parameters(), momentum=0.9),
            "x": {"t": torch.ones(2)},
        }

    checkpointer.save(1, made("cpu"))
    checkpointer.wait()
    hooked: Any = nn.Linear(2, 2, bias=False, device="meta")
    hooked.register_load_state_dict_pre_hook(refuse)
    for key, present, words in (
        ("model", made("meta")["model"], r"'model\..*' .* meta device: call to_empty\(\) first"),
        ("hooked", hooked, r"'hooked\..*' .* meta device: call to_empty\(\) first"),
        ("optimizer", made("meta")["optimizer"], r"meta device: make it after to_empty"),
        ("x", {"t": torch.ones(2, device="meta")}, r"'x.t' .* meta device: call to_empty\(\) first"),
    ):
        with pytest.raises(CheckpointError, match=words):
            checkpointer.restore({key: present})


def test_expanded_tensors_are_named(checkpointer: AsyncCheckpointer) -> None:
    checkpointer.save(1, {"x": torch.ones(3, 2)})
    checkpointer.wait()
    with pytest.raises(CheckpointError, match=r"'x' of the state to restore is expanded, .* call clone\(\) first"):
        checkpointer.restore({"x": torch.zeros(1, 2).expand(3, 2)})


def test_a_disabled_scaler_leaves_the_model(tmp_path: Path) -> None:
    with AsyncCheckpointer(tmp_path) as checkpointer:
        module = nn.Linear(2, 2)
        checkpointer.save(1, {"model": module, "scaler": torch.amp.GradScaler("cpu", enabled=False)})
        other = nn.Linear(2, 2)
        before = other.weight.detach().clone()
        with pytest.raises(CheckpointError, match=r"'scaler' cannot be restored"):
            checkpointer.restore({"model": other, "scaler": torch.amp.GradScaler("cpu")})
        assert torch.equal(other.weight, before)


# ---- check()


class Forgets:
    """An object that does not save all that it loads."""

    def __init__(self) -> None:
        self.value, self.loads = torch.ones(2), 0

    def state_dict(self) -> Any:
        return {"value": self.value, "loads": self.loads}

    def load_state_dict(self, state: Any) -> None:
        self.value, self.loads = state["value"] + 1, self.loads + 1


def test_check_names_what_does_not_come_back(checkpointer: AsyncCheckpointer) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    module[2].weight = module[0].weight  # cleared and put back once
    optimizer = torch.optim.AdamW(module.parameters())
    torch.autograd.backward(module(torch.randn(4, 8)).sum())
    optimizer.step()
    forgets = Forgets()
    row = torch.arange(4.0)
    with torch.inference_mode():
        fixed = torch.ones(2)
    x = [{"q": quantised(1)}, torch.ones(2), {"row": row, "end": row[2:]}, fixed]
    good = {"model": module, "optimizer": optimizer, "x": x, "n": 1}
    before = repr((module.state_dict(), optimizer.state_dict(), good["x"]))
    moment = next(iter(optimizer.state.values()))["exp_avg"]
    assert checkpointer.check(good) == []
    assert repr((module.state_dict(), optimizer.state_dict(), good["x"])) == before
    assert next(iter(optimizer.state.values()))["exp_avg"] is moment
    assert checkpointer.check({"n": np.bytes_(b"a\0")}) == ["'n' is restored with other values"]  # numpy drops the zero
    lines = checkpointer.check({**good, "forgets": forgets, "custom": {"c": Foreign()}})
    assert [line.partition(" of ")[0] for line in lines] == ["'custom.c'"]
    assert checkpointer.check({**good, "forgets": forgets}) == [
        "'forgets.value' is restored with other values",
        "'forgets.loads' is restored with other values",
    ]
    lines = checkpointer.check({"x": Loses()})
    assert lines == ["'x.a' is not restored", "'x.b' is restored, and was not in the state"]
    assert not [path for path in checkpointer.folder.iterdir() if path.name.startswith(".check")]


class Foreign:
    pass


class Loses:
    """An object that has another value than before when it is loaded."""

    def __init__(self) -> None:
        self.names = ["a"]

    def state_dict(self) -> Any:
        return dict.fromkeys(self.names, 1)

    def load_state_dict(self, state: Any) -> None:
        self.names = ["b"]
