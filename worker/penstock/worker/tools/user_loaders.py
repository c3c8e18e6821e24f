"""Users' loaders as runners run them: built, opened, restored and replayed, by the code that workers use.

Imports torch: for child processes of tools (loader_children.py).
"""

from penstock.worker.loader.crossing_kinds import REPLAY
from penstock.worker.loader.epoch_crossing import catch_up, leave
from penstock.worker.loader.restart_points import END, Launch, RestartPoint
from penstock.worker.loader.restorable_loader import RestorableLoader
from penstock.worker.loader.start import start

__all__ = ["END", "REPLAY", "Launch", "RestartPoint", "RestorableLoader", "catch_up", "leave", "start"]
