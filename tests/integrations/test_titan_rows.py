"""The packed rows of the torchtitan example."""

from __future__ import annotations

import importlib
import json
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch
from interpreters import EXAMPLES
from tokenizers import Tokenizer, models

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


def test_line_that_ends_with_a_document(corpus: ModuleType) -> None:
    inputs, labels = corpus.Rows(END)(torch.tensor([5, END, 4, END]))
    assert inputs["positions"].tolist() == [0, 1, 0]
    assert labels.tolist() == [END, IGNORED, END]


def test_batches_of_a_corpus(corpus: ModuleType, tmp_path: Path) -> None:
    words = {word: number for number, word in enumerate(["a", "b", "<s>", "</s>"])}
    Tokenizer(models.WordLevel(words, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "part.jsonl").write_text("".join(json.dumps({"text": "ab"[n % 2]}) + "\n" for n in range(200)))
    loader = corpus.input_fn(str(tmp_path), str(tmp_path), seq_len=16, global_batch_size=4)
    for inputs, labels in islice(loader, 3):
        assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (4, 16)
        assert torch.equal(labels == IGNORED, inputs["input"] == words["</s>"])
        begins = inputs["positions"] == 0
        assert torch.all(begins[:, 1:] == (inputs["input"] == words["</s>"])[:, :-1])
