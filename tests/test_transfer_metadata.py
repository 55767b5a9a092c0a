"""Names of engines in a metadata server: the server's answers, and engines that use it."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from urllib.parse import quote

import harness
import numpy as np
import pytest
from engines import BYTES, LOOPBACK, pattern

from mooncake_backend import metadata_server, metadata_store
from mooncake_backend.metadata_server import KVBootstrapServer, KVPoll
from mooncake_backend.metadata_store import Answer, Budget, Store

pytest.importorskip("aiohttp")

PROGRAMS = ["mooncake_backend.metadata_server", "mooncake.http_metadata_server"]
RPC = "/metadata?key=mooncake%2Frpc_meta%2Fa"
MANY = 600  # connections: more than a server takes


@pytest.fixture
def server():
    """One in this process; (host, port)."""
    served = KVBootstrapServer(0, LOOPBACK)
    served.run()
    yield LOOPBACK, served.port
    served.close()
    assert not served.thread.is_alive()


@contextlib.contextmanager
def program(module=PROGRAMS[0], *flags):
    """The server as a process; its Popen and (host, port)."""
    # Also where whoever runs the tests ignores Ctrl-C, as jobs in the background do.
    with subprocess.Popen(
        [sys.executable, "-m", module, "--port", "0", *flags], stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        try:
            said = process.stderr.readline()
            # 127.0.0.1, unless told otherwise.
            port = int(said.rpartition("http://127.0.0.1:")[2].removesuffix("/metadata\n"))
            yield process, (LOOPBACK, port)
        finally:
            process.kill()


def ask(server, method, path, body=None, headers=None):
    status, text, _ = ask_all(server, method, path, body, headers)
    return status, text


def ask_all(server, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection(*server, timeout=10)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def test_what_the_server_answers(server):
    ram, rpc = "/metadata?key=mooncake/ram/a%3A1", RPC
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
    assert ask(server, "PUT", ram, headers={"Content-Length": "-1"})[0] == 400
    large = bytes(metadata_store.MOST_VALUE_BYTES)
    assert ask(server, "PUT", ram, large)[0] == 200
    assert ask(server, "GET", ram) == (200, large)
    assert ask(server, "PUT", ram, iter([large, b"x"]))[0] == 413  # chunks, of no known length
    assert ask(server, "GET", ram) == (200, large)


def test_a_value_is_replaced_or_deleted_only_if_it_is_the_one_that_was_seen(server):
    assert ask(server, "PUT", RPC, b"x", {"If-Match": '"0"'})[0] == 412
    assert ask(server, "PUT", RPC, b"first")[0] == 200
    seen = {"If-Match": ask_all(server, "GET", RPC)[2]["ETag"]}
    assert ask(server, "PUT", RPC, b"second", {"If-Match": '"0"'})[0] == 412
    assert ask(server, "DELETE", RPC, headers={"If-Match": '"0"'})[0] == 412
    assert ask(server, "PUT", RPC, b"second", seen) == (200, b"metadata updated")
    assert ask(server, "PUT", RPC, b"third", seen)[0] == 412
    assert ask(server, "DELETE", RPC, headers=seen) == (412, b"metadata has another value")
    assert ask(server, "GET", RPC) == (200, b"second")
    now = {"If-Match": ask_all(server, "GET", RPC)[2]["ETag"]}
    assert ask(server, "DELETE", RPC, headers=now) == (200, b"metadata deleted")
    assert ask(server, "DELETE", RPC, headers=now)[0] == 412


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


def test_many_slow_requests_do_not_lock_others_out():
    half = b"GET /metadata?key=a HTTP/1.1\r\nHost: a\r\nX-Slow: "
    with program() as (_, server), contextlib.ExitStack() as stack:
        callers = [
            stack.enter_context(socket.create_connection(server, timeout=10)) for _ in range(MANY)
        ]
        for _ in range(2):
            for caller in callers:
                # The server may have closed it to make room for another one.
                with contextlib.suppress(ConnectionError):
                    caller.sendall(half)
            assert ask(server, "PUT", "/metadata?key=a", b"x")[0] == 200
            # Nor do their bytes, which are no request now, fill the log: nobody reads this pipe.
            assert ask(server, "GET", "/metadata?key=a") == (200, b"x")


def is_closed(caller):
    """Whether the server closes it within 10 s."""
    caller.settimeout(10)
    try:
        while caller.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def is_refused(caller, data):
    """Sends a little more; whether the server has closed the connection."""
    time.sleep(0.02)
    try:
        caller.sendall(data)
    except ConnectionError:
        return True
    return False


def test_a_newcomer_closes_the_connection_that_has_been_idle_longest(monkeypatch, server):
    monkeypatch.setattr(metadata_server, "MOST_CONNECTIONS", 2)
    request = b"GET /metadata?key=a HTTP/1.1\r\nHost: a\r\n\r\n"
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(socket.create_connection(server, timeout=10)) for _ in range(2)
        )
        for caller in (second, first):
            caller.sendall(request)
            assert caller.recv(4096).startswith(b"HTTP/1.1 404")
        assert ask(server, "GET", "/metadata?key=a")[0] == 404
        assert is_closed(second)
        first.sendall(request)
        assert first.recv(4096).startswith(b"HTTP/1.1 404")


def test_a_request_that_comes_byte_by_byte_has_a_deadline(monkeypatch, server):
    monkeypatch.setattr(metadata_server, "PATIENCE", 0.3)
    with socket.create_connection(server, timeout=10) as caller:
        caller.sendall(b"PUT /metadata?key=a HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n")
        harness.until(lambda: is_refused(caller, b"x"), "the end of a slow request")
    assert ask(server, "GET", "/metadata?key=a")[0] == 404


def test_an_answer_that_nobody_reads_has_a_deadline(monkeypatch, server):
    monkeypatch.setattr(metadata_server, "PATIENCE", 0.3)
    assert ask(server, "PUT", "/metadata?key=a", bytes(1 << 20))[0] == 200
    with socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.settimeout(10)
        caller.connect(server)
        request = b"GET /metadata?key=a HTTP/1.1\r\nHost: a\r\n\r\n"
        harness.until(lambda: is_refused(caller, request), "the end of an unread answer")


def test_large_values_under_way_have_a_bound_of_their_own(monkeypatch, server):
    monkeypatch.setattr(metadata_store, "MOST_MOVING_BYTES", 256 << 10)
    served = KVBootstrapServer(0, LOOPBACK)
    served.run()
    try:
        small, large = bytes(64 << 10), bytes(200 << 10)
        assert ask((LOOPBACK, served.port), "PUT", "/metadata?key=a", large)[0] == 503
        assert ask((LOOPBACK, served.port), "PUT", "/metadata?key=a", small)[0] == 200
    finally:
        served.close()


def test_values_have_a_bound_and_a_clients_address_gets_half_of_it(monkeypatch):
    monkeypatch.setattr(metadata_store, "MOST_STORED_BYTES", 100_000)
    store, full = Store(), 507
    assert store.put("a", bytes(30_000), "one", None).status == 200
    assert store.put("b", bytes(30_000), "one", None).status == full  # more than half
    assert store.put("a", bytes(40_000), "one", None).status == 200  # in place of the 30,000
    assert store.put("b", bytes(30_000), "two", None).status == 200
    assert store.put("c", bytes(30_000), "three", None).status == full  # more than all
    assert store.put("c", bytes(20_000), "three", None).status == 200
    assert store.put("b", bytes(30_000), "two", None) == Answer(200, "metadata unchanged")
    # Nothing that is taken back leaves anything behind.
    assert store.put("b", bytes(10), "one", None).status == 200
    for key in "abc":
        assert store.delete(key, None).status == 200
    assert store.put("a", bytes(49_000), "two", None).status == 200
    assert store.put("b", bytes(49_000), "three", None).status == 200
    budget = Budget(10)
    assert [budget.change("one", 5), budget.change("one", 1)] == [True, False]


@pytest.mark.parametrize("module", PROGRAMS)
def test_the_program(module):
    with program(module) as (process, server):
        assert ask(server, "GET", "/metadata?key=a")[0] == 404
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


def test_without_aiohttp_the_program_says_what_to_install():
    code = "import sys; sys.modules['aiohttp'] = None\n"
    code += "from mooncake.http_metadata_server import main; raise SystemExit(main([]))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "): pip install aiohttp\n" in ended.stderr  # this package is not on PyPI


def test_the_server_as_programs_of_mooncake_start_it():
    from mooncake import http_metadata_server

    assert http_metadata_server.KVPoll is KVPoll
    server = http_metadata_server.KVBootstrapServer(port=0, host=LOOPBACK)
    assert server.poll() is KVPoll.Failed
    thread = server.run()
    assert server.poll() is KVPoll.Success
    assert ask((LOOPBACK, server.port), "PUT", "/metadata?key=a", b"x")[0] == 200
    other = KVBootstrapServer(server.port, LOOPBACK)
    with pytest.raises(OSError, match="address already in use"):
        other.run()
    assert other.poll() is KVPoll.Failed
    server.close()
    assert not thread.is_alive()
    assert server.poll() is KVPoll.Failed


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
    env = {"MC_METADATA_CLUSTER_ID": cluster, "MC_TCP_BIND_ADDRESS": LOOPBACK}
    url = url_of(server)
    with harness.Crew(2, env=env, backend=None) as crew:
        crew.call(by_name, url)
        assert "knows no segment" in crew.log(1)
        assert 'the name "host-of-0:1234" is taken' in crew.log(1)
    # Names go with their engines.
    key = f"{cluster + '/' if cluster else ''}mooncake/rpc_meta/host-of-0:1234"
    assert ask(server, "GET", f"/metadata?key={quote(key)}")[0] == 404


KEY = "/metadata?key=mooncake/rpc_meta/n"
ON_LOOPBACK = {"MC_TCP_BIND_ADDRESS": LOOPBACK, "MC_HANDSHAKE_CONNECT_TIMEOUT": "1"}


def url_of(server):
    host, port = server
    return f"http://{host}:{port}/metadata"


def record_of(port, **fields):
    return json.dumps({"ip_or_host_name": LOOPBACK, "rpc_port": port, **fields})


OURS = {"engine": "mooncake-backend"}
ENDED = {**OURS, "incarnation": "0" * 32}


def takes_over(me, url, name):
    engine, code = engine_of(name, url)
    if code != 0:
        return code
    memory = np.zeros(64, dtype=np.uint8)
    assert engine.register_memory(memory.ctypes.data, 64) == 0
    return engine.transfer_sync_read(name, memory.ctypes.data, memory.ctypes.data + 8, 8)


# Without fields: the record of an engine of Mooncake's.
@pytest.mark.parametrize("fields", [OURS, ENDED, {}], ids=["before", "ours", "Mooncake's"])
def test_a_dead_engines_name_is_taken_over(server, fields):
    with socket.socket() as gone:
        gone.bind((LOOPBACK, 0))
        record = record_of(gone.getsockname()[1], **fields)
    assert ask(server, "PUT", KEY, record)[0] == 200
    ranks = harness.run_ranks(
        1, takes_over, url_of(server), "n", env=ON_LOOPBACK, backend=None
    )  # fmt: skip
    assert ranks == [0]


def test_a_name_stays_with_a_program_that_listens_and_does_not_answer(server):
    with socket.create_server((LOOPBACK, 0)) as silent:
        assert ask(server, "PUT", KEY, record_of(silent.getsockname()[1]))[0] == 200
        with harness.Crew(1, env=ON_LOOPBACK, backend=None) as crew:
            assert crew.call(takes_over, url_of(server), "n") == [-1]
            assert 'the name "n" is taken: a program listens at 127.0.0.1:' in crew.log(0)
            assert "delete the name's key" in crew.log(0)


# No packet leaves for this address: the kernel has no way there.
UNREACHABLE = "255.255.255.255"


def test_a_name_stays_with_an_engine_that_cannot_be_reached_and_publishes(server, monkeypatch):
    """The engine may live where we do not reach it. Once it has not published its name for 30 s, it
    has ended."""
    fields = {**ENDED, "ip_or_host_name": UNREACHABLE}
    record = record_of(1, **fields)
    assert ask(server, "PUT", KEY, record)[0] == 200
    now = metadata_store.clock()
    with harness.Crew(1, env=ON_LOOPBACK, backend=None) as crew:
        monkeypatch.setattr(metadata_store, "clock", lambda: now + 20)
        assert crew.call(takes_over, url_of(server), "n") == [-1]
        assert 'the name "n" is taken: the engine that has it cannot be reached' in crew.log(0)
        assert "the name is free" in crew.log(0)
        assert ask(server, "PUT", KEY, record) == (200, b"metadata unchanged")
        monkeypatch.setattr(metadata_store, "clock", lambda: now + 40)
        assert crew.call(takes_over, url_of(server), "n") == [-1]
        monkeypatch.setattr(metadata_store, "clock", lambda: now + 60)
        assert crew.call(takes_over, url_of(server), "n") == [0]


def test_a_name_of_mooncakes_engine_that_cannot_be_reached_stays(server, monkeypatch):
    fields = {"ip_or_host_name": UNREACHABLE}
    assert ask(server, "PUT", KEY, record_of(1, **fields))[0] == 200
    later = metadata_store.clock() + 999
    monkeypatch.setattr(metadata_store, "clock", lambda: later)
    with harness.Crew(1, env=ON_LOOPBACK, backend=None) as crew:
        assert crew.call(takes_over, url_of(server), "n") == [-1]
        assert "delete the name's key" in crew.log(0)


def at_the_old_port(me, server, name, fields):
    """Opens a name whose record leads to another engine, then takes it over."""
    url = url_of(server)
    other, code = engine_of("other", url)
    assert code == 0
    memory = np.zeros(64, dtype=np.uint8)
    address = memory.ctypes.data
    assert other.register_memory(address, 64) == 0
    # The answer of the other engine must not pass for the one of this name.
    record = record_of(other.get_rpc_port(), **fields)
    assert ask(server, "PUT", KEY, record)[0] == 200
    assert other.transfer_sync_read(name, address, address + 8, 8) == -1
    assert other.send_probe(name) != 0
    engine, code = engine_of(name, url)
    assert code == 0
    assert other.send_probe(name) == 0
    # The name goes to another engine meanwhile: the first one leaves it there.
    new = record_of(1, **fields)
    assert ask(server, "DELETE", KEY)[0] == 200
    assert ask(server, "PUT", KEY, new)[0] == 200
    del engine
    assert ask(server, "GET", KEY) == (200, new.encode())


@pytest.mark.parametrize("fields", [OURS, ENDED], ids=["before", "ours"])
def test_a_name_whose_port_belongs_to_another_engine_is_taken_over(server, fields):
    with harness.Crew(1, env=ON_LOOPBACK, backend=None) as crew:
        crew.call(at_the_old_port, server, "n", fields)
        assert "at 127.0.0.1:" in crew.log(0)
        assert '"other" answers now' in crew.log(0)


def outlives_its_server(me):
    """Rank 0 runs the server, too. It switches its role: new memory, while the server is away."""
    if me.rank == 0:
        served = KVBootstrapServer(0, LOOPBACK)
        served.run()
        me.board.set("port", served.port)
    port = me.board.wait("port")
    url = url_of((LOOPBACK, port))
    engine, code = engine_of(f"engine-{me.rank}", url)
    assert code == 0
    first, second, third = (pattern(BYTES, 10 * me.rank + number) for number in range(3))
    assert engine.register_memory(first.ctypes.data, BYTES) == 0
    if me.rank == 0:
        me.board.set("first", first.ctypes.data)
        me.board.wait("connected")
        served.close()
        assert engine.unregister_memory(first.ctypes.data) == 0
        assert engine.register_memory(second.ctypes.data, BYTES) == 0
        me.board.set("second", second.ctypes.data)
        me.board.wait("second read")
        served = KVBootstrapServer(port, LOOPBACK)
        served.run()
        assert engine.register_memory(third.ctypes.data, BYTES) == 0
        me.board.set("third", third.ctypes.data)
        me.board.wait("third read")
        served.close()
        return
    mine = first.ctypes.data

    def reads(reader, name, number):
        code = reader.transfer_sync_read("engine-0", mine, me.board.wait(name), BYTES)
        return code == 0 and (first == pattern(BYTES, number)).all()

    assert reads(engine, "first", 0)
    me.board.set("connected")
    # Connected peers need no server.
    assert reads(engine, "second", 1)
    assert engine.send_probe("engine-0") == 0
    me.board.set("second read")
    # Newcomers find the names of engines that have registered memory since the server is back.
    me.board.wait("third")
    assert engine.unregister_memory(mine) == 0
    newcomer, code = engine_of("newcomer", url)
    assert code == 0
    assert newcomer.register_memory(mine, BYTES) == 0
    harness.until(lambda: newcomer.send_probe("engine-0") == 0, "the name of engine 0")
    assert reads(newcomer, "third", 2)
    me.board.set("third read")


def test_engines_outlive_a_restart_of_the_server():
    with harness.Crew(2, env={"MC_TCP_BIND_ADDRESS": LOOPBACK}, backend=None) as crew:
        crew.call(outlives_its_server)


def waits_for_its_name(me):
    served = KVBootstrapServer(0, LOOPBACK)
    served.run()
    _, code = kept = engine_of("n", url_of((LOOPBACK, served.port)))
    assert code == 0
    served.close()
    served = KVBootstrapServer(served.port, LOOPBACK)
    served.run()
    server = (LOOPBACK, served.port)
    harness.until(lambda: ask(server, "GET", KEY)[0] == 200, "the name", deadline=30)
    served.close()
    del kept


@pytest.mark.slow
def test_a_name_comes_back_by_itself_within_30_seconds():
    harness.run_ranks(
        1, waits_for_its_name, env={"MC_TCP_BIND_ADDRESS": LOOPBACK}, backend=None
    )  # fmt: skip


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
    env = {"MC_TCP_BIND_ADDRESS": LOOPBACK}
    url = url_of(server)
    assert harness.run_ranks(1, opens, url, "foreign", env=env, backend=None) == [(0, "")]


def opens(me, url, name):
    engine, code = engine_of("me", url)
    return code, engine.get_transport(name)


def test_a_server_that_is_not_there():
    with harness.Crew(1, backend=None) as crew:
        assert crew.call(opens, "http://127.0.0.1:9/metadata", "x") == [(-1, "")]
        assert "metadata server http://127.0.0.1:9/metadata: " in crew.log(0)
