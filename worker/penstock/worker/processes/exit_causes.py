"""What a child's end means: its exit status, what it was doing, and where in its code."""

from __future__ import annotations

import signal

from penstock.proto.errors import InputFnError
from penstock.worker.processes.control_channel import DESCRIPTORS_CLOSED
from penstock.worker.processes.progress_page import Ledger

__all__ = ["descriptors_closed", "how_it_ended"]


def how_it_ended(status: int | None, name: str, ledger: Ledger | None) -> str:
    """One line. `ledger`: of a runner; None for a scratch child."""
    if status is None:
        how = "died, cause unknown: the process that could tell does not answer"
    elif status < 0:
        how = f"was killed by {_signal_name(-status)}"
        if -status == signal.SIGKILL:
            how += " (out of memory, if nobody sent it)"
    else:
        how = f"exited with status {status}"
        if status == 0:
            how += ", which is no end of its input (os._exit?)"
    if ledger is None:
        return f"{name} {how}"
    ledger.refresh()
    return f"the runner of {name} {how} at batch {ledger.total}, in {ledger.activity[0]}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time one


def descriptors_closed(status: int | None, name: str) -> InputFnError | None:
    """The error for a child that lost its control socket; another runner would fare no better."""
    if status != DESCRIPTORS_CLOSED:
        return None
    return InputFnError(
        f"{name}: user code closed file descriptors that are not its own, those by which the runner talks to its "
        "daemon (os.closerange?); let it close what it has opened"
    )
