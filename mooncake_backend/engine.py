"""The transfer engine without a group. `mooncake.engine` has the same names."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING

from mooncake_backend import extension
from mooncake_backend.membership import not_yet

if TYPE_CHECKING:
    from mooncake_backend._C import (
        InnerTransferEngine,
        TransferEngine,
        TransferNotify,
        TransferOpcode,
    )
else:
    _native = extension.load()
    InnerTransferEngine = _native.InnerTransferEngine
    TransferEngine = _native.TransferEngine
    TransferNotify = _native.TransferNotify
    TransferOpcode = _native.TransferOpcode
    # At the program's end its engines tell their peers that they leave.
    atexit.register(_native.close_transfer_engines)

Read = TransferOpcode.Read
Write = TransferOpcode.Write
READ = TransferOpcode.READ
WRITE = TransferOpcode.WRITE

SUPPORT_CUDA = False
SUPPORT_EFA = False
SUPPORT_HIP = False
SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = False
SUPPORT_MUSA = False

_RPC = "the RPC helper of the engine"
CoroRPCInterface = RpcInterface = not_yet("RpcInterface", _RPC)
ReceivedData = not_yet("ReceivedData", _RPC)
ReceivedTensor = not_yet("ReceivedTensor", _RPC)


class SharedSegment:
    """Memory that ranks of a host share by GPU handles. Not supported in this version."""

    create = staticmethod(not_yet("SharedSegment.create", "memory shared by GPU handles"))

    @staticmethod
    def supported(mmap: bool = True, host_register: bool = False) -> bool:
        return False


__all__ = [
    "READ",
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "WRITE",
    "CoroRPCInterface",
    "InnerTransferEngine",
    "Read",
    "ReceivedData",
    "ReceivedTensor",
    "RpcInterface",
    "SharedSegment",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
]
