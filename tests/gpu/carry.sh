#!/usr/bin/env bash
# Builds .gpu/: the programs that a machine with a GPU may lack the tools for. Needs nvcc of CUDA 12.8 or later, CMake, Ninja
# and GoogleTest (libgtest-dev). The programs need no library but glibc, of this machine's version or a later one.
#   .gpu/probe, .gpu/probe.fatbin   tests/gpu/probe and its kernels
#   .gpu/mooncake_tests             the C++ tests of the seam to CUDA, with the library's kernels inside
# Usage: tests/gpu/carry.sh          all of them: ten minutes on one core
#        tests/gpu/carry.sh probe    the probe alone: seconds
set -euo pipefail
cd "$(dirname "$0")/../.."

mkdir -p .gpu
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
read -ra kernel_flags <<<"$(tr '\n' ' ' <kernels/nvcc.txt)"
alone=(-static-libstdc++ -static-libgcc)

"$nvcc" "${kernel_flags[@]}" -allow-unsupported-compiler -I. -fatbin -o .gpu/probe.fatbin tests/gpu/probe/kernels.cu
"${CXX:-c++}" -std=c++20 -O2 -Wall -Wextra -Wno-missing-field-initializers -Werror "${alone[@]}" -isystem "$cuda/include" \
  -o .gpu/probe tests/gpu/probe/*.cc -ldl -lpthread
[ "${1-}" != probe ] || exit 0

cmake -S csrc -B build/cpp-carried -G Ninja -DCMAKE_BUILD_TYPE=Release -DMOONCAKE_BUILD_TESTS=ON \
  -DMOONCAKE_BUILD_EXTENSION=OFF -DMOONCAKE_WITH_KERNELS=ON -DMOONCAKE_TEST_FILES=cuda_ \
  -DCMAKE_EXE_LINKER_FLAGS="${alone[*]}"
cmake --build build/cpp-carried --target mooncake_tests -j "$(nproc)"
strip -o .gpu/mooncake_tests build/cpp-carried/mooncake_tests
ls -l .gpu
