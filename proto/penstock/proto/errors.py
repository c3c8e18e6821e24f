"""All errors of Penstock, and the catalogue by which they are sent over gRPC. docs/errors.md has the table of them.

No `grpc.RpcError` leaves Penstock: `penstock.proto.rpc.wire_errors` translates both ways with CATALOGUE. The traceback
of a remote error is sent and shown with it. Nothing is unpickled to rebuild an exception.
"""

from __future__ import annotations

from dataclasses import dataclass


class PenstockError(Exception):
    """Base class of all errors of Penstock. `remote_traceback`: traceback in the process that raised the error, as
    text; "" if that is this process."""

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
    """Error for an argument, flag, variable or setting with an invalid value. The message names the argument, the
    allowed values and the given value."""


class UnsafeBindError(InvalidArgumentError):
    """Error for a server that other machines could reach without TLS, and that was not started with `insecure`; and for
    a Unix socket that another user made or could replace."""


class PortTakenError(PenstockError, OSError):
    """Error if a server cannot listen at an address, because another process already does."""


class ForkedProcessError(PenstockError, RuntimeError):
    """Error if a forked child uses an object, such as a client, that its parent process made. The message names both
    processes."""


class AmbiguousContextError(PenstockError, RuntimeError):
    """Error if several appliances or executors are open, but none in this thread's context. Pass the one to use."""


class JournalError(PenstockError):
    """Error if the coordinator's state on disk cannot be read or written."""


class UnsupportedLeafError(PenstockError, TypeError):
    """Error for a batch with a value that would not arrive as it was made, or of a type that the training process has
    not imported. The message names the value's path in the batch, its type, and what to pass or import."""


class StructureChangedError(PenstockError):
    """Error for a batch whose containers, dtypes or ranks differ from the first batch's, in strict mode. The message
    describes both batches."""


class BatchTooLargeError(PenstockError):
    """Error for a batch larger than max_batch_bytes."""


class BatchCorruptError(PenstockError):
    """Error for a batch or another message on a lane that arrived damaged. It is fetched again; the training loop gets
    the error only if a batch arrives damaged several times in a row."""


class EmptyInputError(PenstockError, RuntimeError):
    """Error for an input that yielded no batch."""


class DatasetError(PenstockError):
    """Error for a dataset that cannot be read. The message names its location and the cause."""


class ShardCorruptError(DatasetError):
    """Error for a shard (one file of a dataset) whose size, hash or content does not match the index. The message names
    the file, the expected and the found value."""


class SampleCorruptError(ShardCorruptError):
    """Error for a sample whose bytes were read and cannot be decoded, such as a truncated image. The message names the
    file, the sample and the cause. `skip_failures` and `repair` of StreamingDataset go on without it."""


class ShardUnavailableError(DatasetError):
    """Error for a file of a dataset that could not be fetched in time, or for a cache folder that cannot be used. The
    message names the file or folder, and the last reason."""


class SnapshotExpiredError(DatasetError):
    """Error for a snapshot of a table of which the table no longer has the log or a file. The message names both."""


class UnsupportedStateError(PenstockError, TypeError):
    """Error for a state with an object that has no safe encoding. The message names the object's key path and type."""

    @property
    def reason(self) -> str:
        """Message without its last sentence, the remedy, which fits only states."""
        return self.message.rpartition(". ")[0] or self.message


class StateCorruptError(PenstockError, ValueError):
    """Error for an encoded state whose bytes are damaged."""


class StateVersionError(PenstockError):
    """Error for an encoded state that a newer Penstock has written."""


class StateMismatchError(PenstockError):
    """Error for a state of another loader, seed or topology (number of boxes and workers), and for boxes of one launch
    of which only some load a state. The message names both values."""


class StateUnavailableError(PenstockError, RuntimeError):
    """Error for a request for a state, snapshot or blob that is not available: its step was not delivered, it is no
    longer kept, or it cannot be made now. The message says what to request instead, or when."""


class NotRestartableError(PenstockError, RuntimeError):
    """Error for a loader that cannot be saved or restored in the requested way, for example because it has no
    `state_dict`. The message names the reason and the remedy."""


class ReplayMismatchError(PenstockError):
    """Error for a restored loader whose batches differ from the delivered ones. The message names the loader and
    the batch."""


class CheckpointError(PenstockError, RuntimeError):
    """Error for a checkpoint that could not be written or read. The message names the cause, and the step, rank or file
    that is concerned."""


class CheckpointCorruptError(CheckpointError):
    """Error for a checkpoint whose files do not match its manifest. The message names the file, the expected and the
    found value."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Error for a folder without a checkpoint, or without the requested one. The message names the existing
    checkpoints."""


class InputFnError(PenstockError):
    """Error that user code raised (input_fn, its loader, or the import of its module), or for a result of input_fn that
    is no loader. In the training loop the message names worker, box, slot and step."""


class MemoryLimitError(PenstockError):
    """Error for a runner (process that runs the loader) that needs more memory than its worker allows, as did the
    runner before it. The message names the limit and the remedy."""


class InputFnNotFoundError(PenstockError):
    """Error for an input_fn that is not found where it is to run: its module or its name is missing there, or the name
    is not that of a callable, or `penstock replay` was not given the script that defines it."""


class InputFnNotAllowedError(PenstockError):
    """Error for an input_fn whose module is under none of the worker's allowed prefixes."""


class UnknownRunError(PenstockError):
    """Error for the name of a run that the coordinator does not have, or for a box that has not opened its run."""


class UnknownWorkerError(PenstockError):
    """Error for the name of a worker that the coordinator does not have."""


class BoxOutOfRangeError(PenstockError, ValueError):
    """Error for a box number outside [0, num_boxes)."""


class BoxTakenError(PenstockError):
    """Error for a box (data-parallel rank) that another process holds already."""


class SupersededError(PenstockError):
    """Error for a call from an old training job, runner or worker daemon: its attempt (launch of the job), its
    generation of the slot, or its name was closed or taken over by a newer one. Also for an expired lane ticket."""


class TopologyError(PenstockError):
    """Error for a run that is opened again with another topology (number of boxes and workers) and without a state, and
    for boxes of one launch that differ in topology or input_fn."""


class VersionSkewError(PenstockError):
    """Error if the two ends use different protocol versions. The message names the known versions and the remedy."""


class AuthenticationError(PenstockError):
    """Error for a missing or wrong token (credential)."""


class NotPermittedError(PenstockError):
    """Error for a token of another role than the call requires."""


class TlsError(PenstockError):
    """Error of TLS: a certificate or key cannot be used, a certificate is not trusted, or only one of two processes
    uses TLS. The message names the file and the remedy."""


class CoordinatorUnavailableError(PenstockError, ConnectionError):
    """Error if the coordinator cannot be reached. The message names the address."""


class OverloadedError(CoordinatorUnavailableError):
    """Error if a call would exceed a limit of the coordinator, such as that on requests at a time, runs or workers. The
    call has changed nothing; repeat it after `retry_after_s`."""

    LONGEST_S = 60.0
    """Largest value of `retry_after_s` that is accepted from a peer, in seconds."""
    retry_after_s: float = 1.0
    """Seconds to wait before the call is repeated."""


class DeadlineError(PenstockError, TimeoutError):
    """Error for a wait that has reached its deadline. The message names the awaited process and the seconds."""


class NoWorkersError(DeadlineError):
    """Error for slots that no worker has taken in time. The message states their number."""


class WorkerLostError(PenstockError):
    """Error if a process of a worker died, such as a runner. The training loop gets it if the slot could not be
    recovered."""


class PoisonBatchError(WorkerLostError):
    """Error for a batch that killed its runner each time, so that it is quarantined. The message names the batch."""


class LaneClosedError(PenstockError):
    """Error for the use of a connection (lane, channel) that this side has closed."""


class LaneLostError(PenstockError, ConnectionError):
    """Error if the other end of a lane (connection that carries batches) is gone without having closed it."""


class ProtocolError(PenstockError):
    """Error for bytes from another process that Penstock would not have sent."""


SAME_RELEASE = "Run the same release of Penstock at both ends"
"""Remedy that an error states if a peer has sent a message that this release of Penstock never sends."""


def malformed(what: str) -> ProtocolError:
    """Return a ProtocolError with the remedy SAME_RELEASE. `what`: sentence about the invalid bytes, without a full
    stop."""
    return ProtocolError(f"{what}. {SAME_RELEASE}")


@dataclass(frozen=True)
class CatalogueEntry:
    error: type[PenstockError]
    status: str
    """Name of the grpc.StatusCode with which the error is sent."""


_BY_STATUS: dict[str, tuple[type[PenstockError], ...]] = {
    "UNKNOWN": (PenstockError, InputFnError),
    "INVALID_ARGUMENT": (
        InvalidArgumentError,
        UnsupportedLeafError,
        UnsupportedStateError,
        BoxOutOfRangeError,
        ProtocolError,
    ),
    "FAILED_PRECONDITION": (
        UnsafeBindError,
        ForkedProcessError,
        AmbiguousContextError,
        StructureChangedError,
        EmptyInputError,
        DatasetError,
        StateVersionError,
        StateMismatchError,
        NotRestartableError,
        CheckpointError,
        TopologyError,
        VersionSkewError,
        TlsError,
    ),
    "UNAVAILABLE": (
        PortTakenError,
        ShardUnavailableError,
        CoordinatorUnavailableError,
        WorkerLostError,
        PoisonBatchError,
        LaneLostError,
    ),
    "INTERNAL": (JournalError,),
    "RESOURCE_EXHAUSTED": (BatchTooLargeError, MemoryLimitError, OverloadedError),
    "DATA_LOSS": (
        BatchCorruptError,
        ShardCorruptError,
        SampleCorruptError,
        StateCorruptError,
        ReplayMismatchError,
        CheckpointCorruptError,
    ),
    "OUT_OF_RANGE": (StateUnavailableError,),
    "NOT_FOUND": (
        SnapshotExpiredError,
        CheckpointNotFoundError,
        InputFnNotFoundError,
        UnknownRunError,
        UnknownWorkerError,
    ),
    "PERMISSION_DENIED": (InputFnNotAllowedError, NotPermittedError),
    "ALREADY_EXISTS": (BoxTakenError,),
    "ABORTED": (SupersededError,),
    "UNAUTHENTICATED": (AuthenticationError,),
    "DEADLINE_EXCEEDED": (DeadlineError, NoWorkersError),
    "CANCELLED": (LaneClosedError,),
}
# Keyed by the class name, which is also sent: a peer's name is looked up only here.
CATALOGUE: dict[str, CatalogueEntry] = {
    error.__name__: CatalogueEntry(error, status) for status, errors in _BY_STATUS.items() for error in errors
}


def error_named(name: str, message: str, remote_traceback: str = "") -> PenstockError:
    """Return an error that a peer sent. For a name that this release does not know, a PenstockError whose message
    contains the name."""
    entry = CATALOGUE.get(name)
    if entry is None:
        return PenstockError(f"{name}: {message}", remote_traceback=remote_traceback)
    return entry.error(message, remote_traceback=remote_traceback)
