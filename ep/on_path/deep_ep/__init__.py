"""DeepEP's names, for programs run by `python -m mooncake.ep.deepep`. Not installed as
`deep_ep`."""

import torch

from mooncake.ep import Buffer, Config, ElasticBuffer, EventHandle, EventOverlap
from mooncake_backend.membership import not_yet

topk_idx_t = torch.int64

_UNIFIED = "DeepEP's unified interface"
EPHandle = not_yet("EPHandle", _UNIFIED)
get_physical_domain_size = not_yet("get_physical_domain_size", _UNIFIED)
get_logical_domain_size = not_yet("get_logical_domain_size", _UNIFIED)

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
