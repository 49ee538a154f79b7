"""The instruction of AMX-BF16 that products are made of, emulated or real, against what Intel documents.

`make emulate-amx` runs this, and the products, on a library in which the instruction is emulated.
"""

import ctypes
import platform
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from hf_qmoe.ops import build_native, native_library


LEAST_NORMAL = Fraction(2) ** -126


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """One in which there is AMX."""
    library = native_library.load().library
    if library is None:
        pytest.skip(str(native_library.why_not()))
    nothing = (torch.zeros(16, 16), *(torch.zeros(16, 32, dtype=torch.bfloat16) for _ in range(2)))
    if library.hf_qmoe_multiply_tile(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in nothing)):
        pytest.skip("this processor has no AMX, and the library does not emulate it")
    return library


def multiply(library: ctypes.CDLL, sums: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``sums + a @ b``, for `sums` ``[16, 16]``, `a` ``[16, 32]`` and `b` ``[32, 16]``."""
    out = sums.clone()
    pairs = b.view(16, 2, 16).transpose(1, 2).contiguous()
    assert library.hf_qmoe_multiply_tile(*(ctypes.c_void_p(t.data_ptr()) for t in (out, a.contiguous(), pairs))) == 0
    return out


def rounded(value: Fraction) -> Fraction:
    """To the 24 bits of float32, to nearest even; zero if that is below the least normal number."""
    if value == 0:
        return value
    exponent = abs(value).numerator.bit_length() - abs(value).denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    step = Fraction(2) ** (exponent - 23)
    result = round(value / step) * step
    return Fraction(0) if abs(result) < LEAST_NORMAL else result


def documented(sums: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Even and odd terms are added apart, from the first on, each sum rounded once; then both, then to what was there.

    Subnormal numbers are zeros, as inputs and as results.
    """

    def exact(tensor: Tensor) -> list[list[Fraction]]:
        return [[rounded(Fraction(value)) for value in row] for row in tensor.double().tolist()]

    terms_a, terms_b, start = exact(a), exact(b.t()), exact(sums)
    out = torch.empty(16, 16)
    for m in range(16):
        for n in range(16):
            parts = [Fraction(0), Fraction(0)]
            for k in range(32):
                parts[k % 2] = rounded(parts[k % 2] + terms_a[m][k] * terms_b[n][k])
            out[m, n] = float(rounded(start[m][n] + rounded(parts[0] + parts[1])))
    return out


def numbers(seed: int, spread: float, center: float = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random `sums`, `a` and `b`, with exponents around `center` for products."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        exponents = torch.randn(shape, generator=generator) * spread
        return torch.randn(shape, generator=generator) * exponents.exp2()

    scale = 2.0 ** (center / 2)
    return random(16, 16) * scale * scale, (random(16, 32) * scale).bfloat16(), (random(32, 16) * scale).bfloat16()


def test_the_emulation_is_used_where_it_was_built():
    """Else `make emulate-amx` would skip everything and pass. The level has passed its comparison on loading, too."""
    library = native_library.load().library
    if library is None or not library.hf_qmoe_emulates_amx():
        pytest.skip("not a library with emulated AMX")
    before = native_library.instruction_set()
    try:
        native_library.use_instruction_set("avx512bf16")
    except ValueError:
        pytest.skip("the emulation takes AVX512-BF16")
    native_library.use_instruction_set("amx")
    assert native_library.instruction_set() == "amx"
    native_library.use_instruction_set(before)


def test_every_element_has_its_place(library):
    """Small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(0)
    sums, a, b = (torch.randint(-99, 100, shape, generator=generator) for shape in ((16, 16), (16, 32), (32, 16)))
    out = multiply(library, sums.float(), a.bfloat16(), b.bfloat16())
    assert torch.equal(out, (sums + a @ b).float())


@pytest.mark.parametrize(
    ("spread", "center"),
    [(0, 0), (4, 0), (12, 0), (2, -126), (8, -130), (2, -148), (4, 60)],
    ids=lambda value: str(value),
)
def test_sums_are_rounded_as_documented(library, spread, center):
    """To the bit (of values: zeros have either sign), where terms cancel, and around the least normal number."""
    sums, a, b = numbers(1, spread, center)
    expected = documented(sums, a, b)
    assert torch.equal(multiply(library, sums, a, b), expected)
    if center >= -126:
        assert expected.count_nonzero() > 200


@pytest.mark.parametrize(
    ("sums", "a", "b", "expected"),
    [
        (2.0**-130, [1.0], [2.0**-126], 2.0**-126),  # a subnormal sum is zero
        (0.0, [2.0**-130], [2.0**30], 0.0),  # a subnormal factor
        (0.0, [2.0**-100], [2.0**-30], 0.0),  # a subnormal result
        (-(2.0**-126), [1.0], [1.5 * 2.0**-126], 0.0),  # of the last addition
        (0.0, [2.0**-63, 0.0, 2.0**-75], [2.0**-63, 0.0, -(2.0**-75)], 0.0),  # 2^-126 - 2^-150 has 24 bits
        (0.0, [2.0**-63, 0.0, 2.0**-80], [2.0**-63, 0.0, -(2.0**-80)], 2.0**-126),  # 2^-126 - 2^-160 rounds up
        (0.0, [2.0**100, 0.0, 2.0**100], [2.0**-120, 0.0, -(2.0**-120)], 0.0),
        (1.0, [2.0**-24, 2.0**-24], [1.0, 1.0], 1.0 + 2.0**-23),  # a pair is added before it meets the sum
        (1.0, [1.0, -1.0, 2.0**-25], [2.0**30, 2.0**30, 1.0], 1.0),  # even and odd terms apart: 2^30 + 2^-25 is 2^30
        (0.0, [float("inf"), 1.0], [1.0, 1.0], float("inf")),
    ],
)
def test_single_sums(library, sums, a, b, expected):
    """Cases in which another order, rounding or treatment of subnormal numbers shows."""
    wide_a, wide_b = torch.zeros(16, 32).bfloat16(), torch.zeros(32, 16).bfloat16()
    wide_a[3, : len(a)], wide_b[: len(b), 5] = torch.tensor(a).bfloat16(), torch.tensor(b).bfloat16()
    start = torch.zeros(16, 16)
    start[3, 5] = sums
    out = multiply(library, start, wide_a, wide_b)
    assert out[3, 5] == expected
    if abs(expected) < float("inf"):
        assert torch.equal(out, documented(start, wide_a, wide_b))


def test_what_is_not_finite_stays_in_its_row_and_column(library):
    """A NaN in row 2 of `a`, and one in column 9 of `b`."""
    sums, a, b = numbers(2, 0)
    a[2, 31], b[30, 9] = torch.nan, torch.nan
    expected = torch.zeros(16, 16, dtype=torch.bool)
    expected[2], expected[:, 9] = True, True
    assert torch.equal(multiply(library, sums, a, b).isnan(), expected)


COMPILER = """#!/bin/sh
case "$*" in *-mamx*) exit 1;; esac
echo "$@" >> {log}
while [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done
"""


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="no file of another processor")
@pytest.mark.parametrize("emulate", [False, True])
def test_compilers_without_amx_build_what_they_can(emulate, monkeypatch, tmp_path):
    """The file for it is left out, and the others are told so; emulated it takes no flags."""
    log, compiler = tmp_path / "log", tmp_path / "old-compiler"
    compiler.write_text(COMPILER.format(log=log))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert build_native.build(output=tmp_path / "library.so", emulate_amx=emulate) == tmp_path / "library.so"
    commands = [line for line in log.read_text().splitlines() if ".cpp" in line]
    assert any("experts_avx512bf16.cpp" in command for command in commands)
    assert any("experts_amx.cpp" in command for command in commands) is emulate
    define = "-DHF_QMOE_EMULATE_AMX" if emulate else "-DHF_QMOE_NO_AMX"
    assert all(define in command for command in commands)
