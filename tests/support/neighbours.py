"""Appliances with settings of their own on daemons that run already: what a test starts for itself takes seconds."""

from __future__ import annotations

import itertools
from typing import Any

from appliances import made

from penstock.client import Appliance

__all__ = ["beside"]

_jobs = itertools.count()


def beside(embedded: Appliance, **settings: Any) -> Appliance:
    """A job of its own on the daemons of an embedded appliance, as another rank of the machine would join them. With
    the seed of the jobs there its runners are forked from the same interpreter."""
    access = embedded._access
    assert access is not None, "no appliance that has daemons of its own"
    job = f"{access.job}-beside-{next(_jobs)}"
    joined = made(access.address, **{"token": access.token, "job": job, "seed": 7, "timeout_s": 60, **settings})
    joined.embedded = True  # so runners are told where our modules are
    return joined
