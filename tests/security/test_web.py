"""The web server against callers of every kind: without a token, from another site, silent, curious, and too late."""

from __future__ import annotations

import base64
import contextlib
import http.client
import logging
import os
import socket
import ssl
import time
from collections.abc import Iterator

import pytest
from pki import Pair, Pki
from tests.security.conftest import SECRETS, TOKENS

from penstock.proto.errors import UnsafeBindError
from penstock.proto.rpc.tls import load_tls
from penstock.runtime.web import http_server
from penstock.runtime.web.http_server import Page, WebServer

HTML = "text/html; charset=utf-8"


def broken() -> Page:
    raise ValueError("a bug, with a secret in it")


ROUTES = {"/": lambda: Page(HTML, "<p>ready ✓</p>".encode()), "/broken": broken}


@contextlib.contextmanager
def serving(listen: str = "127.0.0.1:0", **given: object) -> Iterator[WebServer]:
    server = WebServer(listen, ROUTES, tokens=TOKENS, **given)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def local() -> Iterator[WebServer]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def beyond() -> Iterator[WebServer]:
    """A server that other machines can reach."""
    with serving("0.0.0.0:0", insecure=True) as server:
        yield server


Reply = tuple[http.client.HTTPResponse, bytes]


def ask(server: WebServer, path: str = "/", method: str = "GET", **headers: str) -> Reply:
    port = int(server.address.rpartition(":")[2])
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        return reply, reply.read()


def test_page_has_headers_against_foreign_scripts(local: WebServer) -> None:
    reply, body = ask(local, "/?anything=1")
    assert (reply.status, body.decode()) == (200, "<p>ready ✓</p>")
    assert reply.headers["Content-Type"] == HTML
    assert int(reply.headers["Content-Length"]) == len(body)
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy
    assert (reply.headers["X-Content-Type-Options"], reply.headers["Cache-Control"]) == ("nosniff", "no-store")
    assert "Python" not in reply.headers["Server"]


def test_what_is_not_there_and_what_is_not_done(local: WebServer) -> None:
    assert ask(local, "/nothing")[0].status == 404
    assert ask(local, "/%2e%2e/etc/passwd")[0].status == 404
    assert ask(local, method="POST")[0].status == 501


def test_failed_page_does_not_show_the_reason(local: WebServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "penstock.web"):
        reply, body = ask(local, "/broken")
    assert (reply.status, body) == (500, b"500 Internal Server Error\n")
    assert "the page /broken cannot be made" in caplog.text
    assert ask(local)[0].status == 200


def test_dns_rebinding_is_refused(local: WebServer) -> None:
    """DNS rebinding: the browser asks us, and says the site's name."""
    for host in ("localhost:7071", "127.9.9.9:1", "[::1]:7071"):
        assert ask(local, Host=host)[0].status == 200
    for host in ("evil.example:7071", "127.0.0.1.evil.example", "10.0.0.1", "unix:7071", "", "["):
        assert ask(local, Host=host)[0].status == 403


def raw(server: WebServer, *headers: str) -> int:
    """The status of a request with just these headers, letter by letter: http.client writes them its own way."""
    port = server.address.rpartition(":")[2]
    with socket.create_connection(("127.0.0.1", int(port)), timeout=10) as sock:
        sock.sendall("\r\n".join(["GET / HTTP/1.1", *headers, "", ""]).encode())
        with sock.makefile("rb") as reply:
            return int(reply.readline().split()[1])


def test_header_names_are_case_insensitive(local: WebServer, beyond: WebServer) -> None:
    """Accept them as browsers write them over proxies, and Node always."""
    assert raw(local, "host: 127.0.0.1") == 200
    assert raw(local, "HOST: evil.example") == 403
    assert raw(beyond, "host: node7", f"authorization: Bearer {SECRETS['admin']}") == 200


def test_a_request_for_two_hosts_is_refused(local: WebServer) -> None:
    assert raw(local, "Host: 127.0.0.1", "host: evil.example") == 400


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()


def test_remote_admin_must_send_its_token(beyond: WebServer) -> None:
    for shown in (f"Bearer {SECRETS['admin']}", basic(SECRETS["admin"])):
        assert ask(beyond, Host="node7:7071", Authorization=shown)[0].status == 200


@pytest.mark.parametrize(
    "shown",
    [
        *("", f"Bearer {SECRETS['client']}", basic(SECRETS["worker"])),
        *("Bearer", "Basic %%%", "Basic /w==", SECRETS["admin"], "Bearer \xff"),
    ],
)
def test_others_get_401_and_browsers_a_challenge(beyond: WebServer, shown: str) -> None:
    reply, body = ask(beyond, Authorization=shown)
    assert (reply.status, body) == (401, b"401 Unauthorized\n")
    assert reply.headers["WWW-Authenticate"].startswith("Basic realm=")
    assert ask(beyond, "/nothing")[0].status == 401  # who may not look learns no names of pages


def test_beyond_this_machine_tls_or_the_word(pki: Pki, pair: Pair) -> None:
    with pytest.raises(UnsafeBindError, match="can be reached from other machines"):
        WebServer("0.0.0.0:0", ROUTES, tokens=TOKENS)
    with serving("0.0.0.0:0", tls=load_tls("", pair.cert, pair.key)) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=pki.ca)
        context.check_hostname = False
        port = int(server.address.rpartition(":")[2])
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
        connection.request("GET", "/", headers={"Authorization": basic(SECRETS["admin"])})
        assert connection.getresponse().status == 200
        connection.close()
        with pytest.raises((http.client.HTTPException, OSError)):
            ask(server)  # plain HTTP
        connection.request("GET", "/")  # and it still serves
        assert connection.getresponse().status == 401
        connection.close()


def test_slow_callers_keep_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 0.5)
    with serving() as server:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port))) as slow:
            begun = time.monotonic()
            slow.settimeout(0.05)
            with contextlib.suppress(ConnectionError):
                while time.monotonic() - begun < 20:
                    slow.sendall(b"G")
                    with contextlib.suppress(TimeoutError):
                        if slow.recv(1) == b"":
                            break
            assert time.monotonic() - begun < 10


def test_callers_above_the_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "AT_ONCE", 4)
    with serving() as server, contextlib.ExitStack() as silent:
        host, _, port = server.address.rpartition(":")
        for _ in range(4):
            silent.enter_context(socket.create_connection((host, int(port))))
        with pytest.raises((http.client.HTTPException, OSError)):
            ask(server)
        silent.close()
        until = time.monotonic() + 10
        while True:
            try:
                assert ask(server)[0].status == 200
                return
            except (http.client.HTTPException, OSError):
                assert time.monotonic() < until, "nobody is let in any more"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Python 3.12: there are threads
def test_a_forked_child_does_not_keep_the_port() -> None:
    """Free the port, also with a child such as a torch DataLoader's worker, which may outlive its killed parent."""
    with serving() as server:
        child = os.fork()
        if not child:
            os._exit(int(server._server.socket.fileno() >= 0))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert ask(server)[0].status == 200
