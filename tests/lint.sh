#!/usr/bin/env bash
# Format, lint, types, locks: one word each, or all four. --fix changes files, otherwise they are only checked.
# Usage: tests/lint.sh [format] [lint] [types] [locks] [--fix]
set -euo pipefail
cd "$(dirname "$0")/.."

steps=()
fix=false
for argument in "$@"; do
  case $argument in
    format | lint | types | locks) steps+=("$argument") ;;
    --fix) fix=true ;;
    *) sed -n '2,3s/^# //p' "$0"; exit 2 ;;
  esac
done
[ ${#steps[@]} -gt 0 ] || steps=(format lint types locks)

tests/setup_env.sh clang-format-14 clang-14
export PATH="$PWD/.venv/bin:$PATH"
# The tools alone: to install the project with them would build the extension again.
mapfile -t tools < <(sed -n 's/^dev = \[\(.*\)\].*/\1/p' pyproject.toml | tr ',' '\n' | tr -d ' "')
# Those of the environment, not others on the path: types need its torch.
[ -x .venv/bin/ruff ] && [ -x .venv/bin/mypy ] || pip install -q "${tools[@]}"
python_files=(setup.py csrc mooncake_backend ep tests)
[ -d benchmarks ] && python_files+=(benchmarks)

format() {
  local files
  mapfile -t files < <(find csrc kernels tests -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null)
  if $fix; then
    clang-format-14 -i "${files[@]}"
    ruff format -q "${python_files[@]}"
  else
    clang-format-14 --dry-run --Werror "${files[@]}"
    ruff format -q --check "${python_files[@]}"
  fi
}

lint() {
  if $fix; then ruff check --fix "${python_files[@]}"; else ruff check "${python_files[@]}"; fi
  python tests/words.py
  python tests/simt/mutants.py --texts
}

types() { mypy; }

# Compiles csrc with clang, two minutes on two cores.
locks() { python tests/locks.py; }

for step in "${steps[@]}"; do
  echo "== $step"
  "$step"
done
