#!/usr/bin/env bash
# Sets everything up and runs the main job. Arguments go to `python -m mooncake_backend.demo` (--help lists them).
set -euo pipefail
cd "$(dirname "$0")/../.."

tests/setup_env.sh
exec .venv/bin/python -m mooncake_backend.demo "$@"
