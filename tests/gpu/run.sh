#!/usr/bin/env bash
# Builds, imports and reports the GPU, and runs the suites of layout `device` on it. Where there is none it says so and succeeds.
set -euo pipefail
cd "$(dirname "$0")/../.."

if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
  echo "no GPU on this machine: nothing to run"
  exit 0
fi
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
tests/setup_env.sh
.venv/bin/python - <<'PYTHON'
import torch
from mooncake_backend import extension

print("torch", torch.__version__, "sees", torch.cuda.device_count(), "CUDA devices")
print("extension", extension.load().build_info())
assert torch.cuda.is_available(), "nvidia-smi shows a GPU, but torch cannot use it"
print("one addition on the GPU:", (torch.ones(4, device="cuda") + 1).sum().item(), "(8 expected)")
PYTHON

# Ranks share the GPU if there are fewer than ranks.
TEST_DEVICE=cuda .venv/bin/python -m pytest -q -k device tests/test_collectives.py tests/test_async.py \
  tests/test_groups.py tests/test_point_to_point.py tests/test_ep_buffer.py tests/test_ep_shapes.py tests/test_ep_callers.py
