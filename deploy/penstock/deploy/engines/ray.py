"""Engine for Ray: detached actors, each the parent of a real daemon (ray_actor.py).

The coordinator is bound to the head node: elsewhere it would start with an empty state, and saved states
would be lost silently. Workers are spread over nodes, and started on others when one is lost. Everyone with access to
the Ray cluster can read the arguments of actors (and run code there), so the token is sent only with --send-token;
otherwise its file must have the same path on all nodes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.deploy.console.exit_codes import USAGE, CommandError
from penstock.deploy.engines.engine import Daemon, Fleet, FleetPlan, Scaling, new_names
from penstock.deploy.engines.fleet_folder import FleetFolder
from penstock.deploy.engines.ray_actor import DaemonActor, node_folder
from penstock.proto.errors import AuthenticationError, DeadlineError, PenstockError

_log = logging.getLogger("penstock.deploy.engines")

NAMESPACE = "penstock"
"""Ray namespace of all fleets, whose actors are NAME-coordinator, NAME-1, NAME-2."""
HEAD = "node:__internal_head__"
"""Resource that only Ray's head node has."""
NODE_SHARE = 0.001
"""Amount of a node's resource that binds an actor to it, small, so that others can still use it."""
ANSWER_S = 5.0
"""Seconds for the actors to say whether their daemons have left."""
GIVE_UP_S = 5.0
"""Seconds for an actor to end its daemon after a failed start; short, as one never placed does not answer."""
STOP_S = 40.0
"""Seconds for an actor to end its daemon, more than the daemon's grace."""


def worker_options(plan: FleetPlan) -> dict[str, Any]:
    """Return Ray's options for a worker: a core for each slot, spread over nodes; with the plan's `near`, only over
    those with this resource (`NAME`) or label (`KEY=VALUE`)."""
    key, equals, value = plan.near.partition("=")
    where: dict[str, Any] = {}
    if equals:
        where["label_selector"] = {key: value}
    elif plan.near:
        where["resources"] = {plan.near: NODE_SHARE}
    return {"num_cpus": plan.slots, "scheduling_strategy": "SPREAD", **where, **_LASTING}


_LASTING: dict[str, Any] = {
    "namespace": NAMESPACE,
    "lifetime": "detached",
    "max_restarts": -1,
    "max_task_retries": 3,
    "max_concurrency": 4,  # `stop` runs while `ready` waits
}


def ray_up(plan: FleetPlan, folder: FleetFolder) -> Fleet:
    """Start the fleet. Return when all are ready, or, after `timeout_s`, the coordinator and a worker: Ray keeps trying
    to place the others.

    Raises DeadlineError if the coordinator or all workers are late; CommandError with a daemon's error, for a fleet
    that runs already, or without the package ray; PenstockError if Ray cannot be reached or lost an actor.
    """
    with _connected(plan.ray_address) as ray:
        if _actors_of(ray, plan.name):
            raise CommandError(
                f"a fleet {plan.name} already runs on this Ray cluster. End it by `penstock down`, or choose another "
                "--name",
                USAGE,
            )
        token_file, token = plan.token_file, _token(plan)
        if token:
            plan = plan.model_copy(update={"token_file": str(node_folder(plan) / "token")})
        started: dict[str, Any] = {}
        deadline = time.monotonic() + plan.timeout
        try:
            coordinator = _coordinator_name(plan.name)
            started[coordinator] = _start_coordinator(ray, plan, token)
            about = _ready(ray, started, plan, deadline)
            address = about[coordinator]["line"]
            options, workers = worker_options(plan), {}
            for name in new_names(plan.name, plan.workers, ()):
                workers[name] = _remote(ray, options | {"name": name}, plan.model_dump(), name, address, token)
                started[name] = workers[name]
            about |= _ready(ray, workers, plan, deadline, some=True)
        except BaseException:
            _stop(ray, started, GIVE_UP_S)
            raise
        return Fleet(
            engine="ray",
            name=plan.name,
            dir=str(folder.path),
            coordinator=address,
            token_file=token_file,
            tls=plan.for_callers,
            ray_address=_cluster(ray, plan),
            plan={**plan.model_dump(), "token_file": token_file},
            daemons=[Daemon(name=name, **status) for name, status in about.items()],
        )


def ray_scale(fleet: Fleet, scaling: Callable[[], Scaling], timeout_s: float) -> Fleet | None:
    """Bring a fleet to another number of workers that can work: actors whose daemon drains or has left end first; those
    that Ray has not placed yet count. None if the fleet does not run."""
    with _connected(fleet.ray_address) as ray:
        actors = _actors_of(ray, fleet.name)
        if _coordinator_name(fleet.name) not in actors:
            return None
        wanted = scaling()
        workers = {name: actor for name, actor in actors.items() if not name.endswith("-coordinator")}
        left = _left(ray, workers)
        ending, missing = wanted.split([name for name in workers if name not in left])
        _stop(ray, {name: workers[name] for name in (*left, *ending)})  # first, as new ones may need their cores
        plan = FleetPlan.model_validate({**fleet.plan, "workers": wanted.workers, "timeout": timeout_s})
        token, deadline = _token(plan), time.monotonic() + timeout_s
        if token:
            plan = plan.model_copy(update={"token_file": str(node_folder(plan) / "token")})
        started = {}
        for name in new_names(fleet.name, missing, workers):
            options = worker_options(plan) | {"name": name}
            started[name] = _remote(ray, options, plan.model_dump(), name, fleet.coordinator, token)
        try:
            about = _ready(ray, started, plan, deadline, some=True) if started else {}
        except BaseException:
            _stop(ray, started, GIVE_UP_S)
            raise
        kept = [daemon for daemon in fleet.daemons if daemon.name not in (*left, *ending)]
        added = [Daemon(name=name, **status) for name, status in about.items()]
        return fleet.model_copy(update={"daemons": [*kept, *added], "plan": {**fleet.plan, "workers": wanted.workers}})


def _left(ray: Any, workers: Mapping[str, Any]) -> list[str]:
    """Return the workers whose daemons have ended in order. One whose actor does not answer has not: Ray may have to
    place it again."""
    asked = {actor.has_left.remote(): name for name, actor in workers.items()}
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
    left = []
    for answer in done:
        with contextlib.suppress(ray.exceptions.RayError):
            left += [asked[answer]] if ray.get(answer) else []
    return left


def ray_down(fleet: Fleet, timeout_s: float) -> list[str]:
    """End the workers, then the coordinator. Return a text for each."""
    with _connected(fleet.ray_address) as ray:
        return _stop(ray, _actors_of(ray, fleet.name), timeout_s)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    try:
        import ray
    except ImportError as error:
        raise CommandError("--engine ray needs Ray. Run pip install 'penstock[ray]'", USAGE) from error
    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        raise PenstockError(
            f"the Ray cluster at {address} cannot be reached: {error}. Pass its address by --ray-address"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _cluster(ray: Any, plan: FleetPlan) -> str:
    """Return the address of the Ray cluster for `penstock down`; never "auto"."""
    return plan.ray_address if plan.ray_address.startswith("ray://") else str(ray.get_runtime_context().gcs_address)


def _coordinator_name(fleet: str) -> str:
    return f"{fleet}-coordinator"


def _actors_of(ray: Any, fleet: str) -> dict[str, Any]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    found = {}
    for name in [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]:
        head, _, tail = name.rpartition("-")
        if head == fleet and (tail == "coordinator" or tail.isdigit()):
            with contextlib.suppress(ValueError):  # the actor has ended
                found[name] = ray.get_actor(name, namespace=NAMESPACE)
    return found


def _remote(ray: Any, options: Mapping[str, Any], *arguments: Any) -> Any:
    return ray.remote(DaemonActor).options(**options).remote(*arguments)


def _start_coordinator(ray: Any, plan: FleetPlan, token: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = next((node for node in ray.nodes() if node["Alive"] and HEAD in node["Resources"]), None)
    if node is None:
        raise CommandError(
            "the Ray cluster has no head node for the coordinator. See `ray status` for lost nodes", USAGE
        )
    options = {
        **_LASTING,
        "name": _coordinator_name(plan.name),
        "num_cpus": 0,  # a head node is often configured without CPUs
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
    }
    return _remote(ray, options, plan.model_dump(), "", "", token)


def _token(plan: FleetPlan) -> str:
    """Return the token to send through Ray; "" without --send-token."""
    if not plan.send_token:
        return ""
    try:
        return Path(plan.token_file).read_text()
    except OSError as error:
        raise AuthenticationError(
            f"the token file {plan.token_file} cannot be read: {error.strerror}. Pass another by --token-file"
        ) from None


def _ready(
    ray: Any, actors: Mapping[str, Any], plan: FleetPlan, deadline: float, *, some: bool = False
) -> dict[str, dict[str, Any]]:
    """Wait for actors until `deadline` (monotonic), and return each one's status. `some`: return without the workers
    that Ray could not place in time, if others are ready; they join when a node comes back."""
    waits = {actor.ready.remote(): name for name, actor in actors.items()}
    done, _ = ray.wait(list(waits), num_returns=len(waits), timeout=max(0.1, deadline - time.monotonic()))
    found: dict[str, dict[str, Any]] = {}
    for ref in done:
        try:
            status = ray.get(ref)
        except ray.exceptions.RayError as error:
            text = str(error).strip().splitlines()[-1]
            raise PenstockError(
                f"Ray lost the actor {waits[ref]} before it was ready: {text}. See `ray status` for lost nodes"
            ) from error
        if "error" in status:
            remedy = "; put the token file on every node, or pass --send-token" if status["code"] == 12 else ""
            raise CommandError(f"on node {status['host']}: {status['error']}{remedy}", status["code"])
        found[waits[ref]] = status
    if len(found) < len(waits):
        late = sorted(set(waits.values()) - set(found))
        text = f"Ray did not start {', '.join(late)} within {plan.timeout:g} s"
        if late == [_coordinator_name(plan.name)]:  # the coordinator requests only its node, not CPUs
            raise DeadlineError(f"{text}. See `ray status` for lost nodes, or raise --timeout")
        near = f" on nodes with {plan.near}" if plan.near else ""
        free = ray.available_resources().get("CPU", 0)
        text += f": a worker requests {plan.slots} CPUs{near}; the cluster has {free:g} free now"
        if not (some and found):
            other = ", change --near" if near else ""
            raise DeadlineError(f"{text}. Lower --slots or --workers{other}, or raise --timeout. See `ray status`")
        _log.warning(
            "%s. The fleet runs with %d workers; Ray starts the others when it has free resources", text, len(found)
        )
    return found


def _stop(ray: Any, actors: Mapping[str, Any], timeout_s: float = STOP_S) -> list[str]:
    ended = []
    workers = {name: actor for name, actor in actors.items() if not name.endswith("-coordinator")}
    for group in (workers, {name: actor for name, actor in actors.items() if name not in workers}):
        stops = {name: actor.stop.remote() for name, actor in group.items()}
        if stops:
            ray.wait(list(stops.values()), num_returns=len(stops), timeout=timeout_s)
        for name, actor in group.items():
            ray.kill(actor, no_restart=True)  # also ends the actor's daemon
            ended.append(f"actor {name}")
    return ended
