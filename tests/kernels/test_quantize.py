"""Codes and back, of FP8, INT8 and NVFP4: operators, and their Triton kernels against the references to the bit."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import Tensor

from coat_core import nvfp4
from coat_core.casts import declarations
from coat_core.formats import FORMATS, Format, get_format
from coat_core.granularity import PER_ROW, PER_TENSOR, Granularity, per_group
from coat_core.int8 import quantize_int8 as int8_reference
from coat_core.int8 import rotate as rotate_reference
from coat_core.ops import quantize as ops
from coat_core.ops.quantize import decode_nvfp4, quantize_and_save
from coat_core.quantize import dequantize as dequantize_reference
from coat_core.quantize import quantize as quantize_reference
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import reference
from tests.helpers.rows import KINDS as ROW_KINDS
from tests.helpers.rows import SPECS, assert_codes_of, assert_saved, extreme_values, rows_of_kind

with suppress(ImportError):  # without triton
    from coat_core.ops import quantize_kernel as kernels

GRANULARITIES = [PER_TENSOR, PER_ROW, per_group(16), per_group(128), per_group(256)]
SHAPES = [(3, 40), (2, 5, 300), (1, 4100), (7, 16), (1, 1)]


KINDS = ["plain", "zeros", "outlier", "heavy tails", "tiny", "not finite", "strided"]


def assert_same_codes(found: Tensor, expected: Tensor) -> None:
    """Equal bits, but for the sign of NaN."""
    assert found.dtype == expected.dtype
    assert_bitwise(found.to(torch.float32).nan_to_num(nan=1e6), expected.to(torch.float32).nan_to_num(nan=1e6))


def assert_quantized(x: Tensor, codes: Tensor, scale: Tensor, fmt: str, granularity: Granularity) -> None:
    """Codes and scale of x, as the reference makes them on a CPU."""
    expected = quantize_reference(x.cpu(), fmt, granularity)
    assert_bitwise(scale.cpu(), expected.scale)
    assert_same_codes(codes.cpu(), expected.codes)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_quantize_kernel_has_the_references_bits(
    kind: str, fmt: str, granularity: Granularity, device: torch.device
) -> None:
    for shape in SHAPES:
        x = extreme_values(kind, shape).to(device)
        codes, scale = kernels.quantize(x, fmt, granularity.name, granularity.group_size, None)
        assert_quantized(x, codes, scale, fmt, granularity)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantize_kernel_reads_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(5, 200, device=device).to(dtype)
    for granularity in GRANULARITIES:
        codes, scale = kernels.quantize(x, "e4m3", granularity.name, granularity.group_size, None)
        assert_quantized(x, codes, scale, "e4m3", granularity)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
def test_per_tensor_amax_covers_more_than_one_share_a_program(device: torch.device) -> None:
    x = torch.randn(kernels.SHARE_BLOCK * 5 + 3, device=device)
    for place in (0, kernels.SHARE_BLOCK, x.numel() - 1):
        spiked = x.clone()
        spiked[place] = -1000.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "SHARES_MAX", 2)  # so that each program takes several blocks
            _, scale = kernels.quantize(spiked, "e4m3", "per_tensor", 128, None)
        assert scale.item() == pytest.approx(1000.0 / 448.0)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_quantize_kernel_multiplies_columns_first(granularity: Granularity, device: torch.device) -> None:
    for shape in SHAPES:
        x = torch.randn(shape, device=device).to(torch.bfloat16)
        factors = torch.rand(2 * shape[-1], device=device)[::2]
        product = x.to(torch.float32) * factors
        codes, scale = kernels.quantize(x, "e5m2", granularity.name, granularity.group_size, factors)
        assert_quantized(product, codes, scale, "e5m2", granularity)
        assert_quantized(product, *ops.quantize(x, "e5m2", granularity, factors)[:2], "e5m2", granularity)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
def test_cast_by_amax_is_per_tensor_quantization_from_rows(device: torch.device) -> None:
    from coat_core.ops.device import cast_by_amax

    x = torch.randn(37, 130, device=device)
    codes, scale = cast_by_amax(x, x.abs().amax(1), "e5m2")
    assert_quantized(x, codes, scale, "e5m2", PER_TENSOR)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantize_kernel_has_the_references_bits(fmt: str, granularity: Granularity, device: torch.device) -> None:
    for shape in SHAPES:
        codes, scale, _ = quantize_reference(extreme_values("heavy tails", shape).to(device), fmt, granularity)
        found = kernels.dequantize(codes, scale, granularity.name, granularity.group_size, torch.float32)
        assert_bitwise(found, dequantize_reference(codes, scale, granularity))


@pytest.fixture
def e4m3_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels write e4m3 as they do on a GPU without an instruction for it: byte by byte, with integers."""

    def in_bytes(shape: tuple[int, ...], fmt: Format, device: torch.device) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=device)

    monkeypatch.setattr(kernels, "empty_codes", in_bytes)
    monkeypatch.setattr(kernels, "finished", lambda buffer, dtype: buffer.view(dtype))


@pytest.mark.triton
@pytest.mark.usefixtures("e4m3_in_bytes")
def test_e4m3_by_integers_has_the_casts_bits() -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(torch.float32)
    ties = torch.arange(-(1 << 12), 1 << 12, dtype=torch.float32) * 2.0**-11  # between all small codes
    x = torch.cat([halves[halves.abs() <= 448], halves[halves.isnan()], ties, 440 * torch.rand(8192) - 220])
    x = torch.nn.functional.pad(x, (0, -len(x) % 64)).view(64, -1)
    x[:, 0] = 448.0  # each row's scale is 1
    codes, scale = kernels.quantize(x, "e4m3", "per_row", 128, None)
    assert (scale == 1).all()
    assert_same_codes(codes, x.to(torch.float8_e4m3fn))


@pytest.mark.triton
def test_a_card_without_e4m3_gets_bytes(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    from coat_core.ops import launch as runtime

    given: list[torch.dtype | int] = []
    kernel = {(1,): lambda *args, **options: given.extend(getattr(arg, "dtype", arg) for arg in args)}
    codes = [torch.zeros(16, device=device).to(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
    runtime.launch(kernel, (1,), *codes, 3)
    monkeypatch.setattr(runtime, "_cards_without_e4m3", lambda: frozenset([codes[0].device]))
    runtime.launch(kernel, (1,), *codes, 3)
    assert given == [torch.float8_e4m3fn, torch.float8_e5m2, 3, torch.uint8, torch.float8_e5m2, 3]


@pytest.mark.triton
def test_e4m3_in_bytes_is_read_by_integers() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    found = kernels.dequantize(codes, torch.tensor(3.0), "per_tensor", 128, torch.float32)
    expected = codes.view(torch.float8_e4m3fn).to(torch.float32) * 3.0
    assert_bitwise(found.nan_to_num(nan=1e6), expected.nan_to_num(nan=1e6))


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", [(64, 64), (48, 80), (130, 16), (1, 16)])
def test_transpose_kernel(shape: tuple[int, int], device: torch.device) -> None:
    codes = torch.randint(0, 255, shape, dtype=torch.uint8, device=device).view(get_format("e4m3").dtype)
    found = kernels.transpose_codes(codes)
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8).t())


def test_the_wrappers_are_the_reference_on_a_cpu() -> None:
    x = torch.randn(3, 70, dtype=torch.bfloat16)
    found, expected = ops.quantize(x, "e5m2", per_group(32)), quantize_reference(x, "e5m2", per_group(32))
    assert_same_codes(found.codes, expected.codes)
    assert_bitwise(found.scale, expected.scale)
    assert_bitwise(ops.dequantize(*found[:2], per_group(32)), expected.dequantize())


HOW = [(*spec, "e4m3", 16) for spec in SPECS] + [("e4m3", "per_row", "none", 128), ("none", "none", "e5m2", 128)]


def assert_both(x: Tensor, found: tuple[Tensor, ...], how: tuple[str, str, str, int]) -> None:
    """Assert that these are the codes of x to the bit."""
    fmt, granularity, *saved = how
    assert_codes_of(x.contiguous(), *found[:2], "e4m3" if fmt == "none" else fmt, granularity)
    assert_saved(x, *found[2:], *saved)


@pytest.mark.parametrize("how", HOW, ids=str)
def test_both_are_the_codes_of_x(how: tuple[str, str, str, int]) -> None:
    x = rows_of_kind("slice", (2, 7, 40)).bfloat16()
    found = quantize_and_save(x, *how)
    assert_both(x, found, how)
    declared = declarations["coat::quantize_and_save"](found, x, *how)
    expected = [how[1]] * (how[1] != "none") + ["per_group"] * (how[2] != "none")
    assert [cast.granularity.name for cast in declared] == expected
    if how[2] != "none":
        assert declared[-1].granularity == per_group(how[3])


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", [*ROW_KINDS, "of an image", "heads"])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_quantize_and_save_kernel(kind: str, how: tuple[str, str, str, int], device: torch.device) -> None:
    for shape, dtype in (
        ((2, 7, 48), torch.float32),
        ((1, 7, 40), torch.bfloat16),
        ((3, 5, 130), torch.float16),
        ((1, 3, 2100), torch.bfloat16),
        ((5, 1), torch.float32),
    ):
        x = rows_of_kind(kind, shape).to(device, dtype)
        if kind == "of an image":  # text's rows in front of each image's
            x = torch.randn(shape[0], shape[1] + 3, *shape[2:]).to(device, dtype)[:, 3:]
        elif kind == "heads":  # [B, S, D] as attention leaves it, [B, H, S, d] in memory
            x = torch.randn(2, 3, 7, 16).to(device, dtype).transpose(1, 2).flatten(2)
        assert_both(x, kernels.quantize_and_save(x, *how), how)


ROTATED = [((3, 64), 64), ((2, 3, 320), 64), ((1, 4096), 256), ((7, 16), 16), ((2, 6), 1)]


INT8_KINDS = ["plain", "zeros", "outlier", "heavy tails", "tiny", "not finite", "rows apart", "bf16"]


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", INT8_KINDS)
def test_int8_kernel_has_the_references_bits(kind: str, device: torch.device) -> None:
    for shape, size in ROTATED:
        x, factors = extreme_values(kind, shape), torch.rand(shape[-1]) + 0.5
        for given in (None, factors):
            expected = int8_reference(x, size, given)
            codes, scale = kernels.quantize_int8(x.to(device), size, None if given is None else given.to(device))
            assert_bitwise(codes.cpu(), expected.codes)
            assert_bitwise(scale.cpu().nan_to_num(nan=1e6), expected.scale.nan_to_num(nan=1e6))


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
def test_rotate_kernel_has_the_references_bits(device: torch.device) -> None:
    for shape, size in ROTATED:
        x = torch.randn(shape)
        assert_bitwise(kernels.rotate(x.to(device), size).cpu(), rotate_reference(x, size))
    halves = torch.randn(5, 512).to(torch.bfloat16)
    assert_bitwise(kernels.rotate(halves.to(device), 256).cpu(), rotate_reference(halves, 256).to(torch.bfloat16))


def nvfp4_weight(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Codes and block scales of all kinds; no E4M3 number is NaN in a weight that was quantized."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = torch.randint(1, 127, (n, k // 16), dtype=torch.uint8)
    scales[0], codes[-1] = 1, 0
    return codes, scales


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 16), (3, 128), (32, 144), (48, 272), (70, 64)])
def test_nvfp4_kernel_is_the_reference(n: int, k: int, transposed: bool, device: torch.device) -> None:
    codes, scales = (x.to(device) for x in nvfp4_weight(n, k))
    expected = reference(decode_nvfp4, codes, scales, transposed)
    assert_bitwise(kernels.decode_nvfp4(codes, scales, transposed).cpu(), expected)
    strided = torch.stack([codes, codes], dim=-1)[..., 0]
    assert_bitwise(kernels.decode_nvfp4(strided, scales, transposed).cpu(), expected)


@pytest.mark.triton
def test_nvfp4s_table_has_every_code_of_every_scale(device: torch.device) -> None:
    codes = nvfp4.pack(torch.arange(16, dtype=torch.uint8).expand(126, 16)).to(device)
    scales = torch.arange(1, 127, dtype=torch.uint8, device=device)[:, None]
    assert_bitwise(kernels.decode_nvfp4(codes, scales, False).cpu(), reference(decode_nvfp4, codes, scales, False))
