"""The newest list of the checkpoints in a bucket (checkpoint_catalog.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.data.remote.bucket import Bucket
from penstock.proto.errors import CheckpointError, DatasetError
from penstock.proto.state.checkpoint_catalog import Catalog, catalog_name, newest_number

LISTS = "catalog-"
TRIES = 5
"""Attempts to read the newest list: it may be deleted between its listing and its reading, if two saves end then."""


def newest_catalog(bucket: Bucket, *, deadline_s: float) -> Catalog:
    """Raises CheckpointCorruptError for a damaged list, ShardUnavailableError if the store does not answer."""
    for _ in range(TRIES):
        number = newest_number(bucket.listed(LISTS, deadline_s=deadline_s))
        if number < 0:
            return Catalog()
        name = catalog_name(number)
        if (data := bucket.content(name, deadline_s=deadline_s)) is not None:
            return Catalog.decode(data, bucket.url_of(name))
    raise CheckpointError(f"{bucket.url}: its lists of checkpoints were replaced {TRIES} times while one was read")


def opened_bucket(url: str, storage_options: Mapping[str, Any] | None) -> Bucket:
    """Raises CheckpointError if a package is missing."""
    try:
        return Bucket(url, storage_options)
    except DatasetError as error:
        raise CheckpointError(error.message) from error
