"""Authenticated calls, for the clients in calls.py: answers are accepted only from a server that knows the token.

It applies credentials.token_proof to the metadata of calls and answers. Parts of a streamed answer need a proof in the
initial metadata, or a server without the token could fill the caller's memory until the deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from penstock.proto.errors import (
    AuthenticationError,
    CoordinatorUnavailableError,
    OverloadedError,
    PenstockError,
    TlsError,
)
from penstock.proto.rpc.channel import Tls, translating
from penstock.proto.rpc.credentials.token_proof import CHALLENGE_KEY, PROOF_KEY, TRIES, TokenProver
from penstock.proto.rpc.credentials.tokens import read_again
from penstock.proto.rpc.tls import Renewing, diagnose
from penstock.proto.rpc.version import PROTOCOL, PROTOCOL_KEY, VERSION, VERSION_KEY
from penstock.proto.rpc.wire_errors import ERROR_KEY

SHOWN = 200
"""Characters that an error quotes from a server that has not proven that it knows the token."""
DIAGNOSE_S = 2.0
"""Timeout in seconds of each step of finding out whether TLS is why calls to a listening coordinator fail."""

Metadata = tuple[tuple[str, str], ...]
Trailing = Iterable[tuple[str, str | bytes]] | None
Answer = tuple[Any, Trailing]
_RELEASE = ((PROTOCOL_KEY, str(PROTOCOL)), (VERSION_KEY, VERSION))
_OWN_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Status codes that gRPC sets without a server: accepted unproven, but not with Penstock's own details."""


class AuthenticatedCall:
    def __init__(self, address: str, token: str, tls: Tls | None, deadline_s: float) -> None:
        self.address = address
        self.deadline_s = deadline_s
        self.prover = TokenProver(token)
        self._token = token
        self._files = None if tls is None else Renewing(tls)
        self._closed = False
        self._reached = False

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

    def renew_token(self) -> bool:
        token = read_again(self._token)
        if token == self._token:
            return False
        self._token, self.prover = token, TokenProver(token)
        return True

    def wrong_server_error(self, words: str = "") -> PenstockError:
        """Error for an answer without the token: CoordinatorUnavailableError if the coordinator has answered before,
        and may come back, else AuthenticationError. `words`: text to quote."""
        kind = CoordinatorUnavailableError if self._reached else AuthenticationError
        return kind(
            f"the process that answers at {self.address} does not prove that it has the token, so it is not the "
            f"coordinator{words}: start the coordinator there, or pass its address"
        )

    def _tls_trouble(self, error: CoordinatorUnavailableError) -> TlsError | None:
        """TLS error that explains why the coordinator has never answered; None if it has, because it may come back."""
        if self._reached or isinstance(error, OverloadedError):
            return None
        return diagnose(self.address, self._tls, f"the coordinator at {self.address}", DIAGNOSE_S)


class Call:
    """Call of a client with all its tries: it is made again while `again` is True, until the answer has a proof."""

    def __init__(self, client: AuthenticatedCall) -> None:
        self._client = client
        self.begun: Callable[[], None] = lambda: None
        """Called when the first part of a streamed answer has arrived."""
        self.given_up = False
        """True if the caller waits no longer: nothing that arrives may be used."""
        self._tries = TRIES
        self._show()

    def _show(self) -> None:
        self._prover = self._client.prover
        self._shown = self._prover.shown
        self._tries -= 1
        self.metadata: Metadata = (("authorization", self._shown.header), *_RELEASE)

    def again(self, error: grpc.RpcError) -> bool:
        """Return True if the client must call again, with the new `metadata`, because of a challenge or a changed
        token. Raises an error if a server without the token has answered."""
        if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
            return False
        trailing = error.trailing_metadata() or ()
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            if error.code() not in _OWN_CODES or any(key == ERROR_KEY for key, _ in trailing):
                self.require_proof(trailing, _words(error))
            return False
        if not self._tries:
            return False
        answered = self._prover.answers(_found(trailing, CHALLENGE_KEY), self._shown)
        # Another call may have found the new token meanwhile.
        if not answered and self._prover is self._client.prover and not self._client.renew_token():
            return False
        self._show()
        return True

    def require_proof(self, metadata: Trailing, words: str = "") -> None:
        """Raise an error unless the metadata prove that the server knows the token. `words`: text of its own error."""
        if not self._shown.proven_by(_found(metadata, PROOF_KEY)):
            raise self._client.wrong_server_error(words)


def _words(error: grpc.Call | grpc.aio.AioRpcError) -> str:
    """Escaped text of an error that came without a proof. It may be gRPC's own, which helps if a reply is too large."""
    return f" (it says {error.code().name}: {ascii((error.details() or '')[:SHOWN])[1:-1]})"


def _found(trailing: Trailing, name: str) -> Any:
    return next((value for key, value in trailing or () if key == name), None)
