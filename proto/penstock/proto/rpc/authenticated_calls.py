"""What the clients in calls.py share: the token and release that each call shows, and the errors of calls.

The token crosses the network as it is. So it is sent only to a Unix socket in a private folder, over TLS, or where the
caller allows clear text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import grpc.aio

from penstock.proto.errors import CoordinatorUnavailableError, OverloadedError, TlsError
from penstock.proto.rpc.addresses import refuse_clear_token
from penstock.proto.rpc.channel import Tls, translating
from penstock.proto.rpc.credentials.callers import BEARER
from penstock.proto.rpc.credentials.tokens import check_token, read_again
from penstock.proto.rpc.tls import Renewing, diagnose
from penstock.proto.rpc.version import PROTOCOL, PROTOCOL_KEY, VERSION, VERSION_KEY

DIAGNOSE_S = 2.0
"""Timeout in seconds of each step of finding out whether TLS is why calls to a listening coordinator fail."""

Metadata = tuple[tuple[str, str], ...]
_RELEASE = ((PROTOCOL_KEY, str(PROTOCOL)), (VERSION_KEY, VERSION))


@dataclass
class Call:
    """One call of the blocking client, which another thread makes."""

    begun: Callable[[], None] = lambda: None
    """Called when the first part of a streamed answer has arrived."""
    given_up: bool = False
    """True if the caller waits no longer: nothing that arrives may be used."""


class AuthenticatedCalls:
    def __init__(self, address: str, token: str, tls: Tls | None, deadline_s: float, insecure: bool) -> None:
        check_token(token)
        refuse_clear_token(address, encrypted=tls is not None, insecure=insecure)
        self.address = address
        self.deadline_s = deadline_s
        self._token = token
        self._files = None if tls is None else Renewing(tls)
        self._closed = False
        self._reached = False

    @property
    def metadata(self) -> Metadata:
        return (("authorization", f"{BEARER}{self._token}"), *_RELEASE)

    @contextmanager
    def _guarded(self, method: str, deadline_s: float) -> Iterator[None]:
        with translating(self.address, method, deadline_s, lambda: self._closed):
            yield
        self._reached = True

    @property
    def _tls(self) -> Tls | None:
        return None if self._files is None else self._files.tls

    def _open(self) -> None:
        """Open a channel with the current certificate files."""
        raise NotImplementedError

    def _renew_files(self) -> None:
        """Connect with new certificates after a failed call, if the files have changed. Open calls are kept."""
        if self._files is not None and not self._closed and self._files.renew():
            self._open()

    def again(self, error: grpc.RpcError, shown: Metadata) -> bool:
        """Return True if a call that was refused for its token can be made again, because its file has another one
        now."""
        if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
            return False
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            return False
        self._token = read_again(self._token)
        return self.metadata != shown

    def _tls_trouble(self, error: CoordinatorUnavailableError) -> TlsError | None:
        """TLS error that explains why the coordinator has never answered; None if it has, because it may come back."""
        if self._reached or isinstance(error, OverloadedError):
            return None
        return diagnose(self.address, self._tls, f"the coordinator at {self.address}", DIAGNOSE_S)
