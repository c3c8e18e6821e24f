"""Client in the training job: data loaders whose position can be saved at any step and resumed exactly.

Each name is imported when first used: processes of this package that serve the training job do not need torch."""

from typing import TYPE_CHECKING

from penstock.runtime.lazy_names import lazy_names
from penstock.runtime.process import linux_only  # noqa: F401  # an error says so elsewhere

if TYPE_CHECKING:
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

_BY_MODULE = {
    ".api.appliance": ["Appliance"],
    ".api.data_loader": ["DataLoader"],
    ".api.executor": ["DataExecutor", "checkpoint_closure", "compute_num_steps"],
    ".api.lookahead": ["Lookahead"],
    ".states.batch_sizes": ["infer_batch_size"],
    "penstock.proto.state.assignment": ["get_streaming_batch_size"],
    "penstock.proto.state.restartable": ["DataLoaderCheckpoint", "RestartableDataLoader", "get_worker_state"],
}

if not TYPE_CHECKING:  # type checkers would take any name for one of this package
    __getattr__, __dir__ = lazy_names(globals(), _BY_MODULE)
