#!/usr/bin/env bash
# Builds and tests the kernels on the CPU.
# Usage: tests/simt/run.sh [plain|address|thread|mutants|mutants-N/M ...]   default: the first three
# mutants-N/M: each M-th mutant, counted from N.
# MOONCAKE_SIMT_SEEDS=100 tries so many times as many schedules.
set -euo pipefail
cd "$(dirname "$0")/../.."

# clang's thread sanitizer is ten times as fast here as that of g++ 12.
export CXX=${CXX:-clang++}
flavours=("$@")
[ ${#flavours[@]} -gt 0 ] || flavours=(plain address thread)

build() { # flavour, sanitizer
  local build=build/simt-$1
  mkdir -p build
  cmake -S tests/simt -B "$build" -G Ninja -DMOONCAKE_SANITIZE="$2" >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
  cmake --build "$build" -j "$(nproc)" >"$build.log" 2>&1 || { tail -n 100 "$build.log"; exit 1; }
}

# Each core runs a share of the tests.
run() { # flavour, then a command in front of the tests
  local log=build/simt-$1.races shards failed=0 pids=() i
  shards=$(nproc)
  rm -f "$log".*
  for ((i = 0; i < shards; ++i)); do
    TSAN_OPTIONS=log_path=$log:${TSAN_OPTIONS-} GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$i \
      "${@:2}" "build/simt-$1/simt_tests" --gtest_brief=1 &
    pids+=($!)
  done
  for i in "${pids[@]}"; do wait "$i" || failed=1; done
  [ $failed = 0 ] || { echo "reports of the thread sanitizer: $log.*"; exit 1; }
}

for flavour in "${flavours[@]}"; do
  case $flavour in
    plain)
      build plain none
      run plain ;;
    address)
      build address address,undefined
      run address ;;
    thread)
      build thread thread
      # Its shadow memory has no place under the address randomization of newer kernels.
      if setarch -R true 2>/dev/null; then run thread setarch -R; else run thread; fi ;;
    mutants | mutants-*)
      turn=0/1
      [ "$flavour" = mutants ] || turn=${flavour#mutants-}
      python3 tests/simt/mutants.py --turn "$turn" ;;
    *) sed -n '2,5s/^# //p' "$0"; exit 2 ;;
  esac
done
