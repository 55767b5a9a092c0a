"""Writes tests/cpp/ep/row_vectors.inc: rows and what becomes of them, byte by byte, for every
implementation of the arithmetic of rows, on CPUs and GPUs. FP8 and bf16 are torch's; weighted sums
and LogFMT are computed here in exact fractions, each operation rounded to float32.
Usage: python tests/make_row_vectors.py"""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import torch

TARGET = Path(__file__).with_name("cpp") / "ep/row_vectors.inc"
BLOCK = 128


# ---- numbers


def float_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def float_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def bf16_value(bits: int) -> Fraction:
    return Fraction(float_of(bits << 16))


def rounded(value: Fraction) -> Fraction:
    """To float32, ties to even; normal numbers only."""
    if value == 0:
        return value
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    assert -126 <= exponent < 128
    place = Fraction(2) ** (exponent - 23)
    return round(value / place) * place  # round() takes ties to even


def decimal(text: str) -> Fraction:
    return rounded(Fraction(text))


def to_bf16(values: Iterable[float]) -> list[int]:
    tensor = torch.tensor(list(values), dtype=torch.float32).to(torch.bfloat16)
    return [bits & 0xFFFF for bits in tensor.view(torch.int16).tolist()]


def of_bf16(row: list[int]) -> torch.Tensor:
    signed = [bits - 0x10000 if bits & 0x8000 else bits for bits in row]
    return torch.tensor(signed, dtype=torch.int16).view(torch.bfloat16).float()


def normal_row(dice: random.Random, channels: int, scale: float = 1.0) -> list[int]:
    return to_bf16(dice.gauss(0, scale) for _ in range(channels))


# ---- FP8


def cast_block(block: list[int], round_scale: bool) -> tuple[list[int], int]:
    values = of_bf16(block)
    amax = values.abs().max().clamp(min=1e-4)
    scale = amax / 448
    inverse = 448 / amax
    if round_scale:
        scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
        inverse = 1 / scale
    codes = (values * inverse).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).tolist(), float_bits(scale.item())


def cast_row(row: list[int], round_scale: bool) -> tuple[list[int], list[int]]:
    codes: list[int] = []
    scales: list[int] = []
    for start in range(0, len(row), BLOCK):
        block, scale = cast_block(row[start : start + BLOCK], round_scale)
        codes += block
        scales.append(scale)
    return codes, scales


def pack_exponents(scales: list[int]) -> list[int]:
    words = []
    for start in range(0, len(scales), 4):
        exponents = [bits >> 23 & 0xFF for bits in scales[start : start + 4]]
        words.append(sum(exponent << 8 * i for i, exponent in enumerate(exponents)))
    return words


def fp8_edges() -> list[float]:
    """All codes, what lies in the middle between two, and that by one place off."""
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    middles = [(low + high) / 2 for low, high in itertools.pairwise(values)]
    edges = values + middles
    edges += [float_of(float_bits(middle) + off) for middle in middles for off in (-1, 1)]
    return [*edges, 449.0, 464.0, 465.0, 1e30]


# ---- weighted sums


def combine(rows: list[list[Fraction]], weights: list[Fraction]) -> list[int]:
    sums = []
    for channel in zip(*rows, strict=True):
        total = Fraction(0)
        for value, weight in zip(channel, weights, strict=True):
            total = rounded(value * weight + total)
        sums.append(float(total))
    return to_bf16(sums)


# ---- LogFMT


UNITS = 1 << 18
POWER = [decimal(text) for text in ("-0.69142181", "0.23055579", "-0.03913398")]
LOG = [decimal(text) for text in ("1.43872574", "-0.67778397", "0.32118891", "-0.08213068")]


def negative_power(t: int) -> Fraction:
    f = Fraction(t % UNITS, UNITS)
    power = POWER[2]
    for coefficient in (POWER[1], POWER[0], Fraction(1)):
        power = rounded(power * f + coefficient)
    return power / 2 ** (t // UNITS)


def log2(magnitude: int) -> Fraction:
    x = Fraction(magnitude & 0x7F, 128)
    slope = LOG[3]
    for coefficient in (LOG[2], LOG[1], LOG[0]):
        slope = rounded(slope * x + coefficient)
    return rounded(slope * x + (magnitude >> 7))


def logfmt_step(magnitudes: list[int]) -> int:
    """0: the block stays raw."""
    largest = max(magnitudes)
    if len(magnitudes) < BLOCK or largest < (127 - 64) << 7 or largest >= 0x7F80:
        return 0
    smallest = min(magnitude for magnitude in magnitudes if magnitude)
    octaves = min(rounded(log2(largest) - log2(smallest)), Fraction(32))
    return max(-(int(octaves * UNITS) // -510), 512)


def logfmt_values(largest: int, step: int) -> list[Fraction]:
    codes = range(1, 512)
    return [Fraction(0)] + [
        rounded(bf16_value(largest) * negative_power((511 - code) * step)) for code in codes
    ]


def encode_block(block: list[int], step: int) -> tuple[bytes, list[Fraction]]:
    if step == 0:
        raw = struct.pack(f"<{len(block)}H", *block)
        return raw + bytes(-len(raw) % 16), []
    magnitudes = [bits & 0x7FFF for bits in block]
    values = logfmt_values(max(magnitudes), step)
    codes = []
    for magnitude in magnitudes:
        exact = bf16_value(magnitude)
        codes.append(min(range(512), key=lambda code: (abs(values[code] - exact), code)))
    planes = bytearray(32)
    for i, (code, bits) in enumerate(zip(codes, block, strict=True)):
        planes[i // 8] |= code >> 8 << i % 8
        planes[16 + i // 8] |= bits >> 15 << i % 8
    signs = [-1 if bits >> 15 else 1 for bits in block]
    coded = bytes(code & 0xFF for code in codes) + bytes(planes)
    return coded, [sign * values[code] for sign, code in zip(signs, codes, strict=True)]


def encode_row(row: list[int]) -> tuple[bytes, list[list[Fraction]]]:
    """The bytes, and the values of each block, none for raw ones."""
    headers, body, values = b"", b"", []
    for start in range(0, len(row), BLOCK):
        block = row[start : start + BLOCK]
        magnitudes = [bits & 0x7FFF for bits in block]
        step = logfmt_step(magnitudes)
        headers += struct.pack("<HH", max(magnitudes) if step else 0, step)
        coded, decoded = encode_block(block, step)
        body += coded
        values.append(decoded)
    return headers + bytes(-len(headers) % 16) + body, values


# ---- the file


def array(kind: str, name: str, values: Iterable[int], digits: int) -> list[str]:
    words = [f"0x{value:0{digits}x}" for value in values]
    per_line = 98 // (digits + 4)
    lines = [f"constexpr {kind} {name}[] = {{"]
    for start in range(0, len(words), per_line):
        lines.append("    " + ", ".join(words[start : start + per_line]) + ",")
    return [*lines, "};", ""]


def text() -> str:
    dice = random.Random(1)
    lines = ["// Written by tests/make_row_vectors.py, which says what they are.", ""]

    edges = fp8_edges()
    codes = torch.tensor(edges).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    lines += array("uint32_t", "kE4m3Floats", map(float_bits, edges), 8)
    lines += array("uint8_t", "kE4m3Codes", codes, 2)

    # A usual block, one below the least amax, one of many magnitudes, one whose largest is 448
    # times a power of two, and a short one.
    wide = to_bf16(dice.gauss(0, 1) * 2.0 ** dice.randint(-16, 16) for _ in range(BLOCK))
    tiny = [0, 0x8000, 1, 0x8001, 0x7F, 0x80, *to_bf16([1e-4, -9.9e-5, 3e-7])]
    tiny += normal_row(dice, BLOCK - len(tiny), 1e-5)
    even = [to_bf16([0.4375])[0], *normal_row(dice, BLOCK - 1, 0.1)]
    row = normal_row(dice, BLOCK) + tiny + wide + even + normal_row(dice, 44, 300.0)
    lines += array("uint16_t", "kFp8Row", row, 4)
    for name, round_scale in (("kFp8", False), ("kFp8Rounded", True)):
        row_codes, scales = cast_row(row, round_scale)
        lines += array("uint8_t", f"{name}Codes", row_codes, 2)
        lines += array("uint32_t", f"{name}Scales", scales, 8)
    lines += array("uint32_t", "kFp8Exponents", pack_exponents(scales), 8)

    floats = [0x00000000, 0x80000000, 0x3F808000, 0x3F818000, 0x3F80FFFF, 0x7F7FFFFF, 0xFF7F8000]
    floats += [0x00000001, 0x00008000, 0x00018000, 0x807F8000, 0x7F800000, 0xFF800000, 0x7F800001]
    floats += [dice.getrandbits(32) for _ in range(40)]
    lines += array("uint32_t", "kBf16Floats", floats, 8)
    tensor = torch.tensor([bits - (bits >> 31 << 32) for bits in floats], dtype=torch.int32)
    tensor = tensor.view(torch.float32)
    bits_rounded = tensor.to(torch.bfloat16).view(torch.int16)
    bits_rounded[tensor.isnan()] = 0x7FC0  # torch gives this one or another
    lines += array("uint16_t", "kBf16Rounded", [b & 0xFFFF for b in bits_rounded.tolist()], 4)

    rows = [normal_row(dice, 150, 2.0**-i) for i in range(4)]
    weights = [Fraction(float_of(float_bits(w))) for w in (0.4, 0.3, -0.2, 0.1)]
    summed = combine([[bf16_value(bits) for bits in row] for row in rows], weights)
    lines += array("uint16_t", "kCombineRows", [bits for row in rows for bits in row], 4)
    lines += array("uint32_t", "kCombineWeights", [float_bits(float(w)) for w in weights], 8)
    lines += array("uint16_t", "kCombineSum", summed, 4)

    # Blocks: usual; raw for an infinity; more than 32 octaves with zeros; of one magnitude; short.
    infinite = [*normal_row(dice, BLOCK - 1), 0x7F80]
    deep = to_bf16(dice.gauss(0, 1) * 2.0 ** dice.randint(-40, 0) for _ in range(BLOCK - 3))
    deep += [0, 0x8000, 0x0001]
    equal = [0x4049 | dice.getrandbits(1) << 15 for _ in range(BLOCK)]
    row = normal_row(dice, BLOCK) + infinite + deep + equal + normal_row(dice, 5)
    coded, values = encode_row(row)
    lines += array("uint16_t", "kLogfmtRow", row, 4)
    lines += array("uint8_t", "kLogfmtBytes", coded, 2)
    finite = [[value for part in (0, 2, 3) for value in values[part]]]
    decoded = combine(finite, [Fraction(1)])
    lines += array("uint16_t", "kLogfmtDecoded", decoded, 4)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
