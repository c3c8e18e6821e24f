"""Options of Ray's actors, and a fleet for which Ray has fewer nodes than it asks for. Ray itself: run_up_ray.py."""

from __future__ import annotations

from typing import Any

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
