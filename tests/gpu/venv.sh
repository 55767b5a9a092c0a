#!/usr/bin/env bash
# Makes a virtual environment that sees all packages of the python3 on the path, and needs no network. A venv made of a venv
# with --system-site-packages would see the packages of the system, not those of the outer venv: so a .pth file names them.
# Usage: tests/gpu/venv.sh FOLDER            only makes it
#        tests/gpu/venv.sh FOLDER install    also builds this project and installs it there (editable): minutes
set -euo pipefail
cd "$(dirname "$0")/../.."

folder=${1:?"usage: tests/gpu/venv.sh FOLDER [install]"}
if [ ! -x "$folder/bin/python" ]; then
  python3 -m venv --without-pip "$folder"
  # addsitedir also reads the .pth files of the outer packages, those of setuptools for example.
  python3 - "$folder" <<'PYTHON'
import os, pathlib, sys
places = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
[packages] = pathlib.Path(sys.argv[1]).glob("lib/python3*/site-packages")
lines = [f"import site; site.addsitedir({path!r})\n" for path in places if os.path.isdir(path)]
(packages / "outer.pth").write_text("".join(lines))
PYTHON
fi
"$folder/bin/python" - <<'PYTHON'
import sys
from importlib.util import find_spec
found = {name: find_spec(name) for name in ("torch", "setuptools", "wheel", "pip")}
if missing := [name for name, spec in found.items() if spec is None]:
    sys.exit(f"{sys.prefix} lacks {', '.join(missing)}: install them for the python3 on the path")
print(sys.prefix, "sees", found["torch"].origin)
PYTHON
[ "${2-}" = install ] || exit 0
MOONCAKE_BUILD_SIM=1 exec "$folder/bin/python" -m pip install -v --no-index --no-build-isolation --no-deps -e .
