"""What mooncake-run adds to torchrun; mooncake_backend/run.py is the command."""
