"""Proof that both ends of a call know the same token, without sending the token over the network, where a process that
listens at the coordinator's address while it is down would receive it.

1. A caller's first call has SCHEME alone, and is refused with a *challenge*, a random number of the coordinator.
2. The call is made again with "authorization": SCHEME, the challenge, a random number of its own, and an HMAC of both
   under the token. Further calls have the same, until a restarted coordinator refuses it with a new challenge.
3. The coordinator sends an HMAC of its own with each answer, before the first part. Without it a caller accepts no
   answer, and no error except that the coordinator could not be reached in time.

The coordinator need not store callers, because the header contains all that it needs. The caller sends its proof first,
so an unknown one receives nothing with which it could check guesses. Only TLS protects against a man in the middle."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from penstock.proto.rpc.credentials.roles import Role
from penstock.proto.rpc.credentials.tokens import Tokens, check_token

SCHEME = "Penstock-Proof"
"""First word of the header of a caller that proves its token. Other programs send it with Bearer, over TLS."""
CHALLENGE_KEY = "penstock-challenge"
"""Key of the challenge in the trailing metadata of a refused call."""
PROOF_KEY = "penstock-proof"
"""Key of the coordinator's proof in trailing metadata, and in streamed calls the initial ones."""
TRIES = 6
"""Largest number of tries of one call, between which the coordinator may restart, or a token be replaced."""
CALLERS_KEPT = 16_384
"""Largest number of callers that a coordinator remembers, so that it need not compute their HMACs at each call."""

_NONCE = re.compile(r"[0-9a-f]{32}")
_BEARER = "Bearer "


def _nonce() -> str:
    return secrets.token_hex(16)


def _hmac(token: bytes, who: str, challenge: str, nonce: str) -> str:
    """HMAC for `who`, "caller" or "coordinator": they differ, so that neither can use the other's as its own."""
    return hmac.new(token, f"penstock {who} {challenge} {nonce}".encode(), hashlib.sha256).hexdigest()


# ---------------------------------------------------------------------------------------------------------- caller


@dataclass(frozen=True)
class ShownProof:
    """Proof that a caller sends with a call, and the proof that the answer must have."""

    header: str = SCHEME
    challenge: str = ""
    expected: str = ""

    def proven_by(self, proof: object) -> bool:
        if not self.expected or not isinstance(proof, str):
            return False
        return hmac.compare_digest(proof.encode(), self.expected.encode())


class TokenProver:
    """Maker of a caller's proofs, for several threads. `show` is the proof for the next call, which keeps it to check
    the answer. Raises InvalidArgumentError for an invalid token."""

    def __init__(self, token: str) -> None:
        check_token(token)
        self._token = token.encode()
        self._own = _nonce()
        self.shown = ShownProof()

    def answers(self, challenge: object, shown: ShownProof) -> bool:
        """Compute the proof for a refused call's challenge, and set `self.shown` to it. False, and nothing changes, if
        there was no valid challenge, or `shown` had answered it already."""
        if not isinstance(challenge, str) or not _NONCE.fullmatch(challenge) or challenge == shown.challenge:
            return False
        mine, theirs = (_hmac(self._token, who, challenge, self._own) for who in ("caller", "coordinator"))
        self.shown = ShownProof(f"{SCHEME} {challenge} {self._own} {mine}", challenge, theirs)
        return True


# ----------------------------------------------------------------------------------------------------- coordinator


@dataclass(frozen=True)
class Caller:
    roles: frozenset[Role]
    credential: str
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
        """Return the caller that the header proves; a Challenged that it must answer; None if its token is wrong."""
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
