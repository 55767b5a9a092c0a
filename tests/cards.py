"""Network cards for tests: libfabric's own provider over TCP, so that the same code runs here as on
EFA, InfiniBand and RoCE."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import devices
import pytest
from engines import LOOPBACK

SOFTWARE = {"MOONCAKE_FABRIC_PROVIDERS": "tcp;ofi_rxm"}
CARDS = {**SOFTWARE, "MC_TE_FILTERS": LOOPBACK}
WIRE = {**CARDS, "MOONCAKE_TRANSPORTS": "fabric"}  # without the wires within a host


@functools.cache
def why_none() -> str | None:
    """Why libfabric's software provider is not available here, or None."""
    program = "from mooncake_backend import extension as e; print(e.load().describe_fabric())"
    told = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **CARDS}, capture_output=True,
        text=True, timeout=120, check=True,
    )  # fmt: skip
    return None if "provider tcp;ofi_rxm" in told.stdout else told.stdout


def over(transports: str) -> dict[str, str]:
    """The environment of ranks on this host that reach each other by this transport only, or over
    shm, with tensors of a device. Skips the test if there are no cards for it."""
    if transports.startswith("device"):
        return {**over("shm"), **devices.settings(transports)}
    if transports != "fabric":
        return {"MOONCAKE_TRANSPORTS": transports, "MOONCAKE_HOST_IP": LOOPBACK}
    if why := why_none():
        pytest.skip(f"libfabric has no tcp;ofi_rxm here: {why}")
    return {**WIRE, "MOONCAKE_HOST_IP": LOOPBACK}
