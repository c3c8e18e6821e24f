"""Several hosts on one machine: network namespaces around a router, joined by veth pairs. Needs root and iproute2.

The router is a namespace too, so nothing of the machine's own network is touched. A host's packets can be dropped on
their way to another, in one direction, by a blackhole route; a link can be taken down. Nobody is told.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from cluster import Cluster, Daemon

__all__ = ["HostCluster", "Network", "why_not"]


def why_not() -> str:
    """Why there can be no network namespaces here; "" if there can."""
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (iproute2)"
    name = f"penstock-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


_networks = itertools.count()


class Network:
    """Hosts by name, each with an address of its own."""

    def __init__(self, *hosts: str) -> None:
        self._tag = f"pst{os.getpid()}n{next(_networks)}"
        self._router = f"{self._tag}-router"
        self.addresses = {host: f"10.213.{number}.2" for number, host in enumerate(hosts, 1)}
        self._made: list[str] = []
        try:
            self._make(self._router)
            subprocess.run([*self.inside("router"), "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
            for number, host in enumerate(hosts, 1):
                self._join(host, number)
        except BaseException:
            self.close()
            raise

    def _make(self, namespace: str) -> None:
        _ip("netns", "add", namespace)
        self._made.append(namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")

    def _join(self, host: str, number: int) -> None:
        namespace, gateway = f"{self._tag}-{host}", f"10.213.{number}.1"
        self._make(namespace)
        _ip("-n", namespace, "link", "add", "up0", "type", "veth", "peer", "name", f"to{number}", "netns", self._router)
        _ip("-n", self._router, "addr", "add", f"{gateway}/24", "dev", f"to{number}")
        _ip("-n", self._router, "link", "set", f"to{number}", "up")
        _ip("-n", namespace, "addr", "add", f"{self.addresses[host]}/24", "dev", "up0")
        self.link(host, up=True)

    def inside(self, host: str) -> list[str]:
        """Return the prefix of a command that runs on a host."""
        return ["ip", "netns", "exec", f"{self._tag}-{host}"]

    def link(self, host: str, *, up: bool) -> None:
        """Plug its cable in, or out."""
        namespace = f"{self._tag}-{host}"
        _ip("-n", namespace, "link", "set", "up0", "up" if up else "down")
        if up:  # routes go with the link
            gateway = self.addresses[host].rpartition(".")[0] + ".1"
            _ip("-n", namespace, "route", "replace", "default", "via", gateway)

    def drop(self, source: str, target: str) -> None:
        """Drop everything that `source` sends to `target` from now on; the other direction still works."""
        _ip("-n", f"{self._tag}-{source}", "route", "replace", "blackhole", f"{self.addresses[target]}/32")

    def pass_again(self, source: str, target: str) -> None:
        _ip("-n", f"{self._tag}-{source}", "route", "del", "blackhole", f"{self.addresses[target]}/32")

    def close(self) -> None:
        while self._made:
            subprocess.run(["ip", "netns", "del", self._made.pop()], check=False, capture_output=True)


class HostCluster(Cluster):
    """A coordinator on the host "coordinator", and workers on hosts of their own."""

    def __init__(self, state_dir: Path, network: Network) -> None:
        self.network = network
        super().__init__(state_dir)

    def _start_coordinator(self) -> Daemon:
        self.address = f"{self.network.addresses['coordinator']}:{self.address.rpartition(':')[2]}"
        arguments = ["--listen", self.address, "--state-dir", str(self.state_dir), "--insecure"]
        return self._start("penstock.appliance", *arguments, before=self.network.inside("coordinator"))[0]

    def add_host(self, host: str, slots: int, allow: str) -> Daemon:
        """A worker on a host; its name is the host's."""
        arguments = ["--coordinator", self.address, "--slots", str(slots), "--allow", allow, "--name", host]
        listen = ["--listen", f"{self.network.addresses[host]}:0", "--insecure"]
        worker, _ = self._start("penstock.worker", *arguments, *listen, before=self.network.inside(host))
        self.workers.append(worker)
        return worker

    def python(self, host: str) -> list[str]:
        """The interpreter, there."""
        return [*self.network.inside(host), sys.executable]
