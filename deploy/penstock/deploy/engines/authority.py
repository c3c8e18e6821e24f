"""Certificate authority of a fleet that other machines reach: one file for each role, with all that a process of the
role needs (certificate, key, CA, token). The CA stays over restarts, so that copies on other machines stay valid.

Certificates name roles, not addresses (penstock.proto.rpc.tls), and are renewed in place: running processes read the
files again. Only this module needs the package `cryptography`."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.deploy.console.exit_codes import USAGE, CommandError
from penstock.proto.errors import AuthenticationError
from penstock.proto.rpc.credentials.roles import ROLES
from penstock.proto.rpc.credentials.tokens import MAX_FILE, read_token, read_tokens
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.files.secret_files import read_secret

_log = logging.getLogger("penstock.deploy.engines")

LIFE = timedelta(days=90)
"""Validity of a role's certificate, which is renewed when a third is left."""
CA_LIFE = timedelta(days=3650)
SKEW = timedelta(hours=1)
"""Time by which clocks of other machines may be behind."""
CHECK_S = 60.0
"""Longest time in seconds between two checks, and so until a changed token is in the roles' files."""


class Authority:
    """CA in the file `ca` (mode 0600), which signs for `credentials`: a path with * for the role."""

    def __init__(self, ca: Path, credentials: Path, token_file: str, life: timedelta = LIFE) -> None:
        self._ca, self._credentials, self._token_file, self._life = ca, credentials, token_file, life

    def renew(self) -> float:
        """Write the files that are missing or due, or have another CA or token. Return the seconds until the next
        check. Raises CommandError, AuthenticationError."""
        try:
            self._credentials.parent.mkdir(mode=0o700, exist_ok=True)
            if not self._ca.exists():
                write_whole(self._ca, _made_ca(), mode=0o600)
            ca = _read(self._ca)
            for role in ROLES:
                self._renew(role, ca, f"{role}:{read_token(role, file=self._token_file)}\n")
            self._renew("coordinator", ca, read_tokens(self._token_file))
        except (OSError, ValueError) as error:
            raise CommandError(
                f"the certificates {self._credentials} or their CA {self._ca} cannot be read or written: {error}. Free "
                "disk space, or remove a damaged file",
                USAGE,
            ) from error
        return min(CHECK_S, self._life.total_seconds() / 6)

    def _renew(self, role: str, ca: bytes, tokens: str) -> None:
        path = Path(str(self._credentials).replace("*", role))
        always = ca[ca.index(b"-----BEGIN CERTIFICATE") :] + tokens.encode()
        held = _read(path) if path.exists() else b""
        if held.endswith(always):
            left = x509.load_pem_x509_certificate(held).not_valid_after_utc - datetime.now(UTC)
            if left > self._life / 3:
                return
        write_whole(path, _made_pair(role, ca, self._life) + always, mode=0o600)
        _log.info("wrote the credentials %s", path)


def _read(path: Path) -> bytes:
    return read_secret(str(path), path, MAX_FILE, AuthenticationError)


def _made_ca() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    for_data = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    no = dict.fromkeys((*for_data, "encipher_only", "decipher_only"), False)
    usage = x509.KeyUsage(key_cert_sign=True, crl_sign=True, **no)
    name = _name("CA of a Penstock fleet")
    builder = (
        _begun(name, name, key, CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _pem(builder, key, key)


def _made_pair(role: str, ca: bytes, life: timedelta) -> bytes:
    key, signer = ec.generate_private_key(ec.SECP256R1()), serialization.load_pem_private_key(ca, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        _begun(_name(role), x509.load_pem_x509_certificate(ca).subject, key, life)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(f"{role}.penstock")]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    return _pem(builder, key, signer)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _begun(
    name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, life: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + life)
    )


def _pem(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
) -> bytes:
    """Return the key and the certificate."""
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    of_key = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none)
    return of_key + builder.sign(signer, hashes.SHA256()).public_bytes(pem)
