"""Errors between two processes: how an exception is sent, and how it is raised again at the other end.

`abort` sends a PenstockError as its status in the catalogue and an ErrorDetail in trailing metadata; any other
exception as UNKNOWN with the traceback, to show the bug. `translating` converts back, without grpc.RpcError."""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from penstock.proto.errors import (
    CATALOGUE,
    SAME_RELEASE,
    AuthenticationError,
    CoordinatorUnavailableError,
    DeadlineError,
    InvalidArgumentError,
    LaneClosedError,
    OverloadedError,
    PenstockError,
    VersionSkewError,
    error_named,
)
from penstock.proto.rpc.version import VERSION
from penstock.proto.tracebacks import format_remote, middle_out
from penstock.proto.v1 import records_pb2
from penstock.runtime.telemetry.logs import LONGEST, plain

_Reply = TypeVar("_Reply")

METADATA_MAX = 64 * 1024
"""Largest size of a call's metadata in bytes, set at both ends. A traceback exceeds gRPC's default of 8 KiB."""
NAME_KEEP = 256
MESSAGE_KEEP = 8 * 1024
TRACEBACK_KEEP = 24 * 1024
"""Bytes of a traceback that is sent. With the message, and in base64, it stays below METADATA_MAX."""

ERROR_KEY = "penstock-error-bin"
RETRY_KEY = "penstock-retry-after-ms"


def detail_of(error: BaseException) -> records_pb2.ErrorDetail:
    """Return an error as an ErrorDetail. Any but a PenstockError becomes one, with the traceback here."""
    if isinstance(error, PenstockError):
        name = next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in CATALOGUE), "PenstockError")
        message, remote = error.message, error.remote_traceback
    else:
        name, remote = "PenstockError", format_remote(error)
        message = "".join(traceback.format_exception_only(error)).strip()
    return records_pb2.ErrorDetail(
        name=name,
        message=middle_out(message, MESSAGE_KEEP),
        remote_traceback=middle_out(remote, TRACEBACK_KEEP),
    )


def cut(detail: records_pb2.ErrorDetail, most: int = TRACEBACK_KEEP) -> records_pb2.ErrorDetail:
    """Shorten an ErrorDetail from another process: its message and its traceback to about `most` bytes each."""
    return records_pb2.ErrorDetail(
        name=detail.name[:NAME_KEEP],
        message=middle_out(detail.message, min(most, MESSAGE_KEEP)),
        remote_traceback=middle_out(detail.remote_traceback, most),
    )


def error_of(detail: records_pb2.ErrorDetail) -> PenstockError:
    # Cut and escape here too, because a peer may send any text, and it will be printed.
    name = plain(detail.name, NAME_KEEP)
    return error_named(name, plain(detail.message, LONGEST), plain(detail.remote_traceback, LONGEST))


def _error_of_rpc(error: grpc.RpcError, address: str, method: str, deadline_s: float, closed: bool) -> PenstockError:
    code, details = grpc.StatusCode.UNKNOWN, str(error)
    trailing: tuple[Any, ...] = ()
    if isinstance(error, grpc.aio.AioRpcError | grpc.Call):
        code, details, trailing = error.code(), error.details() or "", tuple(error.trailing_metadata() or ())
    for key, value in trailing:
        if key == ERROR_KEY and isinstance(value, bytes):
            try:
                found = error_of(records_pb2.ErrorDetail.FromString(value))
            except DecodeError:
                break  # an invalid detail: the status is still useful
            if isinstance(found, OverloadedError):
                found.retry_after_s = _retry_after(trailing)
            return found
    where = f"the coordinator at {address}"
    if code is grpc.StatusCode.CANCELLED and closed:
        return closed_here(address, f"during {method}")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return CoordinatorUnavailableError(f"{where} cannot be reached ({method}): {details}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"{where} did not answer {method} within {deadline_s:g} s. Check its load and the network")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return VersionSkewError(f"{where} does not know {method}, which Penstock {VERSION} calls. {SAME_RELEASE}")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return AuthenticationError(f"{where} refused {method}: {details}. Set the same token at both ends")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return InvalidArgumentError(f"the request {method} to {where} is too large: {details}. {SAME_RELEASE}")
    return PenstockError(f"{method} at {where} failed with {code.name}: {details}. Read the log of the coordinator")


def closed_here(address: str, when: str) -> LaneClosedError:
    return LaneClosedError(f"the connection to the coordinator at {address} was closed on this side {when}")


def _retry_after(trailing: tuple[Any, ...]) -> float:
    """Seconds to wait before the call is made again, at most LONGEST_S."""
    for key, value in trailing:
        if key == RETRY_KEY and isinstance(value, str) and value.isdecimal() and len(value) < 10:
            return min(int(value) / 1000, OverloadedError.LONGEST_S)
    return OverloadedError.retry_after_s


@contextmanager
def translating(address: str, method: str, deadline_s: float, closed: Callable[[], bool]) -> Iterator[None]:
    """Translate gRPC's errors of one call into a PenstockError. `closed`: True if the channel was closed here."""
    try:
        yield
    except grpc.RpcError as error:
        raise _error_of_rpc(error, address, method, deadline_s, closed()) from None  # it has all that gRPC reports
    except (grpc.aio.UsageError, ValueError) as error:
        if isinstance(error, PenstockError) or not closed():
            raise
        raise closed_here(address, f"before {method}") from error
    except asyncio.CancelledError as error:
        # A closed aio channel cancels its pending calls, which looks like a cancellation of this task.
        task = asyncio.current_task()
        if not closed() or task is None or task.cancelling():
            raise
        raise closed_here(address, f"during {method}") from error


async def answer_of(call: grpc.aio.StreamUnaryCall[Any, _Reply]) -> _Reply:
    """Return the reply of a call whose request is a stream, or raise an error with the server's status. If it refuses
    the call while parts are being written, gRPC for asyncio (up to 1.85 at least) replaces that by INTERNAL. So the
    status is read in the callback of its arrival, the only moment at which it certainly exists."""
    statuses: list[grpc.aio.AioRpcError] = []
    call.add_done_callback(lambda ended: statuses.append(_ended_with(ended)))
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        for status in statuses:
            # A broken journal is answered with INTERNAL too, but then with an error in the metadata.
            if status.code() is not grpc.StatusCode.INTERNAL or status.trailing_metadata():
                raise status from error
        raise


def _ended_with(call: Any) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*(_at_once(call.trailing_metadata()) or ()))
    return grpc.aio.AioRpcError(
        _at_once(call.code()), grpc.aio.Metadata(), trailing, details=_at_once(call.details()) or ""
    )


def _at_once(asked: Coroutine[Any, Any, Any]) -> Any:
    try:
        asked.send(None)
    except StopIteration as done:
        return done.value
    asked.close()
    raise RuntimeError("the status of a call that has ended must be available at once, but gRPC waits for it")


def status_of(error: Exception) -> str:
    return CATALOGUE[detail_of(error).name].status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    detail = detail_of(error)
    status = grpc.StatusCode[CATALOGUE[detail.name].status]
    first_line = detail.message.partition("\n")[0][:1000]  # the whole message is in the detail
    trailing: tuple[tuple[str, str | bytes], ...] = ((ERROR_KEY, detail.SerializeToString()),)
    if isinstance(error, OverloadedError):
        trailing = (*trailing, (RETRY_KEY, str(math.ceil(1000 * error.retry_after_s))))
    await context.abort(status, first_line, trailing)
