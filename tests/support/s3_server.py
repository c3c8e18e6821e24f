"""An S3 server in a process of its own. It counts its requests, and at a chosen one it kills or stops processes, or
answers with a fault.

The server is moto's, with these differences to S3 taken away:
- A conditional put (`If-None-Match: *`) compares and writes in one step. moto's two steps let two clients win at once,
  so requests are handled one after the other here.
- A part for an upload that was aborted or completed, and its completion, are answered with 404 NoSuchUpload, where moto
  fails with 500, which clients try again.
What still differs: a list of uploads has one page; an abort takes all parts at once (S3 may keep a part that arrives
meanwhile); nothing answers 409 ConditionalRequestConflict, SlowDown or a 200 with an error inside, unless a test asks
for it (`Fault`); a full store and expired keys are answers of `Fault` too.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import parse_qs

from census import alive, children

__all__ = ["AGENT", "KEYS", "Fault", "Request", "S3Server", "Strike"]

HERE = Path(__file__).parent
CONTROL = "/-/"
AGENT = "AWS_SDK_UA_APP_ID"
"""Environment variable with the name under which a process's requests are counted."""
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
    "AWS_DEFAULT_REGION": "us-east-1",
}
DEADLINE_S = 60.0
Moment = Literal["before", "after", "late"]


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    """With the query: /bucket/key?uploadId=..."""
    agent: str
    """Name of the process, from the environment variable AGENT."""
    status: int
    """0: not answered."""

    @property
    def changes(self) -> bool:
        return self.method not in ("GET", "HEAD")


@dataclass(frozen=True)
class Strike:
    """Signal to processes at a request.

    moment: "before" the request is handled, which it then never is; "after" it is handled, but not answered; or the
    request is handled "late", when the test says so (`S3Server.release`): a request that the network kept back.
    """

    at: int
    """Number of the request, counted from 0 since the strike was given."""
    trainers: tuple[int, ...] = ()
    """Processes to signal."""
    writers_of: tuple[int, ...] = ()
    """Processes of which the children get the signal."""
    moment: Moment = "before"
    agent: str = ""
    """Count only requests of processes whose name this regular expression matches."""
    path: str = ""
    """Count only requests whose method and path ("PUT /bucket/key") this regular expression matches."""
    number: int = signal.SIGKILL


@dataclass(frozen=True)
class Fault:
    """Answer to requests whose method and path ("PUT /bucket/key") a regular expression matches."""

    path: str
    status: int = 0
    code: str = ""
    """S3's error code, such as "AccessDenied"."""
    kind: Literal["answer", "cut", "unanswered", "unconditional"] = "answer"
    """answer: with status and code, and the request has no effect. cut: the connection ends within the request's body,
    or within the answer's if the request has none. unanswered: the request takes effect, and the connection ends.
    unconditional: the request's conditions are ignored."""
    times: int = -1
    """Number of requests; -1: all."""
    skip: int = 0
    """Number of requests before that."""
    key: str = ""
    """Access key of the requests; "": any."""


class S3Server:
    """Handle of a test on its server, whose buckets are empty. min_part: least size of a part but the last, in bytes;
    S3's is 5 MiB."""

    def __init__(self, *, min_part: int = 5 << 20, delay_s: float = 0.0) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
            port = listener.getsockname()[1]
            self._log = os.memfd_create("s3-server")
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), str(listener.fileno()), str(delay_s)],
                env={**os.environ, "S3_UPLOAD_PART_MIN_SIZE": str(min_part), "PYTHONPATH": str(HERE)},
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
        self._port = port
        self.url = f"http://127.0.0.1:{port}"
        self.options: dict[str, Any] = {
            "key": KEYS["AWS_ACCESS_KEY_ID"],
            "secret": KEYS["AWS_SECRET_ACCESS_KEY"],
            "client_kwargs": {"endpoint_url": self.url},
        }
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": self.url}
        try:
            self._ask("requests")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._log)

    def make_bucket(self, name: str) -> None:
        self._ask("make_bucket", name)

    def remove_bucket(self, name: str) -> None:
        """Remove a bucket, with all that is in it."""
        self._ask("remove_bucket", name)

    def strike(self, strike: Strike | None) -> None:
        """Give a strike, in the place of the last one."""
        self._ask("strike", None if strike is None else asdict(strike))

    def struck(self) -> Request | None:
        """Return the request of the strike; None if it has not come yet."""
        found = self._ask("struck")
        return None if found is None else Request(**found)

    def release(self) -> None:
        """Handle the request that is to be handled late, if one has come."""
        self._ask("release")

    def fail(self, *faults: Fault) -> None:
        """Answer so from now on, in the place of earlier faults. The first that fits a request counts."""
        self._ask("fail", [asdict(fault) for fault in faults])

    def requests(self) -> list[Request]:
        """Return the requests since the last call."""
        return [Request(**one) for one in self._ask("requests")]

    def objects(self, bucket: str) -> dict[str, int]:
        """Return the objects' sizes in bytes, by key."""
        found: dict[str, int] = self._ask("objects", bucket)
        return found

    def uploads(self, bucket: str) -> list[str]:
        """Return the keys of the multipart uploads that are neither completed nor aborted."""
        found: list[str] = self._ask("uploads", bucket)
        return found

    def contents(self, bucket: str) -> dict[str, bytes]:
        """Return all objects at one moment, by key."""
        return {key: data.encode("latin-1") for key, data in self._ask("contents", bucket).items()}

    def read(self, bucket: str, key: str) -> bytes:
        found: str = self._ask("read", bucket, key)
        return found.encode("latin-1")

    def _ask(self, what: str, *arguments: Any) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=DEADLINE_S)
        try:
            connection.request("POST", f"{CONTROL}{what}", json.dumps(arguments))
            answer = connection.getresponse()
            data = answer.read()
            assert answer.status == 200, data.decode()
            return json.loads(data)
        except OSError as error:
            said = os.pread(self._log, 1 << 16, 0).decode()
            raise AssertionError(f"the S3 server does not answer: {said}") from error
        finally:
            connection.close()


# ---- the program

Start = Callable[..., Any]
ACCOUNT = "123456789012"


class _Application:
    """WSGI application in front of moto's."""

    def __init__(self, delay_s: float) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from moto.s3.models import s3_backends

        self._moto = DomainDispatcherApplication(create_backend_app)
        self._backend = s3_backends[ACCOUNT]["aws"]
        self._delay_s = delay_s
        self._handling = threading.RLock()
        """Held while a request is handled."""
        self._counting = threading.Lock()
        self._requests: list[dict[str, Any]] = []
        self._strike: Strike | None = None
        self._count = 0
        self._struck: dict[str, Any] | None = None
        self._released, self._handled_late = threading.Event(), threading.Event()
        self._is_late = False
        self._faults: list[list[Any]] = []
        """Fault, and how many requests have fitted it."""

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        path: str = environ["PATH_INFO"]
        if path.startswith(CONTROL):
            arguments = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            status = "200 OK"
            try:
                answer = json.dumps(getattr(self, f"_do_{path.removeprefix(CONTROL)}")(*arguments)).encode()
            except Exception:
                status, answer = "500 Error", traceback.format_exc().encode()
            start(status, [("Content-Type", "application/json"), ("Content-Length", str(len(answer)))])
            return [answer]
        return self._serve(environ, start)

    def _serve(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        query = environ.get("QUERY_STRING", "")
        name = re.search(r"\bapp/(\S+)", environ.get("HTTP_USER_AGENT", ""))
        entry = {
            "method": environ["REQUEST_METHOD"],
            "path": environ["PATH_INFO"] + (f"?{query}" if query else ""),
            "agent": name[1] if name else "",
            "status": 0,
        }
        with self._counting:
            self._requests.append(entry)
            fault = self._fault_for(f"{entry['method']} {entry['path']}", environ.get("HTTP_AUTHORIZATION", ""))
        body = _read_body(environ, cut=fault is not None and fault.kind == "cut")
        if body is None or (fault is not None and fault.kind == "cut" and body):
            return _hang_up(environ)
        environ["wsgi.input"] = io.BytesIO(body)
        environ["wsgi.input_terminated"] = (
            True  # without it a stream is read in small pieces, which takes as long as the rest
        )
        environ["CONTENT_LENGTH"] = str(len(body))
        if self._delay_s:
            time.sleep(self._delay_s)
        return self._answer(environ, start, entry, fault)

    def _answer(
        self, environ: dict[str, Any], start: Start, entry: dict[str, Any], fault: Fault | None
    ) -> Iterable[bytes]:
        with self._handling:
            with self._counting:
                strike = self._strike_at(entry)
            if strike is not None and strike.moment == "after":
                self._handle(environ, entry)
            if strike is not None:
                self._struck = entry
                _signal(strike)
        if strike is not None:
            if strike.moment == "late":
                self._released.wait()
                with self._handling:
                    self._handle(environ, entry)
                self._handled_late.set()
            return _hang_up(environ)
        with self._handling:
            if fault is not None and fault.kind == "answer":
                entry["status"] = fault.status
                text = f"<Error><Code>{fault.code}</Code><Message>{fault.code}</Message></Error>"
                data, headers = text.encode(), [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))]
                start(f"{fault.status} {fault.code}", headers)
                return [b"" if entry["method"] == "HEAD" else data]
            if fault is not None and fault.kind == "unconditional":
                for header in ("HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH"):
                    environ.pop(header, None)
            status, headers, data = self._handle(environ, entry)
        if fault is not None and fault.kind == "unanswered":
            return _hang_up(environ)
        if fault is not None and fault.kind == "cut":
            data = data[: len(data) // 2]
            environ["werkzeug.socket"].settimeout(5)
            start(status, headers)
            return _cut(environ, data)
        start(status, headers)
        return [data]

    def _handle(self, environ: dict[str, Any], entry: dict[str, Any]) -> tuple[str, list[tuple[str, str]], bytes]:
        """Handle a request with moto. Return status, headers and body of the answer."""
        upload = parse_qs(environ.get("QUERY_STRING", "")).get("uploadId")
        bucket, _, key = environ["PATH_INFO"].strip("/").partition("/")
        there = self._backend.get_bucket(bucket) if bucket in self._names() else None
        if upload and there is not None and environ["REQUEST_METHOD"] in ("PUT", "POST"):
            completed = getattr(there.keys.get(key), "multipart", None)
            if upload[0] not in there.multiparts and (completed is None or completed.id != upload[0]):
                entry["status"] = 404
                text = b"<Error><Code>NoSuchUpload</Code><Message>The upload does not exist.</Message></Error>"
                return "404 Not Found", [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))], text
        answered: list[Any] = []

        def began(status: str, headers: list[tuple[str, str]], _: Any = None) -> None:
            answered[:] = [status, headers]

        pieces = self._moto(environ, began)
        data = b"".join(pieces)
        status, headers = answered
        entry["status"] = int(status.split()[0])
        return status, headers, data

    def _names(self) -> Sequence[str]:
        return list(self._backend.buckets)

    def _strike_at(self, entry: dict[str, Any]) -> Strike | None:
        strike = self._strike
        if strike is None or not re.search(strike.agent, entry["agent"]):
            return None
        if not re.search(strike.path, f"{entry['method']} {entry['path']}"):
            return None
        self._count += 1
        if self._count <= strike.at:
            return None
        self._strike = None
        self._is_late = strike.moment == "late"
        return strike

    def _fault_for(self, request: str, signature: str) -> Fault | None:
        for one in self._faults:
            fault: Fault = one[0]
            if re.search(fault.path, request) and f"Credential={fault.key}" in signature:
                one[1] += 1
                if one[1] > fault.skip and (fault.times < 0 or one[1] <= fault.skip + fault.times):
                    return fault
        return None

    # ---- what tests ask for

    def _do_make_bucket(self, name: str) -> None:
        with self._handling:
            self._backend.create_bucket(name, "us-east-1")

    def _do_remove_bucket(self, name: str) -> None:
        with self._handling:
            self._backend.get_bucket(name).keys.clear()
            self._backend.delete_bucket(name)

    def _do_strike(self, strike: dict[str, Any] | None) -> None:
        self._do_release()
        with self._counting:
            self._strike = None if strike is None else Strike(**strike)
            self._count, self._struck, self._is_late = 0, None, False
            self._released, self._handled_late = threading.Event(), threading.Event()

    def _do_struck(self) -> dict[str, Any] | None:
        with self._handling:  # after the signal
            return self._struck

    def _do_release(self) -> None:
        self._released.set()
        if self._is_late:
            self._handled_late.wait(DEADLINE_S)

    def _do_fail(self, faults: list[dict[str, Any]]) -> None:
        with self._counting:
            self._faults = [[Fault(**fault), 0] for fault in faults]

    def _do_requests(self) -> list[dict[str, Any]]:
        with self._handling, self._counting:
            found, self._requests = self._requests, []
            return found

    def _do_objects(self, bucket: str) -> dict[str, int]:
        with self._handling:
            return {name: key.size for name, key in self._backend.get_bucket(bucket).keys.items()}

    def _do_uploads(self, bucket: str) -> list[str]:
        with self._handling:
            return [one.key_name for one in self._backend.get_bucket(bucket).multiparts.values()]

    def _do_contents(self, bucket: str) -> dict[str, str]:
        with self._handling:
            found = self._backend.get_bucket(bucket).keys.items()
            return {name: bytes(key.value).decode("latin-1") for name, key in found}

    def _do_read(self, bucket: str, key: str) -> str:
        with self._handling:
            return bytes(self._backend.get_bucket(bucket).keys[key].value).decode("latin-1")


def _read_body(environ: dict[str, Any], *, cut: bool) -> bytes | None:
    """Return a request's body, or half of it; None if the client has not sent all."""
    stream, length = environ["wsgi.input"], environ.get("CONTENT_LENGTH")
    try:
        if not length:
            return bytes(stream.read()) if environ.get("wsgi.input_terminated") else b""
        wanted = int(length) // 2 if cut else int(length)
        data = bytes(stream.read(wanted))
    except OSError:
        return None
    return data if len(data) == wanted else None


def _hang_up(environ: dict[str, Any]) -> Iterable[bytes]:
    """End the connection without an answer."""
    try:
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the client has ended it
    raise ConnectionResetError


def _cut(environ: dict[str, Any], data: bytes) -> Iterable[bytes]:
    """Begin an answer, and end the connection."""
    yield data
    yield from _hang_up(environ)


def _signal(strike: Strike) -> None:
    """Send the signal, and wait until it has been obeyed."""
    pids = [child for parent in strike.writers_of for child in children(parent)]
    pids += strike.trainers
    for pid in pids:
        try:
            os.kill(pid, strike.number)
        except ProcessLookupError:
            pass
    until = time.monotonic() + DEADLINE_S
    while strike.number == signal.SIGKILL and alive(pids) and time.monotonic() < until:
        time.sleep(0.001)


def main() -> None:
    from moto.moto_server.werkzeug_app import MotoRequestHandler
    from werkzeug.serving import make_server

    class Handler(MotoRequestHandler):
        def log_request(self, *_: Any) -> None:
            """Leave the log to faults."""

    fd, delay_s = int(sys.argv[1]), float(sys.argv[2])
    application = _Application(delay_s)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler, fd=fd)
    server.serve_forever()


if __name__ == "__main__":
    main()
