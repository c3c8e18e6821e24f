"""Tracebacks with Penstock's frames folded, and warnings that name the user's line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import penstock
from penstock.client.states.batch_sizes import infer_batch_size
from penstock.data import MapLoader
from penstock.proto.errors import PenstockError
from penstock.proto.tracebacks import fold_stack, format_remote, stack_in_a_line


class Broken:
    """A dataset whose third sample cannot be read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> int:
        if number == 2:
            raise ValueError("no such image")
        return number


def raised(loader: MapLoader) -> BaseException:
    with pytest.raises(ValueError, match="no such image") as caught:
        list(loader)
    return caught.value


def test_a_run_of_our_frames_is_one_line() -> None:
    text = format_remote(raised(MapLoader(Broken(), batch_size=2)))
    assert "of Penstock]" in text
    assert "map_loader.py" not in text
    user = text.partition("of Penstock]")
    assert "in raised" in user[0]
    assert "in __getitem__" in user[2]


def test_our_frames_at_the_outer_end_are_left_out() -> None:
    error = raised(MapLoader(Broken(), batch_size=2))
    assert error.__traceback__ is not None
    text = format_remote(error.with_traceback(error.__traceback__.tb_next))
    assert "of Penstock]" not in text
    assert text.splitlines()[1].strip().endswith("in __getitem__")


def test_our_frames_at_the_inner_end_stay() -> None:
    with pytest.raises(PenstockError) as caught:
        MapLoader(Broken(), batch_size=0)
    assert "map_loader.py" in format_remote(caught.value)


def test_causes_and_groups_are_folded_too() -> None:
    inner = raised(MapLoader(Broken(), batch_size=2))
    try:
        try:
            raise KeyError("outer") from ExceptionGroup("several", [inner])  # type: ignore[type-var]
        except KeyError as error:
            raise RuntimeError("last") from error
    except RuntimeError as error:
        text = format_remote(error)
    assert "RuntimeError: last" in text
    assert "of Penstock]" in text
    assert "map_loader.py" not in text


CRASH = """Fatal Python error: Segmentation fault

Current thread 0x00007fde6dffeb80 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/me/data.py", line 5 in __getitem__
  File "{ours}/data/loading/map_reading.py", line 96 in _all
  File "/home/me/wrap.py", line 9 in <lambda>
  File "{ours}/worker/runner/runner.py", line 40 in run
  File "<string>", line 1 in <module>"""


def test_the_stack_of_one_thread_is_short() -> None:
    text = fold_stack(CRASH.format(ours=penstock.__path__[0]))
    assert text.splitlines() == [
        "Fatal Python error: Segmentation fault",
        '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at',
        '  File "/home/me/data.py", line 5 in __getitem__',
        "  [1 frame of Penstock]",
        '  File "/home/me/wrap.py", line 9 in <lambda>',
    ]
    assert stack_in_a_line(text) == (
        "string_at (/usr/lib/python3.11/ctypes/__init__.py:519) < __getitem__ (/home/me/data.py:5) < "
        "<lambda> (/home/me/wrap.py:9)"
    )
    assert stack_in_a_line("(process 7 is gone)") == ""


def test_a_warning_names_the_users_line() -> None:
    def rows() -> Iterator[int | None]:
        yield infer_batch_size([torch.ones(2), torch.ones(3)])  # the line that calls Penstock

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(rows())
    (warning,) = caught
    assert warning.filename == __file__
    assert "the line that calls Penstock" in Path(__file__).read_text().splitlines()[warning.lineno - 1]
