"""Surroundings that fragments of the pages assume: data that lie elsewhere, a model that is there already.

A fixture here returns the names that a block needs, and once the block has been executed uses what it defined: an
input_fn of a page is called, and must yield a batch. Folders and buckets that pages name are small ones below tmp_path.
"""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock.client.checkpoint
import penstock.data
from penstock.client import Appliance, DataExecutor, DataLoader, Lookahead
from penstock.data import MDSWriter, StreamingDataset, StreamingLoader

Names = dict[str, Any]
ROWS = 256


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of ROWS samples."""
    folder = tmp_path_factory.mktemp("bucket") / "train"
    columns = {"number": "int", "text": "str"}
    with MDSWriter(folder, columns, hashes=["sha1"], size_limit=1 << 10) as shards:
        for number in range(ROWS):
            shards.write({"number": number, "text": f"sample {number}"})
    return folder


def relocated(kind: type, place: Callable[[str], Path]) -> Callable[..., Any]:
    """The class, whose paths and addresses are looked for elsewhere."""

    @functools.wraps(kind, updated=())
    def make(*args: Any, **kwargs: Any) -> Any:
        return kind(*(place(arg) if isinstance(arg, str) else arg for arg in args), **kwargs)

    return make


@pytest.fixture
def shards(bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    """Every s3:// address is the bucket; caches lie below tmp_path. `dataset` is open, nothing is `saved` yet."""

    def place(name: str) -> Path:
        return bucket if name.startswith("s3://") else tmp_path / name.strip("/")

    for name in ("StreamingDataset", "Stream"):
        here = relocated(getattr(penstock.data, name), place)
        monkeypatch.setattr(penstock.data, name, here)
    names: Names = {
        "StreamingLoader": StreamingLoader,
        "dataset": StreamingDataset(bucket),
        "saved": None,
        "torch": torch,
    }
    yield names
    if "input_fn" in names:
        batch = next(iter(names["input_fn"](8)))
        assert len(batch["number"]) == 8
    elif names["saved"] is not None:
        assert names["saved"]["epoch"] == 3, "behind the last batch of the third epoch"
    else:
        assert len(names["dataset"]) > 0


class Images(torch.utils.data.Dataset[torch.Tensor]):
    """Map-style, random, and not here."""

    def __init__(self, folder: str, augment: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self.augment = augment or (lambda image: image)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.augment(torch.full((2, 2), float(index)))


def jitter(image: torch.Tensor) -> torch.Tensor:
    return image + torch.rand(())


def tokenize(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def texts(path: str) -> Iterator[str]:
    with open(path) as file:
        for line in file:
            yield json.loads(line)["text"]


@pytest.fixture
def images_and_texts(tmp_path: Path) -> Iterator[Names]:
    """Files of texts, what reads and cuts them, and a dataset of images."""
    files = []
    for number in range(180):  # 60 a kind: pages deal them to 60 shards
        path = tmp_path / f"{number}.jsonl"
        path.write_text(
            "".join(json.dumps({"text": f"text {row} of file {number}. " * 500}) + "\n" for row in range(2))
        )
        files.append(str(path))
    names: Names = {
        "BOOKS": files[120:],
        "CODE": files[60:120],
        "ImageFolder": Images,
        "Images": Images,
        "Any": Any,
        "Iterator": Iterator,
        "PATHS": files[:60],
        "WEB": files[:60],
        "augment": jitter,
        "crawl": lambda part: (f"page {page:03} of part {part:02}" for page in range(200)),
        "functools": functools,
        "glob": types.SimpleNamespace(glob=lambda pattern: files),
        "json": json,
        "lines": texts,
        "names_of": lambda paths: [Path(path).name for path in paths],
        "os": __import__("os"),
        "partial": functools.partial,
        "random": __import__("random"),
        "texts": texts,
        "tokenize": tokenize,
    }
    before = set(names)
    yield names
    made = [names[name] for name in ("input_fn", "images", "tokens") if name in names.keys() - before]
    assert made
    for input_fn in made:
        batches = iter(input_fn(4))
        assert next(batches) is not None
        del batches


@pytest.fixture(scope="module")
def appliance() -> Iterator[None]:
    """Daemons for the loaders of fragments: daemons of their own would be seconds of a core for each."""
    with Appliance(num_workers_per_box=1):
        yield


@pytest.fixture
def training(appliance: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    """A model, its optimizer, a loader and a training step, for a few steps."""
    here = relocated(penstock.client.checkpoint.AsyncCheckpointer, lambda name: tmp_path / name.strip("/"))
    monkeypatch.setattr(penstock.client.checkpoint, "AsyncCheckpointer", here)
    import streams

    model = torch.nn.Linear(2, 2)
    loader = DataLoader(streams.counter, 1000)
    trained: list[Any] = []
    names: Names = {
        "Appliance": Appliance,
        "DataExecutor": DataExecutor,
        "loader": loader,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "steps": 3,
        "train_step": lambda model, optimizer, batch: trained.append(batch),
    }
    yield names
    assert len(trained) in (0, 3)  # where the page leaves the step out
    assert list(tmp_path.glob("**/checkpoints/step-3/penstock.json"))
    loader.close()


@pytest.fixture
def lookahead(appliance: None) -> Iterator[Names]:
    """A framework, which makes a torch DataLoader of what it is given, and an input of three batches."""
    import splitting

    names: Names = {
        "DataLoader": DataLoader,
        "Lookahead": Lookahead,
        "framework_makes_something_of": functools.partial(torch.utils.data.DataLoader, batch_size=None),
        "input_fn": splitting.split,
    }
    yield names
    assert names["ahead"].step == 3
    assert names["state"]["__penstock__"]


@pytest.fixture
def keyed(appliance: None) -> Iterator[Names]:
    """An input_fn whose batches carry the restore keys of their rows, without an end."""

    import dealt

    names: Names = {"input_fn": functools.partial(dealt.numbers, batch_size=4)}
    yield names
    lines = [json.loads(line) for line in Path("keys-of-box-0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["keys"] == names["batch"]["key"]
    assert names["sample"] == names["batch"]["batch"][0]
    assert names["config"]["loader"]["kind"] == "ShardLoader"
    names["loader"].close()
