"""The normal mode with gradients: dispatch and combine are each other's backward.

All ranks run the backward in the same order. So on every rank the loss must depend on the received
rows and on the combined ones, also where a rank has received none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .buffer import Buffer
from .normal_handle import NormalHandle

Tensor = torch.Tensor


class Dispatched(NamedTuple):
    """The results of dispatch(), see Buffer.dispatch(). k: top-k"""

    rows: Tensor  # bfloat16 [rows, h], with gradients
    topk_idx: Tensor  # [rows, k], numbers among this rank's experts, or -1
    topk_weights: Tensor  # float32 [rows, k], with gradients
    num_per_expert: list[int]  # rows of each of this rank's experts
    handle: NormalHandle


def dispatch(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    **how: Any,
) -> Dispatched:
    """Sends each token to the ranks of its experts. All ranks call it. Errors are as in
    Buffer.dispatch(), on all ranks.

    x: bfloat16 [n, h]
    topk_idx: int64 or int32 [n, k], -1 is no expert; topk_weights: float32 [n, k]
    how: further arguments of Buffer.dispatch(), for the forward only

    The gradient of a token is the float32 sum of its copies' gradients, rounded to bfloat16. The
    gradient of a weight comes from the rank that owns the expert.
    """
    is_fixed = how.get("num_worst_tokens", 0) != 0
    with buffer.call_of_normal_mode("dispatch", 2, x, is_fixed):
        per_rank, per_rdma_rank, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(
            topk_idx, num_experts
        )
    call = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_rdma_rank,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": is_in_rank,
        **how,
    }
    rows, weights, recv_idx, counts, handle = _Dispatch.apply(
        buffer, x, topk_idx, topk_weights, call
    )
    return Dispatched(rows, recv_idx, weights, counts, handle)


def combine(buffer: Buffer, x: Tensor, handle: NormalHandle, **how: Any) -> Tensor:
    """Brings the rows back and adds each token's rows. All ranks call it.

    x: bfloat16 [rows, h], in the order of Dispatched.rows
    how: further arguments of Buffer.combine(), for the forward only. A bias gets no gradient

    Returns bfloat16 [n, h]. Each row of x has the gradient of its token.
    """
    combined: Tensor = _Combine.apply(buffer, x, handle, how)
    return combined


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, buffer: Buffer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, call: Any
    ) -> Any:
        rows, recv_idx, weights, counts, handle, event = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=topk_weights, **call
        )
        event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        ctx.save_for_backward(recv_idx)
        ctx.mark_non_differentiable(recv_idx)
        return rows, weights, recv_idx, counts, handle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor, *_: Any) -> Any:
        (recv_idx,) = ctx.saved_tensors
        # A copy has zeros in place of the weights of other ranks' experts.
        grad_weights = grad_weights.masked_fill(recv_idx < 0, 0)
        grad_x, grad_topk_weights, event = ctx.buffer.combine(
            grad_rows, ctx.handle, topk_weights=grad_weights
        )
        event.current_stream_wait()
        return None, grad_x, None, grad_topk_weights, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Buffer, x: Tensor, handle: NormalHandle, how: Any) -> Tensor:
        combined, _, event = buffer.combine(x, handle, **how)
        event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, *_, event = ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)
        event.current_stream_wait()
        return None, rows, None, None
