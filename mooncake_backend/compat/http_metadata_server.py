"""`python -m mooncake.http_metadata_server`, and the names that programs import from it."""

from mooncake_backend.metadata_server import KVBootstrapServer, KVPoll, main

__all__ = ["KVBootstrapServer", "KVPoll", "main"]

if __name__ == "__main__":
    raise SystemExit(main())
