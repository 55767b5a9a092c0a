#!/usr/bin/env bash
# Sets everything up and runs the tests: C++, Python, then torch's own. Arguments go to pytest, and torch's are left out.
# Usage: tests/run.sh [pytest arguments]
#        tests/run.sh --sanitize address|undefined|thread|address,undefined   only the C++ tests, under a sanitizer
set -euo pipefail
cd "$(dirname "$0")/.."

sanitize=none
if [ "${1-}" = --sanitize ]; then
  sanitize=${2:?"which sanitizer? address, undefined, thread or address,undefined"}
  shift 2
fi

tests/setup_env.sh libgtest-dev iproute2
export PATH="$PWD/.venv/bin:$PATH"
jobs=$(nproc)

build=build/cpp-$sanitize
mkdir -p build
cmake -S csrc -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DMOONCAKE_BUILD_TESTS=ON \
  -DMOONCAKE_BUILD_EXTENSION=OFF -DMOONCAKE_SANITIZE="$sanitize" >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
cmake --build "$build" -j "$jobs"

runner=()
# The thread sanitizer cannot place its shadow memory under the address randomization of newer kernels.
if [ "$sanitize" = thread ] && setarch -R true 2>/dev/null; then runner=(setarch -R); fi
"${runner[@]}" ctest --test-dir "$build" --output-on-failure -j "$jobs"
[ "$sanitize" = none ] || exit 0

python -m pytest tests "$@"
[ $# = 0 ] || exit 0 # somebody asked for some of the tests
python tests/conformance
tests/conformance/run.sh 2.15.0 --every 8
# What torch has since then only; the environment is there now.
exec build/torch-2.15.0/bin/python -m pytest tests/test_window.py
