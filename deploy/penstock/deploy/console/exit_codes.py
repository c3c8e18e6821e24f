"""Exit codes of commands, by the kind of failure, so that a script need not parse messages. A number never changes its
meaning.

Below 10: general (0 success, 1 a bug, 2 usage, 3 TLS); 10 to 19: coordinator, network, runs; 20 to 29: states, user
code, datasets; 30 to 39: findings of `penstock doctor` (30 also a replayed batch that differs); 130: interrupted. An
error of Penstock is one line on standard error, or one JSON object with --json; its tracebacks, also the remote one,
need --debug. Any other exception is a bug, and its traceback is always shown.
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, ParamSpec

import typer

from penstock.proto.errors import CATALOGUE, CoordinatorUnavailableError, PenstockError
from penstock.runtime.telemetry.logs import printable

_P = ParamSpec("_P")

BUG = 1
USAGE = 2
UNSAID = 10
PORT_TAKEN = 13
DIFFERS = 30
CANNOT_SAVE = 31
UNFIT = 32
INTERRUPTED = 130


@dataclass(frozen=True)
class ExitCode:
    """Exit code of a command. `errors`: classes of penstock.proto.errors that end a command with it, with blanks."""

    number: int
    meaning: str
    errors: str = ""


CODES = (
    ExitCode(0, "done; daemons: ended by a signal"),
    ExitCode(BUG, "unexpected: a bug in Penstock, its traceback is shown"),
    ExitCode(USAGE, "usage: an invalid flag, variable or argument", "InvalidArgumentError BoxOutOfRangeError"),
    ExitCode(3, "a certificate cannot be used or is not trusted, or only one end uses TLS", "TlsError"),
    ExitCode(
        UNSAID,
        "another error of Penstock, or standard output cannot be written",
        "PenstockError ProtocolError ForkedProcessError AmbiguousContextError",
    ),
    ExitCode(11, "the coordinator cannot be reached, or is overloaded", "CoordinatorUnavailableError OverloadedError"),
    ExitCode(
        12, "the token is missing, unreadable, wrong, or of another role", "AuthenticationError NotPermittedError"
    ),
    ExitCode(PORT_TAKEN, "the address to listen on is in use", "PortTakenError"),
    ExitCode(14, "the coordinator's state on disk cannot be read or written", "JournalError"),
    ExitCode(15, "the two ends are of different releases", "VersionSkewError"),
    ExitCode(16, "refused to listen beyond this machine without TLS (see --insecure)", "UnsafeBindError"),
    ExitCode(17, "a deadline passed", "DeadlineError NoWorkersError"),
    ExitCode(
        18,
        "no such run or worker, or it does not match the request",
        "UnknownRunError UnknownWorkerError SupersededError BoxTakenError TopologyError",
    ),
    ExitCode(
        19,
        "a worker or lane was lost, or delivers damaged data",
        "WorkerLostError PoisonBatchError LaneLostError LaneClosedError BatchCorruptError",
    ),
    ExitCode(20, "no state is available for this step", "StateUnavailableError"),
    ExitCode(21, "the loader cannot be saved", "NotRestartableError UnsupportedStateError"),
    ExitCode(
        22,
        "a state is damaged, too new, or another loader's",
        "StateCorruptError StateVersionError StateMismatchError",
    ),
    ExitCode(
        23, "a checkpoint does not exist, or cannot be written or read", "CheckpointError CheckpointNotFoundError"
    ),
    ExitCode(24, "a checkpoint is damaged", "CheckpointCorruptError"),
    ExitCode(
        25,
        "input_fn or its loader raised, cannot be found, or is not allowed",
        "InputFnError InputFnNotFoundError InputFnNotAllowedError",
    ),
    ExitCode(
        26,
        "a batch cannot be sent, or there is none",
        "UnsupportedLeafError StructureChangedError BatchTooLargeError EmptyInputError",
    ),
    ExitCode(27, "a runner holds more memory than its worker allows", "MemoryLimitError"),
    ExitCode(
        28,
        "a dataset cannot be fetched or read",
        "DatasetError ShardCorruptError SampleCorruptError ShardUnavailableError SnapshotExpiredError",
    ),
    ExitCode(DIFFERS, "a restored loader yields other batches", "ReplayMismatchError"),
    ExitCode(CANNOT_SAVE, "doctor: the loader streams, but cannot be saved as it is"),
    ExitCode(UNFIT, "doctor: this machine or this cluster has a problem, which is named"),
    ExitCode(INTERRUPTED, "interrupted (Ctrl-C); `penstock up`: ended by a signal while it started"),
)

_START_ONE = (
    "Start it there (penstock coordinator, penstock up), or name another by --coordinator or PENSTOCK_COORDINATOR"
)

_CODE_OF = {name: code.number for code in CODES for name in code.errors.split()}

EXIT_LINES = "\n".join(f"{code.number:>3}  {code.meaning}" for code in CODES)


class CommandError(Exception):
    """Error of a command for which penstock.proto.errors has no class, with its own exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def exit_code(error: PenstockError) -> int:
    """Return the code of the error's class, or of the nearest base class in the table."""
    name = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in CATALOGUE)
    return _CODE_OF[name]


_debug = False


def set_debug(value: bool) -> bool:
    global _debug
    _debug = _debug or value
    return value


def guarded(command: Callable[_P, int | None]) -> Callable[_P, NoReturn]:
    """Return a function that ends the process with the command's value (None: 0), or the code of its error."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> NoReturn:
        raise typer.Exit(_code_of(lambda: command(*args, **kwargs), as_json=bool(kwargs.get("as_json"))))

    return run


def _code_of(command: Callable[[], int | None], *, as_json: bool) -> int:
    try:
        return command() or 0
    except PenstockError as error:
        code = exit_code(error)
        is_away = type(error) is CoordinatorUnavailableError  # in a training job it has another remedy
        message = f"{error.message}. {_START_ONE}" if is_away else error.message
        _print_error(message, type(error).__name__, code, as_json)
        return code
    except CommandError as error:
        _print_error(str(error), None, error.code, as_json)
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED


def _print_error(message: str, name: str | None, code: int, as_json: bool) -> None:
    """Print an error to standard error, within its `except` block. `name`: its class; None for a CommandError."""
    if _debug:
        traceback.print_exc()
    line = printable(" ".join(message.split()))
    about = {"error": {"name": name, "exit_code": code, "message": line}}
    print(json.dumps(about) if as_json else f"penstock: {line}", file=sys.stderr)
