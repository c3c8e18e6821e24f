"""HTTP server of a folder, in a process of its own; optionally with a delay.

    python -m benchmarks.streaming_server FOLDER [--delay SECONDS]

Prints its port and serves until standard input ends. With a delay it waits before each answer, as a store in another
region would; connections are kept. An S3 client with path-style addresses can use this server too, because such a
client reads an object by HEAD and GET.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Folder"]


class Folder(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Header and body in two packets would wait for each other's acknowledgement.
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    def __init__(self, *arguments: Any, delay_s: float, **more: Any) -> None:
        self.delay_s = delay_s
        super().__init__(*arguments, **more)

    def send_head(self) -> Any:
        time.sleep(self.delay_s)
        return super().send_head()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--delay", type=float, default=0.0)
    options = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Folder, directory=options.folder, delay_s=options.delay))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
