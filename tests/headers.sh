#!/usr/bin/env bash
# Compiles csrc/device/cuda against the headers of several CUDAs, and csrc/backend and csrc/bindings against those of
# the oldest torch. The headers come from wheels, into build/headers. Nothing is linked or run.
# Usage: tests/headers.sh [cuda] [torch]   both without an argument: 3 minutes on two cores
set -euo pipefail
cd "$(dirname "$0")/.."

# The oldest cuda.h that csrc/CMakeLists.txt takes comes first, then those of the wheels of torch 2.8 to 2.15.
cuda_wheels=(nvidia-cuda-runtime-cu12==12.0.146 nvidia-cuda-runtime-cu12==12.4.127 nvidia-cuda-runtime-cu12==12.6.77
  nvidia-cuda-runtime-cu12==12.8.90 nvidia-cuda-runtime==13.0.96)
# The wheel for this platform has the same headers, inside almost a gigabyte of code for GPUs.
torch_version=2.8.0
torch_platform=manylinux_2_28_aarch64

steps=("$@")
[ $# -gt 0 ] || steps=(cuda torch)
for step in "${steps[@]}"; do
  case $step in
    cuda | torch) ;;
    *) sed -n '2,4s/^# //p' "$0"; exit 2 ;;
  esac
done

tests/setup_env.sh
export PATH="$PWD/.venv/bin:$PATH"
compiler=(nice "${CXX:-c++}" -std=c++20 -fsyntax-only -Icsrc -I.)

headers() { # wheel, then options of pip; the headers are in build/headers/WHEEL afterwards
  local folder=build/headers/$1
  [ ! -e "$folder/complete" ] || return 0
  rm -rf "$folder"
  mkdir -p "$folder"
  pip download -q --no-deps --only-binary=:all: -d "$folder" "$@"
  python - "$folder" <<'END'
import sys, zipfile
from pathlib import Path

folder = Path(sys.argv[1])
for wheel in folder.glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if "/include/" in name])
    wheel.unlink()
END
  touch "$folder/complete"
}

# The names by which the library looks up the driver's functions. cuda.h renames a function whose arguments change.
driver_names() { # folder of cuda.h
  printf '#include "device/cuda/cuda_driver.h"\n#define LOOKED_UP(name) "looked up" name\nMOONCAKE_CUDA_FUNCTIONS(LOOKED_UP)\n' |
    "${CXX:-c++}" -std=c++20 -Icsrc -isystem "$1" -E -P -x c++ - | tr '\n' ' ' | grep -oE '"looked up" +\w+'
}

cuda() {
  local wheel folder names oldest=
  for wheel in "${cuda_wheels[@]}"; do
    headers "$wheel"
    folder=$(dirname "$(find "build/headers/$wheel" -name cuda.h)")
    printf '%s\0' csrc/device/cuda/cuda_*.cc |
      xargs -0 -n 1 -P "$(nproc)" "${compiler[@]}" -isystem "$folder" || {
      echo "csrc/device/cuda does not compile against $wheel: give values to names that its cuda.h lacks" >&2
      exit 1
    }
    names=$(driver_names "$folder")
    oldest=${oldest:-$names}
    [ "$names" = "$oldest" ] || {
      diff <(echo "$oldest") <(echo "$names") >&2 || true
      echo "$wheel gives other names to functions than ${cuda_wheels[0]}: a build with it would refuse older drivers" >&2
      exit 1
    }
  done
}

torch() {
  local wheel=torch==$torch_version include prefix=build/headers/torch.h python_include
  headers "$wheel" --platform "$torch_platform" --python-version 311
  include=build/headers/$wheel/torch/include
  python_include=$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')
  compiler+=(-fPIC -isystem "$include" -isystem "$include/torch/csrc/api/include" -isystem "$python_include"
    -DTORCH_EXTENSION_NAME=_C -DMOONCAKE_WITH_SIM "-DMOONCAKE_TORCH_VERSION=\"$torch_version\"" '-DMOONCAKE_VERSION="0"')
  # As in csrc/CMakeLists.txt, torch's headers are read once.
  echo '#include <torch/csrc/distributed/c10d/Backend.hpp>' >"$prefix"
  "${compiler[@]/-fsyntax-only/-Wall}" -x c++-header -o "$prefix.gch" "$prefix"
  find csrc/backend csrc/bindings -name '*.cc' -print0 |
    xargs -0 -n 1 -P "$(nproc)" "${compiler[@]}" -Wall -include "$prefix" || {
    echo "csrc/backend or csrc/bindings does not compile against torch $torch_version, the oldest that is supported" >&2
    exit 1
  }
}

for step in "${steps[@]}"; do
  echo "== headers: $step"
  "$step"
done
