"""The packed rows of the torchtitan example."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch
from interpreters import EXAMPLES

END, IGNORED = 9, -100


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("integrations.titan.corpus")


def test_positions_begin_in_each_document(corpus: ModuleType) -> None:
    inputs, labels = corpus.Rows(END)(torch.tensor([5, 6, END, 1, 2, END, END, 3]))
    assert inputs["input"].tolist() == [5, 6, END, 1, 2, END, END]
    assert inputs["positions"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert labels.tolist() == [6, END, IGNORED, 2, END, IGNORED, IGNORED]
