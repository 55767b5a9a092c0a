#!/usr/bin/env bash
# Sets everything up and runs the tests. Arguments other than those below go to pytest, and then only Python's tests run.
# Usage: tests/run.sh                a first look, a quarter of an hour on two cores: C++, Python, a slice of torch's own suite
#        tests/run.sh --ci           the rest of what CI runs: format, lint and types, headers of other CUDAs and of the
#                                    oldest torch, kernels on the CPU, and by turns of commits sanitizers, a third of the
#                                    longer tests of Python, or the newest or oldest torch (20 minutes). CI_TURN=0 to 5
#                                    chooses the turn
#        tests/run.sh --changed      the tests of the rooms that differ from main
#        tests/run.sh --all          everything: also the slow tests, each sanitizer, lifetimes in Python under one of them,
#                                    torch's suite on three torches (hours)
#        tests/run.sh --sanitize address|undefined|thread|address,undefined [ctest arguments]   only the C++ tests
#        tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."

mode=first
case ${1-} in
  --all | --ci | --changed)
    mode=${1#--}
    [ $# = 1 ] || { sed -n '2,12s/^# //p' "$0"; exit 2; } ;;
  --sanitize)
    mode=sanitize sanitizer=${2:?"which sanitizer? address, undefined, thread or address,undefined"}
    shift 2 ;;
  ?*) mode=python ;;
esac

# The core is compiled for the C++ tests and for each torch: the compiler does it once.
export CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_DIR=${CCACHE_DIR:-$PWD/build/ccache} CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
export CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
packages=(ccache libgtest-dev iproute2)
[ "$mode" != all ] || packages+=(spin gcc)
case $mode in all | ci) packages+=(clang) ;; esac
tests/setup_env.sh "${packages[@]}"
export PATH="$PWD/.venv/bin:$PATH"
jobs=$(nproc)
set_up=$SECONDS

step() { printf '\n\033[1m[tests] %s\033[0m (%d s, after %d s of set-up)\n' "$*" $((SECONDS - set_up)) "$set_up"; }

# Without kernels for GPUs: no test here launches one, and nvcc takes a minute.
cpp() { # sanitizer or none, then arguments of ctest
  local build=build/cpp-${1//,/-} sanitizer=$1 runner=() # the linker takes a comma in a path for its own
  shift
  step "C++, sanitizer: $sanitizer"
  mkdir -p build
  cmake -S csrc -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DMOONCAKE_BUILD_TESTS=ON \
    -DMOONCAKE_BUILD_EXTENSION=OFF -DMOONCAKE_WITH_KERNELS=OFF -DMOONCAKE_SANITIZE="$sanitizer" -DMOONCAKE_TEST_FILES="${test_files-}" >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
  cmake --build "$build" -j "$jobs" >"$build.log" 2>&1 || { tail -n 100 "$build.log"; exit 1; }
  # The thread sanitizer cannot place its shadow memory under the address randomization of newer kernels.
  if [ "$sanitizer" = thread ] && setarch -R true 2>/dev/null; then runner=(setarch -R); fi
  "${runner[@]}" ctest --test-dir "$build" --output-on-failure -j "$jobs" "$@" | grep -vE '^ *([0-9]+/[0-9]+ .* Passed|Start)'
}

# Where threads of several rooms meet, as far as it takes seconds; everything is in --all.
thread_slice=(-R 'FlushAgent|MessageClose|EngineMessages|ProgressLock|LeaseTable|EventLoop|EngineOpen|IdleConnections|SharedWork|TransferEngineThreads')
thread_files='flush_agent|message_close|engine_test|progress_lock|lease_table|event_loop|engine_open|shared_work|transfer_engine_test'

python_tests() {
  step "Python"
  # Ranks wait for each other more than they compute: two tests at a time.
  python -m pytest tests -n "$jobs" --dist worksteal -q "$@"
}

# Memory that asynchronous calls touch after its end. The extension is built once more, as its own build was configured.
lifetimes() {
  step "Python, lifetimes of memory under the address sanitizer"
  local build=build/python-address overlay=build/python-address/overlay configured settings
  configured=$(ls -d build/cpython-*-torch"$(torch_version)"*/ | head -n 1)
  mapfile -t settings < <(sed -n 's/^\(MOONCAKE_[A-Z0-9_]*\):[A-Z]*=/-D\1=/p' "$configured/CMakeCache.txt")
  cmake -S csrc -B "$build" -G Ninja "${settings[@]}" -DCMAKE_BUILD_TYPE=Release -DMOONCAKE_SANITIZE=address >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
  cmake --build "$build" --target _C -j "$jobs" >"$build.log" 2>&1 || { tail -n 100 "$build.log"; exit 1; }
  rm -rf "$overlay"
  mkdir "$overlay"
  cp -r mooncake_backend "$overlay/"
  cp "$build"/_C*.so "$overlay/mooncake_backend/"
  # Leaks at Python's end are Python's own.
  PYTHONPATH=$PWD/$overlay ASAN_OPTIONS=detect_leaks=0:${ASAN_OPTIONS-} \
    LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so)" \
    python -m pytest -q -p no:cacheprovider tests/test_lifetimes.py
}

torch_version() { python -c 'import torch; print(torch.__version__.split("+")[0])'; }

torchs_suite() { # arguments of tests/conformance
  step "torch's own suite, torch $(torch_version) $*"
  python tests/conformance "$@"
}

other_torchs_suite() { # version, then arguments of tests/conformance
  step "torch's own suite, torch $*"
  tests/conformance/run.sh "$@"
}

headers() {
  step "headers of other CUDAs and torches"
  tests/headers.sh
}

kernels() {
  step "kernels on the CPU: $*"
  tests/simt/run.sh "$@"
}

lint() {
  step "format, lint, types"
  tests/lint.sh
}

case $mode in
  python) exec python -m pytest tests "$@" ;;
  sanitize) cpp "$sanitizer" "$@" ;;
  first)
    cpp none
    python_tests -m 'not slow and not perf and not ci'
    torchs_suite --every 8
    ;;
  ci)
    export CI=1 # no test of builds is skipped
    turn=${CI_TURN:-$(git rev-list --count HEAD)}
    lint
    headers
    case $((turn % 6)) in
      0)
        kernels plain address thread
        test_files=$thread_files cpp thread "${thread_slice[@]}"
        ;;
      1 | 2 | 3)
        kernels plain
        python_tests -m 'ci and not slow and not perf' --turn "$((turn % 6 - 1))/3"
        ;;
      4)
        kernels plain
        torchs_suite --every 4
        other_torchs_suite 2.15.0 --every 8
        # Torch has windows since then only; the environment is there now. `python -m` would find the clone's own _C first.
        step "windows, torch 2.15.0"
        build/torch-2.15.0/bin/pytest -q tests/test_window.py
        ;;
      5)
        kernels plain
        other_torchs_suite 2.8.0 --every 8 # the oldest torch; its wheels bring the headers of CUDA 12
        ;;
    esac
    torchs_suite --device fake --every 8
    ;;
  changed)
    mapfile -t chosen < <(python tests/rooms.py)
    lint
    [ -z "${chosen[0]}" ] || test_files=${chosen[0]} cpp none
    [ -z "${chosen[1]}" ] || { step "Python"; python -m pytest ${chosen[1]} -n "$jobs" --dist worksteal -q; }
    ;;
  all)
    lint
    headers
    MOONCAKE_SIMT_SEEDS=150 kernels plain
    kernels address thread mutants
    cpp none
    for sanitizer in thread address,undefined; do cpp "$sanitizer"; done
    python_tests -m 'not perf'
    lifetimes
    torchs_suite
    for version in 2.8.0 2.15.0; do other_torchs_suite "$version"; done
    build/torch-2.15.0/bin/pytest -q tests/test_window.py tests/test_lifetimes.py
    docs/models/run.sh --replay 10000
    ;;
esac
step "done"
