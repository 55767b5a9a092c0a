#!/usr/bin/env bash
# Tests and timings on a GPU, in parts of some minutes each. Where there is none it says so and succeeds.
# Usage: tests/gpu/run.sh [driver] [kernels] [suites] [speed]   without arguments: all
#   driver   the seam to CUDA's driver, function by function (C++): launches a kernel, shares memory between two
#            processes, and kills its owner
#   kernels  collectives and rows for experts by kernels, also in CUDA graphs, with one rank and with several on the GPU,
#            and with ranks that are killed and stopped
#   suites   the suites of device tensors, with tensors of CUDA
#   speed    all_reduce of CUDA tensors beside its parts, beside NCCL and Gloo; rows for experts by kernels
set -euo pipefail
cd "$(dirname "$0")/../.."

parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(driver kernels suites speed)
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
  echo "no GPU on this machine: nothing to run"
  exit 0
fi
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv

# A machine without a network brings torch and the tools itself.
if [ ! -e .venv/torch.stamp ] && python3 -c 'import aiohttp, hypothesis, numpy, pytest, setuptools, torch, xdist' 2>/dev/null; then
  [ -x .venv/bin/python ] || python3 -m venv --system-site-packages .venv
  MOONCAKE_BUILD_SIM=1 .venv/bin/python -m pip install -q --no-index --no-build-isolation --no-deps -e .
else
  tests/setup_env.sh
fi
export PATH="$PWD/.venv/bin:$PATH"
python - <<'PYTHON'
import torch
from mooncake_backend import extension

print("torch", torch.__version__, "sees", torch.cuda.device_count(), "CUDA devices")
print("extension", extension.load().build_info())
assert torch.cuda.is_available(), "nvidia-smi shows a GPU, but torch cannot use it"
print("one addition on the GPU:", (torch.ones(4, device="cuda") + 1).sum().item(), "(8 expected)")
works, _, text = extension.load().describe_accelerators("cuda")[0]
assert works, text
PYTHON

driver() {
  cmake -S csrc -B build/cpp-gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DMOONCAKE_BUILD_TESTS=ON \
    -DMOONCAKE_BUILD_EXTENSION=OFF -DMOONCAKE_TEST_FILES='cuda_' >build/cpp-gpu.log
  cmake --build build/cpp-gpu --target mooncake_tests -j "$(nproc)" >>build/cpp-gpu.log
  build/cpp-gpu/mooncake_tests --gtest_filter='*Cuda*:-Cuda/PeerMemorySuite/*' --gtest_brief=1
  # One process each, with their names: an error of the driver may end the context of all that follow.
  for test in TwoMappingsShowOneMemory KernelsWriteSharedMemory MemoryOutlivesTheProcessThatIsKilled; do
    build/cpp-gpu/mooncake_tests --gtest_filter="Cuda/PeerMemorySuite/*.$test" | grep -E '^\[ .*(OK|FAILED|SKIPPED)'
  done
}

# One test at a time: the blocks of all ranks that wait for each other must fit on the GPU, or take turns.
kernels() {
  TEST_DEVICE=cuda python -m pytest -q -m '' tests/test_peer_kernels.py tests/test_peer_two_shot.py tests/test_peer_verbs.py \
    tests/test_symmetric_memory.py tests/test_graphs.py tests/test_staged_graphs.py tests/test_ep_kernels.py tests/test_ep_graphs.py \
    tests/test_ep_token_kernels.py
  TEST_DEVICE=cuda python -m pytest -q -m '' -k device-kernels tests/test_ep_buffer.py tests/test_ep_shapes.py \
    tests/test_ep_callers.py tests/test_ep_failures.py tests/test_ep_normal.py tests/test_ep_elastic.py
}

# Ranks share the GPU if there are fewer than ranks.
suites() {
  TEST_DEVICE=cuda python -m pytest -q -n 4 -m '' -k "(device or cuda) and not kernels" tests/test_collectives.py tests/test_async.py \
    tests/test_groups.py tests/test_point_to_point.py tests/test_ecosystem.py \
    tests/test_ep_buffer.py tests/test_ep_shapes.py tests/test_ep_callers.py
}

# NCCL puts several ranks on one GPU only when it is told to.
speed() {
  export NCCL_MULTI_RANK_GPU_ENABLE=1
  python benchmarks/bench_device.py --device cuda -b 1K -e 64M -f 16 --ranks 2,4
  python benchmarks/bench_collectives.py --device cuda -b 1K -e 16M -f 16 --ranks 2,4 --ops all_reduce \
    --backends mooncake,nccl,gloo
  python benchmarks/bench_peer_table.py --device cuda -b 1K -e 1M --ranks 2,4 --write build/peers.txt
  for tokens in 1 128 512; do python benchmarks/bench_ep_device.py --device cuda --ranks 8 --tokens "$tokens"; done
  python benchmarks/bench_ep_device.py --device cuda --ranks 8 --tokens 4096 --normal
  for words in 1 0; do MOONCAKE_EP_STREAM_WORDS=$words python benchmarks/bench_ep_device.py --device cuda --ranks 8 --staged; done
}

mkdir -p build
for part in "${parts[@]}"; do
  printf '\n\033[1m[gpu] %s\033[0m\n' "$part"
  time "$part"
done
