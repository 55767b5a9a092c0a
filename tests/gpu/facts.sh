#!/usr/bin/env bash
# Prints the facts about a machine with a GPU that explain the other results. It changes nothing, and no fact that is missing
# stops it.
cd "$(dirname "$0")/../.."

show() { # heading, command...
  local heading=$1
  shift
  printf '== %s\n' "$heading"
  timeout 20 "$@" 2>&1 || echo "($1: status $?)"
}

show commit git log -1 --format='%h %s'
show GPU nvidia-smi
show 'compute mode' nvidia-smi --query-gpu=compute_mode,mig.mode.current,persistence_mode --format=csv
show 'time slices' nvidia-smi compute-policy --list
show topology nvidia-smi topo -m
show kernel uname -a
show system sh -c '. /etc/os-release; echo "$PRETTY_NAME, $(ldd --version | head -n 1)"; nproc; free -g; df -h /dev/shm /tmp; id -u; ulimit -l'
show tools bash -c 'for tool in nvidia-cuda-mps-control compute-sanitizer nvcc g++ cmake ninja ip unshare ccache; do
  printf "%-26s %s\n" "$tool" "$(command -v "$tool" || ls "/usr/local/cuda/bin/$tool" 2>/dev/null || echo missing)"; done'
show compilers bash -c 'g++ --version | head -n 1; cmake --version | head -n 1; (nvcc || /usr/local/cuda/bin/nvcc) --version 2>/dev/null | tail -n 2'
show headers bash -c 'for header in "$(python3 -c "import sysconfig; print(sysconfig.get_path(\"include\"))")/Python.h" \
  /usr/include/gtest/gtest.h /usr/include/rdma/fabric.h /usr/local/cuda/include/cuda.h; do
  [ -e "$header" ] && echo "there: $header" || echo "missing: $header"; done'
show packages python3 - <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version

print(sys.version, "in", sys.prefix, "of", sys.base_prefix)
for name in ("torch", "setuptools", "wheel", "pip", "cmake", "ninja", "numpy", "pytest", "pytest-xdist", "hypothesis", "aiohttp"):
    try:
        print(f"{name:14} {version(name)}")
    except PackageNotFoundError:
        print(f"{name:14} missing")
PYTHON
show torch python3 -c 'import torch; print(torch.cuda.nccl.version(), torch.cuda.device_count(), (torch.ones(4, device="cuda") + 1).sum().item(), "(8 expected)")'
