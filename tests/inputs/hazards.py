"""User code at its worst: it hangs, crashes, floods, leaks, forks and closes what is not its own."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import streams
import torch
from torch.utils.data import DataLoader, Dataset

from penstock.worker import current_assignment

_ever = threading.Event()


def waits_in_c() -> None:
    """Holds the GIL in a library's code."""
    read, _ = os.pipe()
    ctypes.PyDLL(None).read(read, ctypes.create_string_buffer(1), 1)


def tells_what_it_has(path: str) -> streams.Counter:
    """Return a loader that reports what user code inherits, and what it can do to its worker's processes."""
    try:
        os.kill(os.getppid(), 0)
        signalled = "done"
    except OSError as error:
        signalled = type(error).__name__
    with open("/proc/self/status") as status:
        privileges = next(line.split()[1] for line in status if line.startswith("NoNewPrivs"))
    own = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing is closed by now
            own.append(os.readlink(f"/proc/self/fd/{fd}"))
    told = {"environment": dict(os.environ), "descriptors": own, "privileges": privileges, "signal": signalled}
    Path(path).write_text(json.dumps(told))
    return streams.Counter(3)


def waits_for_ever() -> None:
    _ever.wait()


class Hangs(streams.Counter):
    """Loader that hangs forever at one point, after a few batches where that is possible."""

    def __init__(self, where: str) -> None:
        super().__init__(100, first=1000 * current_assignment().global_worker_id)
        self.where = where

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.where == "iter":
            waits_for_ever()
        return self._batches()

    def _batches(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            if self.done == 3 and self.where == "next":
                waits_for_ever()
            if self.done == 3 and self.where == "c code":
                waits_in_c()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        if self.where == "state_dict":
            waits_for_ever()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.where == "load_state_dict":
            waits_for_ever()
        super().load_state_dict(state)


def hangs(where: str) -> Hangs:
    if where == "input_fn":
        waits_for_ever()
    return Hangs(where)


class Kept(streams.Counter):
    """Kept over epochs: its runner makes one and no other."""

    exact_states = True


def hangs_again(marker: str) -> Kept:
    if not once(marker):
        waits_for_ever()
    return Kept(10_000, first=1000 * current_assignment().global_worker_id)


def once(marker: str) -> bool:
    """True the first time."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def reads_address_zero() -> None:
    ctypes.string_at(0)


def exits_quietly() -> None:
    os._exit(0)


def dies(how: str, marker: str, batches: int = 20) -> Iterator[torch.Tensor]:
    """Once, before its ninth batch."""
    current_assignment()
    for number in range(batches):
        if number == 8 and once(marker):
            {"segfault": reads_address_zero, "exit": exits_quietly}[how]()
        yield torch.tensor([number, int(torch.randint(0, 1 << 30, ()))])


def will_not_stop(marker: str) -> Iterator[torch.Tensor]:
    """Deaf to signals, with a thread and an exit hook that never end; hangs once the file `marker`.go is there."""
    current_assignment()
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    atexit.register(waits_for_ever)
    threading.Thread(target=waits_for_ever).start()
    while not os.path.exists(f"{marker}.go"):
        yield torch.zeros(1)
    with open(marker, "w") as file:
        file.write(f"{os.getpid()}\n")
    waits_for_ever()


def closes_descriptors() -> Iterator[torch.Tensor]:
    current_assignment()
    for number in range(1000):
        if number == 5:
            os.closerange(3, 4096)
        yield torch.tensor(number)
        time.sleep(0.001)


def unsettles(batches: int = 60) -> Iterator[torch.Tensor]:
    """Changes what a process has one of, and keeps thousands of files open."""
    current_assignment()
    kept = []
    for number in range(batches):
        if number == 3:
            os.chdir("/")
            os.umask(0o777)
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 12_000), hard))
            kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(min(hard, 12_000) - 200)]
        if number == 50:  # a ring holds 32: its consumer has come by now, as a descriptor
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        yield torch.tensor([number, len(kept)])


def floods(batches: int = 40) -> Iterator[torch.Tensor]:
    """Prints without end, from a process of its own too, and one line that never ends."""
    current_assignment()
    line = "x" * 120 + "\n"
    subprocess.Popen([sys.executable, "-c", f"import sys\nwhile True: sys.stdout.write({line * 1000!r})"])
    for number in range(batches):
        sys.stderr.write(line * 2000)
        sys.stdout.write("y" * 1_000_000)
        time.sleep(0.5)
        yield torch.tensor(number)


def escapes(marker: str) -> Iterator[torch.Tensor]:
    """Leaves processes behind: in its group, in a session of its own, and a daemon's grandchild."""
    current_assignment()
    for arguments in ({}, {"start_new_session": True}):
        _note(marker, subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], **arguments).pid)  # type: ignore[call-overload]
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            _note(marker, os.getpid())
            time.sleep(600)
        os._exit(0)
    for number in range(10_000):
        yield torch.tensor(number)
        time.sleep(0.001)


def _note(marker: str, pid: int) -> None:
    with open(marker, "a") as file:
        file.write(f"{pid}\n")


class Samples(Dataset[Any]):
    """Map style; one sample can be poison: making it kills the process."""

    def __init__(self, items: int, poison: tuple[int, ...] = (), size: int = 1) -> None:
        self.items = items
        self.poison = poison
        self.size = size

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.poison:
            os.kill(os.getpid(), signal.SIGSEGV)
        return torch.full((self.size,), index)


def many_processes(sharing: str) -> DataLoader[Any]:
    """Two worker processes under load, which share what multiprocessing and torch can share."""
    current_assignment()
    torch.multiprocessing.set_sharing_strategy(sharing)  # type: ignore[no-untyped-call]
    return DataLoader(Samples(100_000, size=4096), batch_size=4, num_workers=2)


class Leaks(streams.Counter):
    """Keeps `mib` MiB for each batch; `at_once`: before the first, too. A state takes it `state_s` seconds."""

    def __init__(self, mib: int, at_once: int, batches: int, state_s: float) -> None:
        super().__init__(batches, first=1000 * current_assignment().global_worker_id)
        self.mib, self.state_s = mib, state_s
        self.kept = [bytearray(b"x" * (1 << 20)) for _ in range(at_once)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            self.kept += [bytearray(b"x" * (1 << 20)) for _ in range(self.mib)]
            time.sleep(0.04)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        time.sleep(self.state_s)
        return super().state_dict()


class LeaksAndVouches(Leaks):
    exact_states = True


def leaks(mib: int, at_once: int = 0, batches: int = 60, state_s: float = 0.0, vouches: bool = True) -> Leaks:
    return (LeaksAndVouches if vouches else Leaks)(mib, at_once, batches, state_s)


class BadInScratch(streams.Counter):
    """Streams well; restored beside the stream, it goes wrong. `how`: or a folder, with a file for each time it is
    killed then, or waits to be killed. Its states are aggregated, so one between two snapshots is made beside the
    stream."""

    loads_own_state = exact_states = True

    def __init__(self, how: str, batches: int) -> None:
        super().__init__(batches, first=1000 * current_assignment().global_worker_id)
        self.how = how

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.how == "hang":
            waits_for_ever()
        for path in Path(self.how).glob("kill *"):
            if path.name == "kill me":
                path.rename(path.with_name(f"waits {os.getpid()}"))
                waits_for_ever()
            path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "die":
            reads_address_zero()

    def state_dict(self) -> dict[str, Any]:
        time.sleep(0.02)  # too dear to be taken at every step
        return super().state_dict()

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        return {"workers": worker_states}

    def deaggregate_state_dict(self, aggregated: dict[str, Any]) -> dict[str, Any]:
        own: dict[str, Any] = aggregated["workers"][current_assignment().global_worker_id]
        return own


def bad_in_scratch(how: str, batches: int = 3000) -> BadInScratch:
    return BadInScratch(how, batches)


# ---- poison


def poisoned(kind: str, poison: list[int], shuffle: bool = False, items: int = 48) -> Any:
    """Return a loader with 4 samples a batch, sharded by batch over the workers; the batches with the samples `poison`
    kill their process."""
    place = current_assignment()
    if kind == "own":
        return Skipping(items // 4, {sample // 4 for sample in poison})
    if kind == "generator":
        return _batches(items // 4, {sample // 4 for sample in poison if place.global_worker_id == 0})
    from torchdata.stateful_dataloader import StatefulDataLoader

    maker: Any = {"torch": DataLoader, "torchdata": StatefulDataLoader}[kind]
    first = items * place.global_worker_id
    dataset = Shifted(Samples(items, tuple(poison) if place.global_worker_id == 0 else ()), first)
    return maker(dataset, batch_size=4, shuffle=shuffle)


class Shifted(Dataset[Any]):
    """Numbers of its own for each worker."""

    def __init__(self, samples: Samples, first: int) -> None:
        self.samples = samples
        self.first = first

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index] + self.first


class Skipping(streams.Counter):
    """Says itself how a batch is passed over."""

    def __init__(self, batches: int, poison: set[int]) -> None:
        place = current_assignment()
        super().__init__(batches, first=1000 * place.global_worker_id)
        self.poison = poison if place.global_worker_id == 0 else set()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.iterating = True
        while self.done < self.batches:
            if self.done in self.poison:
                os.kill(os.getpid(), signal.SIGSEGV)
            self.done += 1
            yield {"x": torch.full((4,), self.first + self.done)}
        self.done = 0

    def skip_batch(self) -> None:
        if self.done >= self.batches:
            raise StopIteration
        self.done += 1


def _batches(batches: int, poison: set[int]) -> Iterator[torch.Tensor]:
    for number in range(batches):
        if number in poison:
            os.kill(os.getpid(), signal.SIGSEGV)
        yield torch.tensor(number)


class Strays(streams.Counter):
    """Forks a child before each batch that comes back from next(): by an exception, sys.exit() or a batch in turn."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            how = self.done % 3
            if (child := os.fork()) == 0:
                if how == 0:
                    raise RuntimeError("before os._exit")
                if how == 1:
                    sys.exit(5)
                yield {name: -1 - value for name, value in batch.items()}
                continue
            if self.done % 2:  # the others run beside the parent
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (5 if how == 1 else 1)
            yield batch


def strays(batches: int) -> Strays:
    return Strays(batches, first=1000 * current_assignment().global_worker_id)


class HeldFile:
    """A pure loader of a file that is open from the beginning, and is read on from wherever it stands."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "rb")  # noqa: SIM115
        self.file.read(8)

    def __iter__(self) -> Iterator[int]:
        while number := self.file.read(8):
            yield int(number)


def held_file(path: str) -> HeldFile:
    return HeldFile(path)
