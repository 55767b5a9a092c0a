"""`mooncake_http_metadata_server`: a directory of transfer engines, by name.

An engine that is given "http://host:port/metadata" publishes its address there. The server takes
GET, PUT and DELETE of /metadata?key=KEY, and keeps values in memory. It needs aiohttp."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mooncake_backend import metadata_store
from mooncake_backend.metadata_store import Budget, Lease, Store

if TYPE_CHECKING:
    from aiohttp import web

MOST_CONNECTIONS = 512
BACKLOG = 512
# Longest time, in seconds, from the start of a connection, or from its last answer, to the end of
# the next request.
PATIENCE = 20.0
SMALL = 64 << 10  # bytes; values up to this size do not count against the budget for moving values

log = logging.getLogger("mooncake_http_metadata_server")


def load_aiohttp() -> ModuleType:
    """aiohttp.web. ImportError says how to install it."""
    try:
        from aiohttp import web
    except ImportError as error:
        raise ImportError(
            f"the metadata server needs aiohttp, which cannot be imported ({error}): "
            "pip install aiohttp"
        ) from error
    return web


class BadRequestsAreQuiet(logging.Filter):
    """Drops aiohttp's traceback for each request that does not parse. Otherwise unknown clients
    could fill a disk with tracebacks, or block the server at a full pipe."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        # By name: the class moves between aiohttp's modules.
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return "HttpProcessingError" not in kinds


class Connections:
    """Every open connection, the longest idle one first. Used by the event loop's thread only."""

    def __init__(self) -> None:
        self._open: OrderedDict[Connection, None] = OrderedDict()

    def add(self, connection: Connection) -> None:
        """Adds a connection. If there are too many, closes the one that has been idle longest."""
        while len(self._open) >= MOST_CONNECTIONS:
            longest_idle, _ = self._open.popitem(last=False)
            longest_idle.abort("512 connections are open, and it was idle longest")
        self._open[connection] = None

    def touch(self, connection: Connection) -> None:
        if connection in self._open:
            self._open.move_to_end(connection)

    def remove(self, connection: Connection) -> None:
        self._open.pop(connection, None)


class Connection(asyncio.Protocol):
    """One client. Passes its bytes to aiohttp, and bounds the time of a request. aiohttp has no
    limit for a request whose bytes come slowly, nor for an answer that the client does not read."""

    def __init__(self, inner: Any, connections: Connections) -> None:
        self._inner = inner
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def await_request(self) -> None:
        """Starts the time for the next request: at the start, and after each answer."""
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            loop = asyncio.get_running_loop()
            text = f"no whole request, or no end of its answer, within {PATIENCE:g} s"
            self._timer = loop.call_later(PATIENCE, self.abort, text)

    def abort(self, cause: str) -> None:
        if self._transport is not None:
            log.debug("%s: closed: %s", self._transport.get_extra_info("peername"), cause)
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)
        self.await_request()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._connections.touch(self)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        result: bool | None = self._inner.eof_received()
        return result

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._connections.touch(self)
        self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.remove(self)
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._inner.connection_lost(error)


class Requests:
    """Answers requests from a store. Used by the event loop's thread only."""

    def __init__(self, web: ModuleType) -> None:
        self._web = web
        self._store = Store()
        self._moving = Budget(metadata_store.MOST_MOVING_BYTES)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._answer(request)
        finally:
            if request.transport is not None:
                connection = request.transport.get_protocol()
                if isinstance(connection, Connection):
                    connection.await_request()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.method not in ("GET", "PUT", "DELETE"):
            return self._say(405, "Method not allowed", closes=True)
        key = request.query.get("key", "").strip()
        size = len(key.encode("utf-8", "surrogatepass"))
        if not 0 < size <= metadata_store.MOST_KEY_BYTES:
            # The body of a refused PUT is not read.
            return self._say(400, "metadata key is required", closes=request.method == "PUT")
        tags: Collection[str] | None = None
        if request.if_match is not None:
            tags = [tag.value for tag in request.if_match]
        with Lease(self._moving, request.remote or "") as lease:
            if request.method == "GET":
                return await self._send(request, key, lease)
            if request.method == "DELETE":
                answer = self._store.delete(key, tags)
                return self._say(answer.status, answer.text)
            body = await self._receive(request, lease)
            if not isinstance(body, bytes):
                return body
            answer = self._store.put(key, body, request.remote or "", tags)
            return self._say(answer.status, answer.text)

    async def _receive(self, request: web.Request, lease: Lease) -> bytes | web.Response:
        """Returns the request's body, or the answer that refuses it."""
        body = bytearray()
        if (request.content_length or 0) > metadata_store.MOST_VALUE_BYTES:
            return self._say(413, "a value has up to 1 MiB", closes=True)
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > metadata_store.MOST_VALUE_BYTES:
                return self._say(413, "a value has up to 1 MiB", closes=True)
            if len(body) > SMALL and not lease.grow(len(chunk)):
                return self._say(503, "too many large values are under way", closes=True)
        return bytes(body)

    async def _send(self, request: web.Request, key: str, lease: Lease) -> web.StreamResponse:
        value = self._store.get(key)
        if value is None:
            return self._say(404, "metadata not found")
        headers = {
            "ETag": f'"{value.tag}"',
            "Age": str(value.age),
            "Content-Type": "application/json",
        }
        if len(value.data) <= SMALL:
            return self._web.Response(body=value.data, headers=headers)  # type: ignore[no-any-return]
        if not lease.grow(len(value.data)):
            return self._say(503, "too many large values are under way")
        headers["Content-Length"] = str(len(value.data))
        response: web.StreamResponse = self._web.StreamResponse(headers=headers)
        await response.prepare(request)
        for start in range(0, len(value.data), SMALL):
            await response.write(value.data[start : start + SMALL])
        await response.write_eof()
        return response

    def _say(self, status: int, text: str, closes: bool = False) -> web.Response:
        response: web.Response = self._web.Response(
            status=status, text=text, content_type="application/json"
        )
        if closes:
            response.force_close()
        return response


async def serve(host: str, port: int, ready: Callable[[int], object], end: asyncio.Event) -> None:
    """Serves until `end` is set. Calls `ready` with the port once clients may connect. OSError: the
    address cannot be listened on."""
    web = load_aiohttp()
    application = web.Application(client_max_size=metadata_store.MOST_VALUE_BYTES)
    application.router.add_route("*", "/metadata", Requests(web).answer)
    http_log = log.getChild("http")
    http_log.addFilter(quiet := BadRequestsAreQuiet())
    runner = web.AppRunner(
        application,
        access_log=None,
        handle_signals=False,
        handler_cancellation=True,
        keepalive_timeout=PATIENCE,
        lingering_time=2.0,
        logger=http_log,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    connections = Connections()
    try:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(runner.server(), connections),
            host,
            port,
            backlog=BACKLOG,
            reuse_address=True,
        )
        try:
            ready(server.sockets[0].getsockname()[1])
            await end.wait()
        finally:
            server.close()
    finally:
        await runner.cleanup()
        http_log.removeFilter(quiet)


class KVPoll(Enum):
    """The states of Mooncake's servers. A metadata server is in the first or in the last one."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


class KVBootstrapServer:
    """A metadata server on a thread of its own, with the methods of Mooncake's class."""

    def __init__(self, port: int, host: str = "0.0.0.0") -> None:
        load_aiohttp()
        self.port = port
        self.host = host
        self.thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None

    def run(self) -> threading.Thread:
        """Returns once clients may connect. Afterwards `port` is the port in use, also if 0 was
        given. OSError: the address cannot be listened on."""
        started: Future[int] = Future()
        self.thread = threading.Thread(
            target=self._serve, args=(started,), name="mooncake-metadata", daemon=True
        )
        self.thread.start()
        self.port = started.result()
        log.info("HTTP Metadata Server started on %s:%d", self.host, self.port)
        return self.thread

    def _serve(self, started: Future[int]) -> None:
        async def serve_here() -> None:
            self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
            await serve(self.host, self.port, started.set_result, self._end)

        try:
            asyncio.run(serve_here())
        except Exception as error:
            if not started.done():
                started.set_exception(error)
                return
            log.exception("the metadata server has ended")

    def close(self) -> None:
        """Returns when the server has ended, or after 10 s."""
        if self._loop is not None and self._end is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._end.set)
        if self.thread is not None:
            self.thread.join(timeout=10)

    def poll(self) -> KVPoll:
        is_alive = self.thread is not None and self.thread.is_alive()
        return KVPoll.Success if is_alive else KVPoll.Failed


async def serve_until_signal(host: str, port: int) -> None:
    end = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end.set)
    shown = f"[{host}]" if ":" in host else host
    await serve(
        host,
        port,
        lambda found: log.info("engines are told: http://%s:%d/metadata", shown, found),
        end,
    )
    log.info("leaving")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="mooncake_http_metadata_server", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (%(default)s)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (%(default)s; 0.0.0.0: all)"
    )
    parser.add_argument(
        "--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
    )
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=chosen.log_level, format="%(asctime)s %(name)s: %(message)s")
    try:
        asyncio.run(serve_until_signal(chosen.host, chosen.port))
    except (ImportError, OSError, socket.gaierror) as error:
        log.error("does not start: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
