"""Lines for Hugging Face's models: the loss of a packed batch is that of its documents, each by itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from given_shards import Given
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from penstock.data import Packed, ShardLoader, collate_packed

DOCUMENTS = [list(range(10, 10 + size)) for size in (5, 4, 9, 2, 12)]


def model(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, use_cache=False, attn_implementation=attention)
    return LlamaForCausalLM(config).double()


def by_bounds(module: Any, query: Any, key: Any, value: Any, mask: Any, **given: Any) -> tuple[torch.Tensor, None]:
    """Attention of variable length, as Flash attention computes it: within the bounds that the batch has."""
    assert mask is None
    bounds = given["cu_seq_lens_q"].tolist()
    assert bounds == given["cu_seq_lens_k"].tolist()
    assert max(b - a for a, b in itertools.pairwise(bounds)) == given["max_length_q"] == given["max_length_k"]
    attend = torch.nn.functional.scaled_dot_product_attention
    pieces = [
        attend(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], is_causal=True)
        for a, b in itertools.pairwise(bounds)
    ]
    return torch.cat(pieces, 2).transpose(1, 2), None


AttentionInterface.register("by_bounds", by_bounds)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "by_bounds"])
def test_loss_is_that_of_the_documents_alone(attention: str, window: int | None) -> None:
    bounds = attention == "by_bounds"
    options: Any = {"split": False, "pad": 0, "window": window, "cu_seqlens": bounds}
    lines = Packed(Given([DOCUMENTS]), length=14, labels=True, shift=False, names="transformers", **options)
    (batch,) = ShardLoader(lines, batch_size=8, collate_fn=collate_packed)
    assert batch["input_ids"].shape == ((1, 42) if bounds else (3, 14))
    assert ("cu_seq_lens_q" in batch) == bounds
    llama = model(attention)
    packed = llama(**batch).loss

    alone = model("sdpa")
    texts = [torch.tensor([document]) for document in DOCUMENTS]
    losses = [alone(input_ids=text, labels=text).loss * (text.shape[1] - 1) for text in texts]
    expected = torch.stack(losses).sum() / sum(len(document) - 1 for document in DOCUMENTS)
    assert packed.item() == pytest.approx(expected.item(), rel=1e-6)

    for mine, theirs in zip(
        torch.autograd.grad(packed, llama.parameters()),
        torch.autograd.grad(expected, alone.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)
