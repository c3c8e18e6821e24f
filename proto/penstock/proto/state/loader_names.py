"""Names of a run's loader: how an input_fn is sent ("module:qualname"), and how people are told of it."""

from __future__ import annotations

from penstock.proto.v1 import records_pb2

MAIN = "penstock_main"
"""Module name of a training script that was run as a file, so that its `if __name__ == "__main__"` is false."""
BY_VALUE = "penstock_by_value"
"""In place of the module of a callable that is sent as a pickle with its arguments."""


def loader_name(input_fn: str, title: str = "") -> str:
    """Return a loader's name for people: `title`, which a dataset has, or its function, with the user's module."""
    module, _, qualname = input_fn.partition(":")
    is_users = module not in (MAIN, BY_VALUE) and not module.startswith("penstock.")
    return title or (input_fn if is_users else qualname)


def name_of(spec: records_pb2.LoaderSpec) -> str:
    return loader_name(spec.input_fn, spec.title)
