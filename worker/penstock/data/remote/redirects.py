"""Where a server of shards may send its readers on to.

Hubs answer with the address of another host, which is followed. But a server, or who has got into it, could so have a
worker ask what only this network can reach: the metadata service of a cloud, which hands out credentials, or the port
of a database. So an answer of one host does not lead to an address that is nearer than its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from typing import Any

from penstock.proto.errors import ShardUnavailableError

__all__ = ["is_nearer", "watch_redirects"]

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_nearer(target: Address, source: Address) -> bool:
    """Whether fewer can reach the target: this machine and its link are nearer than a private network, and that than
    the Internet."""
    return _reach(target) < _reach(source)


def _reach(address: Address) -> int:
    mapped = getattr(address, "ipv4_mapped", None) or address
    if mapped.is_loopback or mapped.is_link_local or mapped.is_unspecified:
        return 0
    return 2 if mapped.is_global else 1


def watch_redirects(fs: Any) -> None:
    """Refuse them, in a filesystem of fsspec that has no session yet."""
    import aiohttp  # here, for it comes with an extra

    watch = aiohttp.TraceConfig()
    watch.on_request_redirect.append(_look)
    fs.client_kwargs = {**fs.client_kwargs, "trace_configs": [*fs.client_kwargs.get("trace_configs", ()), watch]}


async def _look(session: Any, context: Any, asked: Any) -> None:
    import yarl

    headers = asked.response.headers
    target = asked.url.join(yarl.URL(headers.get("Location") or headers.get("URI") or ""))
    if target.host is None or target.host == asked.url.host:
        return
    sources, targets = await _addresses(asked.url.host), await _addresses(target.host)
    for address in targets:
        if sources and all(is_nearer(address, source) for source in sources):
            raise ShardUnavailableError(
                f"{asked.url.host} leads to {target.host} ({address}), which is nearer to this machine than itself: if "
                "that is meant, give the address there as the remote"
            )


async def _addresses(host: str | None) -> list[Address]:
    """None of a name that only a proxy knows."""
    with contextlib.suppress(OSError, ValueError):
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    return []
