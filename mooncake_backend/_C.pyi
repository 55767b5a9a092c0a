"""The compiled part. Everything that the Python files use of it is declared here."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, overload

import torch
from torch._C._distributed_c10d import Backend, Store, Work

class SplitOptions(Backend.Options):
    """A group's options as torch knows them: what split_group() starts from. A copy, which can be
    copied deeply."""

class MooncakeBackend(Backend):
    """A group's backend, as torch.distributed sees it."""

    @property
    def options(self) -> SplitOptions: ...
    @property
    def active_ranks(self) -> torch.Tensor:
        """options["active_ranks"] as given to create_backend: the same tensor."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """What ProcessGroup.set_timeout() does, which torch 2.8 does not have."""

    def leave_group(self, failure: str | None) -> None:
        """The process ends: waits, within the failure timeout, until what was called has
        ended, here and on those that need us for it. Every later call is refused. `failure`: the
        program ends by this error, and waits for nobody."""

    def leave_job(self, failure: str | None) -> None:
        """Then: leaves all groups that share this one's engine, and says goodbye to the peers, and
        whether the program ends by an error."""

    def evidence(self) -> list[tuple[int, str, str, float]]:
        """(rank, kind, detail, seconds on CLOCK_MONOTONIC) of each rank that is known to be gone or
        accused of it, in rank order. See mooncake_backend.Evidence."""

    def state(self) -> str:
        """See mooncake_backend.dump_state()."""

    @property
    def epoch(self) -> int:
        """Of the job's view, from 1 on."""

    @property
    def survivors(self) -> list[int]:
        """Ranks of the group that are in the job's view, in ascending order."""

    def note_losses(self, ranks: list[int]) -> bool:
        """Whether one of them was in no earlier call."""

    @property
    def supports_coalescing(self) -> bool:
        """See mooncake_backend.batches.are_one_work()."""

    def acknowledge_loss(self) -> bool:
        """See mooncake_backend.acknowledge_loss()."""

    def check_standing(self) -> None:
        """Raises what every call raises once this rank is out of the job."""

    def check_message(self, is_send: bool, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Raises what a send or a receive with these arguments raises."""

    @property
    def on_failure(self) -> str:
        """The mode: "continue" or "raise"."""

    def transport_to(self, rank: int) -> str:
        """The wire to a rank of the group: "shm", "tcp", "inproc" or "self"."""

class Future(torch._C.Future):
    """What get_future() of a work returns. Its callbacks run one after the other, in the order in
    which the operations have ended."""

class CollectiveWork(Work):
    """What a collective returns. Ranks are ranks of the group, in ascending order; until the
    operation has ended all lists are empty, and the epoch is 0."""

    @property
    def contributors(self) -> list[int]:
        """Those whose data is in the result."""

    @property
    def failed_ranks(self) -> list[int]:
        """All others."""

    @property
    def lost_ranks(self) -> list[int]:
        """Of the others, those that contributed to the operation before this one."""

    @property
    def epoch(self) -> int:
        """Of the job's view in which the operation ended."""

    @property
    def sequence_number(self) -> int:
        """From 0 on; in mode "raise" it starts again with the first operation after a loss."""

    @property
    def max_group_size(self) -> int: ...

class MessageWork(Work):
    """What a send or a receive returns."""

    @property
    def failed_ranks(self) -> list[int]:
        """The other side, if the message ended because that is lost."""

    @property
    def lost_ranks(self) -> list[int]:
        """The same."""

    @property
    def max_group_size(self) -> int: ...

class BatchWork(Work):
    """What a block of _coalescing_manager() with a device ends with: one work for all its calls."""

    @property
    def works(self) -> list[Work]:
        """One for each call, in their order."""

    @property
    def lost_ranks(self) -> list[int]:
        """Of any of them."""

    @property
    def max_group_size(self) -> int: ...

def create_backend(
    store: Store,
    rank: int,
    size: int,
    global_ranks: list[int],
    group_id: str,
    timeout: timedelta,
    backend_name: str,
    options: dict[str, Any],
    world: MooncakeBackend | None,
) -> MooncakeBackend:
    """`world` is the default group's backend if that is ours and this is another group: its engine
    is shared. `global_ranks` is empty for the default group."""

def group_of(
    store: Store, backend: MooncakeBackend, devices: list[str]
) -> torch.distributed.ProcessGroup:
    """A group of this backend alone, with its name."""

def dump_state_on_signal(signal: int) -> None:
    """See mooncake_backend.dump_state_on_signal()."""

def drain_completions(seconds: float) -> bool:
    """Waits until the threads that drop tensors and run callbacks have nothing left to do, in all
    groups of this process, for so long at most. Returns whether that is so. For the end of a
    program: Python ends threads that ask for its lock later, and the process with them."""

def build_info() -> dict[str, Any]:
    """What was built ("version"), for which torch ("torch"), and with which wires ("transports",
    names in the order in which they are tried)."""

def describe_fabric() -> list[tuple[bool, str, str]]:
    """Which libfabric and network cards there are, and what would be taken: whether it works, what
    it is about, and a line about it."""

class EpWork:
    """One dispatch or combine. wait() may be called by any thread, and more than once."""

    def wait(self) -> None:
        """Until it has ended; raises its error. The results are valid from then on."""

    def is_completed(self) -> bool: ...

class EpHandle:
    """What a combine has to know of its dispatch."""

    @property
    def num_experts(self) -> int: ...
    @property
    def num_max_tokens(self) -> int: ...
    @property
    def hidden(self) -> int: ...

class EpBuffer:
    """Dispatch and combine. Making one is collective over the group.

    engine: to be used for an exchange, in place of one of its own
    backend: of a group of ours, whose engine is shared; or exchange: called with bytes, returns
    those of all ranks in rank order; route_hint: the host whose direction tells which address of
    this one the others reach, without MOONCAKE_HOST_IP
    raises: a loss is an error of the operation that sees it; otherwise that goes on without
    renormalize: weights of a token that misses contributions are scaled to their whole sum
    devices: network cards of an engine of its own, by name; none: as MC_TE_FILTERS says
    """

    def __init__(
        self,
        rank: int,
        size: int,
        num_bytes: int,
        timeout: timedelta,
        *,
        backend: MooncakeBackend | None = None,
        exchange: Callable[[bytes], list[bytes]] | None = None,
        route_hint: str = "",
        renormalize: bool = False,
        raises: bool = False,
        engine: InnerTransferEngine | None = None,
        devices: Sequence[str] = (),
    ) -> None: ...
    @staticmethod
    def size_hint(num_max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        """Bytes of a buffer that suffices, a multiple of 128."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def active_ranks(self) -> list[bool]:
        """Who is in the agreed view."""

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_tokens: int,
        num_experts: int,
        use_fp8: bool,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int = -1,
        background: bool = False,
        cumulative_recv_stats: torch.Tensor | None = None,
        wait_stats: torch.Tensor | None = None,
    ) -> tuple[
        torch.Tensor,
        torch.Tensor | None,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        EpHandle,
        EpWork,
    ]:
        """active_ranks: read as a mask, written when the operation has ended
        background: returns at once; the results are valid after work.wait()

        Returns, of R ranks, L experts of this rank, T tokens at most from each rank, h channels:
        recv_x: [L, R * T, h], bfloat16 or float8_e4m3fn
        scales: of FP8: float32 [L, R * T, ceil(h / 128)], or int32 with four exponents in each,
            [L, R * T, ceil(h / 512)]; the stride along tokens is 1
        recv_count: int32 [L]
        src_info: int32 [L, R * T], the token's number on its rank
        layout_range: int64 [L, R], how many rows are of that rank in the low 32 bits, where they
            begin in the high ones
        the handle for combine, and what waits"""

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: EpHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        out: torch.Tensor | None = None,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int = -1,
        background: bool = False,
        wait_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, EpWork]:
        """Returns combined_x, bfloat16 [n, h], which is `out` if that was given; bool [n], whether
        a rank that owns one of the token's experts took no part; work."""
    def next_combine_buffer(self, handle: EpHandle) -> torch.Tensor:
        """bfloat16 [L, R * T, h], for zero_copy of the next combine."""

    def set_expert_owners(self, owners: list[int]) -> None:
        """The rank of each expert; the same on all ranks. Counts from the next dispatch on."""

    def mask_rank(self, rank: int, is_masked: bool) -> None: ...
    def masked_ranks(self) -> list[bool]:
        """Of each rank whether it is masked or lost."""

    def unmask_all(self) -> None:
        """The lost stay lost."""

    def local_buffer(self) -> torch.Tensor:
        """uint8 [num_bytes], the memory itself."""

    def update_members(self) -> None: ...
    def close(self, timeout: timedelta) -> None: ...

class TransferOpcode:
    Read: TransferOpcode
    Write: TransferOpcode
    READ: TransferOpcode
    WRITE: TransferOpcode
    def __int__(self) -> int: ...

class TransferNotify:
    """A word to the engine that a transfer leads to."""

    name: str
    msg: str
    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(self, name: str, msg: str) -> None: ...

class InnerTransferEngine:
    """What get_engine() returns, for set_transfer_engine()."""

    @property
    def has_key(self) -> bool: ...

class TransferEngine:
    """Reads and writes memory of other processes. 0 is good, what fails is negative, and the log
    says why: docs/errors.md. Addresses are ints, of the process in which the memory lies. It has
    TransferOpcode as an attribute, too."""

    def __init__(self) -> None: ...
    def initialize(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str | None,
        /,
    ) -> int:
        """`local_hostname`: host, under which others reach this one. `metadata_server`:
        "P2PHANDSHAKE", or "http://host:port/metadata". `protocol`: "tcp" or "shm"."""

    def initialize_ext(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str | None,
        metadata_type: str,
        /,
    ) -> int: ...
    def get_rpc_port(self) -> int:
        """Of the session id, host:port, by which others name this engine."""

    def get_local_topology(self, device_name: str | None = None) -> str:
        """JSON: location -> [[preferred NICs], [others]]."""

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int: ...
    def unregister_memory(self, buffer_addr: int) -> int: ...
    def batch_register_memory(
        self, buffer_addresses: list[int], capacities: list[int], location: str = "*"
    ) -> int:
        """All of them or none."""

    def batch_unregister_memory(self, buffer_addresses: list[int]) -> int: ...
    def allocate_managed_buffer(self, length: int) -> int:
        """Its address, or 0. Peers of the host map it: the fastest to write to."""

    def free_managed_buffer(self, buffer_addr: int, length: int) -> int: ...
    def write_bytes_to_buffer(self, dest_address: int, src_ptr: bytes, length: int) -> int: ...
    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes: ...
    def get_first_buffer_address(self, segment_name: str) -> int: ...
    def transfer_sync_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Returns when the bytes are in the peer's memory."""

    def transfer_sync_read(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int: ...
    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """`notify` is sent when the bytes are there; it returns when that has arrived, too."""

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        transport_hint: str = "",
    ) -> int: ...
    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        transport_hint: str = "",
    ) -> int: ...
    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int: ...
    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        transport_hint: str = "",
    ) -> int:
        """The batch's id, or 0."""

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        transport_hint: str = "",
    ) -> int: ...
    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        opcode: TransferOpcode,
        transport_hint: str = "",
    ) -> int: ...
    def get_batch_transfer_status(self, batch_ids: list[int]) -> int:
        """Waits for all of them, and releases them. -1: one has failed."""

    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int: ...
    def transfer_check_status(self, batch_id: int) -> int:
        """1: done; 0: under way; -1: failed; -2: not in time. Whatever is not 0 releases it."""

    def transfer_write_on_cuda(self, *arguments: object, **named: object) -> NoReturn: ...
    def transfer_read_on_cuda(self, *arguments: object, **named: object) -> NoReturn: ...
    def batch_transfer_write_on_cuda(self, *arguments: object, **named: object) -> NoReturn: ...
    def batch_transfer_read_on_cuda(self, *arguments: object, **named: object) -> NoReturn: ...
    def get_notifies(self) -> list[TransferNotify]:
        """What peers have sent since the last call."""

    def send_probe(self, peer_server_name: str) -> int:
        """Whether an engine answers there."""

    def get_transport(self, target_hostname: str) -> str:
        """The live wire: tcp, shm, inproc, local for ourselves; empty: it cannot be reached."""

    def get_counters(self) -> dict[str, int]:
        """What the engine has done, and what is there now: docs/transfer-engine.md."""

    def get_limits(self) -> dict[str, int]:
        """What it holds at most: transfers (at a time), io_threads, registrations,
        batched_transfers."""

    def warmup_efa_segment(self, segment_name: str) -> int:
        """0, and no effect: there is no EFA."""

    def get_engine(self) -> InnerTransferEngine: ...
    def get_engine_ptr(self) -> int: ...

def close_transfer_engines() -> None:
    """Of the process: those that are still there say goodbye."""
