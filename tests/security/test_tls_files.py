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


def test_one_name_for_all_roles_is_refused(pki: Pki, pair: Pair) -> None:
    with pytest.raises(TlsError, match=r"tls_name=penstock must contain a \* for the other end's role"):
        load_tls(pki.ca, pair.cert, pair.key, "penstock")


def test_server_needs_certificate_and_client_a_ca(pki: Pki, pair: Pair) -> None:
    only_ca, no_ca = load_tls(pki.ca), load_tls("", pair.cert, pair.key)
    assert only_ca is not None
    assert no_ca is not None
    with pytest.raises(TlsError, match="also needs a certificate"):
        only_ca.for_server()
    with pytest.raises(TlsError, match="would trust every server: pass tls_ca"):
        no_ca.for_client()


@pytest.mark.parametrize("what", ["ca", "cert", "key"])
def test_a_file_that_is_not_there_is_named(pki: Pki, pair: Pair, what: str) -> None:
    files = {"ca": pki.ca, "cert": pair.cert, "key": pair.key, what: "/no/such/file"}
    with pytest.raises(TlsError, match=f"tls_{what}=/no/such/file cannot be read: No such file or directory"):
        load_tls(**files)


def test_a_certificate_without_its_key(pair: Pair) -> None:
    with pytest.raises(TlsError, match="needs tls_key too: pass a certificate and its key together"):
        load_tls("", pair.cert)
    with pytest.raises(TlsError, match="needs tls_cert too"):
        load_tls("", "", pair.key)


def test_an_expired_certificate(pki: Pki) -> None:
    old = pki.issue("expired", days=-1)
    with pytest.raises(TlsError, match=rf"tls_cert={old.cert}: the certificate has expired \(it is .* UTC here\)"):
        load_tls("", old.cert, old.key)


def test_what_is_no_pem(pki: Pki, pair: Pair, tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_bytes(os.urandom(1000))
    junk.chmod(0o600)
    for files in ((str(junk), pair.cert, pair.key), (pki.ca, str(junk), pair.key), (pki.ca, pair.cert, str(junk))):
        with pytest.raises(TlsError, match=rf"{junk} must be a PEM file"):
            load_tls(*files)
    junk.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    with pytest.raises(TlsError, match=f"tls_ca={junk} must be a PEM file with"):
        load_tls(str(junk))
    with pytest.raises(TlsError, match=f"tls_cert={junk} and tls_key={pair.key} cannot be used"):
        load_tls("", str(junk), pair.key)


def test_key_with_a_password_is_refused_unasked(pair: Pair, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "ec", "-in", pair.key, "-aes256", "-passout", "pass:secret", "-out", str(locked)],
        check=True,
        capture_output=True,
    )
    locked.chmod(0o600)
    with pytest.raises(TlsError, match="a key without a password"):
        load_tls("", pair.cert, str(locked))


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
