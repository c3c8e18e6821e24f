"""Training process of one box in a history; its options are JSON. Says a line of JSON for each batch and save."""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import appliances
import torch
from proof.contents import brief, fingerprint
from proof.histories import Loop, Plan, live
from proof.kinds import KINDS
from proof.mutations import MUTATIONS, apply

from penstock.client import DataExecutor, DataLoader
from penstock.proto.errors import PenstockError

TIMEOUT_S = 240.0


def main() -> int:
    options = json.loads(sys.argv[1])
    warnings.simplefilter("ignore", UserWarning)
    try:
        _train(Plan.decoded(options["plan"]), options)
    except PenstockError as error:
        _say({"error": type(error).__name__, "message": str(error)})
        return 1
    _say({"end": True})
    return 0


def _train(plan: Plan, options: dict[str, Any]) -> None:
    box, launch = options["box"], plan.launches[options["launch"]]
    kind = KINDS[plan.kind]
    module, _, name = kind.input_fn.partition(":")
    made = getattr(importlib.import_module(module), name)
    given = {"mutation": plan.mutation} if plan.mutation else {}
    if plan.mutation and MUTATIONS[plan.mutation].of_both_sides:
        apply(plan.mutation)
    more = {} if plan.replay_s is None else {"replay_s": plan.replay_s}
    pause = _pace(plan, box)
    gates = {fault.step for fault in plan.faults[options["launch"]] if fault.box == box}
    waits = {fault.step for fault in plan.faults[options["launch"]] if fault.box == box and fault.waits}
    boxes, workers = plan.topology(options["launch"])
    if kind.deaths:
        given["folder"] = options["folder"]
    with appliances.made(
        options["address"],
        box=box,
        num_boxes=boxes,
        num_workers_per_box=workers,
        job=options["job"],
        attempt=str(options["launch"]),
        seed=plan.run_seed,
        lane=plan.lane,
        replay=True,
        retention_steps=4000,
        timeout_s=TIMEOUT_S,
        **more,
    ) as appliance:
        loader = DataLoader(made, **plan.arguments, **given)
        place = (0, 0)
        if launch.resume:
            same = plan.topology(options["launch"] - 1) == (boxes, workers)
            path = f"{options['folder']}/{box if same else 0}.{options['launch'] - 1}.{launch.resume}"
            saved = torch.load(path, weights_only=False)
            loader.load_state_dict(saved["loader"])
            place = saved["place"]

        def iterate(loop: Loop, taken: int) -> Iterator[Any]:
            left = loop.count - taken if loop.kind == "steps" else None
            persistent = loop.kind == "persistent"
            executor = DataExecutor(loader, left, launch.announced, appliance=appliance, persistent=persistent)
            iterator = iter(executor)
            return iter(()) if loop.kind == "iter" else iterator

        def save(step: int, at: tuple[int, int]) -> None:
            path = f"{options['folder']}/{box}.{options['launch']}.{step}"
            torch.save({"loader": loader.state_dict(), "place": at}, path)
            _say({"saved": step})

        steps = live(plan.script, place, launch.resume, options["stop"], iterate, rests=launch.rests)
        for step, batch, at in steps:
            said = {"step": step, "content": fingerprint(batch), "brief": brief(batch)}
            if not kind.is_function:
                said["mark"] = [float(batch["label"][at]) for at in (0, -1, -2)]
            del batch
            _say(said)
            if step in launch.saves:
                save(step, at)
            if step in gates:
                _say({"gate": step})
                while step in waits and not os.path.exists(f"{options['folder']}/{box}.{options['launch']}.go{step}"):
                    time.sleep(0.002)
            pause()
            place = at
        if launch.rests:
            save(launch.stop, (place[0] + 1, 0))
        if any(fault.kind == "kill coordinator" for fault in plan.faults[options["launch"]]):
            _meet(options, boxes)  # a new coordinator does not know where a box was that has closed


def _meet(options: dict[str, Any], boxes: int) -> None:
    """Wait until the loops of all boxes are over."""
    files = [f"{options['folder']}/{box}.{options['launch']}.over" for box in range(boxes)]
    with open(files[options["box"]], "w"):
        pass
    until = time.monotonic() + TIMEOUT_S
    while not all(map(os.path.exists, files)) and time.monotonic() < until:
        time.sleep(0.01)


def _pace(plan: Plan, box: int) -> Any:
    rng = random.Random(f"{plan.seed} {box}")

    def pause() -> None:
        if plan.pace == "slow":
            time.sleep(0.012)
        elif plan.pace == "varying":
            time.sleep(rng.choice([0.0, 0.0, 0.004, 0.004, 0.02, 0.07]))

    return pause


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
