"""The native EpBuffer in plain torch, for tests of what stands on it: the same interface, by
exchanging everything with everybody. Ranks may die where the group is of ours; it is not fast."""

from __future__ import annotations

import io
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import torch

from mooncake_backend import PeerLostError

ALIGNMENT = 128


def ceil(a, b):
    return -(-a // b)


class EpWork:
    def __init__(self, future: Future) -> None:
        self.future = future

    def wait(self):
        self.future.result()

    def is_completed(self):
        return self.future.done()


class EpHandle:
    def __init__(self, buffer, num_experts, num_max_tokens, hidden):
        self.buffer = buffer
        self.num_experts, self.num_max_tokens, self.hidden = num_experts, num_max_tokens, hidden
        self.owners = self.tables = self.active = None  # when the dispatch has ended


class EpBuffer:
    def __init__(
        self, rank, size, num_bytes, timeout, *, backend=None, exchange=None, route_hint="",
        renormalize=False,
        raises=False,
    ):  # fmt: skip
        assert (backend is None) != (exchange is None)
        self.rank, self.size, self.num_bytes = rank, size, num_bytes
        self.backend, self.exchange = backend, exchange
        self.renormalize, self.raises, self.lost = renormalize, raises, set()
        self.is_masked = [False] * size
        self.owners = None
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self.zero_copy_rows = None
        self.queue = ThreadPoolExecutor(1)
        sizes = self._gather(num_bytes)
        if len(set(sizes)) != 1:
            raise ValueError(f"rank {rank}: the ranks give different num_bytes: {sizes}")

    # ---- between ranks

    def _gather(self, mine):
        """Of all ranks what they give, in rank order; None of those that are lost."""
        stream = io.BytesIO()
        torch.save(mine, stream)
        blob = stream.getvalue()
        blobs = self.exchange(blob) if self.exchange else self._gather_by_backend(blob)
        return [blob and torch.load(io.BytesIO(blob), weights_only=False) for blob in blobs]

    def _gather_by_backend(self, blob):
        length = torch.tensor([len(blob)])
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        self.backend.allgather([lengths], [length]).wait()
        most = int(max(lengths))
        mine = torch.frombuffer(bytearray(blob.ljust(most, b"\0")), dtype=torch.uint8)
        of_all = [torch.empty_like(mine) for _ in range(self.size)]
        work = self.backend.allgather([of_all], [mine])
        work.wait()
        lost = set(range(self.size)) - set(work.contributors)
        news, self.lost = lost - self.lost, lost
        if news and self.raises:
            raise PeerLostError(f"rank {self.rank}: lost {news}")
        blobs = [bytes(b[: int(n)].numpy()) for b, n in zip(of_all, lengths, strict=True)]
        return [None if rank in lost else blob for rank, blob in enumerate(blobs)]

    def _run(self, operation, background):
        work = EpWork(self.queue.submit(operation))
        if not background:
            work.wait()
        return work

    # ---- sizes, masks, memory

    @staticmethod
    def size_hint(num_max_tokens, hidden, num_ranks, num_experts):
        dispatched = 16 + max(2 * hidden, hidden + 4 * ceil(hidden, 128))
        rows = ceil(num_experts, num_ranks) * num_ranks * num_max_tokens
        need = 2 * (2 * rows * dispatched + 8 * num_experts * num_ranks)
        return ceil(need, ALIGNMENT) * ALIGNMENT

    @property
    def active_ranks(self):
        return [rank not in self.lost for rank in range(self.size)]

    def masked_ranks(self):
        return [masked or rank in self.lost for rank, masked in enumerate(self.is_masked)]

    def mask_rank(self, rank, is_masked):
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {self.rank}: there is no rank {rank} in {self.size}")
        self.is_masked[rank] = is_masked

    def unmask_all(self):
        self.is_masked = [False] * self.size

    def set_expert_owners(self, owners):
        self.owners = list(owners)

    def local_buffer(self):
        return self.memory

    def update_members(self):
        pass

    def close(self, timeout):
        self.queue.shutdown()

    # ---- checks

    def _require(self, holds, text):
        if not holds:
            raise ValueError(f"rank {self.rank}: {text}")

    def _check(self, name, tensor, dtype, shape, least=None):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"rank {self.rank}: {name} must be a tensor, not {type(tensor)}")
        found = f"not {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        self._require(tensor.device.type == "cpu", f"{name} must be on the CPU, {found}")
        self._require(tensor.dtype == dtype, f"{name} must be {dtype}, {found}")
        fits = tensor.dim() == len(shape) and all(
            want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
        )
        self._require(fits, f"{name} must be {list(shape)}, {found}")
        self._require(tensor.is_contiguous(), f"{name} must be contiguous")
        self._require(least is None or len(tensor) >= least, f"{name} has {len(tensor)} elements,"
                      f" fewer than {least} ranks")  # fmt: skip

    def _check_routes(self, topk_idx, num_experts):
        if topk_idx.numel():
            low, high = topk_idx.min().item(), topk_idx.max().item()
            self._require(low >= -1 and high < num_experts, f"topk_idx has {low} to {high}, not "
                          f"-1 to {num_experts - 1}")  # fmt: skip

    def _mask(self, active_ranks):
        """A copy: it goes to the others as it was when we were called."""
        mask = [not masked for masked in self.is_masked]
        if active_ranks is not None:
            self._check("active_ranks", active_ranks, torch.int32, [None], least=self.size)
            mask = [a and bool(b) for a, b in zip(mask, active_ranks.tolist(), strict=False)]
        return mask

    def _agree(self, masks, active_ranks):
        active = [
            r for r in range(self.size) if r not in self.lost and all(mask[r] for mask in masks)
        ]
        if active_ranks is not None:
            for rank in range(self.size):
                active_ranks[rank] = int(rank in active)
        return active

    def _owners(self, num_experts):
        if self.owners is not None:
            text = f"there are owners of {len(self.owners)} experts, not {num_experts}"
            self._require(len(self.owners) == num_experts, text)
            return self.owners
        share, rest = divmod(num_experts, self.size)
        return [r for r in range(self.size) for _ in range(share + (r < rest))]

    # ---- dispatch

    def dispatch(
        self, x, topk_idx, num_max_tokens, num_experts, *, use_fp8, round_scale=False,
        use_ue8m0=False, active_ranks=None, timeout_us=-1, background=False,
        cumulative_recv_stats=None, wait_stats=None,
    ):  # fmt: skip
        self._check("x", x, torch.bfloat16, [None, None])
        tokens, hidden = x.shape
        self._check("topk_idx", topk_idx, torch.int64, [tokens, None])
        text = f"{tokens} tokens, more than num_max_tokens {num_max_tokens}"
        self._require(tokens <= num_max_tokens, text)
        self._require(num_experts > 0, f"num_experts is {num_experts}")
        self._check_routes(topk_idx, num_experts)
        self._require(round_scale or not use_ue8m0, "use_ue8m0 needs round_scale")
        need = self.size_hint(num_max_tokens, hidden, self.size, num_experts)
        self._require(need <= self.num_bytes, f"the buffer has {self.num_bytes} bytes, and "
                      f"{num_max_tokens} tokens of {hidden} for {num_experts} experts need "
                      f"{need}")  # fmt: skip
        mask = self._mask(active_ranks)
        owners = self._owners(num_experts)
        mine = [e for e, owner in enumerate(owners) if owner == self.rank]
        rows = self.size * num_max_tokens
        if cumulative_recv_stats is not None:
            self._check("recv stats", cumulative_recv_stats, torch.int32, [len(mine)])
        if wait_stats is not None:
            self._check("wait stats", wait_stats, torch.int64, [self.size])

        dtype = torch.float8_e4m3fn if use_fp8 else torch.bfloat16
        recv_x = torch.zeros(len(mine), rows, hidden, dtype=dtype)
        scales = None
        if use_fp8:
            blocks, of = (ceil(hidden, 512), torch.int32) if use_ue8m0 else (
                ceil(hidden, 128), torch.float32)  # fmt: skip
            scales = torch.zeros(len(mine), blocks, rows, dtype=of).transpose(1, 2)
        recv_count = torch.zeros(len(mine), dtype=torch.int32)
        src_info = torch.zeros(len(mine), rows, dtype=torch.int32)
        layout_range = torch.zeros(len(mine), self.size, dtype=torch.int64)
        handle = EpHandle(self, num_experts, num_max_tokens, hidden)
        given = self._cast(x, use_fp8, round_scale, use_ue8m0)
        table = topk_idx.clone()

        def operation():
            of_all = self._gather((given, table, mask, owners, num_max_tokens))
            here = [one for one in of_all if one]
            same = {(str(one[3]), one[4]) for one in here}
            if len(same) > 1:
                raise RuntimeError(f"rank {self.rank}: the ranks called different things: {same}")
            active = self._agree([one[2] for one in here], active_ranks)
            tables = [one and one[1] for one in of_all]
            for expert in range(num_experts):
                count = sum(int((tables[r] == expert).sum()) for r in active)
                text = f"expert {expert} of rank {owners[expert]} gets {count} rows, and there is room for {rows}"  # noqa: E501
                self._require(count <= rows, text)
            for local, expert in enumerate(mine if self.rank in active else []):
                at = 0
                for source, one in enumerate(of_all):
                    nothing = (None, None), x[:0]
                    (values, of_values), table_of = one[:2] if source in active else nothing
                    begin = at
                    for token, chosen in enumerate(table_of.tolist()):
                        for _ in range(chosen.count(expert)):
                            recv_x[local, at] = values[token]
                            if scales is not None:
                                scales[local, at] = of_values[token]
                            src_info[local, at] = token
                            at += 1
                    layout_range[local, source] = begin << 32 | at - begin
                recv_count[local] = at
            if cumulative_recv_stats is not None:
                cumulative_recv_stats.add_(recv_count)
            handle.owners, handle.tables, handle.active = owners, tables, active

        work = self._run(operation, background)
        return SimpleNamespace(
            recv_x=recv_x, scales=scales, recv_count=recv_count, src_info=src_info,
            layout_range=layout_range, handle=handle, work=work,
        )  # fmt: skip

    @staticmethod
    def _cast(x, use_fp8, round_scale, use_ue8m0):
        from mooncake.ep import fp8

        if not use_fp8:
            return x.clone(), None
        values, scales = fp8.cast_to_fp8(x, round_scale)
        return values, fp8.pack_ue8m0(scales) if use_ue8m0 else scales

    # ---- combine

    def _check_handle(self, handle):
        self._require(handle.buffer is self, "the handle is of another buffer")

    def next_combine_buffer(self, handle):
        self._check_handle(handle)
        shape = self._rows_of(handle)
        if self.zero_copy_rows is None or self.zero_copy_rows.shape != shape:
            self.zero_copy_rows = torch.zeros(shape, dtype=torch.bfloat16)
        return self.zero_copy_rows

    def _rows_of(self, handle):
        owned = self._owners(handle.num_experts).count(self.rank)
        return torch.Size([owned, self.size * handle.num_max_tokens, handle.hidden])

    def combine(
        self, x, topk_idx, topk_weights, handle, *, use_logfmt=False, zero_copy=False, out=None,
        active_ranks=None, timeout_us=-1, background=False, wait_stats=None,
    ):  # fmt: skip
        self._check_handle(handle)
        self._require(not (use_logfmt and zero_copy), "use_logfmt excludes zero_copy")
        self._check("x", x, torch.bfloat16, self._rows_of(handle))
        self._check("topk_idx", topk_idx, torch.int64, [None, None])
        self._check_routes(topk_idx, handle.num_experts)
        tokens, hidden = len(topk_idx), handle.hidden
        self._check("topk_weights", topk_weights, torch.float32, topk_idx.shape)
        if out is not None:
            self._check("out", out, torch.bfloat16, [tokens, hidden])
        if wait_stats is not None:
            self._check("wait stats", wait_stats, torch.int64, [self.size])
        mask = self._mask(active_ranks)
        combined = torch.empty(tokens, hidden, dtype=torch.bfloat16) if out is None else out
        missing = torch.zeros(tokens, dtype=torch.bool)
        given = (self.zero_copy_rows if zero_copy else x).clone()

        def operation():
            self._require(torch.equal(handle.tables[self.rank], topk_idx),
                          "topk_idx is not that of the dispatch")  # fmt: skip
            of_all = self._gather((given, mask))
            masks = [one[1] for one in of_all if one]
            active = set(self._agree(masks, active_ranks)) & set(handle.active)
            places = self._places(handle)
            total = torch.zeros(tokens, hidden)
            for token in range(tokens):
                chosen = [j for j, e in enumerate(topk_idx[token].tolist()) if e >= 0]
                there = [
                    j for j in chosen
                    if {handle.owners[topk_idx[token, j]], self.rank} <= active
                ]  # fmt: skip
                missing[token] = len(there) < len(chosen)
                weights = topk_weights[token].double()
                if self.renormalize and there:
                    weights = weights * weights[chosen].sum() / weights[there].sum()
                for j in there:
                    owner, local, row = places[self.rank, token, j]
                    product = of_all[owner][0][local, row].double() * weights[j]
                    total[token] = (product + total[token].double()).float()
            combined.copy_(total.bfloat16())

        work = self._run(operation, background)
        return SimpleNamespace(combined_x=combined, missing_contributions=missing, work=work)

    def _places(self, handle):
        """(source, token, place in top-k) -> (owner, its local expert, row)."""
        counts, places = {}, {}
        local, seen = {}, [0] * self.size
        for expert, owner in enumerate(handle.owners):
            local[expert] = seen[owner]
            seen[owner] += 1
        for source in handle.active:
            for token, chosen in enumerate(handle.tables[source].tolist()):
                for j, expert in enumerate(chosen):
                    if expert >= 0:
                        row = counts.get(expert, 0)
                        counts[expert] = row + 1
                        places[source, token, j] = handle.owners[expert], local[expert], row
        return places


def install(module):
    """Into mooncake.ep.runtime of this process; returns what takes it away again."""
    before = module.native
    module.native = lambda: EpBuffer
    return lambda: setattr(module, "native", before)
