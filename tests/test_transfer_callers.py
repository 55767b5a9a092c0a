"""mooncake.engine as its callers use it: SGLang's wrapper, vLLM's connector, and what the engine's
own first test scripts assert. Written as they write it."""

from __future__ import annotations

import logging
import os
import random
import string
from concurrent.futures import ThreadPoolExecutor

import engines
import harness
import numpy as np
import pytest
import torch
from engines import LOOPBACK, pattern
from harness import raised

logger = logging.getLogger(__name__)
WORKERS = 10


@pytest.fixture(params=engines.WIRES)
def env(request):
    return {"MOONCAKE_TRANSPORTS": request.param}


# ---- SGLang


class Wrapper:
    """As in its mooncake_transfer_engine.py."""

    def __init__(self, hostname, gpu_id, ib_device=None):
        from mooncake.engine import TransferEngine

        self.engine = TransferEngine()
        self.hostname = hostname
        self.gpu_id = gpu_id
        protocol = os.environ.get("MOONCAKE_PROTOCOL", "rdma")
        code = self.engine.initialize(
            hostname, "P2PHANDSHAKE", protocol, ib_device if ib_device is not None else ""
        )
        if code != 0:
            raise RuntimeError("Mooncake Transfer Engine initialization failed.")
        self.session_id = f"{hostname}:{self.engine.get_rpc_port()}"

    def register(self, ptr, length):
        try:
            code = self.engine.register_memory(ptr, length)
        except Exception:
            code = -1
        if code != 0:
            logger.debug("Mooncake memory registration %s failed.", ptr)
        return code

    def batch_register(self, ptrs, lengths):
        try:
            return self.engine.batch_register_memory(ptrs, lengths)
        except Exception:
            return -1

    def batch_deregister(self, ptrs):
        try:
            return self.engine.batch_unregister_memory(ptrs)
        except Exception:
            return -1

    def transfer_sync(self, session_id, buffer, peer_buffer_address, length):
        try:
            code = self.engine.transfer_sync_write(session_id, buffer, peer_buffer_address, length)
        except Exception:
            code = -1
        if code < 0:
            logger.debug("Failed to transfer data from %s to %s.", buffer, session_id)
        return code

    def batch_transfer_sync(self, session_id, buffers, peer_buffer_addresses, lengths):
        try:
            code = self.engine.batch_transfer_sync_write(
                session_id, buffers, peer_buffer_addresses, lengths
            )
        except Exception:
            code = -1
            assert hasattr(self.engine, "batch_transfer_sync_write")
        return code


LAYERS, PAGES, PAGE = 4, 64, 2048  # bytes


def prefill_and_decode(me):
    """Rank 0 prefills, ranks 1 and 2 decode. Pages of every layer go where the decoder has said."""
    os.environ["MOONCAKE_PROTOCOL"] = "tcp"
    wrapper = Wrapper(LOOPBACK, gpu_id=0)
    cache = [torch.zeros(PAGES, PAGE, dtype=torch.uint8) for _ in range(LAYERS)]
    pointers = [layer.data_ptr() for layer in cache]
    assert wrapper.batch_register(pointers, [layer.numel() for layer in cache]) == 0
    auxiliary = torch.zeros(64, dtype=torch.int64)
    assert wrapper.register(auxiliary.data_ptr(), auxiliary.nbytes) == 0
    if me.rank != 0:
        pages = random.Random(me.rank).sample(range(PAGES), 20)
        me.board.set(
            f"decoder-{me.rank}", (wrapper.session_id, pointers, auxiliary.data_ptr(), pages)
        )
        me.board.wait("sent")
        for number, layer in enumerate(cache):
            for index, page in enumerate(pages):
                assert (layer[page] == (number + index + me.rank) % 251).all()
            rest = [page for page in range(PAGES) if page not in pages]
            assert (layer[rest] == 0).all()
        assert auxiliary[3] == 1000 + me.rank
        assert wrapper.batch_deregister(pointers) == 0
        return

    blacklist = {"127.0.0.1:9": 1}  # of an earlier failure; a probe says when it is back
    decoders = [me.board.wait(f"decoder-{rank}") for rank in (1, 2)]

    def send(request):
        session, theirs, _, pages = decoders[request % 2]
        rank = 1 + request % 2
        number = request // 2
        mine = torch.empty(len(pages), PAGE, dtype=torch.uint8)
        for index in range(len(pages)):
            mine[index] = (number + index + rank) % 251
        assert wrapper.register(mine.data_ptr(), mine.nbytes) == 0
        buffers = [mine.data_ptr() + i * PAGE for i in range(len(pages))]
        there = [theirs[number] + page * PAGE for page in pages]
        code = wrapper.batch_transfer_sync(session, buffers, there, [PAGE] * len(pages))
        assert wrapper.engine.unregister_memory(mine.data_ptr()) == 0
        return code

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(send, range(2 * LAYERS))) == [0] * (2 * LAYERS)
    for rank, (session, _, their_auxiliary, _) in enumerate(decoders, 1):
        auxiliary[0] = 1000 + rank
        code = wrapper.transfer_sync(session, auxiliary.data_ptr(), their_auxiliary + 24, 8)
        assert code == 0
        assert wrapper.engine.send_probe(session) == 0
        blacklist[session] = 0
    assert wrapper.engine.send_probe("127.0.0.1:9") != 0
    assert wrapper.transfer_sync("127.0.0.1:9", auxiliary.data_ptr(), 4096, 8) < 0
    assert len(blacklist) == 3
    assert wrapper.engine.get_engine() is not None
    me.board.set("sent")
    return


def test_sglang_sends_the_pages_of_a_request(env):
    harness.run_ranks(3, prefill_and_decode, env=env, backend=None)


def asks_for_rdma(me):
    return raised(Wrapper, LOOPBACK, 0)


def test_sglang_without_the_protocol_is_told():
    with harness.Crew(1, backend=None) as crew:
        assert crew.call(asks_for_rdma) == [
            ("RuntimeError", "Mooncake Transfer Engine initialization failed.")
        ]
        assert "MOONCAKE_ALLOW_FALLBACK=1" in crew.log(0)


# ---- vLLM


def producer_and_consumer(me):
    """As in its mooncake_connector.py: blocks of a request, from a pool of threads."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize(LOOPBACK, "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("Mooncake Transfer Engine initialization failed.")
    rpc_port = engine.get_rpc_port()
    block, blocks, layers = 4096, 100, 3
    caches = {f"layer.{i}": np.zeros(block * blocks, dtype=np.uint8) for i in range(layers)}
    kv_data_ptrs = [int(cache.ctypes.data) for cache in caches.values()]
    kv_data_lens = [cache.nbytes for cache in caches.values()]
    if engine.batch_register_memory(kv_data_ptrs, kv_data_lens) != 0:
        raise RuntimeError("Mooncake batch memory registration failed.")
    if me.rank == 0:
        me.board.set("consumer", (LOOPBACK, rpc_port, kv_data_ptrs))
        me.board.wait("sent")
        return [cache.tobytes() for cache in caches.values()]
    for number, cache in enumerate(caches.values()):
        cache[:] = pattern(len(cache), number)
    host, port, remote_ptrs = me.board.wait("consumer")

    def send_blocks(request):
        chosen = range(request * 10, request * 10 + 10)
        src_ptrs, dst_ptrs, lengths = [], [], []
        for local, remote in zip(kv_data_ptrs, remote_ptrs, strict=True):
            for index in chosen:
                src_ptrs.append(local + index * block)
                dst_ptrs.append(remote + (blocks - 1 - index) * block)
                lengths.append(block)
        return engine.batch_transfer_sync_write(f"{host}:{port}", src_ptrs, dst_ptrs, lengths)

    with ThreadPoolExecutor(WORKERS) as sender:
        assert list(sender.map(send_blocks, range(WORKERS))) == [0] * WORKERS
    me.board.set("sent")
    return [
        cache.reshape(blocks, block)[::-1].tobytes() for cache in caches.values()
    ]  # fmt: skip


def test_vllm_sends_blocks_from_its_pool(env):
    theirs, ours = harness.run_ranks(2, producer_and_consumer, env=env, backend=None)
    assert theirs == ours


# ---- the engine's own first scripts


def random_text(size):
    choices = string.ascii_letters + string.digits + string.punctuation
    return "".join(random.choices(choices, k=size)).encode()


def initiator(me, circles):
    """The target initializes and does nothing else."""
    from mooncake.engine import TransferEngine

    adaptor = TransferEngine()
    assert adaptor.initialize(f"{LOOPBACK}:12345", "P2PHANDSHAKE", "tcp", "") == 0
    own = f"{LOOPBACK}:{adaptor.get_rpc_port()}"
    if me.rank == 0:
        me.board.set("target", own)
        me.board.wait("done")
        return
    target = me.board.wait("target")
    source = adaptor.get_first_buffer_address(own)
    there = adaptor.get_first_buffer_address(target)
    assert source
    assert there
    for _ in range(circles):
        text = random_text(random.randint(16, 256))
        size = len(text)
        assert adaptor.write_bytes_to_buffer(source, text, size) == 0
        assert adaptor.transfer_sync_write(target, source, there, size) == 0
        assert adaptor.write_bytes_to_buffer(source, bytes(size), size) == 0
        assert adaptor.transfer_sync_read(target, source, there, size) == 0
        assert adaptor.read_bytes_from_buffer(source, size) == text

    batch = 100
    sources = [source + i * 1024 for i in range(batch)]
    places = [there + i * 1024 for i in range(batch)]
    for write, read, end in (
        (adaptor.batch_transfer_sync_write, adaptor.batch_transfer_sync_read, lambda code: code),
        (
            adaptor.batch_transfer_async_write,
            adaptor.batch_transfer_async_read,
            lambda number: adaptor.get_batch_transfer_status([number]) if number != 0 else -1,
        ),
    ):
        for _ in range(max(2, circles // 100)):
            texts = [random_text(random.randint(32, 128)) for _ in range(batch)]
            sizes = [len(text) for text in texts]
            for address, text in zip(sources, texts, strict=True):
                assert adaptor.write_bytes_to_buffer(address, text, len(text)) == 0
            assert end(write(target, sources, places, sizes)) == 0
            for address, size in zip(sources, sizes, strict=True):
                assert adaptor.write_bytes_to_buffer(address, bytes(size), size) == 0
            assert end(read(target, sources, places, sizes)) == 0
            for address, text in zip(sources, texts, strict=True):
                assert adaptor.read_bytes_from_buffer(address, len(text)) == text

    # With managed buffers, and asynchronous by one call for each.
    size = 8192
    mine = adaptor.allocate_managed_buffer(size)
    text = random_text(size)
    assert adaptor.write_bytes_to_buffer(mine, text, size) == 0
    number = adaptor.transfer_submit_write(target, mine, there, size)
    assert number > 0
    while (state := adaptor.transfer_check_status(number)) == 0:
        pass
    assert state == 1
    back = adaptor.allocate_managed_buffer(size)
    assert adaptor.transfer_sync_read(target, back, there, size) == 0
    assert adaptor.read_bytes_from_buffer(back, size) == text
    assert adaptor.free_managed_buffer(mine, size) == 0
    assert adaptor.free_managed_buffer(back, size) == 0
    me.board.set("done")


def test_what_the_first_scripts_assert(env):
    harness.run_ranks(2, initiator, 300, env=env, backend=None)
