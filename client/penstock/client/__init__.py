"""Client in the training job: data loaders whose position can be saved at any step and resumed exactly."""

from penstock.runtime.process import linux_only  # noqa: F401  # before the imports that fail elsewhere

# isort: split
from penstock.client.api.appliance import Appliance
from penstock.client.api.data_loader import DataLoader
from penstock.client.api.executor import DataExecutor, checkpoint_closure, compute_num_steps
from penstock.client.api.lookahead import Lookahead
from penstock.client.states.batch_sizes import infer_batch_size
from penstock.proto.state.assignment import get_streaming_batch_size
from penstock.proto.state.restartable import DataLoaderCheckpoint, RestartableDataLoader, get_worker_state

__all__ = [
    "Appliance",
    "DataExecutor",
    "DataLoader",
    "DataLoaderCheckpoint",
    "Lookahead",
    "RestartableDataLoader",
    "checkpoint_closure",
    "compute_num_steps",
    "get_streaming_batch_size",
    "get_worker_state",
    "infer_batch_size",
]
