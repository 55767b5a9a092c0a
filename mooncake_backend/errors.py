"""What the native part raises when ranks are lost (csrc/bindings/module.cc)."""

from __future__ import annotations

from torch.distributed import DistBackendError

__all__ = ["EvictedError", "InputsLostError", "MinorityError", "PeerLostError"]


class PeerLostError(DistBackendError):
    """A rank that the call needs is lost. The group goes on among the others: call again.

    inputs_intact: the tensors that were given are as they were before the call; False: what they
    hold is undefined
    """

    inputs_intact: bool = True


class InputsLostError(PeerLostError):
    """A reduction in place of more than 32 MiB had begun to overwrite its input when it ended: by
    the loss of a rank, or by an error that the text names, such as its timeout."""

    inputs_intact = False


class EvictedError(DistBackendError):
    """The job goes on without this rank, for good: every later call in any group raises it."""


class MinorityError(DistBackendError):
    """Too few ranks are left on this side of a partition to go on, and the others may go on without
    them, for good: every later call in any group raises it."""
