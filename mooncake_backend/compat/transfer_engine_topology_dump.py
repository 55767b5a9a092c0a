"""`python -m mooncake.transfer_engine_topology_dump`."""

from mooncake_backend.topology_dump import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
