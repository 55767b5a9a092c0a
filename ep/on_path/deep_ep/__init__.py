"""DeepEP's names, for programs run by `python -m mooncake.ep.deepep`. Not installed as
`deep_ep`."""

import torch

from mooncake_backend.ep import (
    Buffer,
    Config,
    ElasticBuffer,
    EPHandle,
    EventHandle,
    EventOverlap,
    get_logical_domain_size,
    get_physical_domain_size,
)

topk_idx_t = torch.int64

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
]
