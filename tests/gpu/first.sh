#!/usr/bin/env bash
# The first ten minutes on a machine with a GPU, which needs no network: facts, the probe of the driver, and the tests and
# timings that show the most (tests/gpu/first.py has the steps). tests/gpu/answers.md has the meaning of each answer.
#
# 1. Build here the programs that the machine may lack (ten minutes on one core). git ignores .gpu/:
#        tests/gpu/carry.sh
# 2. Run this there, in the clone with .gpu/ beside it. It ends within 570 seconds:
#        timeout 590 bash tests/gpu/first.sh
# The table of the steps is the end of the output. $OUT (without it: build/gpu/out) then has first.tgz: that table and all
# logs. The archive is written anew after each step, so it is there even if the machine is taken away.
#
# Usage: tests/gpu/first.sh [--help] [--list] [--device fake] [--seconds S] [--most S] [step ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python3 tests/gpu/first.py "$@"
