"""The training job: an ordinary iterator that can be saved at any step and resumed exactly."""

from penstock.client.appliance import Appliance
from penstock.client.batch_sizes import infer_batch_size
from penstock.client.closure import checkpoint_closure
from penstock.client.executor import DataExecutor
from penstock.client.loader import DataLoader
from penstock.client.lookahead import Lookahead
from penstock.client.num_steps import compute_num_steps
from penstock.client.sample_log import SampleLog
from penstock.proto.assignment import get_streaming_batch_size
from penstock.proto.restartable import DataLoaderCheckpoint, RestartableDataLoader, get_worker_state

__all__ = [
    "Appliance",
    "DataExecutor",
    "DataLoader",
    "DataLoaderCheckpoint",
    "Lookahead",
    "RestartableDataLoader",
    "SampleLog",
    "checkpoint_closure",
    "compute_num_steps",
    "get_streaming_batch_size",
    "get_worker_state",
    "infer_batch_size",
]
