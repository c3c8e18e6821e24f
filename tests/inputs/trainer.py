"""A training job as a process of its own, for tests that kill it (tests/support/job.py); its options are JSON.

Says a line of JSON for each batch: its step, and a fingerprint. With "save" it saves its state every so many steps, in
files of their own, and says so; with "resume" it starts from such a file. With "lane_proxy" its lanes over TCP go
through a proxy in this process: SIGUSR1 cuts them, SIGUSR2 silences them, SIGRTMIN heals them. (What comes while the
process is stopped is handled by number when it goes on, each once: healed comes last.)
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from typing import Any

import appliances
import mixed
import streams
import torch
import traps
from proxy import Proxy, dial_through
from xxhash import xxh3_64_intdigest

from penstock.client import DataExecutor, DataLoader
from penstock.client.stream.open_run import OpenRun


def main() -> None:
    options = json.loads(sys.argv[1])
    warnings.simplefilter("ignore", UserWarning)
    made = next(found for where in (traps, streams, mixed) if (found := getattr(where, options["input"], None)))
    if options.get("lane_proxy"):
        put_proxies_between()
    with appliances.made(
        options["address"],
        box=options.get("box", 0),
        num_boxes=options.get("boxes", 1),
        num_workers_per_box=options.get("workers", 2),
        job=options["job"],
        seed=options.get("seed", 5),
        lane=options.get("lane", "auto"),
        timeout_s=options.get("timeout_s", 60),
        attempt=options.get("attempt"),
        replay=True,
        retention_steps=options.get("retention"),
    ) as appliance:
        loader = DataLoader(made, *options.get("arguments", ()))
        start = 0
        if options.get("resume"):
            saved = torch.load(options["resume"], weights_only=False)
            loader.load_state_dict(saved["loader"])
            start = saved["step"]
        executor = DataExecutor(
            loader, num_steps=options["steps"] - start, checkpoint_steps=options.get("save"), appliance=appliance
        )
        for batch in executor:
            say({"step": executor.step, "batch": fingerprint(batch)})
            if options.get("save") and executor.step % options["save"] == 0:
                path = f"{options['state']}.{executor.step}"
                torch.save({"loader": loader.state_dict(), "step": executor.step}, f"{path}.new")
                os.replace(f"{path}.new", path)
                say({"saved": executor.step, "path": path})
            if options.get("pace_s"):
                time.sleep(options["pace_s"])
        say({"recoveries": executor.stats.recoveries})


def put_proxies_between() -> None:
    proxies: dict[str, Proxy] = {}
    OpenRun.dial = dial_through(proxies)  # type: ignore[method-assign]

    def cut(number: int, frame: object) -> None:
        for proxy in list(proxies.values()):
            proxy.cut()

    def silence(number: int, frame: object) -> None:
        for proxy in list(proxies.values()):
            proxy.silence()

    def heal(number: int, frame: object) -> None:
        for proxy in list(proxies.values()):
            proxy.heal()

    signal.signal(signal.SIGUSR1, cut)
    signal.signal(signal.SIGUSR2, silence)
    signal.signal(signal.SIGRTMIN, heal)


def fingerprint(batch: Any) -> int:
    """Return a digest of a batch's content, which is the same in every process."""
    return int(xxh3_64_intdigest(repr(_plain(batch)).encode()))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)
