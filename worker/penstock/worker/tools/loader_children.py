"""Functions that start child processes in which command-line tools run users' loaders as a worker does, and exchange
messages with these children.

This module must not import torch, because the command line imports this module.
"""

from penstock.worker.processes.child_processes import START_DEADLINE_S
from penstock.worker.processes.control_channel import ControlChannel, ControlMessage, plain_detail
from penstock.worker.processes.interpreters import child_environment, interpreter
from penstock.worker.processes.user_code import MAIN, load_input_fn

__all__ = [
    "MAIN",
    "START_DEADLINE_S",
    "ControlChannel",
    "ControlMessage",
    "child_environment",
    "interpreter",
    "load_input_fn",
    "plain_detail",
]
