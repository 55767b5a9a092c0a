"""efa_first_submit_probe: a target and an initiator, as a user starts them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

TOOL = [sys.executable, "-m", "mooncake_backend.first_submit_probe"]
COMMON = ["--protocol=tcp", "--local_server_name=127.0.0.1", f"--buffer_size={1 << 20}"]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOOL, *COMMON, *flags], capture_output=True, text=True, timeout=120, check=False
    )


def test_prints_what_the_original_prints():
    target = subprocess.Popen([*TOOL, *COMMON, "--mode=target"], stdout=subprocess.PIPE, text=True)
    try:
        assert target.stdout is not None
        ready = re.fullmatch(
            r"\[target\] ready, addr=(127\.0\.0\.1:\d+)\n", target.stdout.readline()
        )
        assert ready is not None
        for warmup in (True, False):
            ended = run(f"--segment_id={ready[1]}", f"--warmup={int(warmup)}", "--iters=3")
            assert ended.returncode == 0, ended.stderr
            lines = ended.stdout.splitlines()
            if warmup:
                assert re.fullmatch(r"warmup: +\d+\.\d\d ms \(rc=0\)", lines.pop(0))
            assert len(lines) == 3
            for number, line in enumerate(lines):
                assert re.fullmatch(rf"submit #{number}: +\d+\.\d\d ms", line)
        target.send_signal(signal.SIGTERM)
        assert target.wait(60) == 0
    finally:
        target.kill()
        target.communicate()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--mode=both"], "--mode=both: initiator or target"),
        (["--mode=initiator"], "--segment_id is missing"),
        (["--segment_id=127.0.0.1:9", "--xfer_size=2097152"], "--xfer_size is more"),
        (["--segment_id=127.0.0.1:9", "--warmup=0", "--iters=1"], "submit #0 failed"),
    ],
)
def test_what_cannot_be_done_ends_with_1(flags, said):
    ended = run(*flags)
    assert ended.returncode == 1
    assert said in ended.stderr
