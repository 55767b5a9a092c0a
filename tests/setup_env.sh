#!/usr/bin/env bash
# Makes .venv in the clone with torch, the tools and this project (editable), or brings it up to date.
# MOONCAKE_VENV names another folder for it, below build/: this project is then copied into it, as a clone holds one _C.
# Usage: tests/setup_env.sh [apt package ...]   the packages are needed beyond a compiler and Python's headers
# Exit 2: something is missing that this script may not install; it says what.
set -euo pipefail
cd "$(dirname "$0")/.."

torch_version=${MOONCAKE_TORCH_VERSION:-2.11.0}
venv=${MOONCAKE_VENV:-.venv}
say() { printf '\033[1m[setup]\033[0m %s\n' "$*" >&2; }

find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
    # The interpreter itself: one that is called through an environment, maybe through ours, is no other one.
    if "$candidate" -c '
import os, sys
if not (3, 10) <= sys.version_info[:2] <= (3, 13): sys.exit(1)
print(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))' 2>/dev/null; then
      return
    fi
  done
}

can_compile() {
  printf '#include <span>\nint main() { return std::span<int>{}.size(); }\n' |
    "${CXX:-c++}" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null
}

apt_install() {
  local root=()
  if [ "$(id -u)" != 0 ]; then
    if sudo -n true 2>/dev/null; then root=(sudo -n); else root=(false); fi
  fi
  if [ "${root[0]-}" = false ] || ! command -v apt-get >/dev/null; then
    say "missing, and this user may not install it. Please run:  sudo apt-get install $*"
    exit 2
  fi
  say "installing $*"
  "${root[@]}" apt-get update -qq </dev/null
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "$@" </dev/null >/dev/null
}

has_libfabric() { [ -e /usr/include/rdma/fabric.h ] || [ -e /opt/amazon/efa/include/rdma/fabric.h ]; }
may_install() { command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }; }

install_system_packages() {
  local missing=() version
  version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  "$python" -c 'import venv, ensurepip' 2>/dev/null || missing+=("$version-venv")
  [ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
    missing+=("$version-dev")
  can_compile || missing+=(g++ libc6-dev)
  # Without its headers everything but fabric is built: no reason to stop where they cannot be had.
  if ! has_libfabric && may_install; then missing+=(libfabric-dev libfabric-bin); fi
  local package
  for package in "$@"; do
    dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
  done
  [ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"
  can_compile || {
    say "${CXX:-c++} cannot compile C++20: install g++ 10 or newer and set CXX to it"
    exit 2
  }
}

# What the extension and the installed packages are made from.
made_from=(csrc kernels setup.py pyproject.toml)
[ "$venv" = .venv ] || made_from+=(mooncake_backend)
sources() { find "${made_from[@]}" -type f ! -path '*/__pycache__/*' ! -name '_C.*' -printf '%p %s %T@\n' | sort; }
checksum() { sha256sum | cut -d' ' -f1; }
is_current() { [ -e "$venv/$1" ] && [ "$(cat "$venv/$1")" = "$2" ]; }
copy_of_clone() {
  rm -rf "$venv/source"
  mkdir "$venv/source"
  tar --exclude=./build --exclude=./.venv --exclude=./.git --exclude='_C.*.so' --exclude=_C.json -cf - . |
    tar -xf - -C "$venv/source"
  echo "$venv/source"
}

python=$(find_python)
if [ -z "$python" ]; then
  say "no Python 3.10 to 3.13 found"
  apt_install python3 python3-venv python3-dev
  python=$(find_python)
  [ -n "$python" ] || { say "this system's python3 is too old or too new: install 3.10 to 3.13"; exit 2; }
fi

install_system_packages "$@"

torch=$(echo "$torch_version $python" | checksum)
if ! is_current torch.stamp "$torch"; then
  say "making $venv with $("$python" --version) and torch $torch_version (minutes, the first time)"
  "$python" -m venv --clear "$venv"
  # Not the newest setuptools: torch 2.11 asks for an older one.
  "$venv/bin/pip" install "torch==$torch_version" 'setuptools>=64,<82' wheel cmake ninja
  echo "$torch" >"$venv/torch.stamp"
fi

built=$({ echo "$torch"; has_libfabric && echo libfabric; sources; } | checksum)
if ! is_current build.stamp "$built"; then
  say "building the extension"
  log=$venv/build.log
  if [ "$venv" = .venv ]; then
    what=(-e '.[test,demo]')
  else
    what=("$(copy_of_clone)[test]")
    # So the compiler's cache sees the paths of the clone, and files without torch are not compiled again.
    export CCACHE_BASEDIR=$PWD/$venv/source
  fi
  MOONCAKE_BUILD_SIM=1 "$venv/bin/pip" install -v --no-build-isolation "${what[@]}" 2>&1 |
    tee "$log" | grep --line-buffered -E '\[[0-9]+/[0-9]+\]|^Successfully' >&2 ||
    { tail -n 100 "$log" >&2; say "the build failed; all of its output is in $log"; exit 1; }
  echo "$built" >"$venv/build.stamp"
fi
