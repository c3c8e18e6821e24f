"""A training job as a process of its own, for tests that kill it: python -m trainer, one JSON object as argument.

Says a line of JSON for each batch: step and digest; before that what its state starts from. Saves its state every
`save` steps to `state`, and starts from that file if it is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import streams
import torch
import traps
from xxhash import xxh3_64_intdigest

from penstock.client import Appliance, DataExecutor, DataLoader


def main(options: dict[str, Any]) -> None:
    warnings.simplefilter("ignore", UserWarning)
    made = getattr(traps, options["input"], None) or getattr(streams, options["input"])
    state = Path(options["state"]) if options.get("state") else None
    with Appliance(
        options["address"],
        box=options.get("box", 0),
        num_boxes=options.get("boxes", 1),
        num_workers_per_box=options.get("workers", 2),
        job=options["job"],
        seed=options.get("seed", 5),
        lane=options.get("lane", "auto"),
        timeout_s=options.get("timeout_s", 60),
        replay=True,
    ) as appliance:
        loader = DataLoader(made, *options.get("arguments", ()))
        start = 0
        if state is not None and state.exists():
            saved = torch.load(state, weights_only=False)
            loader.load_state_dict(saved["loader"])
            start = saved["step"]
        executor = DataExecutor(
            loader, num_steps=options["steps"] - start, checkpoint_steps=options.get("save"), appliance=appliance
        )
        for batch in executor:
            say({"step": executor.step, "batch": fingerprint(batch)})
            if state is not None and executor.on_checkpoint_step:
                with open(f"{state}.new", "wb") as file:
                    torch.save({"loader": loader.state_dict(), "step": executor.step}, file)
                os.replace(f"{state}.new", state)
                say({"saved": executor.step})
            if options.get("pace_s"):
                time.sleep(options["pace_s"])
        say({"recoveries": executor.stats.recoveries})


def fingerprint(batch: Any) -> int:
    """Of a batch's content; the same in every process."""
    return int(xxh3_64_intdigest(repr(_plain(batch)).encode()))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
