"""Hosts on this machine: network namespaces, joined by bridges. Traffic stays inside."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PREFIX = "mctest"
RESET = ("ss", "--kill", "--tcp", "--no-header", "state", "established")
_serial = itertools.count()


@dataclass(frozen=True)
class Host:
    """One network namespace; interface `eth<k>` is its link to network k."""

    namespace: str
    v4: tuple[str, ...]  # its address in each network
    v6: tuple[str, ...]

    def run(self, *command: str) -> str:
        return _ip("netns", "exec", self.namespace, *command)


ALLOWED_GOVERNORS = "net.ipv4.tcp_allowed_congestion_control"


class Hosts:
    """`count` hosts with a link to each of `networks` networks. A context manager. Names contain
    our pid, so that the next run finds and removes the remains of a killed one."""

    def __init__(self, count: int, *, networks: int = 1, v4: bool = True, v6: bool = True) -> None:
        remove_stale()
        base = f"{PREFIX}-{os.getpid()}-{next(_serial)}"
        self.switch = f"{base}-switch"
        self.hosts: list[Host] = []
        self.namespaces: list[str] = []
        try:
            self._add(self.switch)
            _batch(
                self.switch,
                [f"link add br{k} mtu 9000 type bridge" for k in range(networks)]
                + [f"link set br{k} up" for k in range(networks)],
            )
            for i in range(count):
                name = f"{base}-{i}"
                self._add(name)
                _batch(self.switch, self._switch_side(name, i, networks))
                host = Host(
                    name,
                    tuple(f"10.77.{k}.{i + 1}" for k in range(networks)) if v4 else (),
                    tuple(f"fd77:{k + 1}::{i + 1}" for k in range(networks)) if v6 else (),
                )
                _batch(name, self._host_side(host, networks))
                self.hosts.append(host)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def spread(self, size: int) -> list[str]:
        """The namespace of each of `size` ranks. Neighbours share a host; the last hosts may get
        fewer."""
        each = -(-size // len(self.hosts))
        return [self.hosts[rank // each].namespace for rank in range(size)]

    def places(self, counts: Sequence[int]) -> list[str]:
        """The namespace of each rank, with so many ranks on each host."""
        return [host.namespace for host, count in zip(self.hosts, counts, strict=True)
                for _ in range(count)]  # fmt: skip

    def link(self, index: int, up: bool, *, network: int = 0) -> None:
        """Plugs the host's link into the network's switch, or out of it. The host does not notice:
        its addresses and routes stay."""
        _batch(self.switch, [f"link set p{index}n{network} {'up' if up else 'down'}"])

    def set_link(self, index: int, up: bool, *, network: int = 0) -> None:
        """Takes the host's own end of the link down, which its kernel sees, or up again."""
        state = "up" if up else "down"
        _batch(self.hosts[index].namespace, [f"link set eth{network} {state}"])

    def deafen(self, deaf: int, to: int, yes: bool = True, *, network: int = 0) -> None:
        """Drops everything that `to` sends to `deaf` over IPv4, but not the other direction; or
        stops dropping it."""
        address = self.hosts[deaf].v4[network]
        _batch(
            self.hosts[to].namespace, [f"route {'add' if yes else 'del'} blackhole {address}/32"]
        )

    def reset(self, index: int) -> None:
        """Ends every TCP connection of the host with a reset to both sides. All processes live."""
        self.hosts[index].run(*RESET)

    def limit(self, rate_bits: int, *, network: int = 0) -> None:
        """Limits the rate at which each host sends into the network. Later connections use Linux's
        default congestion control, cubic, or reno if a namespace may not use cubic. BBR would take
        the pauses of a computing peer for a slower link."""
        for index in range(len(self.hosts)):
            allowed = self.hosts[index].run("sysctl", "-n", ALLOWED_GOVERNORS).split()
            governor = "cubic" if "cubic" in allowed else "reno"
            self.hosts[index].run("sysctl", "-qw", f"net.ipv4.tcp_congestion_control={governor}")
            self.hosts[index].run(
                *f"tc qdisc replace dev eth{network} root tbf".split(),
                *("rate", f"{rate_bits}bit", "burst", "256kb", "latency", "20ms"),
            )

    def close(self) -> None:
        while self.namespaces:
            _ip("netns", "del", self.namespaces.pop())

    def _add(self, name: str) -> None:
        _ip("netns", "add", name)
        self.namespaces.append(name)

    @staticmethod
    def _switch_side(name: str, i: int, networks: int) -> list[str]:
        lines = []
        for k in range(networks):
            port = f"p{i}n{k}"
            lines += [
                f"link add {port} mtu 9000 type veth peer name eth{k} mtu 9000 netns {name}",
                f"link set {port} master br{k} up",
            ]
        return lines

    @staticmethod
    def _host_side(host: Host, networks: int) -> list[str]:
        lines = ["link set lo up"]
        for k in range(networks):
            if host.v4:
                lines.append(f"addr add {host.v4[k]}/24 dev eth{k}")
            if host.v6:
                lines.append(f"addr add {host.v6[k]}/64 dev eth{k} nodad")
            lines.append(f"link set eth{k} up")
        return lines


@cache
def why_not() -> str | None:
    """Why hosts cannot be made here, or None."""
    if os.geteuid() != 0:
        return "not root"
    if shutil.which("ip") is None:
        return "`ip` is missing (package iproute2)"
    try:
        with Hosts(1):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {getattr(error, 'stderr', None) or error}"


@cache
def why_no_resets() -> str | None:
    """Why connections of a host cannot be reset from outside, or None."""
    if why_not():
        return why_not()
    if shutil.which("ss") is None:
        return "`ss` is missing (package iproute2)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            command = [*RESET, "sport", "=", str(client.getsockname()[1])]
            subprocess.run(command, check=False, capture_output=True, timeout=60)
            client.settimeout(0)
            try:
                client.recv(1)
            except BlockingIOError:
                return "this kernel cannot end connections for `ss --kill` (INET_DIAG_DESTROY)"
            except ConnectionError:
                pass
    return None


def existing() -> list[str]:
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.glob(f"{PREFIX}-*")) if folder.exists() else []


def remove_stale() -> None:
    for name in existing():
        if not Path(f"/proc/{name.split('-')[1]}").exists():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60)
    return done.stdout


def _batch(namespace: str, lines: Sequence[str]) -> None:
    subprocess.run(
        ["ip", "-n", namespace, "-batch", "-"],
        input="\n".join(lines) + "\n", check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
