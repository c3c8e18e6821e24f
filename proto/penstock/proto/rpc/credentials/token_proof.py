"""Proof that both ends of a call know the same token, without sending the token over the network.

A process that listens at the coordinator's address, for example on its port while the coordinator was down, would
receive the token of every caller that sends it. So Penstock's own callers prove that they know the token, with TLS or
without:

1. In its first call a caller sends SCHEME alone. The call is refused with a *challenge*, a random number that the
   coordinator drew when it started.
2. The caller makes the call again with this header "authorization": SCHEME, the challenge, a random number of its own,
   and an HMAC of both numbers under the token. The caller sends the same header with all further calls, until a
   restarted coordinator refuses it with a new challenge.
3. The coordinator sends an HMAC of its own with each answer. If an answer comes in parts, the HMAC is sent before the
   first part. Without this HMAC a caller accepts no answer, and no error except one that says that the coordinator
   could not be reached in time.

After a restart of the coordinator the header is no longer valid. A server that does not know the token cannot compute
the HMAC with which it must answer the header. The coordinator need not store callers, because the header contains all
that it needs. The caller must send its proof first, so an unknown caller receives nothing with which it could check
guesses of the token.

Only TLS protects against a man in the middle, who relays the messages of both ends.

This module opens no connection: penstock.proto.rpc.authenticated_calls and penstock.proto.rpc.auth_interceptor use it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from penstock.proto.rpc.credentials.roles import Role
from penstock.proto.rpc.credentials.tokens import Tokens, check_token

__all__ = ["CHALLENGE_KEY", "PROOF_KEY", "TRIES", "Caller", "Challenged", "ShownProof", "TokenProver", "TokenVerifier"]

SCHEME = "Penstock-Proof"
"""First word of the header "authorization" of a caller that proves its token. Programs that cannot make the proof send
their token with the scheme Bearer instead, over TLS."""
CHALLENGE_KEY = "penstock-challenge"
"""Key of the challenge in the trailing metadata of a refused call."""
PROOF_KEY = "penstock-proof"
"""Key of the coordinator's proof in the trailing metadata of every answer to a caller that has proven its token. In
streamed calls the initial metadata contain the same proof."""
TRIES = 6
"""Largest number of times that a client makes one call. Between two tries the coordinator may restart, or a token may
be replaced."""
CALLERS_KEPT = 16_384
"""Largest number of callers that a coordinator remembers, so that it need not compute their HMACs at each call."""

_NONCE = re.compile(r"[0-9a-f]{32}")
_BEARER = "Bearer "


def _nonce() -> str:
    return secrets.token_hex(16)


def _hmac(token: bytes, who: str, challenge: str, nonce: str) -> str:
    """Return an HMAC under the token. `who`: the end of the call that proves its token, "caller" or "coordinator". The
    HMACs of the two ends differ, so that neither end can use the other's HMAC as its own proof."""
    return hmac.new(token, f"penstock {who} {challenge} {nonce}".encode(), hashlib.sha256).hexdigest()


# ---------------------------------------------------------------------------------------------------------- caller


@dataclass(frozen=True)
class ShownProof:
    """Proof that a caller sends with a call, and the proof that the answer must have."""

    header: str = SCHEME
    challenge: str = ""
    expected: str = ""

    def proven_by(self, proof: object) -> bool:
        """Return whether `proof`, from an answer's metadata, shows that the server knows the token."""
        if not self.expected or not isinstance(proof, str):
            return False
        return hmac.compare_digest(proof.encode(), self.expected.encode())


class TokenProver:
    """Maker of a caller's proofs that it knows a token. Several threads may use it.

    `shown` is the proof to send with the next call. A call keeps the ShownProof that it has sent, to check the answer.

    Raises InvalidArgumentError for an invalid token.
    """

    def __init__(self, token: str) -> None:
        check_token(token)
        self._token = token.encode()
        self._own = _nonce()
        self.shown = ShownProof()

    def answers(self, challenge: object, shown: ShownProof) -> bool:
        """Compute the proof for the challenge with which a call was refused, and set `self.shown` to it. Return False,
        and change nothing, if there was no valid challenge, or if the call had already answered this challenge.

        challenge: from the metadata of the refusal; None if it had none. shown: the proof that the refused call sent.
        """
        if not isinstance(challenge, str) or not _NONCE.fullmatch(challenge) or challenge == shown.challenge:
            return False
        mine, theirs = (_hmac(self._token, who, challenge, self._own) for who in ("caller", "coordinator"))
        self.shown = ShownProof(f"{SCHEME} {challenge} {self._own} {mine}", challenge, theirs)
        return True


# ----------------------------------------------------------------------------------------------------- coordinator


@dataclass(frozen=True)
class Caller:
    """Caller of the coordinator, recognised by its token."""

    roles: frozenset[Role]
    credential: str
    """Digest of the token."""
    proof: str = ""
    """Coordinator's proof that it knows the token too; "" for a caller that sent the token itself."""
    jobs_share_token: bool = True
    """True if at most one token is valid for training jobs, so that limits for each token cannot tell jobs apart."""


@dataclass(frozen=True)
class Challenged:
    """Challenge that a caller must answer: it must make its call again, with a proof for this challenge."""

    challenge: str


class TokenVerifier:
    """Verifier of callers' proofs, for the coordinator. Its challenge is valid until the coordinator restarts."""

    def __init__(self, tokens: Tokens, challenge: str | None = None) -> None:
        self.challenge = challenge or _nonce()
        self._tokens = tokens
        self._known: dict[str, Caller] = {}
        """Header "authorization" of a caller with a valid token -> the caller. Other callers are not stored."""

    def renew(self) -> None:
        """Read the tokens from their file again. Callers with a removed token are refused from now on."""
        if self._tokens.renew():
            self._known.clear()

    def caller(self, authorization: str) -> Caller | Challenged | None:
        """Return the caller that the header "authorization" proves. Return a Challenged if it must first answer the
        challenge, None if its token is wrong."""
        found = self._known.get(authorization) or self._judged(authorization)
        if isinstance(found, Caller):
            if len(self._known) == CALLERS_KEPT:
                self._known.clear()
            self._known[authorization] = found
        return found

    def _judged(self, authorization: str) -> Caller | Challenged | None:
        scheme, *words = authorization.split(" ")
        if scheme != SCHEME:
            return self._bearer(authorization)
        if len(words) != 3 or words[0] != self.challenge:
            return Challenged(self.challenge)
        _, nonce, shown = words
        if not _NONCE.fullmatch(nonce):
            return None
        found = None
        for token, roles in self._tokens.roles.items():
            if hmac.compare_digest(shown.encode(), _hmac(token, "caller", self.challenge, nonce).encode()):
                proof = _hmac(token, "coordinator", self.challenge, nonce)
                found = Caller(roles, _digest(token), proof, self._jobs_share_token)
        return found

    def _bearer(self, authorization: str) -> Caller | None:
        token = authorization.removeprefix(_BEARER)
        roles = self._tokens.roles_of(token)
        return Caller(roles, _digest(token.encode()), jobs_share_token=self._jobs_share_token) if roles else None

    @property
    def _jobs_share_token(self) -> bool:
        return sum("client" in roles for roles in self._tokens.roles.values()) < 2


def _digest(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()
