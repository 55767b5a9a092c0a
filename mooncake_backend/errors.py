"""Exceptions that the extension raises when ranks are lost (csrc/bindings/module.cc)."""

from __future__ import annotations

from torch.distributed import DistBackendError

__all__ = ["EvictedError", "InputsLostError", "MinorityError", "PeerLostError"]


class PeerLostError(DistBackendError):
    """A rank that the call needs is lost. The group goes on without it: call again.

    inputs_intact: the call's tensors are as they were before it; False: their contents are
    undefined
    """

    inputs_intact: bool = True


class InputsLostError(PeerLostError):
    """An in-place reduction of more than 32 MiB ended after it had begun to overwrite its input. It
    ended by the loss of a rank, or by the error that the text names, such as its timeout."""

    inputs_intact = False


class EvictedError(DistBackendError):
    """The job goes on without this rank. Every later call in any group raises this, until the
    process has come back with join_group(), for each group."""


class MinorityError(DistBackendError):
    """Too few ranks are left on this side of a partition. The other side may go on without them.
    Every later call in any group raises this, until the process has come back with join_group(),
    for each group."""
