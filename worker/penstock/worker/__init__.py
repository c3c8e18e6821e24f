"""The worker: a daemon that runs users' loaders in child processes and streams their batches to training jobs."""

from penstock.runtime.process import linux_only  # noqa: F401  # before the imports that fail elsewhere

# isort: split
from penstock.proto.state.assignment import current_assignment, get_streaming_batch_size
from penstock.worker.batch.building import collate, empty

__all__ = ["collate", "current_assignment", "empty", "get_streaming_batch_size"]
