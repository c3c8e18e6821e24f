"""Descriptions of how and where a child process ended, for errors and logs."""

from __future__ import annotations

from penstock.proto.errors import InputFnError
from penstock.runtime.process.end import describe_exit
from penstock.worker.processes.control_channel import DESCRIPTORS_CLOSED
from penstock.worker.processes.progress_page import ProgressPage

__all__ = ["descriptors_closed", "how_it_ended"]


def how_it_ended(status: int | None, progress_page: ProgressPage) -> str:
    """Return how a runner ended, as the end of a sentence, such as "was killed by SIGKILL after batch 17, in next": it
    had made 17 batches of its slot, and was making another. The caller puts the subject before it.

    status: exit status, negative for a signal; None = unknown.
    """
    progress_page.refresh()
    return f"{describe_exit(status)} after batch {progress_page.total}, in {progress_page.activity[0]}"


def descriptors_closed(status: int | None, name: str) -> InputFnError | None:
    """Return the error for a child whose user code closed Penstock's control socket; None if the child ended in another
    way. The error is an InputFnError and not a WorkerLostError, because a replacement runner would end in the same way.
    """
    if status != DESCRIPTORS_CLOSED:
        return None
    return InputFnError(
        f"{name}: user code closed file descriptors that Penstock needs, for example with os.closerange(). Close only "
        "files that you opened"
    )
