"""Loaders that count their samples by language."""

from __future__ import annotations

from typing import Any

from penstock.data import Balance, Counts, MapLoader

__all__ = ["counted", "measured"]


class Lines:
    """Samples whose tokens are their numbers."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"tokens": number, "language": "en" if number % 3 else "de"}


def counted(batch: int, **options: Any) -> MapLoader:
    counts = Counts(by="language", tokens="tokens")
    return MapLoader(Lines(), global_batch_size=batch, shuffle=True, reseed=False, keys="key", counts=counts, **options)


def measured(batch: int) -> MapLoader:
    """The same with costs that are measured."""
    return counted(batch, balance=Balance([1.0] * 1000, report=True))
