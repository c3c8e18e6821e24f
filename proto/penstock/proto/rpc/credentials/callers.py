"""Callers of the coordinator, recognised by the token that each call shows: "authorization: Bearer TOKEN"."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.proto.rpc.credentials.roles import Role
from penstock.proto.rpc.credentials.tokens import Tokens

BEARER = "Bearer "
PROOF = "Penstock-Proof"
"""Scheme of callers up to 0.1, which showed no token but a proof of it."""


@dataclass(frozen=True)
class Caller:
    roles: frozenset[Role]
    credential: str
    """Name of the token, or else its digest."""
    jobs_share_token: bool = True
    """True if at most one token or name is valid for training jobs, so that limits for each cannot tell jobs apart."""


class Callers:
    """The callers that a coordinator lets in: those that show one of its tokens."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._known: dict[str, Caller] = {}
        """Header "authorization" -> caller, at most one for each token."""

    def renew(self) -> None:
        """Read the tokens from their file again. Callers with a removed token are refused from now on."""
        if self._tokens.renew():
            self._known.clear()

    def find(self, authorization: str) -> Caller | None:
        found = self._known.get(authorization)
        if found is None and authorization.startswith(BEARER):
            token = authorization.removeprefix(BEARER)
            if roles := self._tokens.roles_of(token):
                jobs = {self._tokens.credential(one) for one, can in self._tokens.roles.items() if "client" in can}
                credential = self._tokens.credential(token.encode())
                found = self._known[authorization] = Caller(roles, credential, len(jobs) < 2)
        return found
