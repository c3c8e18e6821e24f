"""Errors of user code, as fields of messages to the daemon."""

from __future__ import annotations

import signal
import traceback

from penstock.proto.errors import InputFnError, PenstockError
from penstock.runtime.process.lifetime import job_signalled
from penstock.worker.processes.control_channel import plain_detail
from penstock.worker.runner.epoch_process import die_like

SIGNALLED_S, SIGNAL_S = 30.0, 0.2
"""Seconds after a signal to the whole job in which an error of the loader counts as its consequence, and in which the
signal may come after the error."""


def told(error: Exception) -> dict[str, str]:
    """Return the error's fields. But if the whole job has got a signal, it has ended processes that user code started:
    end this process too, so that another one makes again what it was to make."""
    is_users = isinstance(error, InputFnError) or not isinstance(error, PenstockError)
    if is_users and job_signalled(SIGNALLED_S, SIGNAL_S):
        traceback.print_exception(error)
        die_like(-signal.SIGTERM)
    return plain_detail(error)
