"""Certificates and keys that cannot serve: found at the start, each named with its file and the remedy."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from pki import Pair, Pki

from penstock.deploy.engines.authority import Authority
from penstock.proto.errors import PenstockError, TlsError
from penstock.proto.rpc.credentials.tokens import read_token, read_tokens
from penstock.proto.rpc.tls import load_tls


def test_good_files_are_taken_and_no_key_is_shown(pki: Pki, pair: Pair) -> None:
    tls = load_tls(pki.ca, pair.cert, pair.key, "*.penstock")
    assert tls is not None
    assert tls.key == Path(pair.key).read_bytes()
    assert "PRIVATE" not in repr(tls)
    assert tls.for_server() is tls.for_client() is tls


def test_server_needs_certificate_and_client_a_ca(pki: Pki, pair: Pair) -> None:
    only_ca, no_ca = load_tls(pki.ca), load_tls("", pair.cert, pair.key)
    assert only_ca is not None
    assert no_ca is not None
    with pytest.raises(TlsError, match="also needs a certificate"):
        only_ca.for_server()
    with pytest.raises(TlsError, match="would trust every server: pass tls_ca"):
        no_ca.for_client()


@pytest.fixture(scope="module")
def files(pki: Pki, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    old = pki.issue("expired", days=-1)
    made = {"": "", "ca": pki.ca, "cert": pair.cert, "key": pair.key, "old": old.cert, "of old": old.key}
    made |= {name: str(folder / name) for name in ("none", "junk", "nonsense", "locked")}
    Path(made["junk"]).write_bytes(os.urandom(1000))
    Path(made["nonsense"]).write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    command = ["openssl", "ec", "-in", pair.key, "-aes256", "-passout", "pass:secret", "-out", made["locked"]]
    subprocess.run(command, check=True, capture_output=True)
    for name in ("junk", "nonsense", "locked"):
        Path(made[name]).chmod(0o600)
    return made


@pytest.mark.parametrize(
    ("ca", "cert", "key", "says"),
    [
        ("none", "cert", "key", "tls_ca={none} cannot be read: No such file or directory"),
        ("ca", "none", "key", "tls_cert={none} cannot be read: No such file or directory"),
        ("ca", "cert", "none", "tls_key={none} cannot be read: No such file or directory"),
        ("", "cert", "", "needs tls_key too: pass a certificate and its key together"),
        ("", "", "key", "needs tls_cert too"),
        ("", "old", "of old", r"tls_cert={old}: the certificate has expired \(it is .* UTC here\)"),
        ("junk", "cert", "key", "{junk} must be a PEM file"),
        ("ca", "junk", "key", "{junk} must be a PEM file"),
        ("ca", "cert", "junk", "{junk} must be a PEM file"),
        ("nonsense", "", "", "tls_ca={nonsense} must be a PEM file with"),
        ("", "nonsense", "key", "tls_cert={nonsense} and tls_key={key} cannot be used"),
        ("", "cert", "locked", "a key without a password"),
    ],
)
def test_files_that_cannot_serve_are_named(files: dict[str, str], ca: str, cert: str, key: str, says: str) -> None:
    with pytest.raises(TlsError, match=says.format(**files)):
        load_tls(files[ca], files[cert], files[key])


def test_one_name_for_all_roles_is_refused(pki: Pki, pair: Pair) -> None:
    with pytest.raises(TlsError, match=r"tls_name=penstock must contain a \* for the other end's role"):
        load_tls(pki.ca, pair.cert, pair.key, "penstock")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_files_of_keys_and_tokens_that_others_can_read(pki: Pki, pair: Pair, tmp_path: Path, mode: int) -> None:
    secret, token = tmp_path / "secret", tmp_path / "token"
    secret.write_bytes(b"".join(Path(file).read_bytes() for file in (pair.cert, pair.key, pki.ca)) + b"a-token\n")
    token.write_text("a-token")
    token.chmod(0o600)
    ways: list[Callable[[], object]] = [
        lambda: load_tls("", pair.cert, str(secret)),
        lambda: load_tls(*[str(secret)] * 3),
        lambda: read_token("client", file=secret),
        lambda: read_tokens(secret),
        Authority(secret, tmp_path / "made" / "*.pem", str(token)).renew,
    ]
    for read in ways:
        secret.chmod(0o600)
        read()
        secret.chmod(mode)
        with pytest.raises(PenstockError, match=rf"can be read by others \(mode 0{mode:o}\): chmod 600 {secret}"):
            read()


def test_a_servers_common_name_is_no_name(pki: Pki) -> None:
    """gRPC and Python take it for want of another, although certificates name roles by DNS names."""
    for role in ("coordinator", "worker"):
        pair = pki.issue(f"{role}.penstock", "email:none@penstock")
        for name in ("", "*.penstock"):
            tls = load_tls(pki.ca, pair.cert, pair.key, name)
            assert tls is not None
            with pytest.raises(TlsError, match="must have a name of its server as subjectAltName, and not as CN alone"):
                tls.check_own(role)
            assert not tls.client_context().hostname_checks_common_name
