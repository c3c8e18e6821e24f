"""Metadata of a caller, as programs in other languages send them."""

from __future__ import annotations

from penstock.proto.rpc.version import PROTOCOL, PROTOCOL_KEY, VERSION, VERSION_KEY


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"), (PROTOCOL_KEY, str(PROTOCOL)), (VERSION_KEY, VERSION))
