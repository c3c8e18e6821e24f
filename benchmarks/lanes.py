"""Speed of the lanes alone, compared with the limit of the machine: no torch, no user code, no coordinator or daemons.

    python benchmarks/lanes.py [--seconds 1] [--sizes 4,64,1024,8192] [--rounds 3] [--tls FOLDER]

For each batch size, in one run so that the figures can be compared: copying it in memory, sending it over one plain TCP
connection between two processes (a send and a receive for each batch, no framing), the local lane (runner, consumer),
and the TCP lane (runner, sender, receiver, consumer). The runner copies each batch into its ring from ordinary memory,
as `FlatBatch.write_to` does; the consumer reads the first byte, and releases entries in groups of a quarter of the
ring. The modes take turns, and the fastest round of each counts, because other load only slows them. `cpu us` is
processor time per batch of each process, in that order.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from penstock.client.stream.receiver_process import Receiver
from penstock.proto.lane import tcp
from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import connect_local, pack_shapes
from penstock.proto.lane.producer import Producer
from penstock.proto.lane.ring import Ring, entries_for
from penstock.proto.lane.tls_socket import TlsSocket
from penstock.proto.rpc.tls import Tls, load_tls
from penstock.proto.v1 import lane_pb2
from penstock.worker.daemon.sender import Sender

WARM_UP = 0.3


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child, and return the child's process id. The child ends when this process ends, if not
    before."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the measurement is over, and the other side has closed
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def cpu_s(pid: int) -> float:
    """Return the processor seconds that all live threads of a process have used so far."""
    try:
        return (
            sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9
        )
    except OSError:
        return 0.0


def source(size: int) -> memoryview:
    return memoryview((os.urandom(1 << 16) * (size // (1 << 16) + 1))[:size])


def run_runner(sock: socket.socket, size: int, content: memoryview | None = None) -> None:
    """Run a runner without user code: copy batches of `size` bytes into the ring, announce them on the lane `sock`, and
    wait only for free ring entries."""
    producer, batch = Producer(1 << 30), source(size) if content is None else content
    producer.know_structure(1, b"x")
    producer.attach(sock, lane_pb2.Hello(next_total=1))
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    total = 0
    while producer.attached:
        reserved = producer.reserve(size)
        if reserved is None:
            producer.take_acks()
            if not producer.free_entries and producer.attached:
                poll.poll()
            continue
        total += 1
        start = reserved.offset
        reserved.ring.view[start : start + size] = batch
        producer.publish(reserved, total, 0, 1, size, pack_shapes((size,)), 0x123456789ABCDEF)
        if producer.free_entries < 2:
            producer.take_acks()


def consume(consumer: Consumer, size: int, seconds: float, pids: list[int]) -> tuple[float, list[float]]:
    """Read batches from a lane for `seconds` seconds. Return batches per second, and the processor time for each batch,
    in microseconds, of this process and of each of `pids`."""
    poll = select.poll()
    poll.register(consumer.fileno(), select.POLLIN)
    released: list[int] = []
    group, total, begun = 2 * max(1, entries_for(size) // 4), 0, 0
    start = until = 0.0
    before: list[float] = []
    while True:
        frame = consumer.receive()
        if frame is None:
            consumer.release(released)
            released.clear()
            consumer.flush()
            if not poll.poll(10_000):
                raise SystemExit(
                    f"the lane brought no batch for 10 s after batch {total}: see the messages of runner and sender "
                    "above"
                )
            continue
        total += 1
        if frame.total != total:
            raise SystemExit(
                f"the lane must bring batch {total} next, got batch {frame.total}: a fault of the lane, look for it "
                "before measuring"
            )
        ring = consumer.rings[frame.ring]
        ring.view[frame.entry * ring.entry_bytes]
        released += (frame.ring, frame.entry)
        consumer.delivered(total)
        if len(released) >= group:
            consumer.release(released)
            released.clear()
            consumer.flush()
            now = time.perf_counter()
            if not until:
                until = now + WARM_UP
            elif now >= until:
                if before:
                    break
                start, begun, until = now, total, now + seconds
                before = [cpu_s(pid) for pid in (os.getpid(), *pids)]
    batches = total - begun
    after = [cpu_s(pid) for pid in (os.getpid(), *pids)]
    used = [1e6 * (end - begin) / batches for begin, end in zip(before, after, strict=True)]
    return batches / (now - start), used[1:] + used[:1]


def local(size: int, seconds: float) -> tuple[float, list[float]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def runner() -> None:
        ours.close()
        run_runner(theirs, size)

    pid = in_child(runner)
    theirs.close()
    consumer = Consumer(ours, "the runner")
    try:
        return consume(consumer, size, seconds, [pid])
    finally:
        consumer.close()
        end(pid)


def remote(
    size: int,
    seconds: float,
    content: memoryview | None = None,
    codecs: Sequence[lane_pb2.Codec.ValueType] = (),
    tls: Tls | None = None,
) -> tuple[float, list[float]]:
    receiver = Receiver(tls=tls)
    listener = socket.create_server(("127.0.0.1", 0))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def daemon() -> None:
        theirs.close()
        sock, _ = listener.accept()
        if tls is not None:
            context = tls.server_context()
            context.sslsocket_class = TlsSocket
            sock = context.wrap_socket(sock, server_side=True)
        hello = tcp.parsed_hello(sock.recv(tcp.length_of(sock.recv(tcp.SEAL.size))))
        sender = Sender(sock, ours, hello, "bench")
        sender.start()
        sender.join()

    def runner() -> None:
        ours.close()
        run_runner(theirs, size, content)

    pids = [in_child(runner), in_child(daemon)]
    ours.close()
    theirs.close()
    name = receiver.start()
    sock = connect_local(name, 5)
    target = f"127.0.0.1:{listener.getsockname()[1]}"
    sock.send(lane_pb2.Hello(next_total=1, target=target, codecs=codecs).SerializeToString())
    consumer = Consumer(sock, "the receiver")
    assert receiver.pid is not None
    try:
        return consume(consumer, size, seconds, [*pids, receiver.pid])
    finally:
        consumer.close()
        receiver.stop()
        listener.close()
        for pid in pids:
            end(pid)


def raw_tcp(size: int, seconds: float) -> tuple[float, list[float]]:
    """Measure the limit of TCP: one process sends batches of `size` bytes from its ring over one connection, another
    receives them into its ring. Return batches per second, and the processor time for each batch of both processes, in
    microseconds."""
    listener = socket.create_server(("127.0.0.1", 0))
    slots = entries_for(size)

    def sender() -> None:
        ring, index = Ring.create(size, slots), 0
        sock = socket.create_connection(listener.getsockname())
        tcp.tune(sock)
        while True:
            index = (index + 1) % slots
            sock.sendall(ring.view[index * size : (index + 1) * size])

    pid = in_child(sender)
    sock, _ = listener.accept()
    ring, index, batches, begun, start, until = Ring.create(size, slots), 0, 0, 0, 0.0, time.perf_counter() + WARM_UP
    before: list[float] = []
    while True:
        index = (index + 1) % slots
        target = ring.view[index * size : (index + 1) * size]
        while target:
            target = target[sock.recv_into(target) :]
        batches += 1
        now = time.perf_counter()
        if now >= until:
            if before:
                break
            start, begun, until = now, batches, now + seconds
            before = [cpu_s(pid), cpu_s(os.getpid())]
    used = [
        1e6 * (cpu_s(one) - begin) / (batches - begun) for one, begin in zip((pid, os.getpid()), before, strict=True)
    ]
    end(pid)
    sock.close()
    listener.close()
    return (batches - begun) / (now - start), used


def memcpy(size: int, seconds: float) -> tuple[float, list[float]]:
    slots, batch = entries_for(size), source(size)
    ring, index, copies = Ring.create(size, slots), 0, 0
    start, cpu = time.perf_counter(), time.process_time()
    while (now := time.perf_counter()) < start + seconds:
        for _ in range(slots):
            index = (index + 1) % slots
            ring.view[index * size : (index + 1) * size] = batch
        copies += slots
    return copies / (now - start), [1e6 * (time.process_time() - cpu) / copies]


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of each measurement")
    parser.add_argument("--sizes", default="4,64,1024,8192", help="sizes of a batch, in KiB")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds; the fastest counts")
    parser.add_argument("--only", default="memcpy,raw TCP,local lane,TCP lane")
    parser.add_argument(
        "--tls",
        metavar="FOLDER",
        help="also measure the TCP lane under TLS, with the folder's ca.pem, cert.pem, key.pem",
    )
    given = parser.parse_args()
    ways = {"memcpy": memcpy, "raw TCP": raw_tcp, "local lane": local, "TCP lane": remote}
    if given.tls:
        files = (str(Path(given.tls, name)) for name in ("ca.pem", "cert.pem", "key.pem"))
        ways["TLS lane"] = partial(remote, tls=load_tls(*files))
        given.only += ",TLS lane"
    only = given.only.split(",")
    print(f"{'batch':>8}  {'way':10} {'batches/s':>10} {'GB/s':>6}  cpu us a batch")
    for kib in map(int, given.sizes.split(",")):
        best: dict[str, tuple[float, list[float]]] = {}
        for _ in range(given.rounds):
            for way in only:
                found = ways[way](kib << 10, given.seconds)
                best[way] = max(found, best.get(way, found))
        for way, (rate, used) in best.items():
            costs = " ".join(f"{one:.1f}" for one in used)
            note = f"  {rate / best['raw TCP'][0]:.2f} of raw TCP" if way == "TCP lane" and "raw TCP" in best else ""
            print(f"{kib:4} KiB  {way:10} {rate:10,.0f} {rate * (kib << 10) / 1e9:6.2f}  {costs}{note}", flush=True)


if __name__ == "__main__":
    main()
