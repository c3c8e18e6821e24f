"""Tokens: their sources, and the roles of each token.

A token comes from a file or the environment, never from a command's argument, which every user of the machine can read.
The text is a single token, valid for every role, or lines "role:token" or "role/name:token". PEM blocks beside them are
skipped, so that one file can hold certificate, key and token (`credentials`). A coordinator accepts all of them; others
use that of their role. So a cluster can share one file.

A file is read again while a process runs (`read_again`), so tokens can change. One that other users can read is
refused: a leaked secret is worse than a daemon that does not start. No message and no repr here contains a token."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from dataclasses import dataclass
from typing import cast

from penstock.proto.errors import AuthenticationError, InvalidArgumentError, PenstockError
from penstock.proto.rpc.credentials.roles import ROLES, Role
from penstock.runtime.config.settings_file import token_file_of_settings
from penstock.runtime.files.secret_files import read_secret

_log = logging.getLogger("penstock.tokens")

MAX_FILE = 64 << 10
_PEM = re.compile(r"-----BEGIN .*?-----END [^\n]*", re.DOTALL)
NAME_MAX = 40
"""Largest number of characters in a token's name, which so differs from a digest."""
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_MAX}}}")
MAX_TOKEN = 4096
"""Largest number of characters in a token, which may be sent in a header of at most 64 KiB."""


BEARER = "Bearer "
"""Begin of the header "authorization" by which each call shows its token."""

_logged: dict[str, str] = {}


class FromFile(str):
    """Token, or text with several tokens, that was read from a file, which may have changed since."""

    file: str
    role: Role | None = None
    """Role for which the single token was chosen; None for the whole text of the file."""

    @classmethod
    def of(cls, text: str, file: str, role: Role | None = None) -> FromFile:
        made = cls(text)
        made.file, made.role = os.path.abspath(file), role
        return made


def read_again(held: str) -> str:
    """Return the present content of `held`'s file; `held` itself without a file, or if it is being replaced now."""
    if not isinstance(held, FromFile):
        return held
    try:
        found = read_tokens(held.file) if held.role is None else read_token(held.role, file=held.file)
    except PenstockError as error:
        if _logged.get(held.file) != error.message:
            _log.warning("the changed token file cannot be used, and the current tokens stay valid: %s", error.message)
        _logged[held.file] = error.message
        return held
    _logged.pop(held.file, None)
    return found


@dataclass(frozen=True)
class Caller:
    """Who shows a token."""

    roles: frozenset[Role]
    credential: str
    """Name of the token, or else its digest."""
    jobs_share_token: bool = True
    """True if at most one token or name is valid for training jobs, so that limits for each cannot tell jobs apart."""


class Tokens:
    """Tokens with their roles. Raises InvalidArgumentError for invalid text, AuthenticationError without a token."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._callers: dict[str, Caller] = {}
        """Header "authorization" -> caller, at most one for each token."""
        self.roles: dict[bytes, frozenset[Role]] = {}
        self.names: dict[bytes, str] = {}
        """Token -> name in its lines "role/name:token"; tokens of one name count as one, and may replace each other."""
        for line in filter(None, map(str.strip, text.splitlines())):
            place, colon, token = line.rpartition(":")
            role, slash, name = place.partition("/")
            if colon and (role not in ROLES or (slash and (name in ROLES or not _NAME.fullmatch(name)))):
                raise InvalidArgumentError(
                    f"a line of a token file must be role:token or role/name:token, with a role of {_names(ROLES)} "
                    f"and a name of 1 to {NAME_MAX} letters, digits, dots, dashes and underscores that is no role, "
                    "or a token alone"
                )
            check_token(token)
            if slash and self.names.setdefault(token.encode(), name) != name:
                raise InvalidArgumentError(f"a token must have one name, got {self.names[token.encode()]} and {name}")
            roles = frozenset((cast(Role, role),)) if colon else ROLES
            self.roles[token.encode()] = self.roles.get(token.encode(), frozenset()) | roles
        if not self.roles:
            raise AuthenticationError("the token must not be empty: put one into its file or variable")

    def renew(self) -> bool:
        """Read the text from its file again. Return True if it has changed: removed tokens are refused from now on."""
        text = read_again(self._text)
        if text == self._text:
            return False
        renewed = Tokens(text)
        self._text, self.roles, self.names = text, renewed.roles, renewed.names
        self._callers.clear()
        _log.info("loaded the new tokens from the file, for the roles %s", self.about)
        return True

    def roles_of(self, shown: str) -> frozenset[Role]:
        """Return the roles of a token that a caller has sent. The time that this takes does not depend on the token."""
        found: frozenset[Role] = frozenset()
        for token, roles in self.roles.items():
            if hmac.compare_digest(shown.encode(), token):
                found = roles
        return found

    def caller(self, authorization: str) -> Caller | None:
        found = self._callers.get(authorization)
        if found is None and authorization.startswith(BEARER):
            token = authorization.removeprefix(BEARER)
            if roles := self.roles_of(token):
                jobs = {self.credential(one) for one, can in self.roles.items() if "client" in can}
                found = Caller(roles, self.credential(token.encode()), len(jobs) < 2)
                self._callers[authorization] = found
        return found

    def credential(self, token: bytes) -> str:
        """Return the token's name, or else its digest: what limits and budgets are counted by."""
        return self.names.get(token) or hashlib.sha256(token).hexdigest()

    def names_of(self, role: Role) -> set[str]:
        return {name for token, name in self.names.items() if role in self.roles[token]}

    def of(self, role: Role) -> str | None:
        """Return the token to send in a role, preferably one of this role only."""
        fitting = [(len(roles), token) for token, roles in self.roles.items() if role in roles]
        return min(fitting)[1].decode() if fitting else None

    @property
    def about(self) -> str:
        return _names(frozenset().union(*self.roles.values()))

    def __repr__(self) -> str:
        return f"<Tokens for {self.about}>"


def _names(roles: frozenset[Role]) -> str:
    return ", ".join(sorted(roles))


def check_token(token: str) -> None:
    """Raise InvalidArgumentError for a token that a header cannot have."""
    if not token or not token.isascii() or not token.isprintable() or " " in token or len(token) > MAX_TOKEN:
        raise InvalidArgumentError(f"a token must be one word of 1 to {MAX_TOKEN} printable ASCII characters")


def read_token(role: Role, file: str | os.PathLike[str] | None = None) -> str:
    """Return the token to send in a role, from the first given of: `file`, PENSTOCK_TOKEN,
    PENSTOCK_TOKEN_FILE, the settings file's token_file. Raises AuthenticationError, which names the file, if it cannot
    be read, can be read by others, or has no token of the role; InvalidArgumentError for text that is no token."""
    text, source = _text(file)
    tokens = _parsed(text, source)
    found = tokens.of(role)
    if found is None:
        raise AuthenticationError(f"{source} has no token for the role {role}: add a line {role}:TOKEN")
    return FromFile.of(found, text.file, role) if isinstance(text, FromFile) else found


def read_tokens(file: str | os.PathLike[str] | None = None) -> str:
    """Return the text with tokens for a coordinator, from the same sources as `read_token`."""
    text, source = _text(file)
    _parsed(text, source)
    return text


def admin_tokens(file: str | os.PathLike[str] | None = None) -> str:
    """Return tokens for web pages that other machines can reach. Raises AuthenticationError without one of admin."""
    text, source = _text(file)
    tokens = _parsed(text, source)
    if tokens.of("admin") is None:
        raise AuthenticationError(
            f"{source} has no token for the role admin, which web pages need: add admin:TOKEN, or listen on 127.0.0.1"
        )
    return text


def _parsed(text: str, source: str) -> Tokens:
    try:
        return Tokens(text)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{source}: {error.message}") from None


def _file(given: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    return given if given is not None else os.environ.get("PENSTOCK_TOKEN_FILE") or token_file_of_settings() or None


def _text(file: str | os.PathLike[str] | None) -> tuple[str, str]:
    """Text with tokens, and its source. Raises AuthenticationError if there is none, or if others can read the file."""
    from_environment = os.environ.get("PENSTOCK_TOKEN", "")
    if file is None and from_environment:
        return from_environment, "PENSTOCK_TOKEN"
    file = _file(file)
    if file is None:
        raise AuthenticationError("no token was given: set PENSTOCK_TOKEN, or PENSTOCK_TOKEN_FILE (or token_file)")
    name = f"the token file {os.fspath(file)}"
    try:
        text = read_secret(name, file, MAX_FILE, AuthenticationError).decode("ascii")
    except UnicodeError:
        raise AuthenticationError(f"{name} must be ASCII text: name the file with the token") from None
    text = _PEM.sub("", text)
    if not text.strip():
        raise AuthenticationError(f"{name} is empty or has no token: write one into it")
    return FromFile.of(text, os.fspath(file)), name
