"""Appliances whose further settings are variables while they are made, as operators give them."""

from __future__ import annotations

import os
import threading
from typing import Any
from unittest.mock import patch

from penstock.client import Appliance
from penstock.client.api.appliance_settings import ApplianceOptions

__all__ = ["made"]

_environment = threading.Lock()


def made(address: str | None = None, **settings: Any) -> Appliance:
    """`settings`: options of Appliance, and by the same kind of names others; None: not given."""
    options = {name: settings[name] for name in settings if name in ApplianceOptions.__annotations__}
    variables = {
        f"PENSTOCK_{name.upper()}": str(settings[name])
        for name in settings.keys() - options.keys()
        if settings[name] is not None
    }
    with _environment, patch.dict(os.environ, variables):
        return Appliance(address, **options)
