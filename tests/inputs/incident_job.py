"""Training job of an incident: python incident_job.py JOB WORKERS SECONDS_A_STEP HOW BATCHES SECONDS_A_BATCH. All its
settings are defaults. It says when its first step was taken."""

from __future__ import annotations

import sys
import time

import ends

from penstock.client import Appliance, DataExecutor, DataLoader


def main(job: str, workers: str, step_s: str, how: str, batches: str, batch_s: str) -> None:
    with Appliance(job=job, num_workers_per_box=int(workers), seed=5) as appliance:
        executor = DataExecutor(DataLoader(ends.ending, how, int(batches), float(batch_s)), appliance=appliance)
        for _ in iter(executor):
            if executor.step == 1:
                print("first step", flush=True)
            time.sleep(float(step_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
