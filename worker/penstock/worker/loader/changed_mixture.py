"""Calls of a user's loader that change its mixture in mid-run (`penstock mix`). The loader needs two methods, as
ShardLoader has: `change_mixture` applies the run's changes before a state is loaded; `plan_change` tries one in a
helper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.proto.errors import InvalidArgumentError, PenstockError
from penstock.proto.state.allowed_modules import module_of
from penstock.proto.state.loader_names import MAIN
from penstock.proto.v1 import coordinator_pb2, records_pb2
from penstock.worker.processes.user_code import check_allowed, load_input_fn

_NO_HOOK = (
    "input_fn must return a ShardLoader over a Mixture, {}, got a {}. Return the ShardLoader itself, not a wrapper"
)


def apply_changes(loader: Any, assignment: records_pb2.WorkerAssignment) -> None:
    """Call `change_mixture` of a new loader with all changes so far (also none), and a function that makes an added
    source by name. Raise InvalidArgumentError if there are changes and no such method."""
    change_mixture = getattr(loader, "change_mixture", None)
    if not callable(change_mixture):
        if assignment.mixture_changes:
            why = "because `penstock mix` has changed the weights of the run's mixture"
            raise InvalidArgumentError(_NO_HOOK.format(why, type(loader).__qualname__))
        return

    def load(name: str) -> Any:
        return _source(name, assignment.loader)

    change_mixture([_plain(change, assignment.attempt) for change in assignment.mixture_changes], load)


def plan_change(loader: Any, trial: coordinator_pb2.MixtureTrial, resume: Mapping[str, Any] | None) -> bytes:
    """Try a change with a new loader, and return a serialised MixturePlan. resume: decoded state with which this launch
    began. Raises InvalidArgumentError without the method, and what the method raises."""
    plan = getattr(loader, "plan_change", None)
    if not callable(plan):
        why = "so that `penstock mix` can change the mixture's weights"
        raise InvalidArgumentError(_NO_HOOK.format(why, type(loader).__qualname__))
    weights = {asked.source: asked.weight for asked in trial.weights}
    if len(weights) < len(trial.weights):
        raise InvalidArgumentError("--weights must name each source once, got one of them twice. Leave one out")
    added = {source.source: source.function for source in trial.added}
    state = None if resume is None else resume["aggregated"]
    order, (epoch, position), parts, was, now, functions = plan(
        trial.steps, trial.epochs, state, weights, added, list(trial.retired)
    )
    mixture_plan = coordinator_pb2.MixturePlan(order=order)
    mixture_plan.change.epoch, mixture_plan.change.position = epoch, position
    mixture_plan.change.added.extend(
        records_pb2.AddedSource(source=name, function=fn) for name, fn in functions.items()
    )
    mixture_plan.change.weights.extend(
        records_pb2.MixtureWeight(source=name, parts=part) for name, part in parts.items()
    )
    for name in parts:
        mixture_plan.shares.add(source=name, was=was.get(name, 0.0), now=now[name])
    return mixture_plan.SerializeToString()


def _plain(change: records_pb2.MixtureChange, attempt: int) -> dict[str, Any]:
    return {
        "key": change.key,
        "epoch": change.epoch,
        "position": change.position,
        "parts": {weight.source: weight.parts for weight in change.weights},
        "added": {added.source: added.function for added in change.added},
        "required": change.attempt == attempt,
    }


def _source(name: str, spec: records_pb2.LoaderSpec) -> Any:
    """Make an added source. Its function must be in an allowed module, or in an embedded worker's main script."""
    allow = list(spec.allow) or [module_of(spec.input_fn).partition(".")[0]]
    function_spec = records_pb2.LoaderSpec(input_fn=name, main_path=spec.main_path, sys_path=spec.sys_path, allow=allow)
    try:
        if module_of(name) != MAIN or not spec.main_path:
            check_allowed(name, allow)
        fn = load_input_fn(function_spec)
    except PenstockError as error:
        message = f"the function {name!r} of an added source: {error.message}"
        raise type(error)(message, remote_traceback=error.remote_traceback) from error
    return fn()
