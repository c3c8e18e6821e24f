"""The training job: an ordinary iterator that can be saved at any step and resumed exactly."""

from penstock.client.appliance import Appliance
from penstock.client.closure import checkpoint_closure
from penstock.client.executor import DataExecutor
from penstock.client.loader import DataLoader
from penstock.client.lookahead import Lookahead
from penstock.proto.restartable import DataLoaderCheckpoint, RestartableDataLoader, get_worker_state

__all__ = [
    "Appliance",
    "DataExecutor",
    "DataLoader",
    "DataLoaderCheckpoint",
    "Lookahead",
    "RestartableDataLoader",
    "checkpoint_closure",
    "get_worker_state",
]
