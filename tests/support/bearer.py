"""What a caller shows that knows no proof: its token, as programs in other languages do."""

from __future__ import annotations

from penstock.proto.rpc.version import PROTOCOL, PROTOCOL_KEY, VERSION, VERSION_KEY


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"), (PROTOCOL_KEY, str(PROTOCOL)), (VERSION_KEY, VERSION))
