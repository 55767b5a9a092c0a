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

    @property
    def job_ranks(self) -> list[int]:
        """Rank of the job of each rank of the group. -1: none has come yet."""

    def show_losses(self) -> None:
        """With auto_sync_on_failure=False and auto_deactivate_on_failure=True: get_active_ranks()
        shows the ranks that are active now."""

    is_newcomer: bool
    is_removed: bool
    room: int
    series: int
    def ready_key(self, rank: int) -> int:
        """Names the process that waits to be let in for this rank; 0: there is none."""

    def recover_ranks(self, ranks: list[int], ready: float, keys: list[int] = []) -> list[int]: ...
    def deactivate_ranks(self, ranks: list[int]) -> None: ...
    def join_group(self) -> None: ...
    def join_token(self) -> bytes: ...
    def note_losses(self, ranks: list[int]) -> bool:
        """Returns whether one of these ranks was in no earlier call."""

    @property
    def supports_coalescing(self) -> bool:
        """See mooncake_backend.batches.are_one_work()."""

    def acknowledge_loss(self) -> bool:
        """See mooncake_backend.acknowledge_loss()."""

    @staticmethod
    def note_losses_read() -> None:
        """The program reads which ranks contribute, and needs no warnings of missing parts."""

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
    def num_experts(self) -> int: ...
    @property
    def num_max_tokens(self) -> int: ...
    @property
    def hidden(self) -> int: ...

class EpRoute:
    """The way of the rows of EpBuffer.normal_dispatch(), for combines, and for dispatches that go
    the same way."""

    @property
    def number(self) -> int:
        """Of the dispatch: the same on all ranks."""

    @property
    def tokens(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def num_rows(self) -> int:
        """With a bound: places of rows."""

    @property
    def is_token_in_rank(self) -> torch.Tensor:
        """As it was given."""

    @property
    def ends(self) -> torch.Tensor:
        """int32 [R]: the rows up to those of each rank. By kernels and with a bound it is on the
        device."""

    @property
    def participants(self) -> list[bool]: ...
    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The tokens of each operation, from the first to the one behind the last; none by
        kernels."""

    @property
    def kernels(self) -> int | None:
        """Number of the kernels' call; None: the rows went through host memory."""

    @property
    def is_at_worst(self) -> bool:
        """The rows went through host memory, with a bound."""

    def is_of(self, buffer: EpBuffer) -> bool: ...

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
    beside: a buffer over `exchange` whose connections this one uses; nothing is exchanged
    bytes_beside: of the buffers that are made beside this one
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
        beside: EpBuffer | None = None,
        bytes_beside: int = 0,
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
        self, field_bytes: Sequence[int], hidden: int, weights: int, rows_per_token: float
    ) -> int:
        """The most tokens of a rank for which normal_dispatch() and normal_combine() have room.

        rows_per_token: the most rows that a rank receives, for each token that a rank may have
        """

    def new_result(self, sizes: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """A CPU tensor of these sizes, not initialised. A large one reuses memory of results that
        the program has dropped."""

    def uses_words(self, device: torch.device) -> bool:
        """Whether streams of the device wait for calls through host memory, and the host does not.
        A call that fails then ends the buffer."""

    def goes_by_kernels(self, device: torch.device) -> bool:
        """Whether kernels do the normal mode of tensors on this device. Collective, the first
        time."""

    def begin_call(self, operations: int, is_alone: bool) -> None:
        """Begins a call of the normal mode. If this rank refuses it, `operations` of the group end
        with the error on all ranks. is_alone: the others wait for none of them"""

    def refuse_call(self, why: str) -> bool:
        """Ends the call with this error on the ranks that wait for it, as a ValueError. False: it
        has ended on all ranks already."""

    def takes_bound(
        self,
        fields: list[torch.Tensor],
        bound: tuple[int, int | None],
        weights: int | None,
        timeout_us: int,
    ) -> bool:
        """Whether normal_dispatch() takes such a bound: the same on all ranks."""

    def normal_dispatch(
        self,
        fields: list[torch.Tensor],
        is_token_in_rank: torch.Tensor,
        token_ranks: torch.Tensor | None,
        num_tokens_per_expert: torch.Tensor,
        agreed: list[tuple[str, int | torch.Tensor | None]],
        weights: int | None = None,
        bound: tuple[int, int | None] | None = None,
        of: EpRoute | None = None,
        shown_rows: int = 0,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int = -1,
    ) -> tuple[
        list[torch.Tensor],
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        EpRoute,
        torch.Tensor,
        torch.Tensor,
        EpWork | None,
    ]:
        """Collective: a dispatch of the normal mode.

        fields: [n, any] each, of any dtype: the parts of each token's row
        is_token_in_rank: bool [n, R], on the device of the fields if they go by kernels or with a
            bound, else on the CPU, as token_ranks is
        token_ranks: int32 [n, any]: the ranks of each token, in the order in which the combine adds
            their rows; -1 is none, in any place. None: the order of ranks
        num_tokens_per_expert: int64 [E] on the CPU; not read with a bound
        agreed: arguments that all ranks have to give alike, by name: numbers below 2**32, and
            tensors, of which the dtype and the columns count
        weights: of a row, for which the combine gets room; None: for any top-k
        bound: the most rows that a rank receives, and the most tokens of a rank, if known. Then the
            host waits for nothing, and the results have so many rows, with zeros behind the
            received ones
        of: with a bound, an earlier dispatch to which the rows belong
        shown_rows: of the results, with zeros behind the received ones; 0: only these. Fewer than a
            rank receives are an error of all ranks

        Returns fields of the received rows, in the order of rank and token; their tokens' numbers
        there, int32; of each rank its rows for each rank, and its tokens, int64 [R, R + 1]; the
        ranks that took part, bool [R]; the route; without a bound, int64 [R, E]: the tokens of each
        rank for each expert, and those of ranks that took part; and the work, if the host did not
        wait. All but the fields and the last three are on the device of `ends` of the route.
        """

    def normal_dispatch_again(
        self,
        fields: list[torch.Tensor],
        route: EpRoute,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int = -1,
    ) -> list[torch.Tensor]:
        """Collective: other rows go the way of the route, to the places of its rows. Those of ranks
        that have gone since are zeros."""

    def normal_combine(
        self,
        x: torch.Tensor,
        route: EpRoute,
        topk_weights: torch.Tensor | None = None,
        biases: list[torch.Tensor] = ...,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int = -1,
        background: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, EpWork]:
        """Collective: brings the rows back and adds those of each token.

        x: bfloat16 [rows, h]; topk_weights: float32 [rows, any], summed beside them. Further rows
            are not read
        biases: bfloat16 [n, h] each, where the sums begin

        Returns the sums, bfloat16 [n, h]; bool [n], see Buffer.missing_contributions; the sums of
        the weights, float32 [n, any]; and the work.
        """

    def normal_barrier(self) -> None:
        """Collective: waits for all ranks."""

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
