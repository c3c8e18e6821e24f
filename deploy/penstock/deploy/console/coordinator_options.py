"""Address and credentials of the coordinator that a command calls. Every such command has the same seven options, the
fields of `Peer`. Values that are not given as options come from environment variables and the settings file.

If none of these names a coordinator, the command takes the one that this user runs here: an embedded appliance, or a
fleet of `penstock up` (penstock.runtime.process.announcements). If there are several, the error lists them. If there is
none, the default address is taken.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.deploy.console.daemon_settings import PeerSettings, TlsSettings, resolve
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.rpc.addresses import UNIX
from penstock.runtime.config.settings import source_of
from penstock.runtime.config.settings_file import token_file_of_settings
from penstock.runtime.process.announcements import Announcement, accepts, announced
from penstock.runtime.telemetry.logs import printable

if TYPE_CHECKING:  # at run time gRPC is imported only when a command needs it
    from penstock.proto.rpc.calls import CoordinatorClient
    from penstock.proto.rpc.tls import Tls

__all__ = ["Peer"]


@dataclass(frozen=True)
class Peer:
    """Values of the options that name a coordinator and its credentials; None for an option that was not given. Nothing
    is checked before use: a method raises InvalidArgumentError, TlsError or AuthenticationError if a value that it
    needs is invalid or missing."""

    coordinator: str | None = None
    job: str | None = None
    token_file: Path | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_name: str | None = None

    @property
    def address(self) -> str:
        """Return the coordinator's address, HOST:PORT or unix:/PATH."""
        if self._is_named or self._announcement is None:
            return self._named
        return self._announcement.address

    def tls(self) -> Tls | None:
        """Return the TLS files for the connection, read and checked; None if it uses no TLS."""
        files = {"tls_ca": self.tls_ca, "tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_name": self.tls_name}
        if self._announcement is not None and not self._is_named:
            announced_files = self._announcement.tls
            files = {name: file or announced_files.get(name) for name, file in files.items()}
        return resolve(TlsSettings, **files).load()

    def token(self) -> str:
        """Return the operator's credential token."""
        from penstock.deploy.console.command_token import peer_token

        file = self.token_file
        if file is None and self._announcement is not None and not self._has_other_token:
            file = Path(self._announcement.token_file)
        return peer_token("admin", file)

    @property
    def _is_named(self) -> bool:
        """True if an option, a variable or the settings file names the coordinator's address, and --job is not
        given."""
        return self.job is None and (self.coordinator is not None or bool(source_of(PeerSettings, "coordinator")))

    @property
    def _has_other_token(self) -> bool:
        """True if the token is that of a variable or the settings file, although the coordinator may have announced the
        path of its token file. This is so if the user names the coordinator as HOST:PORT and has set a token."""
        return self._is_named and not self._named.startswith(UNIX) and _has_token()

    @property
    def _named(self) -> str:
        return resolve(PeerSettings, coordinator=self.coordinator).coordinator

    def _unannounced(self, found: list[Announcement]) -> list[str]:
        """Return a list with one line about the default address if a `penstock coordinator` may listen there that is
        not among the announced ones (`found`). A coordinator started by that command announces nothing.

        Return an empty list if nothing listens there, or if neither a variable nor the settings file has a token: the
        command could not call that coordinator, which may be another user's.
        """
        if not found or not _has_token() or self._named in [one.address for one in found] or not accepts(self._named):
            return []
        return [f"the default address: {self._named}"]

    @cached_property
    def _announcement(self) -> Announcement | None:
        """Return the announcement (a file about a coordinator that runs here) of the coordinator to call. If the user
        named an address, it is the announcement with this address; if the user gave --job, that of this job; otherwise
        the only one. Return None if no announcement fits an address, or if there are none.

        Raises InvalidArgumentError if several fit, and if none fits --job.
        """
        if self.job is not None and self.coordinator is not None:
            raise InvalidArgumentError("only one of --coordinator and --job must be given, got both. Omit one")
        found = announced()
        if self._is_named:
            return next((one for one in found if one.address == self._named), None)
        fit = [one for one in found if self.job is None or one.name == self.job]
        listed = [*map(str, fit), *(self._unannounced(fit) if self.job is None else ())]
        if len(listed) > 1:
            raise InvalidArgumentError(
                f"a coordinator must be named, because {len(listed)} are known here: {printable('; '.join(listed))}. "
                "Choose one by --job NAME or --coordinator ADDRESS"
            )
        if self.job is not None and not fit:
            here = printable("; ".join(map(str, found))) or "none"
            offer = "Name one of these, or pass" if found else "Pass"
            raise InvalidArgumentError(
                f"--job must be the job of an embedded appliance that runs here, or the name of a fleet of `penstock "
                f"up`, got {self.job!r}; running: {here}. {offer} --coordinator ADDRESS"
            )
        return fit[0] if fit else None

    def client(self) -> CoordinatorClient:
        """Return a client of the coordinator."""
        from penstock.proto.rpc.calls import CoordinatorClient

        return CoordinatorClient(self.address, self.token(), tls=self.tls())


def _has_token() -> bool:
    """Return True if an environment variable or the settings file has a token or names a token file."""
    return bool(os.environ.get("PENSTOCK_TOKEN") or os.environ.get("PENSTOCK_TOKEN_FILE") or token_file_of_settings())
