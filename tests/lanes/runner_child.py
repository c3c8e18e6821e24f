"""A runner for the lane tests: a Producer in a process of its own, which does what it is told over a control socket.

Like the real one it has a single thread, makes batches while ring entries are free, reads acks, and makes nothing more
of an epoch that was left. Commands are JSON, one a packet, sometimes with a descriptor; each gets one answer, `until`
only once what it names has come true.
"""

from __future__ import annotations

import base64
import json
import os
import random
import select
import signal
import socket
import sys
from collections import deque
from typing import Any

from penstock.proto.lane.frames import pack_shapes
from penstock.proto.lane.producer import Producer
from penstock.proto.v1 import lane_pb2, records_pb2

Item = dict[str, Any]


def content(total: int, size: int) -> bytes:
    """Return the content that the runner puts into batch `total`; every fifth cannot be compressed."""
    rng = random.Random(total * 1_000_003 + size)
    if total % 5 == 0:
        return rng.randbytes(size)
    data = bytearray(size)
    data[::8] = rng.randbytes((size + 7) // 8)
    return bytes(data)


def digest(total: int) -> int:
    """Return the digest that the runner announces for batch `total`: any 64 bits, which a lane only carries."""
    return total * 0x9E3779B97F4A7C15 % (1 << 64)


class Child:
    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.producer = Producer(1 << 30)
        self.waiting: list[Item] = []
        self.work: deque[Item] = deque()
        self.made = self.left = 0
        self.starved = self.deaf = False

    def reset(self, max_batch_bytes: int) -> None:
        self.producer.close(say_so=False)
        self.__init__(self.control)  # type: ignore[misc]  # as new
        self.producer.max_batch_bytes = max_batch_bytes

    def state(self) -> Item:
        producer = self.producer
        return {
            "made": self.made,
            "starved": self.starved,
            "todo": len(self.work),
            "attached": producer.attached,
            "closed": producer.closed,
            "delivered": producer.delivered,
            "open_epochs": producer.open_epochs,
            "abandoned": list(producer.abandoned),
            "wanted": [[total, steps] for total, steps in sorted(producer.wanted.items())],
            "abandons": producer.abandons,
            "free": producer.free_entries,
            "slots": producer.ring_entries,
            "rings": len(producer.rings),
            "kept": len(producer._kept),
            "lent": sum(map(len, producer._lent.values())),
        }

    def command(self, item: Item, fds: list[int]) -> Item | None:
        producer, kind = self.producer, item.pop("do")
        if kind == "reset":
            self.reset(**item)
        elif kind == "attach":
            hello = lane_pb2.Hello()
            hello.ParseFromString(base64.b64decode(item["hello"]))
            producer.attach(socket.socket(fileno=fds.pop()), hello)
        elif kind == "work":
            self.work += item["items"]
        elif kind == "deaf":
            self.deaf = item["deaf"]
        elif kind == "until":
            self.waiting.append(item["state"])
            return None
        elif kind == "close":
            producer.close()
        return self.state()

    def make(self) -> None:
        """Make batches as long as the ring has free entries."""
        producer = self.producer
        for epoch in list(producer.abandoned)[self.left :]:
            self.work = deque(item for item in self.work if item.get("epoch", epoch + 1) > epoch)
        self.left = len(producer.abandoned)
        while self.work:
            item = self.work[0]
            kind = item["kind"]
            if kind == "batch":
                size, shapes, total = item["size"], item["shapes"], item["total"]
                reserved = producer.reserve(size, len(shapes))
                self.starved = reserved is None
                if reserved is None:
                    return
                reserved.view[:size] = content(total, size)
                producer.know_structure(1, b"structure")
                producer.publish(reserved, total, item["epoch"], 1, size, pack_shapes(shapes), digest(total))
                self.made += 1
            elif kind == "end":
                producer.end(item["epoch"], item["total"])
            elif kind == "fail":
                error = records_pb2.ErrorDetail(
                    name="InputFnError", message=item["message"], remote_traceback=item["traceback"]
                )
                producer.fail(item["epoch"], item["total"], error)
            elif kind == "close":
                producer.close()
            self.work.popleft()

    def answer(self, state: Item) -> None:
        self.control.send(json.dumps(state).encode())

    def run(self) -> None:
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        watched = -1
        while True:
            producer = self.producer
            fd = producer.fileno()
            if watched >= 0 and watched != fd:
                poll.unregister(watched)
            watched = -1 if self.deaf else fd
            if fd >= 0 and self.deaf:
                try:
                    poll.unregister(fd)
                except KeyError:
                    pass
            elif fd >= 0:
                poll.register(fd, select.POLLIN | (select.POLLOUT if producer.blocked else 0))
            state = self.state()
            for wanted in [wanted for wanted in self.waiting if wanted.items() <= state.items()]:
                self.waiting.remove(wanted)
                self.answer(state)
            ready = dict(poll.poll())
            if fd in ready:
                if ready[fd] & ~select.POLLOUT:
                    producer.take_acks()
                producer.flush()
            if self.control.fileno() in ready:
                data, fds, _, _ = socket.recv_fds(self.control, 1 << 17, 4)
                if not data:
                    return
                reply = self.command(json.loads(data), fds)
                self.make()
                if reply is not None:
                    self.answer(self.state())
            self.make()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Child(socket.socket(fileno=int(sys.argv[1]))).run()
    os._exit(0)
