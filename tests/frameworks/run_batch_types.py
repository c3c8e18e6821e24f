"""Batches of tensordict and PyG arrive as they were made, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batch_memory import trip

from penstock.proto.errors import UnsupportedLeafError

tensordict = pytest.importorskip("tensordict")
data = pytest.importorskip("torch_geometric.data")


@tensordict.tensorclass
class Sample:
    x: torch.Tensor
    name: str = "unnamed"
    mask: torch.Tensor | None = None


class Molecule(data.Data):  # type: ignore[name-defined, misc, unused-ignore]
    """Data with an attribute that counts nodes of its own."""

    def __inc__(self, key: str, value: Any, *rest: Any) -> Any:
        return 5 if key == "anchor" else super().__inc__(key, value, *rest)


def tensor_dict(**settings: Any) -> Any:
    inner = tensordict.TensorDict({"b": torch.zeros(4, 3)}, batch_size=[4, 3], names=["row", "y"])
    values = {"z": torch.ones(4, 2), "a": inner, "text": "t", "texts": ["a", "b", "c", "d"], "s": sample()}
    return tensordict.TensorDict(values, batch_size=[4], **settings)


def sample() -> Any:
    return Sample(x=torch.ones(4, 2), name="named", batch_size=[4])  # type: ignore[call-arg]


@pytest.mark.parametrize("settings", [{}, {"names": ["row"]}, {"lock": True}, {"device": "cpu"}], ids=str)
def test_tensordicts(settings: dict[str, Any]) -> None:
    sent = tensor_dict(**settings)
    got = trip({"batch": sent})["batch"]
    assert type(got) is tensordict.TensorDict
    assert list(got.keys()) == ["z", "a", "text", "texts", "s"]
    for one, other in ((got, sent), (got["a"], sent["a"])):
        assert (one.batch_size, one.names, one.device, one.is_locked) == (
            other.batch_size,
            other.names,
            other.device,
            other.is_locked,
        )
    assert got["z"].tolist() == sent["z"].tolist()
    assert (got["text"], list(got["texts"])) == ("t", ["a", "b", "c", "d"])
    assert type(got["s"]) is Sample


def test_tensorclasses() -> None:
    got = trip(sample())
    assert (type(got), len(got), got.batch_size, got.name, got.mask) == (Sample, 4, (4,), "named", None)
    assert got.x.tolist() == torch.ones(4, 2).tolist()
    assert got[1:].x.shape == (3, 2)
    assert trip(tensordict.NonTensorData({"a": [1, "x"]})).data == {"a": [1, "x"]}


def test_what_a_tensordict_loses_is_named() -> None:
    noted = tensordict.TensorDict({"a": torch.ones(2)}, [2])
    noted.note = "mine"
    with pytest.raises(UnsupportedLeafError, match="attribute 'note'"):
        trip(noted)
    with pytest.raises(UnsupportedLeafError, match=r"batch\['a'\] is a .*MemoryMappedTensor"):
        trip(tensordict.TensorDict({"a": torch.ones(2)}, [2]).memmap_())


def graph(cls: Any) -> Any:
    edges = torch.tensor([[0, 1], [1, 2]])
    made = cls(x=torch.ones(3, 2), edge_index=edges, anchor=torch.tensor([1]), name="g", num_nodes=3)
    made._private = 4
    return made


@pytest.mark.parametrize("cls", [data.Data, Molecule])
def test_graphs(cls: Any) -> None:
    got = trip({"g": graph(cls)})["g"]
    assert type(got) is cls
    assert repr(got.to_dict()) == repr(graph(cls).to_dict())
    assert (got._private, got.num_nodes, got.num_edges) == (4, 3, 2)


@pytest.mark.parametrize("cls", [data.Data, Molecule])
def test_batches_of_graphs(cls: Any) -> None:
    sent = data.Batch.from_data_list([graph(cls), graph(cls)])
    got = trip(sent)
    assert type(got) is type(sent)
    assert (got.num_graphs, got.ptr.tolist(), got.anchor.tolist()) == (2, [0, 3, 6], sent.anchor.tolist())
    assert type(got[1]) is cls
    assert [repr(one.to_dict()) for one in got.to_data_list()] == [repr(one.to_dict()) for one in sent.to_data_list()]


def test_graphs_of_other_kinds_are_refused() -> None:
    with pytest.raises(UnsupportedLeafError, match=r"batch is a .*HeteroData"):
        trip(data.HeteroData())
