"""The cause of a child's end: its exit status, its activity, and where it was in its code."""

from __future__ import annotations

from penstock.proto.errors import InputFnError
from penstock.runtime.process.end import describe_exit
from penstock.worker.processes.control_channel import DESCRIPTORS_CLOSED
from penstock.worker.processes.progress_page import ProgressPage

__all__ = ["descriptors_closed", "how_it_ended"]


def how_it_ended(status: int | None, progress_page: ProgressPage) -> str:
    """Return how a runner ended, and where it was: a sentence without its subject."""
    progress_page.refresh()
    return f"{describe_exit(status)} at batch {progress_page.total}, in {progress_page.activity[0]}"


def descriptors_closed(status: int | None, name: str) -> InputFnError | None:
    """Return the error for a child whose user code closed its control socket; None for any other end. It is an error of
    user code, and not a lost worker, because a replacement runner would end in the same way."""
    if status != DESCRIPTORS_CLOSED:
        return None
    return InputFnError(
        f"{name}: user code closed file descriptors of Penstock that the runner needs to talk to its daemon "
        "(os.closerange?): close only files that you opened"
    )
