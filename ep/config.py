"""DeepEP's Config, the settings of its normal mode. Here only its size hints have a use."""

from __future__ import annotations

from dataclasses import dataclass

_ALIGNMENT = 128
_RANKS_PER_HOST = 8
# A row in a queue also carries top-k indices (int64) and weights (float32) of up to _MAX_TOPK
# experts, and scales.
_MAX_TOPK = 128
_MAX_SCALES = 128


@dataclass(frozen=True)
class Config:
    """DeepEP's attributes. Tokens are in a queue between two ranks of a host (nvl) or two hosts
    (rdma). ValueError: a number that DeepEP refuses, too."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        if self.num_sms < 0:
            raise ValueError(f"num_sms is {self.num_sms}")
        for path in ("nvl", "rdma"):
            for way in ("send", "recv"):
                name = f"num_max_{path}_chunked_{way}_tokens"
                if getattr(self, name) <= 0:
                    raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.num_max_nvl_chunked_send_tokens >= self.num_max_nvl_chunked_recv_tokens:
            raise ValueError(
                f"{self}: the NVLink send tokens must be fewer than the receive tokens"
            )
        if 2 * self.num_max_rdma_chunked_send_tokens > self.num_max_rdma_chunked_recv_tokens:
            raise ValueError(
                f"{self}: the RDMA send tokens must be at most half of the receive tokens"
            )

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of the queues between ranks of a host.

        hidden_bytes: of the channels of a token
        """
        peers = min(num_ranks, _RANKS_PER_HOST)
        return self._queues(peers, self.num_max_nvl_chunked_recv_tokens, hidden_bytes)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of the queues between hosts of 8 ranks, in both directions; 0 for one host.

        hidden_bytes: of the channels of a token
        """
        if num_ranks <= _RANKS_PER_HOST:
            return 0
        hosts = -(-num_ranks // _RANKS_PER_HOST)
        return 2 * self._queues(hosts, self.num_max_rdma_chunked_recv_tokens, hidden_bytes)

    def _queues(self, peers: int, tokens: int, hidden_bytes: int) -> int:
        row = hidden_bytes + _MAX_TOPK * (8 + 4) + _MAX_SCALES * 4
        channels = max(1, self.num_sms // 2)
        return _aligned(channels * peers * tokens * row)


# By number of ranks: send and receive tokens over NVLink, then over RDMA, for dispatch and combine.
_DISPATCH = {
    2: (24, 256, 6, 128),
    8: (6, 256, 6, 128),
    16: (36, 288, 20, 128),
    64: (32, 288, 8, 128),
    96: (20, 480, 12, 128),
    128: (20, 560, 12, 128),
    144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}
_COMBINE = {
    2: (10, 256, 6, 128),
    4: (9, 256, 6, 128),
    8: (4, 256, 6, 128),
    16: (4, 288, 12, 128),
    64: (1, 288, 8, 128),
    96: (1, 480, 8, 128),
    128: (1, 560, 8, 128),
    144: (2, 720, 8, 128),
    160: (2, 720, 8, 128),
}


def dispatch_config(num_sms: int, num_ranks: int) -> Config:
    return _config(_DISPATCH, num_sms, num_ranks)


def combine_config(num_sms: int, num_ranks: int) -> Config:
    return _config(_COMBINE, num_sms, num_ranks)


def _config(table: dict[int, tuple[int, int, int, int]], num_sms: int, num_ranks: int) -> Config:
    """The configuration of the next larger size in the table, so that a group that lost a rank has
    one."""
    sizes = [size for size in table if size >= num_ranks]
    if num_ranks < 1 or not sizes:
        raise ValueError(f"there are configurations for 1 to {max(table)} ranks, not {num_ranks}")
    return Config(num_sms, *table[min(sizes)])


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
