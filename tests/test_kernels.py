"""kernels/common: its vectors are what their generator writes, and nvcc takes its headers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import make_row_vectors
import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMON = ROOT / "kernels/common"
# Calls what the headers define, so that device code is made of all of it.
KERNEL = """
using namespace mooncake::ep;

__global__ void everything(const uint16_t* in, float* floats, uint8_t* bytes, uint32_t* words) {
  const Fp8Scale scale = fp8Scale(bf16ToFloat(largerMagnitude(0, in[0])), in[1] != 0);
  bytes[0] = castToE4m3(in[2], scale);
  bytes[1] = ue8m0Of(scale.scale);
  floats[0] = e4m3ToFloat(bytes[2]);
  words[0] = floatToBf16(fusedSum(floats[1], floats[2], floats[3]));
  const LogfmtHeader header = logfmtHeader(in[3], in[4]);
  words[1] = logfmtCode(bf16Magnitude(in[5]), header);
  floats[4] = logfmtMagnitude(words[2], header);
  words[3] = logfmtHeaderBytes(words[4]) + logfmtBlockBytes(header, words[5]);
}
"""


def test_vectors_are_what_their_generator_writes():
    assert make_row_vectors.TARGET.read_text() == make_row_vectors.text(), (
        "run tests/make_row_vectors.py"
    )


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_nvcc_takes_the_headers(tmp_path):
    headers = sorted(header.relative_to(ROOT) for header in COMMON.glob("*.h"))
    assert headers
    source = tmp_path / "everything.cu"
    source.write_text("".join(f'#include "{header}"\n' for header in headers) + KERNEL)
    flags = ["-std=c++17", "-arch=sm_90", "-Werror", "all-warnings", f"-I{ROOT}"]
    done = subprocess.run(
        ["nvcc", *flags, "-c", str(source), "-o", str(tmp_path / "everything.o")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
