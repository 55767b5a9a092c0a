"""mooncake-run's additions to torchrun. mooncake_backend/run.py is the command."""
