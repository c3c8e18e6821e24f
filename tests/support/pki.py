"""Certificates for tests, made by the openssl command: a CA, and what is signed by it or by none."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Pair", "Pki"]

CA_KEY = "keyUsage=critical,keyCertSign,cRLSign"
ROLES = ",".join(f"DNS:{role}.penstock" for role in ("coordinator", "worker", "client", "admin"))
LOCAL = f"DNS:localhost,IP:127.0.0.1,{ROLES}"
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    cert: str
    key: str


class Pki:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        # Python 3.13's default context takes no CA that does not say what its key is for.
        self._authority = self._made("ca", "-x509", "-subj", "/CN=tests", "-addext", CA_KEY)
        self.ca = self._authority.cert

    def issue(self, name: str, alternatives: str = LOCAL, days: int = 2) -> Pair:
        """A certificate that the CA has signed; with negative `days` it has expired."""
        request = self.folder / f"{name}.csr"
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={alternatives}\n")
        pair = self._made(name, "-subj", f"/CN={name}", out=request)
        authority = ("-CA", self.ca, "-CAkey", self._authority.key, "-CAcreateserial")
        _openssl("x509", "-req", "-in", request, *authority, "-days", days, "-extfile", extensions, "-out", pair.cert)
        return pair

    def self_signed(self, name: str) -> Pair:
        """Return a certificate that no CA has signed."""
        return self._made(name, "-x509", "-subj", f"/CN={name}", "-addext", f"subjectAltName={LOCAL}")

    def _made(self, name: str, *how: str, out: Path | None = None) -> Pair:
        pair = Pair(str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key"))
        _openssl("req", *NEW_KEY, "-nodes", "-keyout", pair.key, *how, "-out", out or pair.cert)
        os.chmod(pair.key, 0o600)
        return pair


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
