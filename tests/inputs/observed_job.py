"""A training job that shows its metrics both ways, tells where, and ends when it is told to. Arguments: a folder."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import observed
import torch
from prometheus_client import REGISTRY, generate_latest

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.checkpoint import AsyncCheckpointer
from penstock.client.metrics import collector


def main() -> None:
    folder = Path(sys.argv[1])
    mortal = folder / "mortal"
    warnings.simplefilter("ignore")  # of the runner that kills itself
    REGISTRY.register(collector())
    os.environ["PENSTOCK_HTTP"] = "127.0.0.1:0"
    model = torch.nn.Linear(3, 3)
    with Appliance(replay=True) as appliance, AsyncCheckpointer(folder / "checkpoints") as saver:
        with Appliance() as other:  # shares the server
            assert other.metrics_url == appliance.metrics_url
        loader = DataLoader(observed.input_fn, 4000, str(mortal))
        executor = DataExecutor(loader, num_steps=200, appliance=appliance)
        for _ in executor:
            if executor.step == 30:
                saver.save(30, {"model": model})
            if executor.step == 50:
                mortal.touch()
        saver.wait()
        (folder / "own.prom").write_bytes(generate_latest(REGISTRY))
        loader.state_dict()
        print(appliance.metrics_url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
