"""Blends of Energon's metadataset files: the same folders with the same shares, and a reason where that cannot be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from archives import archive
from shard_server import ShardServer

from penstock.data import LogicalShards, MapLoader, Mixture, ShardLoader, energon_blend, energon_concat, index_folder
from penstock.data.sharded.energon_blend import BlendPlan, read_plan
from penstock.proto.errors import DatasetError, InvalidArgumentError

OLD = "splits: {train: {datasets: [{weight: 2, path: ../a, subflavor: x}, {path: b, split_part: val}]}}"
NEW = "{__class__: MetadatasetV2, splits: {train: {blend: [%s]}, val: {path: ./a}}}"
EPOCHS = "{__class__: MetadatasetV2, splits: {train: {blend_epochized: [%s]}, val: {concat: [{path: b}, {path: a}]}}}"


def plan_of(texts: Mapping[str, str], path: str = "/m/x.yaml", split: str = "train") -> BlendPlan:
    return read_plan(path, split, lambda name: texts[name].encode())


def members(plan: BlendPlan) -> list[tuple[Any, ...]]:
    return [(one.path, one.split, one.weight, one.repetitions, dict(one.subflavors)) for one in plan.members]


def test_old_blends_are_read() -> None:
    plan = plan_of({"/m/x.yaml": OLD})
    assert plan.kind == "blend"
    assert members(plan) == [
        ("/a", "train", Fraction(2, 3), 1, {"__subflavor__": "x"}),
        ("/m/b", "val", Fraction(1, 3), 1, {}),
    ]


def test_nested_weights_are_multiplied() -> None:
    inner = NEW % "{weight: 0.3, path: a, subflavors: {k: 1, l: 2}}, {weight: 0.1, path: 's3://bucket/c'}"
    outer = NEW % "{weight: 5, path: n/inner.yaml, subflavors: {k: 3}}, {weight: 3, path: /d}"
    plan = plan_of({"/m/x.yaml": outer, "/m/n/inner.yaml": inner})
    assert members(plan) == [
        ("/m/n/a", "train", Fraction(15, 32), 1, {"k": 3, "l": 2}),
        ("s3://bucket/c", "train", Fraction(5, 32), 1, {"k": 3}),
        ("/d", "train", Fraction(3, 8), 1, {}),
    ]
    assert [one.path for one in plan_of({"/m/x.yaml": outer}, split="val").members] == ["/m/a"]


def test_nested_repetitions_are_multiplied() -> None:
    inner = EPOCHS % "{repetitions: 2, path: a}, {path: b}"
    outer = EPOCHS % "{repetitions: 3, path: inner.yaml}, {repetitions: 1, path: /d}"
    plan = plan_of({"s3://b/m/x.yaml": outer, "s3://b/m/inner.yaml": inner}, "s3://b/m/x.yaml")
    assert plan.kind == "blend_epochized"
    assert [(one.path, one.repetitions) for one in plan.members] == [("s3://b/m/a", 6), ("s3://b/m/b", 3), ("/d", 1)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (NEW % "{path: a, subset: {range: [0%, 50%]}}", "subset must be left out, because .*its split.yaml"),
        (
            NEW % "{path: a, shuffle_over_epochs_multiplier: -1}",
            r"Expected `int` >= 1 - at `\$.shuffle_over_epochs_multiplier`",
        ),
        (NEW % "{path: lines.jsonl}", "got a file of lines"),
        (NEW % "{path: a, weight: -1}", r"Expected `float` >= 0.0 - at `\$.weight`"),
        (NEW % "{path: x.yaml}", "must not name each other more than 16 deep"),
        (EPOCHS % "{path: a, repetitions: 0.5}", "a whole number >= 1, got 0.5"),
        (EPOCHS % "{path: y.yaml}", "must not be a blend within a blend_epochized"),
        ("{splits: {train: {join: {a: {path: a}}, joiner: f}}}", "join must be left out, because"),
        ("{", "cannot be read"),
    ],
)
def test_what_cannot_be_the_same_is_refused(text: str, says: str) -> None:
    with pytest.raises(DatasetError, match=says):
        plan_of({"/m/x.yaml": text, "/m/y.yaml": NEW % "{path: a}"})


# ---- folders


def prepared(root: Path, counts: Mapping[str, int], dataset: str = "field_map: {text: txt}") -> Path:
    """Write folders as Energon prepares them, each with a split train and a split val of two samples."""
    for name, count in counts.items():
        folder = root / name
        (folder / ".nv-meta").mkdir(parents=True)
        for split, numbers in (("train", range(count)), ("val", range(count, count + 2))):
            archive(folder / f"{split}.tar", [(f"{n}.txt", f"{name} {n}".encode()) for n in numbers])
        (folder / ".nv-meta" / "split.yaml").write_text("split_parts: {train: [train.tar], val: [val.tar]}")
        (folder / ".nv-meta" / "dataset.yaml").write_text(dataset)
        index_folder(folder)
    return root


def texts(source: Any, count: int | None = None, **options: Any) -> list[str]:
    loader = ShardLoader(source, batch_size=1, collate_fn=lambda rows: rows[0]["text"], seed=3, **options)
    found = []
    for text in loader:
        found.append(text)
        if len(found) == count:
            break
    return found


def test_blend_has_the_shares(tmp_path: Path) -> None:
    root = prepared(tmp_path, {"a": 4, "b": 6})
    (root / "x.yaml").write_text(NEW % "{weight: 0.3, path: a}, {weight: 0.1, path: ./b}")
    source = energon_blend(root / "x.yaml", shards=2)
    assert isinstance(source, Mixture)
    assert (source.names, source.wanted()) == (("a", "b"), [0.75, 0.25])
    seen = Counter(texts(source, 48))
    assert {name: sum(n for text, n in seen.items() if text[0] == name) for name in "ab"} == {"a": 36, "b": 12}
    assert {seen[f"a {n}"] for n in range(4)} == {9}


def test_repetitions_are_exact_in_an_epoch(tmp_path: Path) -> None:
    root = prepared(tmp_path, {"a": 4, "b": 6})
    (root / "x.yaml").write_text(EPOCHS % "{repetitions: 3, path: a}, {path: b}")
    source = energon_blend(root / "x.yaml", shards=2)
    assert isinstance(source, LogicalShards)
    expected = Counter({**{f"a {n}": 3 for n in range(4)}, **{f"b {n}": 1 for n in range(6)}})
    assert Counter(texts(source)) == expected
    val = energon_concat(root / "x.yaml")
    assert [val[n]["text"] for n in range(len(val))] == ["b 6", "b 7", "a 4", "a 5"]
    assert len(list(MapLoader(val, batch_size=2, shuffle=False))) == 2


def test_subflavors_are_in_samples(tmp_path: Path) -> None:
    root = prepared(tmp_path, {"a": 1, "b": 1})
    (root / "x.yaml").write_text(NEW % "{path: a, subflavors: {size: small}}, {path: b}")
    val = energon_concat(root / "x.yaml", "train")
    assert val[0] == {"__key__": "0", "text": "a 0", "__subflavors__": {"size": "small"}}
    assert val[1]["__subflavors__"] == {}
    first: Any = val.datasets[0]
    assert first[[0]] == first[:] == [val[0]]


def test_sample_loader_must_be_passed(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="is not run"):
        root = prepared(tmp_path, {"a": 2}, "sample_loader: 'sample_loader.py:sample_loader'")
    (root / "x.yaml").write_text(NEW % "{path: a}")
    with pytest.raises(DatasetError, match=r"which is not run, .* pass sample_loaders=\{'a': function\}"):
        energon_blend(root / "x.yaml", shards=1)
    with pytest.raises(InvalidArgumentError, match=r"sample_loaders must name folders of the blend \(a\), got b"):
        energon_blend(root / "x.yaml", shards=1, sample_loaders={"b": dict})
    source = energon_blend(root / "x.yaml", shards=1, sample_loaders={"a": lambda raw: {"text": raw["txt"].upper()}})
    assert sorted(texts(source, 2)) == ["A 0", "A 1"]


def test_remote_folders_of_one_name_are_read(tmp_path: Path) -> None:
    """Each has a cache of its own below `local`."""
    root = tmp_path / "remote"
    prepared(root / "one", {"data": 2})
    prepared(root / "two", {"data": 3})
    (root / "x.yaml").write_text(EPOCHS % "{path: one/data}, {path: two/data}")
    with ShardServer(root) as server:
        source = energon_blend(f"{server.url}/x.yaml", shards=1, local=tmp_path / "cache")
        assert sorted(texts(source)) == ["data 0", "data 0", "data 1", "data 1", "data 2"]
    assert all(folder.name.startswith("data-") for folder in (tmp_path / "cache").iterdir())
