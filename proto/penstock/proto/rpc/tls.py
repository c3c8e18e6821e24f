"""TLS: the certificate files of this process, checks of them, and the reasons why another process refuses them.

Every process has four settings: `ca`, the CA of the other end's certificate; `cert` and `key`, this end's; `name`, the
DNS name expected in the other end's certificate instead of its address. The `*` in it stands for the other end's role:
*.penstock means coordinator.penstock, worker.penstock, client.penstock (a job) or admin.penstock (an operator). With
one name for all, a worker could pose as the coordinator. One file can be ca, cert and key at once (`credentials`). A
coordinator needs cert and key, and requests certificates if it has a ca; a job or command needs the ca; a worker all.

Files are read at the start, at each connection, and after a client's failed call (`Renewing`). New ones are checked by
a handshake of this process with itself, because OpenSSL reliably detects a wrong key or an expired certificate. Errors
in a handshake with the other end become a TlsError with the remedy: `explain`. gRPC has its own TLS, for which `Tls`
keeps the bytes. Lanes use Python's ssl with TLS 1.3 only, because both ends are Penstock."""

from __future__ import annotations

import datetime
import logging
import socket
import ssl
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.proto.errors import TlsError
from penstock.proto.rpc.addresses import socket_path
from penstock.runtime.files.secret_files import read_secret

_log = logging.getLogger("penstock.tls")

_Role = TypeVar("_Role", bound=str)

MAX_FILE = 1 << 20
"""Largest size of a certificate file in bytes: five times that of a bundle of all public CAs."""
_EXPIRED, _NOT_YET, _OTHER_NAME = (10,), (9,), (62, 64)
"""OpenSSL's numbers (X509_V_ERR_...) of the reasons why the verification of a certificate failed."""
_UNKNOWN_CA = (2, 18, 19, 20, 21, 24)


@dataclass(frozen=True)
class Tls:
    """TLS settings of this process, and the checked contents of its certificate files. Made by `load_tls`."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    name: str = ""
    ca: bytes = field(default=b"", repr=False)
    cert: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)

    def expected(self, role: str) -> str:
        """Name that the certificate of an end in this role must have; "": the address that was called."""
        return self.name.replace("*", role)

    def check_own(self, role: str) -> None:
        """Raise TlsError if this process's own certificate names no server, or if certificates name roles, and it does
        not name `role`. Its common name (CN) does not count, which gRPC's callers would take for want of another."""
        certificate = _rehearse(self)
        if not any(kind in ("DNS", "IP Address") for kind, _ in certificate.get("subjectAltName", ())):
            raise TlsError(
                f"tls_cert={self.cert_file} must have a name of its server as subjectAltName, and not as CN alone: "
                "make one (docs/security.md)"
            )
        if self.name and self.expected(role) not in dns_names(certificate):
            wanted = f"the name {self.expected(role)} (tls_name={self.name})"
            raise TlsError(f"tls_cert={self.cert_file} must be for {wanted}: make one (docs/security.md)")

    def roles_named(self, names: Iterable[str], roles: Iterable[_Role]) -> frozenset[_Role]:
        """Return those of `roles` for which a certificate with these names is valid: all if they do not name roles."""
        if not self.name:
            return frozenset(roles)
        shown = set(names)
        return frozenset(role for role in roles if self.expected(role) in shown)

    def for_server(self) -> Tls:
        """Raises TlsError if there is no certificate (tls_cert) to show to callers."""
        if not self.cert:
            raise TlsError(f"a server with tls_ca={self.ca_file} also needs a certificate: --tls-cert, --tls-key")
        return self

    def for_client(self) -> Tls:
        """Raises TlsError if there is no CA (tls_ca) with which to check the other end."""
        if not self.ca:
            raise TlsError("TLS without a CA would trust every server: pass tls_ca, the other end's CA (--tls-ca)")
        return self

    def server_context(self) -> ssl.SSLContext:
        """For accepting lanes. It requests certificates from callers if there is a CA."""
        context = _context(ssl.PROTOCOL_TLS_SERVER)
        # Lanes do not resume sessions, so session tickets would only cost a write.
        context.num_tickets = 0
        _show(context, self)
        if self.ca:
            _trust(context, self)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        context = _context(ssl.PROTOCOL_TLS_CLIENT)
        _trust(context, self)
        if self.cert:
            _show(context, self)
        return context


def load_tls(ca: str = "", cert: str = "", key: str = "", name: str = "") -> Tls | None:
    """Return the checked files; None if none is given. `name`: expected in the other end's certificate; "": the
    address. Raises TlsError with the file and the remedy."""
    if not (ca or cert or key):
        if name:
            raise TlsError(f"tls_name={name} also needs tls_ca: pass --tls-ca")
        return None
    if name and "*" not in name:
        raise TlsError(
            f"tls_name={name} must contain a * for the other end's role, such as *.penstock: make a certificate for "
            "each role (docs/security.md)"
        )
    if bool(cert) != bool(key):
        has, lacks = ("tls_cert", "tls_key") if cert else ("tls_key", "tls_cert")
        raise TlsError(f"{has}={cert or key} needs {lacks} too: pass a certificate and its key together")
    tls = Tls(ca, cert, key, name, *_contents(ca, cert, key))
    if ca:
        _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), tls)
    if cert:
        _rehearse(tls)
    return tls


class Renewing:
    """Certificate files that may be replaced. Invalid ones are logged, not used. `role`: as a server; or ""."""

    def __init__(self, tls: Tls, role: str = "") -> None:
        self.tls = tls
        self.expires_at = expires(tls).timestamp() if role else 0.0
        """Unix time when the server's own certificate expires; 0 for no server."""
        self._role = role
        self._logged = ""
        self._lock = threading.Lock()

    def renew(self) -> bool:
        """Read the files again. Return True if they have changed and are valid; `tls` then has the new contents."""
        with self._lock:
            try:
                tls = self._read()
            except TlsError as error:
                if error.message != self._logged:
                    _log.warning("the changed certificates cannot be used, the current ones stay: %s", error.message)
                self._logged = error.message
                return False
            self._logged = ""
            if tls is None:
                return False
            self.tls = tls
            self.expires_at = expires(tls).timestamp() if self._role else 0.0
            _log.info("loaded the new certificates from the files")
            return True

    def renewed(self) -> Tls:
        """Read the files again, and return their contents, or the earlier ones if the files are invalid now."""
        self.renew()
        return self.tls

    def _read(self) -> Tls | None:
        held = self.tls
        if _contents(held.ca_file, held.cert_file, held.key_file) == (held.ca, held.cert, held.key):
            return None
        tls = load_tls(held.ca_file, held.cert_file, held.key_file, held.name)
        if tls is not None and self._role:
            tls.check_own(self._role)
        return tls


def _contents(ca: str, cert: str, key: str) -> tuple[bytes, bytes, bytes]:
    if ca == cert == key:
        return (_read("credentials", ca),) * 3  # read once, so that certificate and key fit each other
    return _read("tls_ca", ca), _read("tls_cert", cert), _read("tls_key", key)


def _read(what: str, file: str) -> bytes:
    if not file:
        return b""
    data = read_secret(f"{what}={file}", file, MAX_FILE, TlsError, secret=what in ("tls_key", "credentials"))
    if b"-----BEGIN " not in data:
        raise TlsError(f"{what}={file} must be a PEM file of a certificate or key")
    return data


class WrappedSocket(ssl.SSLSocket):
    """TLS socket that avoids a leak: if the peer has reset the connection, Python's `wrap_socket` does not close it."""

    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError as error:
            if self.version() is None:  # called by wrap_socket
                self.close()
                raise ConnectionResetError("the other end closed the connection before TLS began") from error
            raise


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = WrappedSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.hostname_checks_common_name = False
    context.options |= ssl.OP_NO_COMPRESSION
    return context


def _trust(context: ssl.SSLContext, tls: Tls) -> None:
    try:
        context.load_verify_locations(cadata=tls.ca.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise TlsError(f"tls_ca={tls.ca_file} must be a PEM file with a CA's certificate: {_reason(error)}") from error


def _show(context: ssl.SSLContext, tls: Tls) -> None:
    try:
        # Without a password function OpenSSL would prompt at the terminal.
        context.load_cert_chain(tls.cert_file, tls.key_file, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsError(f"tls_key={tls.key_file} is not the key of tls_cert={tls.cert_file}: pass that") from error
        raise TlsError(
            f"tls_cert={tls.cert_file} and tls_key={tls.key_file} cannot be used ({_reason(error)}): pass PEM files, "
            "and a key without a password"
        ) from error
    except OSError as error:
        raise TlsError(f"tls_cert={tls.cert_file} cannot be read: {error.strerror}. Name a readable file") from error


def dns_names(certificate: Mapping[str, Any]) -> list[str]:
    return [value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]


def expires(tls: Tls) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(ssl.cert_time_to_seconds(str(_rehearse(tls)["notAfter"])), datetime.UTC)


def _rehearse(tls: Tls) -> dict[str, Any]:
    """Do a TLS handshake of this process with itself, to check the dates and the key of its certificate."""
    server, client = tls.server_context(), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.verify_mode = ssl.CERT_NONE
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=tls.cert.decode("ascii", "replace"))
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [server.wrap_bio(to_server, to_client, server_side=True), client.wrap_bio(to_client, to_server)]
    waiting = list(ends)
    while waiting:
        for end in ends[::-1]:
            try:
                end.do_handshake()
                if end in waiting:
                    waiting.remove(end)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError as error:
                raise TlsError(f"tls_cert={tls.cert_file}: {_verification(error)}") from error
            except ssl.SSLError as error:
                raise TlsError(f"tls_cert={tls.cert_file} cannot be used: {_reason(error)}. Make a new one") from error
    return ends[1].getpeercert() or {}


def _verification(error: ssl.SSLCertVerificationError) -> str:
    now = f"it is {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC here"
    if error.verify_code in _EXPIRED:
        return f"the certificate has expired ({now}): make a new one"
    if error.verify_code in _NOT_YET:
        return f"the certificate is not valid yet ({now}): check the clock of this machine"
    return f"the certificate is invalid: {error.verify_message}. Make a new one (docs/security.md)"


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or str(error) or type(error).__name__
    return str(reason).replace("_", " ").lower()


# ---------------------------------------------------------------------------------------------- with the other end


def no_tls_here(what: str) -> TlsError:
    """Error for a connection from this process, which does not use TLS, to `what`, which does."""
    return TlsError(
        f"{what} uses TLS, and this end does not: pass the CA, --tls-ca FILE (PENSTOCK_TLS_CA), or --credentials FILE"
    )


_DAMAGED = ("BAD_RECORD_MAC", "DECODE_ERROR", "BAD_SIGNATURE", "DIGEST_CHECK_FAILED")
"""OpenSSL's reasons for damaged bytes. DECRYPT_ERROR also occurs if a CA was made anew under its old name."""


def explain(error: OSError, what: str, tls: Tls) -> TlsError | None:
    """Return the TlsError that explains a connection's error; None if TLS is not the cause, as for damage in transit.
    Call it also for the first read after the handshake: with TLS 1.3 the other end's refusal arrives only then."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _OTHER_NAME:
            expected = f"tls_name={tls.name}" if tls.name else "the address that was called"
            expected += " with its role for *" if tls.name else ""
            return TlsError(f"{what} shows a certificate for another name than {expected}: pass --tls-name NAME")
        if error.verify_code in _UNKNOWN_CA:
            return TlsError(f"{what} shows a certificate that is not signed by tls_ca={tls.ca_file}: pass its CA")
        return TlsError(f"{what} shows an invalid certificate: {_verification(error)}")
    ended = isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
    if not isinstance(error, ssl.SSLError) or ended or is_damage(error):
        return None
    reason = str(error.reason)
    if "ALERT" in reason:
        return refused_by(what, tls, reason.partition("ALERT_")[2])
    return TlsError(
        f"{what} does not use TLS, and this end does (tls_ca={tls.ca_file}): pass --tls-cert there ({_reason(error)})"
    )


def is_damage(error: OSError) -> bool:
    """True if TLS received damaged bytes, in the handshake or later."""
    reason = str(error.reason) if isinstance(error, ssl.SSLError) else ""
    return any(sign in reason for sign in _DAMAGED)


def refused_by(what: str, tls: Tls, reason: str = "") -> TlsError:
    """Error for a connection closed because of this process's certificate. `reason`: TLS alert (UNKNOWN_CA)."""
    why = f" ({reason.replace('_', ' ').lower()})" if reason else ""
    if not tls.cert:
        return TlsError(f"{what} requests a certificate and this end has none{why}: pass --tls-cert and --tls-key")
    return TlsError(
        f"{what} does not accept the certificate tls_cert={tls.cert_file}{why}: pass one signed by its tls_ca"
    )


def host_of(address: str) -> tuple[str, int]:
    """Host and port of "host:port", without the brackets of an IPv6 host."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def diagnose(address: str, tls: Tls | None, what: str, timeout_s: float) -> TlsError | None:
    """Return the TlsError that explains why calls to a listening coordinator fail, if TLS is why. gRPC reports "Socket
    closed" in all cases, so connect once more, `timeout_s` for each step."""
    if socket_path(address) is not None:
        return None
    host, port = host_of(address)
    try:
        sock = socket.create_connection((host, port), timeout_s)
    except OSError:
        return None
    with sock:
        context = _context(ssl.PROTOCOL_TLS_CLIENT) if tls is None else tls.client_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        if tls is None:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            name = (tls.expected("coordinator") if tls else "") or host
            with context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False) as wrapped:
                wrapped.do_handshake()
                if tls is None:
                    return no_tls_here(what)
                # A gRPC server sends its settings first, as soon as it accepts this end.
                return None if wrapped.recv(1) else refused_by(what, tls)
        except ConnectionError:
            return None
        except OSError as error:
            return None if tls is None else explain(error, what, tls)
