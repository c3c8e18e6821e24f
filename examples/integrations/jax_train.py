"""JAX and Orbax: training in pure JAX that can be killed at any time and started again.

    PYTHONPATH=examples python -m integrations.jax_train --out run1

The same command resumes exactly from the newest checkpoint, which Orbax writes in the background: parameters, momentum
and the loader's position, all of one step. --workers may differ from start to start.

Several processes are started as jax.distributed wants it, each with its --process, and take their batches from the
workers of one coordinator (PENSTOCK_COORDINATOR, PENSTOCK_TOKEN, PENSTOCK_JOB):

    python -m integrations.jax_train --out run1 --processes 2 --process 0 --jax-coordinator host0:7000
    python -m integrations.jax_train --out run1 --processes 2 --process 1 --jax-coordinator host0:7000

Each process is a box: it gets its part of the rows of a global batch, and `place` makes one jax.Array of all parts. A
checkpoint resumes with another number of processes too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from integrations.command import StepLog, options
from integrations.data import CONTEXT, input_fn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.integrations.jax import numpy_batches, state_from_json, state_to_json

WIDTH = 16
"""Size of the embedding of each byte of the context."""
RATE, MOMENTUM = 0.1, 0.9

Arrays = dict[str, jax.Array]


def initial_parameters() -> Arrays:
    """Return the parameters of a model that predicts the next byte from those before it."""
    embedding, up, head = jax.random.split(jax.random.key(0), 3)
    inner = CONTEXT * WIDTH
    return {
        "embedding": jax.random.normal(embedding, (256, WIDTH)),
        "up": jax.random.normal(up, (inner, inner)) * inner**-0.5,
        "head": jax.random.normal(head, (inner, 256)) * inner**-0.5,
    }


def loss_of(parameters: Arrays, batch: Arrays) -> jax.Array:
    """Return the loss: nats per byte, mean over the rows of all processes."""
    hidden = parameters["embedding"][batch["context"]].reshape(-1, CONTEXT * WIDTH)
    hidden = hidden + jax.nn.gelu(hidden @ parameters["up"])
    scores = jax.nn.log_softmax(hidden @ parameters["head"])
    return -jnp.take_along_axis(scores, batch["target"][:, None], axis=1).mean()


@jax.jit
def train_step(training: dict[str, Arrays], batch: Arrays) -> tuple[dict[str, Arrays], jax.Array]:
    """Return the parameters and momentum after one step of SGD with momentum, and the loss before the step."""
    loss, gradients = jax.value_and_grad(loss_of)(training["parameters"], batch)
    momentum = jax.tree.map(lambda old, new: MOMENTUM * old + new, training["momentum"], gradients)
    parameters = jax.tree.map(lambda old, step: old - RATE * step, training["parameters"], momentum)
    return {"parameters": parameters, "momentum": momentum}, loss


def train(steps: int, checkpoint_every: int, out: Path, workers: int) -> None:
    """Train up to step `steps`, from the newest checkpoint in `out` if there is one."""
    box, num_boxes = jax.process_index(), jax.process_count()
    mesh = Mesh(jax.devices(), ("data",))
    by_rows, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    def place(batch: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
        """Return the global batch, of which this process has the rows of its devices."""
        return {name: jax.make_array_from_process_local_data(by_rows, rows) for name, rows in batch.items()}

    parameters = initial_parameters()
    training = {"parameters": parameters, "momentum": jax.tree.map(jnp.zeros_like, parameters)}
    training = jax.device_put(training, replicated)
    loader = DataLoader(input_fn, global_batch_size=32)
    with (
        ocp.CheckpointManager(
            out.absolute() / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=3)
        ) as manager,
        Appliance(box=box, num_boxes=num_boxes, num_workers_per_box=workers),
        StepLog(out / f"rank{box}.jsonl") as log,
    ):
        done = manager.latest_step() or 0
        if done:
            items = ocp.args.Composite(training=ocp.args.StandardRestore(training), loader=ocp.args.JsonRestore())
            restored = manager.restore(done, args=items)
            training = restored.training
            loader.load_state_dict(state_from_json(restored.loader))
        executor = DataExecutor(loader, num_steps=steps - done, checkpoint_steps=checkpoint_every)
        for batch in numpy_batches(executor):
            training, loss = train_step(training, place(batch))
            log.write(executor.step, float(loss), batch)
            if executor.on_checkpoint_step:
                position = state_to_json(loader.state_dict())
                items = ocp.args.Composite(training=ocp.args.StandardSave(training), loader=ocp.args.JsonSave(position))
                manager.save(executor.step, args=items)


def main() -> None:
    parser = options("Train a small model in JAX.")
    parser.add_argument("--workers", type=int, default=2, help="worker slots of each process (2)")
    parser.add_argument("--processes", type=int, default=1, help="number of processes (1)")
    parser.add_argument("--process", type=int, default=0, help="number of this process")
    parser.add_argument("--jax-coordinator", metavar="HOST:PORT", help="address of process 0, if there are several")
    chosen = parser.parse_args()
    if chosen.processes > 1:
        jax.distributed.initialize(chosen.jax_coordinator, chosen.processes, chosen.process)
    train(chosen.steps, chosen.checkpoint_every, chosen.out, chosen.workers)


if __name__ == "__main__":
    main()
