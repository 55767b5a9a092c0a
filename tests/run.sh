#!/usr/bin/env bash
# Sets everything up and runs the tests. Arguments other than those below go to pytest, and then only Python's tests run.
# Usage: tests/run.sh                a first look, a quarter of an hour on two cores: C++, Python, a slice of torch's own suite
#        tests/run.sh --ci           the rest of what CI runs: format, lint and types, then parts of tests/turns.py, until 50
#                                    minutes are over: those that recent commits reach, and those whose turn it is (longer
#                                    tests, sanitizers, kernels on the CPU, other torches). CI_PARTS="kernels device" chooses
#        tests/run.sh --changed [BASE]   the tests that what differs from BASE reaches, by includes and imports
#                                    (tests/rooms.py); BASE is main if it is not given
#        tests/run.sh --all          everything: also the slow tests, each sanitizer, lifetimes in Python under one of them,
#                                    torch's suite on three torches (hours)
#        tests/run.sh --sanitize address|undefined|thread|address,undefined [ctest arguments]   only the C++ tests
#        tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."

mode=first
case ${1-} in
  --all | --ci | --changed)
    mode=${1#--} base=${2-main}
    [ $# = 1 ] || [ "$mode $#" = "changed 2" ] || { sed -n '2,13s/^# //p' "$0"; exit 2; } ;;
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
case $mode in all | ci | changed) packages+=(clang) ;; esac
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

# Seeds from 1 on: an ordinary run has 50. In cpp() a test may take two minutes only.
renewals() { # number of cases
  cpp none -N >/dev/null
  step "replacements of ranks that are killed at any step: $1 cases"
  MOONCAKE_TEST_CASES=$1 build/cpp-none/mooncake_tests --gtest_filter='RenewalSweep.*'
}

# Where threads of several rooms meet, as far as it takes seconds; everything is in --all.
thread_slice=(-R 'FlushAgent|MessageClose|EngineMessages|ProgressLock|LeaseTable|EventLoop|EngineOpen|IdleConnections|SharedWork|TransferEngineThreads')

python_tests() {
  step "Python"
  # Ranks wait for each other more than they compute: two tests at a time.
  python -m pytest -n "$jobs" --dist worksteal -q "$@"
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

part() { # name in tests/turns.py
  case $1 in
    longer) # pytest ends with 5 if none of these files has a longer test
      python_tests $(python tests/turns.py --files longer) -m 'ci and not slow and not perf' --most 500 || [ $? = 5 ] ;;
    longer-?) python_tests tests -m 'ci and not slow and not perf' --turn "${1#longer-}/8" ;;
    kernels) kernels plain ;;
    kernels-*) kernels "${1#kernels-}" ;;
    mutants) kernels "mutants-$(python tests/turns.py --mutants)" ;;
    headers) headers ;;
    renewals) renewals 300 ;;
    device) torchs_suite --device fake --every 8 ;;
    threads) test_files=$(python tests/turns.py --files threads) cpp thread "${thread_slice[@]}" ;;
    memory-?) test_files=$(python tests/turns.py --files "$1") cpp address,undefined ;;
    suite) torchs_suite --every 4 ;;
    oldest) other_torchs_suite 2.8.0 --every 8 ;; # its wheels bring the headers of CUDA 12
    newest)
      other_torchs_suite 2.15.0 --every 8
      # Torch has windows since then only; the environment is there now. `python -m` would find the clone's own _C first.
      step "windows, torch 2.15.0"
      build/torch-2.15.0/bin/pytest -q tests/test_window.py ;;
    *) echo "no part $1: see tests/turns.py" >&2; exit 2 ;;
  esac
}

case $mode in
  python) exec python -m pytest tests "$@" ;;
  sanitize) cpp "$sanitizer" "$@" ;;
  first)
    cpp none
    python_tests tests -m 'not slow and not perf and not ci'
    torchs_suite --every 8
    ;;
  ci)
    export CI=1 # no test of builds is skipped
    # All of CI takes at most 50 minutes on two idle cores.
    began=${CI_BEGAN:-$(($(date +%s) - 25 * 60))}
    lint
    mapfile -t parts < <(python tests/turns.py --minutes $((50 - ($(date +%s) - began) / 60)))
    for name in ${CI_PARTS-"${parts[@]}"}; do part "$name"; done
    ;;
  changed)
    git rev-parse --verify --quiet "$base^{commit}" >/dev/null || { echo "no commit $base" >&2; exit 2; }
    mapfile -t chosen < <(python tests/rooms.py "$base")
    lint
    [ -z "${chosen[0]}" ] || test_files=${chosen[0]} cpp none
    [ -z "${chosen[2]}" ] || kernels plain
    [ -z "${chosen[1]}" ] || python_tests ${chosen[1]}
    ;;
  all)
    lint
    headers
    MOONCAKE_SIMT_SEEDS=150 kernels plain
    kernels address thread mutants
    cpp none
    renewals 10000
    for sanitizer in thread address,undefined; do cpp "$sanitizer"; done
    python_tests tests -m 'not perf'
    lifetimes
    torchs_suite
    for version in 2.8.0 2.15.0; do other_torchs_suite "$version"; done
    build/torch-2.15.0/bin/pytest -q tests/test_window.py tests/test_lifetimes.py
    docs/models/run.sh --replay 10000
    ;;
esac
step "done"
