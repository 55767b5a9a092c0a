#!/usr/bin/env bash
# Makes the tables of docs/fabric.md on two AWS instances with EFA (p5en, p6), in a clone after tests/setup_env.sh.
# Usage: efa_pair.sh first HOST    on the instance whose address is HOST, first
#        efa_pair.sh second HOST   on the other one
# The second instance prints the results of transfer_engine_bench, the first one those of fabric_bench.
set -euo pipefail
cd "$(dirname "$0")/.."

role=${1-} host=${2-}
case $role in
  first) rank=0 ;;
  second) rank=1 ;;
  *) sed -n '2,5s/^# //p' "$0"; exit 2 ;;
esac
[ -n "$host" ] || { sed -n '2,5s/^# //p' "$0"; exit 2; }
bytes=65536,131072,262144,524288,1048576,2097152,4194304
name=$(hostname -I | cut -d' ' -f1)

export PATH="$PWD/.venv/bin:/opt/amazon/efa/bin:$PATH"
# Any provider but EFA is an error, instead of a slower table.
export MOONCAKE_FABRIC_REQUIRE=efa
ulimit -l unlimited

step() { printf '\n== %s\n' "$*"; }

step "machine"
fi_info --version
fi_info -p efa | grep -c 'domain:' | sed 's/$/ EFA domains/'
python -m mooncake_backend doctor | grep -E 'libfabric|cards|CPUs'

step "build"
cmake -S csrc -B build/efa -G Ninja -DCMAKE_BUILD_TYPE=Release -DMOONCAKE_BUILD_EXTENSION=OFF -DMOONCAKE_BUILD_BENCHMARKS=ON >/dev/null
cmake --build build/efa --target fabric_bench >/dev/null

# Both sides run the same commands in the same order, and meet at a port of the first instance.
port=18500
bench() {
  port=$((port + 1))
  step "fabric_bench $*"
  timeout 600 build/efa/fabric_bench "$@" --rank "$rank" --ranks 2 --meet "$host:$port"
}
one=$(fi_info -p efa | awk '/domain:/ { sub(/-rdm$/, "", $2); print $2; exit }')
bench ceiling --devices "$one" --bytes "$bytes"
bench ceiling --devices "$one" --bytes "$bytes" --spin
bench send --devices "$one" --bytes "$bytes"
bench cards --bytes 65536,1048576,16777216,67108864,1073741824 --depth 64
bench all-to-all --devices "$one" --bytes 1048576
bench first-submit --rounds 3

# Measures through the whole engine. The target ends when the initiator has finished.
common=(--metadata_server=P2PHANDSHAKE --protocol=efa --buffer_size=$((4 << 30)))
meet=$((port + 1))
if [ "$role" = first ]; then
  step "transfer_engine_bench: target; ends by itself"
  transfer_engine_bench --mode=target "${common[@]}" --local_server_name="$name" | tee /tmp/efa_pair.target &
  target=$!
  trap 'kill "$target" 2>/dev/null' EXIT
  timeout 60 sh -c 'until grep -q "^target: " /tmp/efa_pair.target; do sleep 0.2; done'
  # Sends the target's name to the initiator, which closes the connection when it has finished.
  python - "$meet" <<'PY'
import socket, sys
name = open("/tmp/efa_pair.target").read().split("target: ")[1].split(",")[0]
with socket.create_server(("", int(sys.argv[1]))) as door:
    door.settimeout(600)
    caller, _ = door.accept()
    caller.settimeout(3600)
    caller.sendall(name.encode() + b"\n")
    caller.recv(1)
PY
else
  python - "$host" "$meet" "$name" <<'PY'
import socket, subprocess, sys, time
host, port, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
for attempt in range(300):
    try:
        door = socket.create_connection((host, port), 10)
        break
    except OSError:
        time.sleep(1)
segment = door.makefile().readline().strip()
common = ["--metadata_server=P2PHANDSHAKE", "--protocol=efa", f"--segment_id={segment}",
          f"--local_server_name={name}", f"--buffer_size={4 << 30}", "--duration=10"]
for operation in ("write", "read"):
    for block in (65536, 131072, 262144, 524288, 1 << 20, 2 << 20):
        subprocess.run(["transfer_engine_bench", *common, f"--operation={operation}",
                        f"--block_size={block}", "--threads=16", "--batch_size=128"], timeout=300)
for warmup in (0, 1):
    subprocess.run(["efa_first_submit_probe", "--mode=initiator", f"--segment_id={segment}",
                    f"--local_server_name={name}", f"--warmup={warmup}"], timeout=300)
PY
fi
