"""All errors of Penstock as one tree, and the catalogue by which they are sent over gRPC.

    PenstockError
    ├── InvalidArgumentError (ValueError)      an invalid value
    │   └── UnsafeBindError                    listening beyond this machine without TLS
    ├── PortTakenError (OSError)               the address to listen on is in use
    ├── ForkedProcessError (RuntimeError)      used in a forked child of the process that it belongs to
    ├── AmbiguousContextError (RuntimeError)   several appliances are open: pass the one to use
    ├── JournalError                           the coordinator's state on disk cannot be read or written
    ├── batches
    │   ├── UnsupportedLeafError (TypeError)   a batch holds a value that is not a tensor, array or scalar
    │   ├── StructureChangedError              strict mode: the tree or a dtype changed between batches
    │   ├── BatchTooLargeError                 a batch above max_batch_bytes
    │   ├── BatchCorruptError                  a batch is damaged, however often it is fetched
    │   └── EmptyInputError (RuntimeError)     an input without any batch
    ├── DatasetError                           a dataset that cannot be read as it is: its index, columns or settings
    │   ├── ShardCorruptError                  a shard that does not match its index, or is not readable
    │   └── ShardUnavailableError              a file that could not be fetched; names its address, and why
    ├── state
    │   ├── UnsupportedStateError (TypeError)  a state holds an object without a safe encoding
    │   ├── StateCorruptError (ValueError)     checksum or framing does not match
    │   ├── StateVersionError                  written by a newer Penstock
    │   ├── StateMismatchError                 a state of another loader, seed or topology
    │   ├── StateUnavailableError (RuntimeError)  the step was not delivered, or is no longer kept
    │   ├── NotRestartableError (RuntimeError) the loader cannot be saved as asked
    │   └── ReplayMismatchError                a restored loader does not reproduce its batches
    ├── CheckpointError (RuntimeError)         a checkpoint that could not be written or read; names rank and cause
    │   ├── CheckpointCorruptError             its files do not match its manifest
    │   └── CheckpointNotFoundError (FileNotFoundError)  there is none, or not the requested one
    ├── user code
    │   ├── InputFnError                       input_fn or its loader raised; carries the remote traceback
    │   ├── MemoryLimitError                   a runner and its replacement exceed --runner-memory
    │   ├── InputFnNotFoundError               the module or name cannot be imported on the worker
    │   └── InputFnNotAllowedError             the module is under none of the worker's allowed prefixes
    ├── run
    │   ├── UnknownRunError, BoxOutOfRangeError (ValueError), BoxTakenError, SupersededError
    │   ├── UnknownWorkerError                 no worker has that name
    │   ├── TopologyError                      opened again with another topology and no state for it
    │   ├── VersionSkewError                   the two ends speak different protocol versions
    │   ├── AuthenticationError                token missing or wrong
    │   ├── NotPermittedError                  the token is for another role
    │   └── TlsError                           a certificate that cannot be used or trusted; TLS at one end only
    └── peers
        ├── CoordinatorUnavailableError (ConnectionError)
        │   └── OverloadedError                too many requests at a time; says when to retry
        ├── DeadlineError (TimeoutError)       a wait that ran out; names the awaited process
        │   └── NoWorkersError                 slots that no worker could take
        ├── WorkerLostError                    a worker died and its slot could not be recovered
        ├── LaneClosedError                    this side closed the lane
        ├── LaneLostError (ConnectionError)    the peer is gone
        └── ProtocolError                      invalid bytes from a peer

No `grpc.RpcError` leaves Penstock: `penstock.proto.rpc.channel` translates both ways with CATALOGUE. The traceback of a
remote error is sent and shown with it. Nothing is unpickled to rebuild an exception.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "CATALOGUE",
    "AmbiguousContextError",
    "AuthenticationError",
    "BatchCorruptError",
    "BatchTooLargeError",
    "BoxOutOfRangeError",
    "BoxTakenError",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CoordinatorUnavailableError",
    "DatasetError",
    "DeadlineError",
    "EmptyInputError",
    "ForkedProcessError",
    "InputFnError",
    "InputFnNotAllowedError",
    "InputFnNotFoundError",
    "InvalidArgumentError",
    "JournalError",
    "LaneClosedError",
    "LaneLostError",
    "MemoryLimitError",
    "NoWorkersError",
    "NotPermittedError",
    "NotRestartableError",
    "OverloadedError",
    "PenstockError",
    "PortTakenError",
    "ProtocolError",
    "ReplayMismatchError",
    "ShardCorruptError",
    "ShardUnavailableError",
    "StateCorruptError",
    "StateMismatchError",
    "StateUnavailableError",
    "StateVersionError",
    "StructureChangedError",
    "SupersededError",
    "TlsError",
    "TopologyError",
    "UnknownRunError",
    "UnknownWorkerError",
    "UnsafeBindError",
    "UnsupportedLeafError",
    "UnsupportedStateError",
    "VersionSkewError",
    "WorkerLostError",
    "error_named",
]


class PenstockError(Exception):
    """Base class of all errors of Penstock. `remote_traceback`: traceback in the other process as text; "" for a local
    error."""

    def __init__(self, message: str = "", *, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        if not self.remote_traceback:
            return self.message
        remote = self.remote_traceback.rstrip()
        return f"{self.message}\n\n--- remote traceback ---\n{remote}\n--- end of remote traceback ---"


class InvalidArgumentError(PenstockError, ValueError):
    """An argument, flag, variable or setting has an invalid value. The message names it, the allowed values and the one
    it got."""


class UnsafeBindError(InvalidArgumentError):
    """A server would listen where other machines can reach it, without TLS and without `insecure`."""


class PortTakenError(PenstockError, OSError):
    """The address to listen on is in use."""


class ForkedProcessError(PenstockError, RuntimeError):
    """An object is used in a forked child of the process that it belongs to. The message names both processes."""


class AmbiguousContextError(PenstockError, RuntimeError):
    """Several appliances or executors are open, and none of them in this thread's context. Pass the one to use."""


class JournalError(PenstockError):
    """The coordinator's state on disk cannot be read or written."""


class UnsupportedLeafError(PenstockError, TypeError):
    """A batch holds a value that is not a tensor, array or scalar. The message names the leaf's path and type."""


class StructureChangedError(PenstockError):
    """The tree or a dtype changed between two batches in strict mode. The message names both."""


class BatchTooLargeError(PenstockError):
    """A batch is larger than max_batch_bytes."""


class BatchCorruptError(PenstockError):
    """A batch differs from the one that was made or sent, however often it is fetched."""


class EmptyInputError(PenstockError, RuntimeError):
    """An input yielded no batch at all."""


class DatasetError(PenstockError):
    """A dataset cannot be read. The message names its location and the cause."""


class ShardCorruptError(DatasetError):
    """A shard's size, hash or content does not match the index. The message names the file, the expected and the found
    value."""


class ShardUnavailableError(DatasetError):
    """A file of a dataset could not be fetched, or not in time. The message names its address, the attempts, and the
    last reason."""


class UnsupportedStateError(PenstockError, TypeError):
    """A state holds an object that has no safe encoding. The message names its key path and type."""


class StateCorruptError(PenstockError, ValueError):
    """An encoded state fails its checksum or framing."""


class StateVersionError(PenstockError):
    """An encoded state was written by a newer Penstock."""


class StateMismatchError(PenstockError):
    """A state belongs to another loader, seed or topology. The message names both values."""


class StateUnavailableError(PenstockError, RuntimeError):
    """No state is available for this step. The message names the available steps."""


class NotRestartableError(PenstockError, RuntimeError):
    """The loader cannot be saved or restored in the requested way."""


class ReplayMismatchError(PenstockError):
    """Batches of a restored loader differ from those delivered. The message names loader and step."""


class CheckpointError(PenstockError, RuntimeError):
    """A checkpoint could not be written or read. The message names the step, the rank, the file and the cause."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint's files do not match its manifest. The message names the file, the expected and the found value."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A folder has no checkpoint, or not the requested one. The message names the existing checkpoints."""


class InputFnError(PenstockError):
    """User code raised on a worker. The message names worker, box, slot and step."""


class MemoryLimitError(PenstockError):
    """A runner holds more memory than its worker allows, and its replacement does too. The message names both amounts
    and the remedy."""


class InputFnNotFoundError(PenstockError):
    """input_fn cannot be imported on the worker."""


class InputFnNotAllowedError(PenstockError):
    """input_fn's module is under none of the worker's allowed prefixes."""


class UnknownRunError(PenstockError):
    """The coordinator has no run of that name."""


class UnknownWorkerError(PenstockError):
    """The coordinator has no worker of that name."""


class BoxOutOfRangeError(PenstockError, ValueError):
    """The box number does not lie in [0, num_boxes)."""


class BoxTakenError(PenstockError):
    """Another live client holds this box of the same attempt."""


class SupersededError(PenstockError):
    """A newer attempt or generation has replaced this one, or it was closed. Its messages are refused."""


class TopologyError(PenstockError):
    """The run was opened again with another topology, and without a state that fits it."""


class VersionSkewError(PenstockError):
    """The two ends speak different protocol versions. The message names both versions and the remedy."""


class AuthenticationError(PenstockError):
    """The token is missing or wrong."""


class NotPermittedError(PenstockError):
    """The token is for another role than the call requires."""


class TlsError(PenstockError):
    """A certificate or key cannot be used or is not trusted, or only one end uses TLS. The message names the file and
    the remedy."""


class CoordinatorUnavailableError(PenstockError, ConnectionError):
    """The coordinator cannot be reached. The message names the address."""


class OverloadedError(CoordinatorUnavailableError):
    """The coordinator gets too many requests at a time. Nothing was changed. Repeat the call after `retry_after_s`."""

    LONGEST_S = 60.0
    """Largest number of seconds to wait that is accepted from a peer."""
    retry_after_s: float = 1.0
    """Seconds to wait before the call is repeated."""


class DeadlineError(PenstockError, TimeoutError):
    """A wait has reached its deadline. The message names the awaited process and the seconds."""


class NoWorkersError(DeadlineError):
    """No worker took some slots in time. The message states the number of these slots."""


class WorkerLostError(PenstockError):
    """A worker died and its slot could not be recovered."""


class LaneClosedError(PenstockError):
    """The lane was used after this side closed it."""


class LaneLostError(PenstockError, ConnectionError):
    """The other end of the lane is gone without a CLOSE frame."""


class ProtocolError(PenstockError):
    """Bytes from a peer are invalid."""


@dataclass(frozen=True)
class CatalogueEntry:
    """Row of the catalogue of errors."""

    error: type[PenstockError]
    status: str
    """Name of the grpc.StatusCode with which the error is sent."""


# Keyed by the class name, which is also sent: a peer's name is looked up only here.
CATALOGUE: dict[str, CatalogueEntry] = {
    entry.error.__name__: entry
    for entry in (
        CatalogueEntry(PenstockError, "UNKNOWN"),
        CatalogueEntry(InvalidArgumentError, "INVALID_ARGUMENT"),
        CatalogueEntry(UnsafeBindError, "FAILED_PRECONDITION"),
        CatalogueEntry(PortTakenError, "UNAVAILABLE"),
        CatalogueEntry(ForkedProcessError, "FAILED_PRECONDITION"),
        CatalogueEntry(AmbiguousContextError, "FAILED_PRECONDITION"),
        CatalogueEntry(JournalError, "INTERNAL"),
        CatalogueEntry(UnsupportedLeafError, "INVALID_ARGUMENT"),
        CatalogueEntry(StructureChangedError, "FAILED_PRECONDITION"),
        CatalogueEntry(BatchTooLargeError, "RESOURCE_EXHAUSTED"),
        CatalogueEntry(BatchCorruptError, "DATA_LOSS"),
        CatalogueEntry(EmptyInputError, "FAILED_PRECONDITION"),
        CatalogueEntry(DatasetError, "FAILED_PRECONDITION"),
        CatalogueEntry(ShardCorruptError, "DATA_LOSS"),
        CatalogueEntry(ShardUnavailableError, "UNAVAILABLE"),
        CatalogueEntry(UnsupportedStateError, "INVALID_ARGUMENT"),
        CatalogueEntry(StateCorruptError, "DATA_LOSS"),
        CatalogueEntry(StateVersionError, "FAILED_PRECONDITION"),
        CatalogueEntry(StateMismatchError, "FAILED_PRECONDITION"),
        CatalogueEntry(StateUnavailableError, "OUT_OF_RANGE"),
        CatalogueEntry(NotRestartableError, "FAILED_PRECONDITION"),
        CatalogueEntry(ReplayMismatchError, "DATA_LOSS"),
        CatalogueEntry(CheckpointError, "FAILED_PRECONDITION"),
        CatalogueEntry(CheckpointCorruptError, "DATA_LOSS"),
        CatalogueEntry(CheckpointNotFoundError, "NOT_FOUND"),
        CatalogueEntry(InputFnError, "UNKNOWN"),
        CatalogueEntry(MemoryLimitError, "RESOURCE_EXHAUSTED"),
        CatalogueEntry(InputFnNotFoundError, "NOT_FOUND"),
        CatalogueEntry(InputFnNotAllowedError, "PERMISSION_DENIED"),
        CatalogueEntry(UnknownRunError, "NOT_FOUND"),
        CatalogueEntry(UnknownWorkerError, "NOT_FOUND"),
        CatalogueEntry(BoxOutOfRangeError, "INVALID_ARGUMENT"),
        CatalogueEntry(BoxTakenError, "ALREADY_EXISTS"),
        CatalogueEntry(SupersededError, "ABORTED"),
        CatalogueEntry(TopologyError, "FAILED_PRECONDITION"),
        CatalogueEntry(VersionSkewError, "FAILED_PRECONDITION"),
        CatalogueEntry(AuthenticationError, "UNAUTHENTICATED"),
        CatalogueEntry(NotPermittedError, "PERMISSION_DENIED"),
        CatalogueEntry(TlsError, "FAILED_PRECONDITION"),
        CatalogueEntry(CoordinatorUnavailableError, "UNAVAILABLE"),
        CatalogueEntry(OverloadedError, "RESOURCE_EXHAUSTED"),
        CatalogueEntry(DeadlineError, "DEADLINE_EXCEEDED"),
        CatalogueEntry(NoWorkersError, "DEADLINE_EXCEEDED"),
        CatalogueEntry(WorkerLostError, "UNAVAILABLE"),
        CatalogueEntry(LaneClosedError, "CANCELLED"),
        CatalogueEntry(LaneLostError, "UNAVAILABLE"),
        CatalogueEntry(ProtocolError, "INVALID_ARGUMENT"),
    )
}


def error_named(name: str, message: str, remote_traceback: str = "") -> PenstockError:
    """Return an error of the class with this name, which a peer sent. For an unknown name (of a newer peer) it is a
    PenstockError whose message contains the name."""
    entry = CATALOGUE.get(name)
    if entry is None:
        return PenstockError(f"{name}: {message}", remote_traceback=remote_traceback)
    return entry.error(message, remote_traceback=remote_traceback)
