"""Users' loaders as runners run them: built, opened, restored and replayed, by the code that workers use.

Imports torch, so only child processes of tools import it (loader_children.py).
"""

from penstock.worker.loader.crossing_kinds import REPLAY
from penstock.worker.loader.restart_plan import Leg, Target
from penstock.worker.loader.restart_points import END, Launch, RestartPoint
from penstock.worker.loader.restorable_loader import RestorableLoader
from penstock.worker.loader.start import start
from penstock.worker.loader.travel import catch_up, leave, travel

__all__ = [
    "END",
    "REPLAY",
    "Launch",
    "Leg",
    "RestartPoint",
    "RestorableLoader",
    "Target",
    "catch_up",
    "leave",
    "start",
    "travel",
]
