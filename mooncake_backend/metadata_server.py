"""`mooncake_http_metadata_server`: where engines that were given "http://host:port/metadata" write
down where they answer.

GET, PUT and DELETE of /metadata?key=KEY. Values are bytes, kept in memory. A key with "rpc_meta" in
it names an engine: it is not overwritten by another value as long as it is there."""

from __future__ import annotations

import argparse
import logging
import socket
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

MOST_KEYS = 100_000
MOST_KEY_BYTES = 4096
MOST_VALUE_BYTES = 16 << 20
MOST_CONNECTIONS = 512
PATIENCE = 20.0  # seconds for a caller to say what it wants

log = logging.getLogger("mooncake_http_metadata_server")


class Values:
    """Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}

    def get(self, key: str) -> tuple[int, bytes]:
        with self._lock:
            value = self._values.get(key)
        return (404, b"metadata not found") if value is None else (200, value)

    def put(self, key: str, value: bytes) -> tuple[int, bytes]:
        with self._lock:
            known = self._values.get(key)
            if known is not None and "rpc_meta" in key:
                if known == value:
                    return 200, b"metadata unchanged"
                return 400, b"Duplicate rpc_meta key not allowed"
            if known is None and len(self._values) >= MOST_KEYS:
                return 507, b"too many keys"
            self._values[key] = value
        return 200, b"metadata updated"

    def delete(self, key: str) -> tuple[int, bytes]:
        with self._lock:
            value = self._values.pop(key, None)
        return (404, b"metadata not found") if value is None else (200, b"metadata deleted")


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "mooncake-metadata"
    timeout = PATIENCE

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _key(self) -> str | None:
        """What the request is about; None: it has been answered."""
        asked = urlsplit(self.path)
        if asked.path != "/metadata":
            self._answer(404, b"not found")
            return None
        key = parse_qs(asked.query).get("key", [""])[0].strip()
        if not key or len(key.encode("utf-8", "surrogatepass")) > MOST_KEY_BYTES:
            self._answer(400, b"metadata key is required")
            return None
        return key

    def do_GET(self) -> None:
        if (key := self._key()) is not None:
            self._answer(*self.server.values.get(key))

    def do_DELETE(self) -> None:
        if (key := self._key()) is not None:
            self._answer(*self.server.values.delete(key))

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_VALUE_BYTES:
            self.close_connection = True  # its body is not read
            self._answer(413 if length.isdecimal() else 411, b"a value has up to 16 MiB")
            return
        value = self.rfile.read(int(length))
        if len(value) == int(length) and (key := self._key()) is not None:
            self._answer(*self.server.values.put(key, value))

    def _refuse(self) -> None:
        self.close_connection = True
        self._answer(405, b"Method not allowed")

    do_POST = do_HEAD = do_PATCH = do_OPTIONS = _refuse  # noqa: N815

    def log_message(self, format: str, *arguments: Any) -> None:
        log.debug("%s %s", self.address_string(), format % arguments)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        self.values = Values()
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), Handler)

    def server_bind(self) -> None:
        """Without the reverse look-up of the host's name, which may take seconds."""
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        self._free.acquire()  # others wait in the kernel's queue
        try:
            super().process_request(request, client_address)
        except Exception:  # no thread; Ctrl-C comes when there is one, too, which gives it back
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection from %s ended early", client_address, exc_info=True)


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
    with Server(chosen.host, chosen.port) as server:
        host = f"[{chosen.host}]" if ":" in chosen.host else chosen.host
        log.info("engines are told: http://%s:%d/metadata", host, server.server_port)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            log.info("leaving")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
