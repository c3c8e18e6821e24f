"""Values go back to the parameters that they were of, in whatever order these come and whatever wraps their module."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from around import Around
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.client.checkpoint.values.optimizers import group_order, named_state, numbered_state, regrouped
from penstock.client.checkpoint.values.parameter_names import parameter_names
from penstock.proto.errors import CheckpointError, InvalidArgumentError

LAYERS = ("a", "b", "c", "d")


class Net(nn.Module):
    """Layers of one topology, registered in the order that is given: only names tell them apart."""

    def __init__(self, order: tuple[str, ...] = LAYERS, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = {name: nn.Linear(4, 4) for name in LAYERS}
        for name in order:
            setattr(self, name, layers[name])
        if tied:
            layers["d"].weight = layers["a"].weight

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for name in LAYERS:
            value = torch.tanh(getattr(self, name)(value))
        return value


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True),
    "adafactor": torch.optim.Adafactor,
}


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.linspace(-1, 1 + step, 12).reshape(3, 4)).square().sum().backward()
        optimizer.step()


def by_name(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All of an optimizer's state, with the settings of each parameter's group."""
    pairs = sorted(net.named_parameters(remove_duplicate=False), reverse=True)
    names = {id(parameter): name for name, parameter in pairs}  # the first one in the alphabet, of tied ones
    found: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for one in group["params"]:
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            found[names[id(one)]] = {"state": optimizer.state.get(one, {}), "settings": settings}
    return found


def alike(one: Any, other: Any) -> bool:
    """Compare two states, their types too, at any depth."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def grouped(net: nn.Module, groups: list[list[str]]) -> list[dict[str, Any]]:
    named = dict(net.named_parameters())
    return [{"params": [named[name] for name in group]} for group in groups]


@st.composite
def arrangements(draw: Any) -> tuple[tuple[str, ...], list[list[str]], tuple[str, ...], list[list[str]]]:
    """Orders of modules, and of parameters in groups, at a save and at a restore."""
    names = [f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias")]
    cut = draw(st.integers(1, len(names)))
    shuffled = draw(st.permutations(names))
    groups = [group for group in (shuffled[:cut], shuffled[cut:]) if group]
    again = draw(st.permutations([draw(st.permutations(group)) for group in groups]))
    return tuple(draw(st.permutations(LAYERS))), groups, tuple(draw(st.permutations(LAYERS))), again


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(OPTIMIZERS)), arrangements())
def test_states_go_by_names(kind: str, arranged: Any) -> None:
    """Without files: what `save` and `restore` do with an optimizer's state in between is nothing to it."""
    order, groups, order_again, groups_again = arranged
    net = Net(order)
    optimizer = OPTIMIZERS[kind](grouped(net, groups))
    for number, group in enumerate(optimizer.param_groups):
        group["lr"], group["weight_decay"] = 0.1 / (number + 1), 0.01 * number
    train(net, optimizer)
    saved = copy.deepcopy(named_state(optimizer.state_dict(), parameter_names(optimizer, {"model": net}, "optimizer")))

    fresh = Net(order_again)
    fresh.load_state_dict(net.state_dict())
    again = OPTIMIZERS[kind](grouped(fresh, groups_again))
    names = parameter_names(again, {"model": fresh}, "optimizer")
    lengths = [len(group["params"]) for group in again.param_groups]
    again.load_state_dict(numbered_state(saved, names, group_order(saved, names, lengths), lengths))
    assert alike(by_name(fresh, again), by_name(net, optimizer))
    train(net, optimizer)
    train(fresh, again)
    assert alike(dict(fresh.named_parameters()), dict(net.named_parameters()))


@pytest.mark.parametrize("wrapped", [False, True])
def test_modules_in_another_order_are_restored(checkpointer: AsyncCheckpointer, wrapped: bool) -> None:
    """Groups with a schedule each, in another order too. A schedule is of the optimizer within a wrapper."""

    def made(order: tuple[str, ...]) -> tuple[Net, Any, Any]:
        net = Net(order, tied=True)
        biases = {"params": [one for name, one in net.named_parameters() if "bias" in name], "lr": 0.01}
        weights = {"params": [one for name, one in net.named_parameters() if "weight" in name], "lr": 0.1}
        groups = [biases, weights] if order == LAYERS else [weights, biases]
        optimizer = OPTIMIZERS["adamw"](groups)
        return net, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))

    def run(net: Net, optimizer: Any, scheduler: Any) -> None:
        for _ in range(2):
            train(net, optimizer, 1)
            scheduler.step()

    net, optimizer, scheduler = made(LAYERS)
    run(net, optimizer, scheduler)
    around: Any = Around if wrapped else lambda one: one
    checkpointer.save(1, {"model": net, "optimizer": around(optimizer), "scheduler": scheduler})
    fresh, again, schedule = made(LAYERS[::-1])
    checkpointer.restore({"scheduler": schedule, "optimizer": around(again), "model": fresh})
    assert alike(by_name(net, optimizer), by_name(fresh, again))
    run(net, optimizer, scheduler)
    run(fresh, again, schedule)
    found = fresh.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in net.state_dict().items())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_modules_inside_and_plain_ones(checkpointer: AsyncCheckpointer) -> None:
    """Compile modules inside others, and inside one that is compiled itself. torch compiles nothing before the first
    call."""

    def made(inside: bool) -> tuple[Any, Any]:
        net: Any = Net()
        net.c = nn.Sequential(net.c)
        if inside:
            net.b = torch.compile(net.b)
            net.c = torch.compile(net.c)
            net = torch.compile(net)
        return net, torch.optim.AdamW(net.parameters(), lr=0.1)

    def trained(optimizer: Any) -> None:
        for number, one in enumerate(optimizer.param_groups[0]["params"]):
            one.grad = torch.full_like(one, number + 1.0)
        optimizer.step()

    net, optimizer = made(True)
    trained(optimizer)
    checkpointer.save(1, {"model": net, "optimizer": optimizer})
    path = Path(checkpointer.result())
    fresh, again = made(False)
    checkpointer.restore({"model": fresh, "optimizer": again})
    checkpointer.restore({"model": made(True)[0]})
    assert b"_orig_mod" not in (path / ".metadata").read_bytes()
    values = zip(net.state_dict().values(), fresh.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in values)
    assert alike(again.state_dict()["state"], optimizer.state_dict()["state"])


def test_names_from_elsewhere(tmp_path: Path) -> None:
    """Names come from several modules, dicts of tensors, and the optimizer itself."""
    net, other, lone = Net(), nn.Linear(4, 4), nn.Parameter(torch.ones(3))
    both = torch.optim.Adam([*other.parameters(), *net.parameters(), lone])
    names = parameter_names(both, {"net": net, "other": other, "tensors": {"lone": lone}}, "both")
    assert names[:3] == ["other.weight", "other.bias", "net.a.weight"]
    assert names[-1] == "tensors.lone"
    assert parameter_names(both, {"net": net, "other": other}, "both")[-1] == "#0 [3]"
    plain = torch.optim.Adam(net.parameters())
    assert parameter_names(plain, {"model": net.state_dict()}, "plain") == [name for name, _ in net.named_parameters()]
    with pytest.warns(UserWarning, match=r"'plain' .* 4 parameters of shape .* Adam\(model.named"):
        assert parameter_names(plain, {}, "plain")[:2] == ["#0 [4, 4]", "#1 [4]"]
    twice = torch.optim.Adam(other.parameters())
    twice.param_groups[0]["param_names"] = ["same", "same"]
    with pytest.raises(InvalidArgumentError, match=r"'twice' .* several parameters named 'same'"):
        parameter_names(twice, {}, "twice")
    own = torch.optim.Adam(net.named_parameters())
    assert parameter_names(own, {}, "own") == [name for name, _ in net.named_parameters()]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("added", r"'optimizer' cannot be restored from .* no optimizer state for the parameters 'd.bias', 'd.weight'"),
        ("removed", r"has optimizer state for the parameters 'c.bias', 'c.weight', but the optimizer has 'a.bias'"),
        ("regrouped", r"param_groups.0. has the parameters 'a.bias', 'a.weight', but no saved group has exactly these"),
    ],
)
def test_other_parameters_are_named_errors(checkpointer: AsyncCheckpointer, change: str, words: str) -> None:
    def parameters(net: Net, layers: str) -> list[nn.Parameter]:
        return [one for layer in layers for one in getattr(net, layer).parameters()]

    net, fresh = Net(), Net()
    saved = torch.optim.AdamW(parameters(net, "abc"))
    train(net, saved)
    if change == "regrouped":
        groups = [{"params": parameters(fresh, "a")}, {"params": parameters(fresh, "bc")}]
    else:
        groups = [{"params": parameters(fresh, {"added": "abcd", "removed": "ab"}[change])}]
    checkpointer.save(1, {"model": net, "optimizer": saved})
    optimizer = torch.optim.AdamW(groups)
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    with pytest.raises(CheckpointError, match=words):
        checkpointer.restore({"model": fresh, "optimizer": optimizer})
    assert alike(fresh.state_dict() | {}, before)
    assert not optimizer.state


def test_parameters_without_names_are_warned_of(checkpointer: AsyncCheckpointer) -> None:
    """Save and restore warn if parameters have one shape; with other shapes another order is an error."""
    few, many = nn.Linear(2, 3), Net()
    with pytest.warns(UserWarning, match="save the module with it"):
        checkpointer.save(1, {"optimizer": torch.optim.SGD(many.parameters())})
    with pytest.warns(UserWarning, match="known by their order only"):
        checkpointer.restore({"optimizer": torch.optim.SGD([*many.parameters()])})
    checkpointer.save(2, {"optimizer": torch.optim.SGD(few.parameters())})
    with pytest.raises(CheckpointError, match="save and restore the module"):
        checkpointer.restore({"optimizer": torch.optim.SGD([few.bias, few.weight])})


def test_numbered_states_inside_others_warn(checkpointer: AsyncCheckpointer) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    train(net, optimizer)
    state = {"plain": {"inner": optimizer.state_dict()}}
    with pytest.warns(UserWarning, match="'plain.inner' of the state is an optimizer's state_dict"):
        checkpointer.save(1, state)
    with pytest.warns(UserWarning, match="'plain.inner' of the state is an optimizer's state_dict"):
        checkpointer.restore(state)
    lone = torch.optim.SGD([nn.Parameter(torch.ones(2))], momentum=0.9)
    lone.param_groups[0]["params"][0].grad = torch.ones(2)
    lone.step()
    checkpointer.save(2, {"plain": lone.state_dict()})  # one parameter has no order


class Odd(torch.optim.Optimizer):
    """Keeps what torch's `load_state_dict` would round, convert or take apart, and a state of no parameter's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        kept: dict[Any, Any] = self.state
        count = kept["run"].setdefault("count", torch.zeros((), dtype=torch.int64))
        count.add_(1)
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                if not state:
                    state.update(momentum=torch.zeros_like(one, dtype=torch.float32), mask=one > 0, count=count)
                    state.update(both=[torch.full((2,), 2**40 + 1), (1, torch.ones(2, dtype=torch.float64) / 3)])
                state["momentum"].mul_(0.9).add_(one.grad.float(), alpha=0.1 / float(state["count"]))
                one.sub_(state["momentum"].to(one.dtype))


@pytest.mark.parametrize("wrapped", [False, True])
def test_states_keep_types_and_shared_tensors(checkpointer: AsyncCheckpointer, wrapped: bool) -> None:
    def made(order: tuple[str, ...]) -> tuple[Net, list[Any]]:
        net = Net(order).bfloat16()
        return net, [torch.optim.NAdam(net.parameters()), torch.optim.ASGD(net.parameters()), Odd(net.parameters())]

    def trained(net: Net, optimizers: list[Any]) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
            net(torch.linspace(-1, 1, 12, dtype=torch.bfloat16).reshape(3, 4)).square().sum().backward()
            optimizer.step()

    net, optimizers = made(LAYERS)
    fresh, again = made(LAYERS[::-1])
    trained(net, optimizers)
    around: Any = Around if wrapped else lambda one: one
    checkpointer.save(1, {"model": net, **{f"o{n}": around(one) for n, one in enumerate(optimizers)}})
    checkpointer.restore({"model": fresh, **{f"o{n}": around(one) for n, one in enumerate(again)}})
    for _ in range(2):
        for one, other in zip(optimizers, again, strict=True):
            assert alike(by_name(net, one), by_name(fresh, other))
            assert alike(one.state.get("run"), other.state.get("run"))
        trained(net, optimizers)
        trained(fresh, again)
    assert alike(dict(net.named_parameters()), dict(fresh.named_parameters()))


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")  # torch 2.8's own L-BFGS
@pytest.mark.parametrize("kind", ["flat", "listed"])
def test_order_dependent_states_are_refused(checkpointer: AsyncCheckpointer, kind: str) -> None:
    """L-BFGS has values of all parameters in one tensor; settings may have a value for each parameter."""

    def made(order: tuple[str, ...]) -> tuple[Net, torch.optim.Optimizer]:
        net = Net(order)
        if kind == "flat":
            return net, torch.optim.LBFGS(net.parameters(), max_iter=2)
        scales = [ord(name[0]) / 100 for name, _ in net.named_parameters()]
        return net, torch.optim.SGD([{"params": [*net.parameters()], "betas": [*range(8)], "scales": scales}])

    net, optimizer = made(LAYERS)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(torch.ones(3, 4)).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    checkpointer.save(1, {"model": net, "optimizer": optimizer})
    fresh, again = made(LAYERS[::-1])
    with pytest.raises(CheckpointError, match=r"another order than at the save, and '(d|scales)' of "):
        checkpointer.restore({"model": fresh, "optimizer": again})
    fresh, again = made(LAYERS)
    checkpointer.restore({"model": fresh, "optimizer": again})
    assert alike(by_name(net, optimizer), by_name(fresh, again))


def test_an_ambiguous_list_by_group_is_an_error() -> None:
    assert regrouped({"base_lrs": [1.0, 2.0], "milestones": [5, 9], "gamma": 0.1}, [1, 0]) == {
        "base_lrs": [2.0, 1.0],
        "milestones": [5, 9],
        "gamma": 0.1,
    }
    with pytest.raises(CheckpointError, match="'mine' of its scheduler seems to have one value per group"):
        regrouped({"mine": [1, 2]}, [1, 0])
    assert regrouped({"mine": [1, 2]}, [0, 1]) == {"mine": [1, 2]}


def test_reordered_groups_keep_their_schedulers() -> None:
    """A MultiStepLR has a Counter of steps, and OneCycleLR a list of phases, which may be as many as groups."""
    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in (0.1, 0.2)]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    assert type(regrouped(steps.state_dict(), [1, 0])["milestones"]) is Counter
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1.0, 2.0], total_steps=9)
    state = cycle.state_dict()
    assert regrouped(state, [1, 0])["_schedule_phases"] == state["_schedule_phases"]


def test_two_values_for_one_tensor_are_refused(checkpointer: AsyncCheckpointer) -> None:
    """Saved from an untied module, restored into a tied one; equal values fit, NaN too."""
    apart: Any = Net()
    tied: Any = Net(tied=True)
    checkpointer.save(1, {"model": apart})
    before = tied.a.weight.clone()
    with pytest.raises(CheckpointError, match="share one tensor, but were saved with different values"):
        checkpointer.restore({"model": tied})
    assert torch.equal(tied.a.weight, before)
    with torch.no_grad():
        apart.a.weight[0, 0] = torch.nan
        apart.d.weight.copy_(apart.a.weight)
    checkpointer.save(2, {"model": apart})
    checkpointer.restore({"model": tied})
    assert torch.equal(tied.d.weight[1:], apart.d.weight[1:])
