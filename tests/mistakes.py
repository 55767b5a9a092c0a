"""Wrong calls, which a rank refuses by itself, without a message to the others."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import devices
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import raised
from torch._C._distributed_c10d import _make_nccl_premul_sum

import mooncake_backend

SPLITS = hasattr(dist.ProcessGroup, "split_group")  # since torch 2.9
KINDS = ("ValueError", "RuntimeError", "NotImplementedError", "TypeError")
# Calls that are no mistakes in a group of one rank.
OF_SEVERAL = [
    "short list", "output size", "input size", "lists", "not divisible", "gathered list",
    "gathered by others", "scattered list", "scattered by others", "short reduction",
    "outputs in one place", "outputs in one column", "outputs that overlap", "huge splits",
    "wrong batch", "wrong rank in a batch", "few splits", "negative tag", "tag beyond 32 bits",
    "split outside", "split below",
]  # fmt: skip


class WrapperTensor(torch.Tensor):
    """A tensor without memory of its own, like DTensor and FakeTensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> WrapperTensor:
        where = {"dtype": inner.dtype, "device": inner.device}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **where)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        raise NotImplementedError(f"{cls.__name__} does not do {function}")


def freed(count: int) -> torch.Tensor:
    """A tensor whose storage was freed, as FSDP does with parameters."""
    tensor = torch.ones(count)
    tensor.untyped_storage().resize_(0)
    return tensor


def own_mistakes(group: Any) -> dict[str, tuple[Callable[[], Any], str]]:
    """name: (call, text that its error must contain)."""
    n, rank = group.size(), group.rank()
    me, other = (dist.get_global_rank(group, r) for r in (rank, (rank + 1) % n))
    stranger = dist.get_world_size() + 7
    ones, greatest = torch.ones, dist.ReduceOp.MAX
    meta = ones(3, device="meta")
    backend = mooncake_backend.group.backend_of(group)
    on_cpu = devices.kind() == "cpu"
    quantized = torch.quantize_per_tensor(ones(3), 1, 0, torch.qint8) if on_cpu else None
    nested, sparse = torch.nested.nested_tensor([ones(2), ones(3)]), torch.eye(3).to_sparse()
    premul, g = _make_nccl_premul_sum, {"group": group}
    coalesced, into = group.allreduce_coalesced, group.allgather_into_tensor_coalesced
    scatters = group.reduce_scatter_tensor_coalesced
    shared, fp8, column = ones(3), ones(3).to(torch.float8_e5m2), ones(3, 2)[:, 0]
    whole, wrapper = ones(n * 3 + 3), WrapperTensor(ones(3))
    halves = ones(3).to(torch.complex32)
    late = timedelta(seconds=1)

    def many(count: int, times: int = n) -> list[torch.Tensor]:
        return [ones(count) for _ in range(times)]

    def single(output: Any, given: Any, *splits: list[int]) -> Any:
        return dist.all_to_all_single(output, given, *splits, group=group)

    def gather_to(root: int, outputs: list[torch.Tensor], given: torch.Tensor | None = None) -> Any:
        options = dist.GatherOptions()
        options.rootRank = root
        return backend.gather([outputs], [ones(3) if given is None else given], options)

    def scatter_from(root: int, inputs: list[torch.Tensor]) -> Any:
        options = dist.ScatterOptions()
        options.rootRank = root
        return backend.scatter([ones(3)], [inputs], options)

    def root_tensor() -> Any:
        options = dist.BroadcastOptions()
        options.rootTensor = 1
        return backend.broadcast([ones(3)], options)

    def in_a_batch(peer: int, tensor: torch.Tensor, tag: int = 0) -> Any:
        right = dist.P2POp(dist.irecv, ones(3), other, group)
        return dist.batch_isend_irecv([right, dist.P2POp(dist.isend, tensor, peer, group, tag)])

    def split(ranks: list[int]) -> Any:
        return group.split_group(ranks, timeout=late, group_name="wrong", opts=backend.options)

    return {
        # A device or a kind of tensor that cannot be moved.
        "meta": (lambda: backend.allreduce([meta]), "meta"),
        "meta input": (lambda: gather_to(rank, [ones(3)] * n, meta), "meta"),
        "meta output": (lambda: backend.allgather([[meta] * n], [ones(3)]), "meta"),
        "meta message": (lambda: backend.recv([meta], (rank + 1) % n, 0), "meta"),
        "mixed devices": (lambda: backend.allreduce_coalesced([shared, meta]), "meta"),
        "meta batch": (
            lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, meta, other, group)]), "",
        ),
        "sparse": (lambda: backend.broadcast([sparse]), "broadcast has the layout Sparse"),
        "csr": (lambda: backend.allreduce([torch.eye(3).to_sparse_csr()]), "SparseCsr"),
        "greatest sparse": (lambda: backend.allreduce([sparse], greatest), "SUM"),
        "sparse list": (lambda: coalesced([sparse, sparse]), ""),
        # torch makes these for few devices.
        **({
            "mkldnn": (lambda: backend.allreduce([ones(3).to_mkldnn()]), "Mkldnn"),
            "quantized": (lambda: backend.allreduce([quantized]), "int_repr"),
            "quantized message": (
                lambda: backend.send([quantized], (rank + 1) % n, 0), "int_repr",
            ),
        } if on_cpu else {}),
        "nested": (lambda: backend.allreduce([nested]), "nested"),
        "wrapper": (lambda: backend.allreduce([wrapper]), "no memory"),
        "wrapper in the API": (lambda: dist.all_reduce(wrapper, **g), "WrapperTensor"),
        "freed": (lambda: dist.all_reduce(freed(3), **g), "no memory"),
        "freed message": (lambda: dist.isend(freed(3), other, **g), ""),
        "no tensor": (lambda: dist.all_reduce(None, **g), "tensor"),
        "complex halves": (lambda: backend.broadcast([halves]), "broadcast: tensors of"),
        "complex halves in lists": (
            lambda: backend.allgather_coalesced([[one.to(halves)] for one in many(3)], [halves]),
            "coalesced: tensors",
        ),
        "complex halves in tensors": (
            lambda: into([torch.cat([halves] * n)], [halves]), "coalesced: tensors",
        ),
        # Lists.
        "two tensors": (lambda: backend.allreduce([ones(3), ones(3)]), "one tensor"),
        "empty list": (lambda: dist.all_gather([], ones(3), **g), ""),
        "long list": (lambda: dist.all_gather(many(3, n + 1), ones(3), **g), "rank"),
        "lists": (lambda: dist.all_to_all([ones(1)] * n, [ones(1)] * (n - 1), **g), ""),
        "gathered list": (lambda: gather_to(rank, [ones(3)] * (n - 1)), "rank"),
        "scattered list": (lambda: scatter_from(rank, [ones(3)] * (n + 1)), "rank"),
        "long reduction": (
            lambda: dist.reduce_scatter(ones(3), [ones(3)] * (n + 1), **g), "ranks",
        ),
        "no tensors": (lambda: coalesced([]), ""),
        "no inputs": (lambda: into([], []), ""),
        "lists of gathers": (lambda: backend.allgather_coalesced([], [ones(3)]), "rank"),
        "outputs of gathers": (lambda: into([ones(n)], [ones(1), ones(1)]), "outputs"),
        "outputs of scatters": (lambda: scatters([ones(1)], [ones(n)] * 2), "outputs"),
        # Shapes.
        "output shape": (lambda: dist.all_gather(many(4), ones(3), **g), "shape"),
        "output size": (
            lambda: dist.all_gather_into_tensor(ones(5 * n + 1), ones(5), **g), "output",
        ),
        "input size": (
            lambda: dist.reduce_scatter_tensor(ones(5), ones(5 * n - 1), **g), "input",
        ),
        "gathered shape": (lambda: gather_to(rank, many(4)), "shape"),
        "scattered shape": (lambda: scatter_from(rank, [ones(2)] * n), "shape"),
        "reduced shape": (lambda: dist.reduce_scatter(ones(3), [ones(2)] * n, **g), "shape"),
        "shape of gathers": (
            lambda: backend.allgather_coalesced([[one] for one in many(2)], [ones(3)]), "times",
        ),
        "size of gathers": (lambda: into([ones(n), ones(n + 1)], [ones(1), ones(1)]), "times"),
        "size of scatters": (lambda: scatters([ones(2)], [ones(n)]), "times"),
        # Types.
        "output type": (lambda: dist.all_gather([ones(3).int()] * n, ones(3), **g), "type"),
        "gathered type": (
            lambda: backend.allgather([[one.int() for one in many(3)]], [ones(3)]),
            "all_gather: input",
        ),
        "base type": (
            lambda: dist.all_gather_into_tensor(ones(n).int(), ones(1), **g),
            "all_gather_into_tensor: input and output differ in type",
        ),
        "list types": (
            lambda: backend.alltoall([one.int() for one in many(1)], [ones(1)] * n),
            "all_to_all: input",
        ),
        "scattered type": (lambda: scatter_from(rank, [ones(3).int()] * n), "scatter: input"),
        "type of scatters": (
            lambda: scatters([ones(1).int()], [ones(n)]), "reduce_scatter_tensor_coalesced: input",
        ),
        # Splits.
        "not divisible": (lambda: single(ones(n + 1), ones(n + 1)), "divi"),
        "0-dim splits": (lambda: single(torch.tensor(1.0), torch.tensor(1.0)), "divi"),
        "few splits": (lambda: single(ones(n), ones(n), [n], [1] * n), "split"),
        "wrong sum": (lambda: single(ones(n), ones(n), [1] * n, [2] * n), "add up"),
        "negative split": (lambda: single(ones(n), ones(n), [1] * n, [-1, *[1] * (n - 1)]), "neg"),
        # Their sum is n, in 64 bits.
        "huge splits": (
            lambda: single(
                ones(n), ones(n), [1] * n, [2**63 - 1, 2**63 - 1, n + 2, *[0] * n][: max(n, 3)]
            ), "split",
        ),
        "functional splits": (
            lambda: functional.all_to_all_single(ones(n), [1] * n, [2] * n, group) + 1, "add up",
        ),
        # Roots, ranks, tags.
        "root": (lambda: dist.broadcast(ones(1), stranger, **g), ""),
        "root below": (lambda: dist.reduce(ones(1), -1, **g), ""),
        "root tensor": (root_tensor, "broadcast: root tensor 1"),
        "gathering root": (lambda: gather_to(n, many(3)), "gather: root"),
        "scattering root": (lambda: scatter_from(-1, [ones(3)] * n), "scatter: root -1"),
        "gathered by others": (lambda: gather_to((rank + 1) % n, many(3)), "root"),
        "scattered by others": (lambda: scatter_from((rank + 1) % n, [ones(3)] * n), "root"),
        "functional root": (lambda: functional.broadcast(ones(1), n, group) + 1, "broadcast: root"),
        "to nobody": (lambda: backend.send([ones(1)], n, 0), "group"),
        "from nobody": (lambda: backend.recv([ones(1)], -2, 0), "group"),
        "to a stranger": (lambda: dist.send(ones(1), stranger, **g), ""),
        "to itself": (lambda: dist.isend(ones(1), me, **g), "rank"),
        "from itself": (lambda: backend.recv([ones(1)], rank, 0), "itself"),
        "negative tag": (lambda: backend.send([ones(3)], (rank + 1) % n, -1), "tag"),
        "tag beyond 32 bits": (lambda: dist.isend(ones(1), other, tag=2**40, **g), "arguments"),
        "wrong batch": (lambda: in_a_batch(other, ones(3), tag=-5), "tag"),
        "wrong rank in a batch": (lambda: in_a_batch(me, ones(3)), "itself"),
        # Groups.
        "unknown group": (lambda: dist.all_reduce(shared, group="nobody's"), "nobody's"),
        "second init": (lambda: dist.init_process_group("mooncake", rank=0, world_size=1), "twice"),
        "rank outside": (lambda: dist.new_group([stranger]), "world"),
        **({
            "split outside": (lambda: split([0, n]), "not in a group"),
            "split below": (lambda: split([0, -1]), "not in a group"),
            "split of nobody": (lambda: split([]), "empty"),
        } if SPLITS else {}),
        # Reductions that there are not.
        "max of complex": (
            lambda: backend.allreduce([ones(3).cfloat()], greatest), "all_reduce: there is no MAX",
        ),
        "sum of fp8": (lambda: dist.all_reduce(fp8, **g), "all_reduce: there is no SUM"),
        "one fp8": (lambda: coalesced([ones(3), fp8]), "all_reduce_coalesced: there is no SUM"),
        "fp8 in a list": (lambda: dist.reduce_scatter(fp8.clone(), [fp8] * n, **g), "float8_e5m2"),
        "avg of bool": (lambda: dist.all_reduce(ones(3).bool(), dist.ReduceOp.AVG, **g), "bool"),
        "bits of floats": (lambda: dist.all_reduce(ones(3), dist.ReduceOp.BAND, **g), "BAND"),
        "factor of ints": (lambda: dist.all_reduce(ones(3).int(), premul(2.0), **g), "PREMUL_SUM"),
        "complex factor": (lambda: dist.all_reduce(ones(3), premul(ones(1) * 1j), **g), "complex"),
        "functional name": (lambda: functional.all_reduce(ones(3), "mean", group) + 1, "mean"),
        # Results in one place.
        "expanded": (lambda: dist.all_reduce(ones(1).expand(3), **g), "clone"),
        "expanded message": (lambda: dist.recv(ones(1).expand(3), other, **g), ""),
        "outputs in one place": (lambda: dist.all_gather([shared] * n, ones(3), **g), "share"),
        "outputs in one column": (lambda: dist.all_gather([column] * n, ones(3), **g), "share"),
        "outputs that overlap": (
            lambda: dist.all_gather([whole[2 * r :][:3] for r in range(n)], ones(3), **g), "share",
        ),
    }  # fmt: skip


def check(group: Any, number: int | None = None) -> None:
    """Checks that the mistake with that number, or each, is refused with the right text."""
    mistakes = own_mistakes(group)
    names = [name for name in mistakes if group.size() > 1 or name not in OF_SEVERAL]
    for name in names if number is None else [names[number % len(names)]]:
        call, text = mistakes[name]
        try:
            kind, message = raised(call)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        assert kind in KINDS, f"{name}: {kind}: {message}"
        assert message, name
        assert text in message, f"{name}: {message}"
