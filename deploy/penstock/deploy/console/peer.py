"""Coordinator that a command calls, and its credentials. If nothing names one, it is the one that this user runs here
(penstock.runtime.process.announcements); several are an error, none means the default address."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.deploy.console.command_token import token_source
from penstock.deploy.console.settings import PeerSettings, resolve
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.rpc.addresses import UNIX
from penstock.runtime.config.settings import source_of
from penstock.runtime.process.announcements import Announcement, announced
from penstock.runtime.telemetry.logs import printable

if TYPE_CHECKING:  # at run time gRPC is imported only when a command needs it
    from penstock.proto.rpc.calls import CoordinatorClient
    from penstock.proto.rpc.tls import Tls


class Peer:
    """Coordinator that options, variables or the settings file name, or that runs here. Nothing is checked before use:
    methods raise InvalidArgumentError, TlsError or AuthenticationError."""

    def __init__(self, *, job: str | None = None, token_file: Path | None = None, **flags: Any) -> None:
        self._job, self._token_file, self._flags = job, token_file, flags

    @property
    def address(self) -> str:
        """HOST:PORT or unix:/PATH."""
        if self._is_named or self._announcement is None:
            return self._named
        return self._announcement.address

    def tls(self) -> Tls | None:
        return self._settings.tls()

    @cached_property
    def _settings(self) -> PeerSettings:
        flags = self._flags
        if self._announcement is not None and not self._is_named:
            flags = {**self._announcement.tls, **{name: value for name, value in flags.items() if value}}
        return resolve(PeerSettings, **flags)

    def token(self) -> str:
        from penstock.proto.rpc.credentials.tokens import read_token

        file = self._settings.tokens_in(self._token_file)
        if file is None and self._announcement is not None and not self._has_other_token:
            file = Path(self._announcement.token_file)
        if file is None and not self._is_named and not token_source():
            raise InvalidArgumentError(
                "no coordinator is known here: no fleet of `penstock up` and no embedded appliance of this user runs. "
                "Start one, or give --coordinator ADDRESS and PENSTOCK_TOKEN_FILE"
            )
        return read_token("admin", file=file)

    @property
    def _is_named(self) -> bool:
        """True if an option, a variable or the settings file names the address, and --job is not given."""
        given = self._flags.get("coordinator") is not None
        return self._job is None and (given or bool(source_of(PeerSettings, "coordinator")))

    @property
    def _has_other_token(self) -> bool:
        """True if the address is named as HOST:PORT and a token is set, which then wins over the announced file."""
        return self._is_named and not self._named.startswith(UNIX) and bool(token_source())

    @property
    def _named(self) -> str:
        return resolve(PeerSettings, **self._flags).coordinator

    @cached_property
    def _announcement(self) -> Announcement | None:
        """Announcement of the named address, else of --job, else the only one. Raises InvalidArgumentError for
        several, and if none fits --job."""
        if self._job is not None and self._flags.get("coordinator") is not None:
            raise InvalidArgumentError("only one of --coordinator and --job must be given, got both. Omit one")
        found = announced()
        if self._is_named:
            return next((one for one in found if one.address == self._named), None)
        fit = [one for one in found if self._job is None or one.name == self._job]
        here = printable("; ".join(map(str, fit or found))) or "none"
        if len(fit) > 1:
            raise InvalidArgumentError(
                f"a coordinator must be named, because {len(fit)} are known here: {here}. Choose one by --job NAME or "
                "--coordinator ADDRESS"
            )
        if self._job is not None and not fit:
            raise InvalidArgumentError(
                f"--job must be the job of an embedded appliance that runs here, or the name of a fleet of `penstock "
                f"up`, got {self._job!r}; running: {here}. Name one of these, or pass --coordinator ADDRESS"
            )
        return fit[0] if fit else None

    def client(self) -> CoordinatorClient:
        from penstock.proto.rpc.calls import CoordinatorClient

        return CoordinatorClient(self.address, self.token(), tls=self.tls(), insecure=self._settings.insecure)
