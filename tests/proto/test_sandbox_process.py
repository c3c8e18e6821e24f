"""Effects that a process in a sandbox can have on others."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from penstock.runtime.process.sandbox import why_not_whole

INSIDE = """
import ctypes, json, os, signal, subprocess, sys
from penstock.runtime.process.sandbox import enter

def tried(do):
    try:
        do()
    except OSError as error:
        return type(error).__name__
    return "done"

libc = ctypes.CDLL(None, use_errno=True)

def attach():
    if libc.ptrace(16, os.getppid(), 0, 0):
        raise OSError(ctypes.get_errno(), "")

enter()
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(json.dumps({
    "privileges": [line.split()[1] for line in open("/proc/self/status") if line.startswith("NoNewPrivs")],
    "signal to a stranger": tried(lambda: os.kill(os.getppid(), 0)),
    "trace of a stranger": tried(attach),
    "signal to a child": tried(child.kill),
    "another sandbox": tried(enter),
}))
child.wait()
"""


def test_signals_reach_children_but_no_strangers() -> None:
    said = json.loads(subprocess.run([sys.executable, "-c", INSIDE], capture_output=True, check=True, text=True).stdout)
    assert said["privileges"] == ["1"]
    assert (said["signal to a child"], said["another sandbox"]) == ("done", "done")
    if why := why_not_whole():
        pytest.skip(why)
    assert said["signal to a stranger"] == said["trace of a stranger"] == "PermissionError"
