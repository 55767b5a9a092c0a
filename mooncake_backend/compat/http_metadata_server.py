"""`python -m mooncake.http_metadata_server`."""

from mooncake_backend.metadata_server import Server, main

__all__ = ["Server", "main"]

if __name__ == "__main__":
    raise SystemExit(main())
