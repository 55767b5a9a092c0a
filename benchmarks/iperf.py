"""iperf3: the rate of a link without our code."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence


def server(address: str, there: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*there, "iperf3", "-s", "-B", address], stdout=subprocess.DEVNULL)


def bits(addresses: list[str], how: list[str], here: Sequence[str] = ()) -> float:
    """The sum of the rates to all addresses, in bit/s. With --bidir, that of the slower
    direction."""
    command = [*here, "iperf3", "-t", "3", "-O", "1", "-J", "--connect-timeout", "5000", *how, "-c"]
    for _ in range(20):  # a server may still be busy with the previous client
        clients = [
            subprocess.Popen([*command, address], stdout=subprocess.PIPE, text=True)
            for address in addresses
        ]
        try:
            told = [json.loads(client.communicate(timeout=30)[0] or "{}") for client in clients]
        except subprocess.TimeoutExpired:
            told = [{}]
        finally:
            for client in clients:
                client.kill()
                client.wait()
        ways = ["sum_received", *(["sum_received_bidir_reverse"] if "--bidir" in how else [])]
        if all(way in one.get("end", {}) for one in told for way in ways):
            return min(sum(one["end"][way]["bits_per_second"] for one in told) for way in ways)
        time.sleep(0.2)
    raise RuntimeError("iperf3 gives no result")
