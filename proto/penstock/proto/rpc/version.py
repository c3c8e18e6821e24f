"""Version of this process, sent in every call: its release, and the number of its control protocol."""

from __future__ import annotations

from importlib import metadata as _package

PROTOCOL = 4
"""Number of the control protocol. Peers with another number are refused at their first call."""

try:
    VERSION = _package.version("penstock")
except _package.PackageNotFoundError:  # run from a source tree that is not installed
    VERSION = "0.1.0"

PROTOCOL_KEY = "penstock-protocol"
VERSION_KEY = "penstock-version"
