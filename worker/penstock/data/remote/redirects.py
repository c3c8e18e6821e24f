"""Limits on redirects. Data hubs redirect to other hosts, which is followed. But a server, or an attacker who controls
it, could make a worker request addresses that only this network can reach: a cloud's metadata service, which hands out
credentials, or a database. So a redirect to another host is refused if that is nearer than the server's own."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from typing import Any

from penstock.proto.errors import ShardUnavailableError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_nearer(target: Address, source: Address) -> bool:
    """Return True if `target` is nearer: this machine and its link, then a private network, then the Internet."""
    return _reach(target) < _reach(source)


def _reach(address: Address) -> int:
    mapped = getattr(address, "ipv4_mapped", None) or address
    if mapped.is_loopback or mapped.is_link_local or mapped.is_unspecified:
        return 0
    return 2 if mapped.is_global else 1


def watch_redirects(fs: Any) -> None:
    """Make a filesystem of fsspec refuse redirects to nearer addresses. Call this before it has a session."""
    import aiohttp  # imported here, because aiohttp is installed only with an extra

    watch = aiohttp.TraceConfig()
    watch.on_request_redirect.append(_check_redirect)
    fs.client_kwargs = {**fs.client_kwargs, "trace_configs": [*fs.client_kwargs.get("trace_configs", ()), watch]}


async def _check_redirect(session: Any, context: Any, request: Any) -> None:
    import yarl

    headers = request.response.headers
    target = request.url.join(yarl.URL(headers.get("Location") or headers.get("URI") or ""))
    if target.host is None or target.host == request.url.host:
        return
    sources, targets = await _addresses(request.url.host), await _addresses(target.host)
    for address in targets:
        if sources and all(is_nearer(address, source) for source in sources):
            raise ShardUnavailableError(
                f"{request.url.host} must not redirect to {target.host} ({address}), an address on this machine or its "
                "private network. Give the target's address as the remote to allow it"
            )


async def _addresses(host: str | None) -> list[Address]:
    with contextlib.suppress(OSError, ValueError):
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    return []
