#!/usr/bin/env bash
# Tests and timings on a GPU, in parts of at most 8 minutes each (tests/gpu/parts.py). Where there is no GPU it says so and
# succeeds. Needs no network where torch and the tools are installed.
# Usage: tests/gpu/run.sh [part ...]   without arguments: all parts, one after the other
#        tests/gpu/run.sh setup        only builds and installs, which comes before the first part: some minutes
#        tests/gpu/run.sh --list       the parts
# tests/gpu/first.sh is the first look at such a machine, in ten minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."

[ "${1-}" != --list ] || exec python3 tests/gpu/parts.py --list
if ! command -v nvidia-smi >/dev/null || ! timeout 60 nvidia-smi -L 2>/dev/null | grep -q GPU; then
  echo "no GPU on this machine: nothing to run"
  exit 0
fi
timeout 60 nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv

# A machine without a network brings torch and the tools itself.
if [ ! -e .venv/torch.stamp ] && python3 -c 'import aiohttp, hypothesis, numpy, pytest, setuptools, torch, xdist' 2>/dev/null; then
  mkdir -p build/gpu
  timeout 470 tests/gpu/venv.sh .venv install >build/gpu/install.log 2>&1 || { tail -n 60 build/gpu/install.log; exit 1; }
else
  tests/setup_env.sh
fi
export PATH="$PWD/.venv/bin:$PATH"
timeout 120 python - <<'PYTHON'
import torch
from mooncake_backend import extension

print("torch", torch.__version__, "sees", torch.cuda.device_count(), "CUDA devices")
print("extension", extension.load().build_info())
assert torch.cuda.is_available(), "nvidia-smi shows a GPU, but torch cannot use it"
print("one addition on the GPU:", (torch.ones(4, device="cuda") + 1).sum().item(), "(8 expected)")
works, _, text = extension.load().describe_accelerators("cuda")[0]
assert works, text
PYTHON
[ "${1-}" != setup ] || exit 0
exec python tests/gpu/parts.py "$@"
