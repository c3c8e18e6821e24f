"""The checkpoint writer, with parts of uploads that are so small that small files have several.

A program, which tests have started in the place of client/penstock/client/checkpoint/saving/writer.py."""

from __future__ import annotations

from pathlib import Path

from penstock.client.checkpoint.saving import writer
from penstock.data.remote import bucket

__all__ = ["THIS"]

THIS = Path(__file__)
PART = 1 << 14


if __name__ == "__main__":
    bucket.PART = PART
    writer.main()
