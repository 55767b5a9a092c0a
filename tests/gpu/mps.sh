#!/usr/bin/env bash
# Runs a command whose processes share the GPU by a server of NVIDIA's MPS, and ends the server. Without MPS on this machine
# it says so and runs nothing. It changes no setting of the GPU.
# Usage: tests/gpu/mps.sh COMMAND [argument ...]
set -uo pipefail

control=$(command -v nvidia-cuda-mps-control) || {
  echo "no nvidia-cuda-mps-control on this machine: not run with MPS"
  exit 0
}
folder=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY=$folder CUDA_MPS_LOG_DIRECTORY=$folder
end() {
  echo quit | timeout 10 "$control"
  tail -n 5 "$folder"/*.log 2>/dev/null
  rm -rf "$folder"
}
timeout 10 "$control" -d || exit
trap end EXIT
"$@"
