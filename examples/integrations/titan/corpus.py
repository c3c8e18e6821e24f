"""Input of the torchtitan example: lines of JSON with a "text" each, as packed rows of tokens.

Workers import this module, and it imports neither torchtitan nor penstock.client.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from penstock.data import Chunked, LineFile, LogicalShards, Mapped, Packed, Repeated, ShardLoader, WindowShuffled

__all__ = ["Rows", "input_fn"]

IGNORED = -100
"""Label that torchtitan's losses leave out."""
SHARDS = 60
"""Number of logical shards. It is a part of the order of samples, so it is chosen once, and has many divisors."""
BLOCK = 8
"""Number of rows of a block, which is also a part of the order. With it, the order does not depend on the batch size of
the first step."""


def input_fn(
    dataset_path: str, tokenizer_path: str, seq_len: int, global_batch_size: int, bos: str = "<s>", eos: str = "</s>"
) -> ShardLoader:
    """Return the loader of all *.jsonl files in a folder. A batch is a pair of

    {"input": int64, [rows, seq_len]; "positions": int64, [rows, seq_len]}, and labels: int64, [rows, seq_len].
    """
    tokenizer = Tokenizer.from_file(str(Path(tokenizer_path) / "tokenizer.json"))
    first, last = tokenizer.token_to_id(bos), tokenizer.token_to_id(eos)
    if first is None or last is None:
        raise ValueError(f"the tokenizer must have the tokens {bos!r} and {eos!r}. Pass the names of its own")
    paths = sorted(Path(dataset_path).glob("*.jsonl"))
    records = LogicalShards([LineFile(path) for path in paths], shards=SHARDS, names=[path.name for path in paths])

    def ids(record: dict[str, Any]) -> list[int]:
        found: list[int] = tokenizer.encode(record["text"], add_special_tokens=False).ids
        return found

    documents = Mapped(Repeated(records), ids)
    lines = Packed(Chunked(documents, length=8 * seq_len, bos=first, eos=last), length=seq_len + 1)
    rows = Mapped(WindowShuffled(lines, 16), Rows(last))
    return ShardLoader(rows, global_batch_size=global_batch_size, partitions=4, block=BLOCK)


class Rows:
    """Function from a line of tokens to a row for torchtitan: its tokens, their positions, and their labels.

    Each token is to be predicted from those before it in its document. So positions begin at 0 in each document, and
    the last token of a document has no label.
    """

    def __init__(self, end: int) -> None:
        """end: the token that ends a document."""
        self._end = end

    def __call__(self, line: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
        tokens, ends = line[:-1], line[:-1] == self._end
        index = torch.arange(len(tokens))
        begins = torch.where(ends.roll(1), index, 0)
        begins[0] = 0  # the line's first token, though roll put the last one's flag there
        positions = index - begins.cummax(0).values
        return {"input": tokens, "positions": positions}, torch.where(ends, IGNORED, line[1:])
