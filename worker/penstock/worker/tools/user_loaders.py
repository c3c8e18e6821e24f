"""Users' loaders for command-line tools: made, opened, restored and replayed by the same code as in a runner.

This module imports torch, so only child processes of the tools import it (loader_children.py).
"""

from penstock.worker.loader.positioned_loader import PositionedLoader
from penstock.worker.loader.restart_plan import Leg, Target
from penstock.worker.loader.restart_points import END, Launch, RestartPoint
from penstock.worker.loader.start import start
from penstock.worker.loader.travel import catch_up, leave, travel

__all__ = [
    "END",
    "Launch",
    "Leg",
    "PositionedLoader",
    "RestartPoint",
    "Target",
    "catch_up",
    "leave",
    "start",
    "travel",
]
