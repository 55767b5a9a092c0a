"""The compiled extension. Declares everything that the Python files use of it."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, overload

import torch
from torch._C._distributed_c10d import Backend, Store, Work

class SplitOptions(Backend.Options):
    """A group's options in torch's type, which split_group() copies. Each is a copy of its own, and
    copy.deepcopy() works on it."""

class MooncakeBackend(Backend):
    """The backend of a group, for torch.distributed."""

    @property
    def options(self) -> SplitOptions: ...
    @property
    def active_ranks(self) -> torch.Tensor:
        """options["active_ranks"] as given to create_backend: the same tensor."""

    @property
    def active_ranks_on_host(self) -> torch.Tensor:
        """active_ranks, or its twin in pinned memory if that is a device's."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Implements ProcessGroup.set_timeout(), which torch 2.8 lacks for backends like ours."""

    def leave_group(self, failure: str | None) -> None:
        """Called when the process ends. Waits, within the failure timeout, until the calls of this
        rank have ended, and those of ranks that need this one for them. Every later call is
        refused. `failure`: the error that ends the program; then nothing is waited for."""

    def leave_job(self, failure: str | None) -> None:
        """Called after leave_group(). Leaves all groups that share this one's engine. Tells the
        peers goodbye, and whether the program ends with an error."""

    def evidence(self) -> list[tuple[int, str, str, float]]:
        """(rank, kind, detail, seconds on CLOCK_MONOTONIC) of each rank that has ended or is
        accused of it, in rank order. See mooncake_backend.Evidence."""

    def state(self) -> str:
        """See mooncake_backend.dump_state()."""

    @property
    def epoch(self) -> int:
        """Epoch of the job's view, from 1 on."""

    @property
    def survivors(self) -> list[int]:
        """Ranks of the group that are in the job's view, in ascending order."""

    def note_losses(self, ranks: list[int]) -> bool:
        """Returns whether one of these ranks was in no earlier call."""

    @property
    def supports_coalescing(self) -> bool:
        """See mooncake_backend.batches.are_one_work()."""

    def acknowledge_loss(self) -> bool:
        """See mooncake_backend.acknowledge_loss()."""

    def check_standing(self) -> None:
        """Raises the error of every later call if this rank is out of the job."""

    def check_message(self, is_send: bool, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Raises the error that a send or a receive with these arguments would raise."""

    @property
    def on_failure(self) -> str:
        """Failure mode of the group: "continue" or "raise"."""

    def transport_to(self, rank: int) -> str:
        """Wire to a rank of the group: "shm", "tcp", "fabric", "inproc" or "self"."""

class Future(torch._C.Future[Any]):
    """Result of get_future() of a work. Its callbacks run one after the other, in the order in
    which the operations have ended."""

class CollectiveWork(Work):
    """Work of a collective. Ranks are ranks of the group, in ascending order. Until the operation
    has ended all lists are empty, and the epoch is 0."""

    @property
    def contributors(self) -> list[int]:
        """Ranks whose data is in the result."""

    @property
    def failed_ranks(self) -> list[int]:
        """All other ranks of the group."""

    @property
    def lost_ranks(self) -> list[int]:
        """Failed ranks that contributed to the operation before this one."""

    @property
    def epoch(self) -> int:
        """Epoch of the job's view in which the operation ended."""

    @property
    def sequence_number(self) -> int:
        """Number of the operation, from 0 on. In mode "raise" the first operation after a loss is 0
        again."""

    @property
    def max_group_size(self) -> int: ...

class MessageWork(Work):
    """Work of a send or a receive."""

    @property
    def failed_ranks(self) -> list[int]:
        """The other side, if the message ended because that rank is lost."""

    @property
    def lost_ranks(self) -> list[int]:
        """Equal to failed_ranks."""

    @property
    def max_group_size(self) -> int: ...

class BatchWork(Work):
    """One work for all calls in a block of _coalescing_manager() with a device."""

    @property
    def works(self) -> list[Work]:
        """The works of the calls, in their order."""

    @property
    def lost_ranks(self) -> list[int]:
        """Lost ranks of all these works."""

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
    """`world`: backend of the default group, if that is ours and this is another group; its engine
    is shared. `global_ranks` is empty for the default group."""

def group_of(
    store: Store, backend: MooncakeBackend, devices: list[str]
) -> torch.distributed.ProcessGroup:
    """Makes a process group with only this backend, and with the backend's name."""

def dump_state_on_signal(signal: int) -> None:
    """See mooncake_backend.dump_state_on_signal()."""

def drain_completions(seconds: float) -> bool:
    """Waits, at most `seconds`, until the threads that release tensors and run callbacks are idle
    in all groups of this process. Returns whether they are. For the end of a program: Python later
    ends every thread that asks for its lock, and the process with it."""

def build_info() -> dict[str, Any]:
    """Returns "version" of the build, "torch" that it was built for, and "transports": the names of
    its wires, in the order in which they are tried, and how many "kernels" for GPUs it has."""

def describe_fabric() -> list[tuple[bool, str, str]]:
    """Lists libfabric and the network cards, and which of them an engine would use. Each entry:
    whether it works, its subject, and a line of text."""

def describe_accelerators(name: str) -> list[tuple[bool, str, str]]:
    """Describes the driver "cuda" and its devices, as describe_fabric() describes cards: the ways
    between the devices, too. One entry if there is no driver."""

class EpWork:
    """One dispatch or combine. Any thread may call wait(), and more than once."""

    def wait(self) -> None:
        """Blocks until the operation has ended, and raises its error. Afterwards the results are
        valid. Results on a device are valid for the current stream; if its streams know words, this
        neither blocks nor raises errors of operations that still run."""

    def synchronize(self) -> None:
        """Blocks until the results are there, on a device too. Raises the operation's error."""

    def is_completed(self) -> bool: ...

class EpHandle:
    """The routing of a dispatch, which its combine needs."""

    @property
    def number(self) -> int:
        """Of the operation; the same on all ranks."""

    @property
    def num_experts(self) -> int: ...
    @property
    def num_max_tokens(self) -> int: ...
    @property
    def hidden(self) -> int: ...

class EpTokenHandle:
    """A dispatch by kernels, for EpBuffer.combine_on_device()."""

    @property
    def number(self) -> int:
        """Of the dispatch: the same on all ranks."""

    @property
    def dispatched(self) -> torch.Tensor:
        """uint8 [16] on the device: two uint64. The second has a bit for each rank that took
        part."""

class EpBuffer:
    """Dispatch and combine. Making one is collective over the group.

    rank, size: place in the group, and its size
    num_bytes: size of the buffer's memory; see size_hint()
    timeout: longest time of each operation
    backend: backend of a group of ours; the buffer shares its engine
    exchange: for other groups: takes bytes, returns those of all ranks in rank order
    engine: runs the buffer, together with `exchange`; None: the buffer makes an engine of its own
    route_hint: host in whose direction the ranks' addresses are chosen, unless MOONCAKE_HOST_IP is
    set
    raises: a loss is an error of the operation that sees it; otherwise that operation goes on
    renormalize: if contributions to a token are missing, the others' weights are scaled up to the
    full sum
    devices: network cards of the buffer's own engine, by name; none: as MC_TE_FILTERS says
    has_results: part of the memory holds the rows that dispatch() returns
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
        has_results: bool = True,
    ) -> None: ...
    @staticmethod
    def size_hint(num_max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        """Bytes that suffice for a buffer with these sizes, a multiple of 128."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host: those that map each other's memory."""

    @property
    def active_ranks(self) -> list[bool]:
        """Of each rank, whether it is in the agreed view."""

    def most_tokens(
        self, field_bytes: Sequence[int], hidden: int, extras: int, rows_per_token: float
    ) -> int:
        """The most tokens of a rank for which dispatch_tokens() and combine_tokens() have room.

        rows_per_token: the most rows that a rank receives, for each token that a rank may have
        """

    def new_result(self, sizes: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """A CPU tensor of these sizes, not initialised. A large one reuses memory of results that
        the program has dropped."""

    def count_tokens(
        self, numbers: list[int], active_ranks: torch.Tensor | None = None, timeout_us: int = -1
    ) -> tuple[list[list[int]], list[bool]]:
        """Collective. Returns the numbers of each rank, below 2**32 and as many on all ranks, and
        the ranks that took part. The numbers of others are 0."""

    def dispatch_tokens(
        self,
        fields: list[torch.Tensor],
        token_ranks: torch.Tensor,
        num_max_tokens: int,
        hidden: int,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int = -1,
        error: str = "",
        into: list[torch.Tensor] = ...,
        begins: list[int] = ...,
        ends: list[int] = ...,
        agreed: int = 0,
    ) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor, list[bool], EpHandle]:
        """Collective. CPU tensors only.

        fields: [n, any] each, of any dtype: the parts of each token's row
        token_ranks: int32 [n, any]: the ranks of each token, in the order in which
            combine_tokens() adds their rows; -1 is none, in any place
        hidden: channels of the rows that combine_tokens() brings back
        error: if not empty, ends the call on all ranks as a ValueError
        into: fields [any, any] and the tokens' numbers, int32 [any], if the rows go there: those of
            rank r to the places from begins[r] up to ends[r]. They are not returned then
        agreed: any number below 2**32; ranks that give different ones get an error

        Returns the fields of the received rows, in the order of rank and token; their tokens'
        numbers there, int32; how many rows came from the ranks up to each, int32 [R]; the ranks
        that took part; the handle.
        """

    def combine_tokens(
        self,
        x: torch.Tensor,
        handle: EpHandle,
        out: torch.Tensor,
        missing: torch.Tensor,
        extras: torch.Tensor | None = None,
        extra_sums: torch.Tensor | None = None,
        biases: list[torch.Tensor] = ...,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int = -1,
        background: bool = False,
        first_rows: list[int] = ...,
        after: EpWork | None = None,
        among: list[bool] = ...,
    ) -> EpWork:
        """Collective. All tensors are on the device of x; out, missing and extra_sums are written.

        among: by rank: it may take part; empty: all

        first_rows: [R]: where in x and extras the rows that came from each rank begin. Without it
            they have the rows of the handle's dispatch only
        after: an earlier call that this one continues. If that fails, this one ends with its error
            and sends nothing

        x: bfloat16 [rows, h]; out: bfloat16 [n, h]
        missing: bool [n], see Buffer.missing_contributions
        extras, extra_sums: float32 [rows, any], and their sums [n, any]
        biases: bfloat16 [n, h] each, where the sums begin
        """

    def send_tokens_again(
        self,
        fields: list[torch.Tensor],
        into: list[torch.Tensor],
        token_ranks: torch.Tensor,
        num_max_tokens: int,
        hidden: int,
        begins: list[int],
        ends: list[int],
        among: list[bool],
        active_ranks: torch.Tensor | None = None,
        timeout_us: int = -1,
        agreed: int = 0,
    ) -> EpWork:
        """dispatch_tokens() of tensors of a device to known places: those of rank r in `into` are
        from begins[r] up to ends[r]; they are zeros if it takes no part. The current stream waits
        for the results."""

    def send_tokens_at_worst(
        self,
        fields: list[torch.Tensor],
        token_ranks: torch.Tensor,
        hidden: int,
        extras: int,
        into: list[torch.Tensor],
        sources: torch.Tensor,
        ends: torch.Tensor,
        table: torch.Tensor,
        participants: torch.Tensor,
        active_ranks: torch.Tensor | None = None,
        agreed: int = 0,
        of: EpHandle | None = None,
    ) -> tuple[EpHandle, EpWork]:
        """count_tokens() and dispatch_tokens() of tensors of a device with words, into `into`,
        which has as many rows on all ranks. Those behind the received ones are not written. The
        current stream waits for the results, see EpNormal::WorstArguments."""

    def send_tokens_as_worst(
        self,
        handle: EpHandle,
        fields: list[torch.Tensor],
        into: list[torch.Tensor],
        active_ranks: torch.Tensor | None = None,
        timeout_us: int = -1,
        agreed: int = 0,
    ) -> EpWork:
        """The same way again, as with send_tokens_again()."""

    def uses_words(self, device: torch.device) -> bool:
        """Whether streams of the device wait for calls through host memory, and the host does not.
        A call that fails then ends the buffer."""

    def takes_tokens(self, device: torch.device) -> bool:
        """Whether kernels do the normal mode of tensors on this device. Collective, the first
        time."""

    def end_on_device(self, why: str) -> None:
        """Ends the calls by kernels, on all ranks. Every later one raises ValueError."""

    def dispatch_on_device(
        self,
        fields: list[torch.Tensor],
        into: list[torch.Tensor],
        choices: torch.Tensor,
        counts: torch.Tensor,
        capacity: int,
        most_tokens: int | None,
        most_rows: int,
        hidden: int,
        weights: int,
        among: list[bool],
        active_ranks: torch.Tensor | None = None,
        timeout_us: int = -1,
        agreed: int = 0,
    ) -> tuple[EpTokenHandle, torch.Tensor, torch.Tensor, torch.Tensor, EpWork]:
        """dispatch_tokens() by kernels. Collective; does not wait on the host.

        into: [capacity, any] each; rows behind the last one become zeros
        choices: int32 [n, any, 2]: a rank of the token, -1 is none, and the token's place among
            those of this rank for it
        counts: int32 [R]: this rank's tokens for each rank
        most_tokens, most_rows: of one rank; the same on all ranks, as `agreed` is. most_tokens
            None: not known, so all tokens and rows go at once
        weights: of a row, for which combine_on_device() needs room
        among: the ranks that the call counts as active
        active_ranks: int32 [R] of the device; ranks that take no part become 0

        Returns the handle; the rows' tokens at their ranks, int32 [capacity]; how many rows came
        from the ranks up to each, int32 [R]; of each rank its rows for each rank, and its tokens,
        int32 [R, R + 1].
        """

    def dispatch_on_device_again(
        self,
        fields: list[torch.Tensor],
        into: list[torch.Tensor],
        handle: EpTokenHandle,
        among: list[bool],
        active_ranks: torch.Tensor | None = None,
        timeout_us: int = -1,
        agreed: int = 0,
    ) -> EpWork:
        """Other rows to the places of the handle's dispatch. Those of ranks that have gone since
        are zeros."""

    def combine_on_device(
        self,
        x: torch.Tensor,
        handle: EpTokenHandle,
        out: torch.Tensor,
        missing: torch.Tensor,
        weights: torch.Tensor | None,
        weight_sums: torch.Tensor | None,
        biases: list[torch.Tensor],
        among: list[bool],
        active_ranks: torch.Tensor | None = None,
        timeout_us: int = -1,
        background: bool = False,
    ) -> EpWork:
        """combine_tokens() by kernels. Rows of x behind the handle's capacity are not read.

        background: the current stream waits for the results by EpWork.wait() only
        """

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
        hooked: bool = False,
        cumulative_recv_stats: torch.Tensor | None = None,
        wait_stats: torch.Tensor | None = None,
        keeps_rows: bool = True,
    ) -> tuple[
        torch.Tensor,
        torch.Tensor | None,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        EpHandle,
        EpWork,
    ]:
        """active_ranks: int32 [R], read as a mask; lost and skipped ranks are 0 after the operation
        background: returns at once; the results are valid after work.wait()
        keeps_rows: False: the next dispatch may overwrite recv_x, so earlier results stay valid

        Returns, with R ranks, L experts of this rank, T tokens at most from each rank, h channels:
        recv_x: [L, R * T, h], bfloat16 or float8_e4m3fn
        scales: with FP8: float32 [L, R * T, ceil(h / 128)], or int32 with four exponents in each,
            [L, R * T, ceil(h / 512)]; the stride along tokens is 1
        recv_count: int32 [L]
        src_info: int32 [L, R * T], the token's number on its rank
        layout_range: int64 [L, R], number of rows from that rank in the low 32 bits, index of the
            first one in the high 32 bits
        handle: for combine
        work: to wait for"""

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
        hooked: bool = False,
        wait_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, EpWork]:
        """Returns combined_x, bfloat16 [n, h], which is `out` if that was given; bool [n], whether
        a rank that owns one of the token's experts did not take part; and the work."""
    def next_combine_buffer(self, handle: EpHandle) -> torch.Tensor:
        """bfloat16 [L, R * T, h], the memory that the next combine sends with zero_copy."""

    def set_expert_owners(self, owners: list[int]) -> None:
        """The rank that owns each expert, the same on all ranks. Takes effect at the next
        dispatch."""

    def mask_rank(self, rank: int, is_masked: bool) -> None: ...
    def show_masked_ranks(self, shown: torch.Tensor) -> None:
        """Writes int32 [R]: 1 for each rank that is masked or lost. On a device in the order of the
        current stream."""

    def unmask_all(self) -> None:
        """Removes all masks. Lost ranks stay lost."""

    def local_buffer(self) -> torch.Tensor:
        """uint8 [num_bytes], the buffer's memory itself."""

    def stream_on(self, device: torch.device) -> torch.Stream:
        """The stream of the copies from and to the device."""

    def update_members(self) -> None: ...
    def close(self, timeout: timedelta) -> None: ...

class TransferOpcode:
    Read: TransferOpcode
    Write: TransferOpcode
    READ: TransferOpcode
    WRITE: TransferOpcode
    def __int__(self) -> int: ...

class TransferNotify:
    """A message to the target engine of a transfer."""

    name: str
    msg: str
    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(self, name: str, msg: str) -> None: ...

class InnerTransferEngine:
    """Result of get_engine(), for set_transfer_engine()."""

    @property
    def has_key(self) -> bool: ...

class TransferEngine:
    """Reads and writes memory of other processes. Calls return 0 on success and a negative code on
    failure, and the log says why: docs/errors.md. Addresses are ints, of the process that owns the
    memory. The class TransferOpcode is an attribute, too."""

    def __init__(self) -> None: ...
    def initialize(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str | None,
        /,
    ) -> int:
        """`local_hostname`: host by which others reach this one. `metadata_server`: "P2PHANDSHAKE",
        or "http://host:port/metadata". `protocol`: "tcp", "shm", "efa", "rdma" or "fabric"."""

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
        """Port of the session id, host:port, by which others name this engine."""

    def get_local_topology(self, device_name: str | None = None) -> str:
        """JSON: location -> [[preferred NICs], [others]]."""

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int: ...
    def unregister_memory(self, buffer_addr: int) -> int: ...
    def batch_register_memory(
        self, buffer_addresses: list[int], capacities: list[int], location: str = "*"
    ) -> int:
        """Registers all of them, or none if one fails."""

    def batch_unregister_memory(self, buffer_addresses: list[int]) -> int: ...
    def allocate_managed_buffer(self, length: int) -> int:
        """Returns the address, or 0. Peers on this host map it: the fastest memory to write to."""

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
        """Returns once the data is in the peer's memory."""

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
        """Sends `notify` after the data. Returns once that has arrived, too."""

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
        """Waits for all batches, and releases them. -1: a transfer has failed."""

    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int: ...
    def transfer_check_status(self, batch_id: int) -> int:
        """1: done; 0: under way; -1: failed, or late. Except for 0 the batch is released."""

    def transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """The transfer begins when the stream comes to it, and the stream goes on when it is over.
        A failure is raised by the next such call."""

    def transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None: ...
    def batch_transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None: ...
    def batch_transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None: ...
    def get_notifies(self) -> list[TransferNotify]:
        """Returns the notifications that have arrived since the last call."""

    def send_probe(self, peer_server_name: str) -> int:
        """0 if an engine of this name answers."""

    def get_transport(self, target_hostname: str) -> str:
        """The live wire: tcp, fabric, shm, inproc, or local for this engine. Empty: unreachable."""

    def get_counters(self) -> dict[str, int]:
        """Counters of work done and of the present state: docs/transfer-engine.md."""

    def get_limits(self) -> dict[str, int]:
        """Limits of the engine: transfers (at a time), io_threads, registrations,
        batched_transfers."""

    def warmup_efa_segment(self, segment_name: str) -> int:
        """Connects, and lets each network card of this engine reach the segment. 0 on wires without
        cards, too."""

    def get_engine(self) -> InnerTransferEngine: ...
    def get_engine_ptr(self) -> int: ...

def close_transfer_engines() -> None:
    """Closes all engines of this process. They tell their peers goodbye."""
