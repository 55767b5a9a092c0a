"""Names of engines in a metadata server: the server's answers, and engines that use it."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from urllib.parse import quote

import harness
import numpy as np
import pytest
from engines import BYTES, LOOPBACK, pattern

from mooncake_backend import metadata_server

PROGRAMS = ["mooncake_backend.metadata_server", "mooncake.http_metadata_server"]


@pytest.fixture
def server():
    """One in this process; (host, port)."""
    with metadata_server.Server(LOOPBACK, 0) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served.server_address
        served.shutdown()
        thread.join()


def ask(server, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection(*server, timeout=10)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_what_the_server_answers(server):
    ram, rpc = "/metadata?key=mooncake/ram/a%3A1", "/metadata?key=mooncake%2Frpc_meta%2Fa"
    assert ask(server, "GET", ram) == (404, b"metadata not found")
    assert ask(server, "DELETE", ram) == (404, b"metadata not found")
    assert ask(server, "PUT", ram, b"\x00one") == (200, b"metadata updated")
    assert ask(server, "PUT", ram, b"two") == (200, b"metadata updated")
    assert ask(server, "GET", "/metadata?key=mooncake%2Fram%2Fa:1") == (200, b"two")
    assert ask(server, "DELETE", ram) == (200, b"metadata deleted")
    assert ask(server, "GET", ram)[0] == 404
    assert ask(server, "PUT", rpc, b"here") == (200, b"metadata updated")
    assert ask(server, "PUT", rpc, b"here") == (200, b"metadata unchanged")
    assert ask(server, "PUT", rpc, b"there") == (400, b"Duplicate rpc_meta key not allowed")
    assert ask(server, "GET", rpc) == (200, b"here")
    assert ask(server, "GET", "/metadata") == (400, b"metadata key is required")
    assert ask(server, "GET", "/metadata?key=%20") == (400, b"metadata key is required")
    assert ask(server, "GET", "/metadata?key=" + "x" * 5000)[0] == 400
    assert ask(server, "GET", "/other?key=a")[0] == 404
    assert ask(server, "POST", ram, b"x") == (405, b"Method not allowed")
    assert ask(server, "PUT", ram, headers={"Content-Length": str(1 << 40)})[0] == 413
    assert ask(server, "PUT", ram, headers={"Content-Length": "-1"})[0] == 411


def test_strangers_do_not_hold_it_up(server):
    with contextlib.ExitStack() as stack:
        for text in (
            b"",
            b"GET",
            b"\x16\x03\x01" + bytes(100),
            b"PUT /metadata?key=a HTTP/1.1\r\n",
        ):
            caller = socket.create_connection(server, timeout=10)
            stack.enter_context(caller)
            caller.sendall(text)
        assert ask(server, "PUT", "/metadata?key=a", b"x")[0] == 200


@pytest.mark.parametrize(
    "module", ["mooncake_backend.metadata_server", "mooncake.http_metadata_server"]
)
def test_the_program(module):
    # Also where whoever runs the tests ignores Ctrl-C, as jobs in the background do.
    with subprocess.Popen(
        [sys.executable, "-m", module, "--port", "0"], stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as program:  # fmt: skip
        try:
            said = program.stderr.readline()
            # 127.0.0.1, unless told otherwise.
            port = int(said.rpartition("http://127.0.0.1:")[2].removesuffix("/metadata\n"))
            assert ask((LOOPBACK, port), "GET", "/metadata?key=a")[0] == 404
            program.send_signal(signal.SIGINT)
            assert program.wait(10) == 0
        finally:
            program.kill()


# ---- engines


def engine_of(name, url, initialize_ext=False):
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if initialize_ext:
        return engine, engine.initialize_ext(name, url.removeprefix("http://"), "tcp", "", "http")
    return engine, engine.initialize(name, url, "tcp", "")


def by_name(me, url):
    engine, code = engine_of(f"host-of-{me.rank}:1234", url, initialize_ext=me.rank == 1)
    assert code == 0
    memory = pattern(BYTES, me.rank)
    assert engine.register_memory(memory.ctypes.data, BYTES) == 0
    if me.rank == 0:
        me.board.set("address", int(memory.ctypes.data))
        me.board.wait("done")
        return
    there = me.board.wait("address")
    target = "host-of-0:1234"
    assert engine.transfer_sync_read(target, memory.ctypes.data, there, BYTES) == 0
    assert (memory == pattern(BYTES, 0)).all()
    assert engine.send_probe(target) == 0
    assert engine.send_probe("nobody") == -200
    assert engine.transfer_sync_read("nobody", memory.ctypes.data, there, 8) == -1
    # Whoever is there keeps its name.
    assert engine_of(target, url)[1] == -1
    me.board.set("done")
    return


@pytest.mark.parametrize("cluster", ["", "prod"])
def test_engines_find_each_other_by_name(server, cluster):
    host, port = server
    env = {"MC_METADATA_CLUSTER_ID": cluster, "MC_TCP_BIND_ADDRESS": LOOPBACK}
    url = f"http://{host}:{port}/metadata"
    with harness.Crew(2, env=env, backend=None) as crew:
        crew.call(by_name, url)
        assert "knows no segment" in crew.log(1)
        assert 'the name "host-of-0:1234" is taken' in crew.log(1)
    # Names go with their engines.
    key = f"{cluster + '/' if cluster else ''}mooncake/rpc_meta/host-of-0:1234"
    assert ask(server, "GET", f"/metadata?key={quote(key)}")[0] == 404


def takes_over(me, url, name):
    engine, code = engine_of(name, url)
    assert code == 0
    memory = np.zeros(64, dtype=np.uint8)
    assert engine.register_memory(memory.ctypes.data, 64) == 0
    return engine.transfer_sync_read(name, memory.ctypes.data, memory.ctypes.data + 8, 8)


def test_a_dead_engines_name_is_taken_over(server):
    host, port = server
    with socket.socket() as gone:
        gone.bind((LOOPBACK, 0))
        record = {
            "ip_or_host_name": LOOPBACK,
            "rpc_port": gone.getsockname()[1],
            "engine": "mooncake-backend",
        }
    assert ask(server, "PUT", "/metadata?key=mooncake/rpc_meta/n", json.dumps(record))[0] == 200
    env = {"MC_TCP_BIND_ADDRESS": LOOPBACK}
    url = f"http://{host}:{port}/metadata"
    assert harness.run_ranks(1, takes_over, url, "n", env=env, backend=None) == [0]


@pytest.mark.parametrize(
    "record",
    [
        b'{"ip_or_host_name":"127.0.0.1","rpc_port":15001}',
        b'{"engine":"another","rpc_port":1}',
        b'{"engine":"mooncake-backend"}',
        b'{"engine":"mooncake-backend","ip_or_host_name":"127.0.0.1","rpc_port":99999}',
        b'{"engine":"mooncake-backend","ip_or_host_name":{},"rpc_port":1}',
        b"[",
        b"",
        b"{" * 100_000,
        bytes(range(256)),
    ],
)
def test_what_others_wrote_is_refused(server, record):
    assert ask(server, "PUT", "/metadata?key=mooncake/rpc_meta/foreign", record)[0] == 200
    host, port = server
    env = {"MC_TCP_BIND_ADDRESS": LOOPBACK}
    url = f"http://{host}:{port}/metadata"
    assert harness.run_ranks(1, opens, url, "foreign", env=env, backend=None) == [(0, "")]


def opens(me, url, name):
    engine, code = engine_of("me", url)
    return code, engine.get_transport(name)


def test_a_server_that_is_not_there():
    with harness.Crew(1, backend=None) as crew:
        assert crew.call(opens, "http://127.0.0.1:9/metadata", "x") == [(-1, "")]
        assert "metadata server http://127.0.0.1:9/metadata: " in crew.log(0)
