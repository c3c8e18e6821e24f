"""The program of a slot's process. A loader that is one object over all epochs runs here, a pure one in a child for
each epoch, forked from what input_fn has left here (epoch_runner.py). Neither has a thread of Penstock or gRPC, because
user code may fork there.

Children would share threads, sockets, pipes, processes or writable shared memory that input_fn has left. Each child
then calls input_fn itself: it is forked from a spare process, which was forked before any user code ran.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import os
import signal
import sys
from typing import NoReturn

from penstock.proto.errors import LaneLostError
from penstock.runtime.process import forks
from penstock.runtime.process.end import reap, signal_child
from penstock.runtime.process.lifetime import signals_blocked
from penstock.runtime.process.spawn import fork
from penstock.worker.loader.start import compare_record, record_of
from penstock.worker.processes.control_channel import (
    ControlChannel,
    DescriptorsClosedError,
    begin_slot,
)
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.runner.epoch_process import Outcome, run_epoch
from penstock.worker.runner.epoch_runner import EpochRunner
from penstock.worker.runner.kept_runner import KeptRunner
from penstock.worker.runner.slot_stream import SlotStream, StartData, StopError, receive_start
from penstock.worker.runner.surroundings import Surroundings
from penstock.worker.runner.user_errors import told

_log = logging.getLogger("penstock.worker")

MAX_CAPABILITIES = 64 << 10
_WAKE = signal.SIGUSR1
_GUARD = """
import os, signal, sys, time
ending = {signal.SIGTERM, signal.SIGINT}
for number in ending:
    signal.signal(number, lambda *_: None)
signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
os.closerange(3, 65536)
pid = int(sys.argv[1])
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status not in (9, 19) else None
    os.kill(os.getpid(), -status)
    time.sleep(1)
os._exit(max(status, 0))
"""
"""Program that waits for its child and ends in the same way."""


def run_slot(channel: ControlChannel, progress_page: ProgressPage) -> None:
    assignment = begin_slot(channel, "runner")
    stream = SlotStream(assignment, channel, progress_page)
    try:
        _run(stream)
    except (StopError, LaneLostError):
        pass
    finally:
        with contextlib.suppress(OSError):  # user code may have closed its descriptors
            stream.producer.close()


def _run(stream: SlotStream) -> None:
    stream.doing("starting")
    sent = receive_start(stream.channel)
    _compare_record(stream, sent)
    spare = _Spare(stream, sent)
    before = Surroundings()
    try:
        with forks.hosting(stream.channel, stream.page, stream.producer):
            stream.source.build()
        source = stream.source
        if not source.is_pure:
            spare.end()
            stream.host_user_code()
            _run_kept(stream, sent)
        surroundings = before.left()
        if surroundings:
            _log.info("%s: each epoch calls input_fn again in a new process, because %s", source.name, surroundings)
            spare.take_over()
        spare.end()
    except (StopError, LaneLostError, DescriptorsClosedError):
        raise
    except Exception as error:
        stream.channel.send("failed", error=told(error))
        raise StopError from error
    gc.freeze()  # a collection would write to pages that the children share
    EpochRunner(stream, sent).run()


def _compare_record(stream: SlotStream, sent: StartData) -> None:
    """Compare in a child what was delivered on another topology: what it leaves in modules must not reach the slot's
    loader."""
    source = stream.source
    if stream.assignment.recovery or record_of(source.assignment, sent.resume) is None:
        return

    def work(_: object) -> Outcome:
        try:
            with forks.hosting(stream.channel, stream.page, stream.producer):
                compare_record(source, sent.resume)
            return Outcome({"error": None}, [])
        except Exception as error:
            return Outcome({"error": told(error)}, [])

    started = stream.page.made_by
    outcome = run_epoch("penstock-epoch", work, lambda: None, started, stream.producer, lambda: False)
    stream.page.made_by(0)
    assert outcome is not None
    if outcome.record["error"] is not None:
        stream.channel.send("failed", error=outcome.record["error"])
        raise StopError


def _run_kept(stream: SlotStream, sent: StartData) -> NoReturn:
    runner = KeptRunner(stream)
    runner.prepare(sent)
    position = stream.source.position
    stream.page.set_position(position.total, position.epoch, position.samples)
    runner.run()
    raise StopError


class _Spare:
    """Process forked before any user code ran, which waits for a signal until it is needed."""

    def __init__(self, stream: SlotStream, sent: StartData) -> None:
        self._stream, self._sent = stream, sent
        self._capabilities = mmap.mmap(-1, MAX_CAPABILITIES)
        with signals_blocked(_WAKE):
            self._pid = fork(self._wait)

    def _wait(self) -> None:
        signal.sigwait({_WAKE})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {_WAKE})
        stream = self._stream
        size = int.from_bytes(self._capabilities[:4], "little")
        stream.source.capabilities.ParseFromString(self._capabilities[4 : 4 + size])
        with contextlib.suppress(StopError, LaneLostError):
            EpochRunner(stream, self._sent, stream.source.build).run()

    def take_over(self) -> NoReturn:
        """Let the spare run the slot, and only wait for it as another program: so all that user code opened here is
        closed."""
        data = self._stream.source.capabilities.SerializeToString()
        self._capabilities[: 4 + len(data)] = len(data).to_bytes(4, "little") + data
        signal_child(self._pid, _WAKE)
        with signals_blocked():  # until the other program has its handlers
            os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", _GUARD, str(self._pid)])

    def end(self) -> None:
        if self._pid:
            signal_child(self._pid)
            reap(self._pid)
            self._pid = 0
