"""kernels/: the vectors of kernels/common are what their generator writes, nvcc takes its headers,
and no kernel spills registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import kernel_resources
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


needs_nvcc = pytest.mark.skipif(kernel_resources.NVCC is None, reason="no nvcc")


@needs_nvcc
def test_nvcc_takes_the_benchmark_of_the_proxy(tmp_path):
    """Only a machine with a GPU runs it (benchmarks/bench_proxy.py)."""
    flags = ["-std=c++20", "-arch=sm_90a", "-Werror", "all-warnings", "-allow-unsupported-compiler"]
    done = subprocess.run(
        [str(kernel_resources.NVCC), *flags, f"-I{ROOT}", f"-I{ROOT / 'csrc'}",
         "-c", str(ROOT / "benchmarks/proxy_gpu.cu"), "-o", str(tmp_path / "proxy_gpu.o")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@needs_nvcc
def test_nvcc_takes_the_headers(tmp_path):
    headers = sorted(header.relative_to(ROOT) for header in COMMON.glob("*.h"))
    assert headers
    source = tmp_path / "everything.cu"
    source.write_text("".join(f'#include "{header}"\n' for header in headers) + KERNEL)
    flags = ["-std=c++17", "-arch=sm_90", "-Werror", "all-warnings", f"-I{ROOT}"]
    done = subprocess.run(
        [
            str(kernel_resources.NVCC),
            *flags,
            "-c",
            str(source),
            "-o",
            str(tmp_path / "everything.o"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Calls each function of device.h that is made of PTX.
WRAPPERS = """
#include "kernels/device.h"
using namespace mooncake::kernels;
__global__ void all(uint32_t* words, uint64_t* longWords) {
  words[0] = loadRelaxedSystem(words + 1) + loadAcquireSystem(words + 2);
  words[3] = loadRelaxedDevice(words + 4) + loadAcquireDevice(words + 5);
  storeRelaxedSystem(words + 6, 1);
  storeReleaseSystem(words + 7, 1);
  storeRelaxedDevice(words + 8, 1);
  storeReleaseDevice(words + 9, 1);
  words[10] = addRelaxedDevice(words + 11, 1) + addAcqRelDevice(words + 12, 1);
  longWords[0] = loadRelaxedSystem(longWords + 1) + loadAcquireSystem(longWords + 2);
  longWords[3] = loadRelaxedDevice(longWords + 4) + loadAcquireDevice(longWords + 5);
  storeRelaxedSystem(longWords + 6, 1);
  storeReleaseSystem(longWords + 7, 1);
  storeRelaxedDevice(longWords + 8, 1);
  storeReleaseDevice(longWords + 9, now());
  words[13] = lane();
  relax();
}
"""
INSTRUCTIONS = [
    *(
        f"{verb}.{order}.{scope}.global.{word}"
        for verb, orders in (("ld", ("relaxed", "acquire")), ("st", ("relaxed", "release")))
        for order in orders
        for scope in ("gpu", "sys")
        for word in ("u32", "u64")
    ),
    "atom.relaxed.gpu.global.add.u32",
    "atom.acq_rel.gpu.global.add.u32",
]


@needs_nvcc
def test_wrappers_are_the_instructions_of_their_names(tmp_path):
    """The emulator runs none of these."""
    source = tmp_path / "wrappers.cu"
    source.write_text(WRAPPERS)
    ptx = tmp_path / "wrappers.ptx"
    subprocess.run(
        [str(kernel_resources.NVCC), "-std=c++17", "-arch=sm_80", f"-I{ROOT}", "-ptx", str(source),
         "-o", str(ptx)],
        check=True,
        timeout=300,
    )  # fmt: skip
    text = ptx.read_text()
    found = re.findall(
        r"^\s*((?:ld|st|atom)\.(?:relaxed|acquire|release|acq_rel)[\w.]*)", text, re.M
    )
    assert sorted(found) == sorted(INSTRUCTIONS)
    assert "%globaltimer" in text
    assert "%laneid" in text
    assert "nanosleep" in text


# ---- kernels


@pytest.fixture(scope="module")
def resources() -> list[kernel_resources.Resources]:
    return kernel_resources.parse(kernel_resources.compile_kernels())


@needs_nvcc
def test_no_kernel_spills(resources):
    """A kernel with a stack needs local memory, and to make room for that the driver may wait for
    kernels that run."""
    assert [found for found in resources if found.spilled or found.stack] == []


@needs_nvcc
def test_the_report_of_resources_is_up_to_date(resources):
    written = kernel_resources.TARGET.read_text()
    version = kernel_resources.compiler()
    if not written.startswith(f"{version};"):
        pytest.skip(f"{version} may give other numbers")
    assert written == kernel_resources.text(version, resources), "run tests/kernel_resources.py"


@needs_nvcc
def test_every_kernel_has_its_number(resources):
    header = (ROOT / "kernels/kernel_id.h").read_text()
    names = re.findall(r'"(mooncake_\w+)"', header)
    enumerators = re.findall(r"^  (k\w+),$", header, re.M)
    assert names
    assert sorted(names) == sorted({found.kernel for found in resources})
    camel = ["k" + "".join(map(str.capitalize, name.split("_")[1:])) for name in names]
    assert enumerators == camel


SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* data) {
  float kept[96];
  for (int i = 0; i < 96; ++i) kept[i] = data[i * blockDim.x + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 96; ++i) data[(95 - i) * blockDim.x + threadIdx.x] = kept[i] * kept[95 - i];
}
extern "C" __global__ void shares(float* data) {
  __shared__ float there[64];
  there[threadIdx.x] = data[threadIdx.x];
  __syncthreads();
  data[threadIdx.x] = there[63 - threadIdx.x];
}
"""


@needs_nvcc
def test_spills_and_shared_memory_are_seen(tmp_path):
    source = tmp_path / "spilling.cu"
    source.write_text(SPILLING)
    found = kernel_resources.parse(kernel_resources.compile_kernels(source))
    assert [one.kernel for one in found] == ["shares"] * 3 + ["spills"] * 3
    assert all(one.spilled and one.stack for one in found[3:])
    assert all(one.shared >= 256 and not one.spilled for one in found[:3])
