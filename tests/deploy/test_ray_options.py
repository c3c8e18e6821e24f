"""Options of Ray's actors, and a fleet for which Ray has fewer nodes than it asks for. Ray itself: run_up_ray.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.deploy.engines.engine import FleetPlan


def plan(**more: Any) -> FleetPlan:
    settings = {"engine": "ray", "name": "f", "workers": 2, "slots": 4, "allow": "m", "token_file": "/token"}
    return FleetPlan.model_validate({**settings, **more})


def test_what_ray_is_asked_for() -> None:
    from penstock.deploy.engines.ray import worker_options

    def options(near: str) -> dict[str, Any]:
        return worker_options(plan(near=near))

    assert options("")["num_cpus"] == 4
    assert "resources" not in options("")
    assert options("accelerator_type:H100")["resources"] == {"accelerator_type:H100": 0.001}
    assert options("pool=train")["label_selector"] == {"pool": "train"}
    assert (options("")["max_restarts"], options("")["lifetime"]) == (-1, "detached")


def test_the_living_nodes_will_do(caplog: pytest.LogCaptureFixture) -> None:
    """Ray finds room for one worker of two: the fleet is up with it, and Ray goes on trying."""
    from penstock.deploy.engines.ray import _ready
    from penstock.proto.errors import DeadlineError

    def actor(name: str) -> Any:
        return SimpleNamespace(ready=SimpleNamespace(remote=lambda: name))

    ray: Any = SimpleNamespace(
        wait=lambda waits, num_returns, timeout: (["f-1"], ["f-2"]),
        get=lambda name: {"host": "node", "line": name},
        available_resources=lambda: {"CPU": 1.0},
    )
    actors = {name: actor(name) for name in ("f-1", "f-2")}
    with pytest.raises(DeadlineError, match="Ray did not start f-2 within 7 s"):
        _ready(ray, actors, plan(timeout=7), 0.0)
    assert set(_ready(ray, actors, plan(timeout=7), 0.0, some=True)) == {"f-1"}
    assert "the cluster has 1 free now. The fleet runs with 1 workers" in caplog.text
    ray.wait = lambda waits, num_returns, timeout: ([], ["f-1", "f-2"])
    with pytest.raises(DeadlineError, match="did not start f-1, f-2"):
        _ready(ray, actors, plan(timeout=7), 0.0, some=True)
