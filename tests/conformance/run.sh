#!/usr/bin/env bash
# Runs torch's suite on any torch from 2.8 on, in an environment of its own (build/torch-VERSION).
# Usage: tests/conformance/run.sh VERSION [arguments of tests/conformance]
set -euo pipefail
cd "$(dirname "$0")/../.."
version=${1:?"which torch, e.g. 2.15.0?"}
shift

export MOONCAKE_TORCH_VERSION=$version MOONCAKE_VENV=build/torch-$version
mkdir -p build
tests/setup_env.sh
exec "$MOONCAKE_VENV/bin/python" tests/conformance "$@"
