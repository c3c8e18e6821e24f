"""Limits on where a server leads. Data hubs redirect to other hosts, which is followed. But a server, or an attacker
who controls it or its name, could make a worker request addresses that only this network can reach: a cloud's metadata
service, which hands out credentials, or a database. So no request goes to an address nearer than those to which the
user's own server resolved first.

The check is in the connector's resolver, so the addresses that are checked are those that are connected to. Addresses
that a URL names itself are never resolved: they are checked as the redirect comes. Only a proxy's own name is not
checked, and behind a proxy no other is resolved here: the proxy decides."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import Any
from urllib.request import getproxies

from penstock.proto.errors import ShardUnavailableError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "169.254.169.254",
        "fd00:ec2::254",
        "169.254.170.2",
        "169.254.170.23",
        "fd00:ec2::23",
        "fd20:ce::254",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
    )
)
"""Addresses at which clouds hand out credentials: most of them, AWS (machines, tasks, pods), Google, Alibaba, Azure,
Oracle."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""Addresses that a network without IPv4 forwards to the IPv4 address in their last 32 bits."""


def is_nearer(target: Address, source: Address) -> bool:
    """Return True if `target` is nearer: a cloud's metadata, then this machine and its link, then a private network,
    then the Internet."""
    return _reach(target) < _reach(source)


def _reach(address: Address) -> int:
    reached: Address = address
    if isinstance(address, ipaddress.IPv6Address):
        nat64 = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None
        reached = nat64 or address.ipv4_mapped or address.sixtofour or address
    if reached in METADATA:
        return 0
    if reached.is_loopback or reached.is_link_local or reached.is_unspecified:
        return 1
    return 3 if reached.is_global and not getattr(reached, "is_site_local", False) else 2


class RedirectLimit:
    """Limit of one remote's requests. `host`: of the URL that the user gave, as it is resolved (raw_host of yarl)."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._proxies: set[str | None] = set()
        literal = _literal(host)
        self._nearest = None if literal is None else _reach(literal)
        """Smallest reach that is allowed; None until the user's host is resolved, which never happens behind a
        proxy."""

    def install(self, fs: Any) -> None:
        """Limit the requests of fsspec's filesystem for HTTP. Call this before it has a session."""
        import aiohttp  # imported here, because aiohttp is installed only with an extra
        import yarl

        limit = self
        given = [*getproxies().values(), fs.kwargs.get("proxy"), fs.client_kwargs.get("proxy")]
        self._proxies = {yarl.URL(str(proxy)).raw_host for proxy in given if proxy}

        class Resolver(aiohttp.DefaultResolver):  # type: ignore[misc, valid-type]
            async def resolve(self, host: str, *arguments: Any, **options: Any) -> Any:
                found = await super().resolve(host, *arguments, **options)
                limit.check(host, [_address(each["host"]) for each in found])
                return found

        async def redirected(session: Any, context: Any, request: Any) -> None:
            headers = request.response.headers
            target = request.url.join(yarl.URL(headers.get("Location") or headers.get("URI") or "")).raw_host
            literal = _literal(target or "")
            if target is not None and literal is not None and target != self._host:
                self.check(target, [literal])

        make = fs.get_client

        async def client(**options: Any) -> Any:
            options.setdefault("connector", aiohttp.TCPConnector(resolver=Resolver()))
            return await make(**options)

        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(redirected)
        fs.client_kwargs = {**fs.client_kwargs, "trace_configs": [*fs.client_kwargs.get("trace_configs", ()), trace]}
        fs.get_client = client

    def check(self, host: str, addresses: list[Address]) -> None:
        """Raise ShardUnavailableError if a request to this host would go to an address that is too near."""
        if (host in self._proxies and host != self._host) or not addresses:
            return
        nearest = min(addresses, key=_reach)
        if host == self._host and self._nearest is None:
            self._nearest = max(1, _reach(nearest))
        if _reach(nearest) >= (1 if self._nearest is None else self._nearest):
            return
        where = (
            "where clouds hand out credentials" if _reach(nearest) == 0 else "on this machine or its private network"
        )
        how = "resolve" if host == self._host else f"redirect to {host},"
        raise ShardUnavailableError(
            f"{self._host} must not {how} to {nearest}, an address {where}. Give that address as the remote to allow it"
        )


def _literal(host: str) -> Address | None:
    with contextlib.suppress(ValueError):
        return _address(host)
    return None


def _address(text: str) -> Address:
    return ipaddress.ip_address(text.partition("%")[0])
