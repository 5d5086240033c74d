"""Codes and back, of FP8, INT8 and NVFP4: operators, and their Triton kernels against the references to the bit."""

from contextlib import suppress

import pytest
import torch
from torch import Tensor

from coat_core import nvfp4
from coat_core.casts import declarations
from coat_core.formats import FORMATS, get_format
from coat_core.granularity import PER_ROW, PER_TENSOR, Granularity, per_group
from coat_core.int8 import quantize_int8 as int8_reference
from coat_core.int8 import rotate as rotate_reference
from coat_core.ops import quantize as ops
from coat_core.ops.quantize import decode_nvfp4, quantize_and_save
from coat_core.quantize import dequantize as dequantize_reference
from coat_core.quantize import quantize as quantize_reference
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import reference
from tests.helpers.rows import LAYOUTS, SPECS, assert_casts, assert_follows, rows

with suppress(ImportError):  # without triton
    from coat_core.ops import quantize_kernel as kernels
    from coat_core.ops.gelu_kernel import mlp_activation_down

GRANULARITIES = [PER_TENSOR, PER_ROW, per_group(16), per_group(128), per_group(256)]
SHAPES = [(2, 4, 40), (1, 4100), (1, 1)]


def values(kind: str, shape: tuple[int, ...]) -> Tensor:
    """fp32, strided: rows of every kind, also with values that are not finite; or what fp32 holds as subnormals."""
    x = rows(shape, "strided")
    if kind == "tiny":
        return torch.randn(shape) * 1e-42
    if kind == "not finite":
        x[(0,) * x.ndim], x[(-1,) * x.ndim] = float("inf"), float("nan")
    return x


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
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize(
    ("kind", "fmt"), [("rows", "e4m3"), ("rows", "e5m2"), ("tiny", "e4m3"), ("not finite", "e5m2")]
)
def test_quantize_kernel_has_the_references_bits(kind, fmt, granularity, device):
    for shape in SHAPES:
        x = values(kind, shape).to(device)
        codes, scale = kernels.quantize(x, fmt, granularity.name, granularity.group_size, None)
        assert_quantized(x, codes, scale, fmt, granularity)


@pytest.mark.triton
def test_quantize_kernel_reads_half_precision_and_multiplies_columns_first(device):
    x, factors = torch.randn(5, 200, device=device).bfloat16(), torch.rand(400, device=device)[::2]
    for granularity in GRANULARITIES:
        how = (granularity.name, granularity.group_size)
        assert_quantized(x, *kernels.quantize(x, "e4m3", *how, None), "e4m3", granularity)
        product = x.to(torch.float32) * factors
        assert_quantized(product, *kernels.quantize(x, "e5m2", *how, factors), "e5m2", granularity)
        assert_quantized(product, *ops.quantize(x, "e5m2", granularity, factors)[:2], "e5m2", granularity)


@pytest.mark.triton
def test_per_tensor_amax_covers_more_than_one_share_a_program(device, monkeypatch):
    monkeypatch.setattr(kernels, "SHARES_MAX", 2)  # so that each program takes several blocks
    x = torch.randn(kernels.SHARE_BLOCK * 5 + 3, device=device)
    for place in (0, kernels.SHARE_BLOCK, x.numel() - 1):
        spiked = x.clone()
        spiked[place] = -1000.0
        _, scale = kernels.quantize(spiked, "e4m3", "per_tensor", 128, None)
        assert scale.item() == pytest.approx(1000.0 / 448.0)


@pytest.mark.triton
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantize_kernel_has_the_references_bits(fmt, granularity, device):
    for shape in SHAPES:
        codes, scale, _ = quantize_reference(rows(shape).to(device), fmt, granularity)
        found = kernels.dequantize(codes, scale, granularity.name, granularity.group_size, torch.float32)
        assert_bitwise(found, dequantize_reference(codes, scale, granularity))


@pytest.mark.triton
def test_e4m3_by_integers_has_the_casts_bits(monkeypatch):
    """As on a GPU without an instruction for it: written and read byte by byte."""
    monkeypatch.setattr(kernels, "empty_values", lambda shape, *_: torch.zeros(shape, dtype=torch.uint8))
    monkeypatch.setattr(kernels, "finished", lambda buffer, dtype: buffer.view(dtype))
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(torch.float32)
    ties = torch.arange(-(1 << 12), 1 << 12, dtype=torch.float32) * 2.0**-11  # between all small codes
    x = torch.cat([halves[halves.abs() <= 448], halves[halves.isnan()], ties, 440 * torch.rand(8192) - 220])
    x = torch.nn.functional.pad(x, (0, -len(x) % 64)).view(64, -1)
    x[:, 0] = 448.0  # each row's scale is 1
    codes, scale = kernels.quantize(x, "e4m3", "per_row", 128, None)
    assert (scale == 1).all()
    assert_same_codes(codes, x.to(torch.float8_e4m3fn))
    monkeypatch.undo()
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    found = kernels.dequantize(codes, torch.tensor(3.0), "per_tensor", 128, torch.float32)
    expected = codes.view(torch.float8_e4m3fn).to(torch.float32) * 3.0
    assert_bitwise(found.nan_to_num(nan=1e6), expected.nan_to_num(nan=1e6))


@pytest.mark.triton
def test_a_card_without_e4m3_gets_bytes(monkeypatch, device):
    from coat_core.ops import launch as runtime

    given: list[torch.dtype | int] = []
    kernel = {(1,): lambda *args, **options: given.extend(getattr(arg, "dtype", arg) for arg in args)}
    codes = [torch.zeros(16, device=device).to(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
    runtime.launch(kernel, (1,), *codes, 3)
    monkeypatch.setattr(runtime, "_cards_without_e4m3", lambda: frozenset([codes[0].device]))
    runtime.launch(kernel, (1,), *codes, 3)
    assert given == [torch.float8_e4m3fn, torch.float8_e5m2, 3, torch.uint8, torch.float8_e5m2, 3]


@pytest.mark.triton
@pytest.mark.parametrize("shape", [(48, 80), (130, 16), (1, 16)])
def test_transpose_kernel(shape, device):
    codes = torch.randint(0, 255, shape, dtype=torch.uint8, device=device).view(get_format("e4m3").dtype)
    found = kernels.transpose_codes(codes)
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8).t())


HOW = [(*spec, "e4m3", 16) for spec in SPECS] + [("e4m3", "per_row", "none", 128), ("none", "none", "e5m2", 128)]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_both_are_the_codes_of_x(how):
    x = rows((2, 7, 40)).bfloat16()
    found = quantize_and_save(x, *how)
    assert_casts(quantize_and_save, found, (x, *how))
    declared = declarations["coat::quantize_and_save"](found, x, *how)
    expected = [how[1]] * (how[1] != "none") + ["per_group"] * (how[2] != "none")
    assert [cast.granularity.name for cast in declared] == expected
    if how[2] != "none":
        assert declared[-1].granularity == per_group(how[3])


@pytest.mark.triton
@pytest.mark.parametrize("layout", [*LAYOUTS, "of an image", "heads"])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_quantize_and_save_kernel(layout, how, device):
    if layout == "of an image":  # text's rows in front of each image's
        x = rows((3, 8, 130), "dense").half()[:, 3:]
    elif layout == "heads":  # [B, S, D] as attention leaves it, [B, H, S, d] in memory
        x = rows((2, 3, 7, 16), "dense").bfloat16().transpose(1, 2).flatten(2)
    else:
        x = rows({"dense": (5, 1), "strided": (1, 4, 2100), "slice": (2, 7, 48)}[layout], layout)
    assert_follows(quantize_and_save, (x, *how), device)


@pytest.mark.triton
@pytest.mark.parametrize(("shape", "size"), [((1, 4, 320), 64), ((1, 4096), 256), ((4, 6), 1)])
def test_int8_kernels_have_the_references_bits(shape, size, device):
    factors = torch.rand(shape[-1]) + 0.5
    for x in (values("tiny", shape), values("not finite", shape), rows(shape), rows(shape).bfloat16()):
        for given in (None, factors):
            expected = int8_reference(x, size, given)
            codes, scale = kernels.quantize_int8(x.to(device), size, None if given is None else given.to(device))
            assert_bitwise(codes.cpu(), expected.codes)
            assert_bitwise(scale.cpu().nan_to_num(nan=1e6), expected.scale.nan_to_num(nan=1e6))
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(shape).to(dtype)
        assert_bitwise(kernels.rotate(x.to(device), size).cpu(), rotate_reference(x, size).to(dtype))


@pytest.mark.triton
def test_a_row_that_is_not_finite_has_no_int8_scale(device):
    """From every kernel that makes codes, as from the reference."""
    x = values("not finite", (2, 3, 256))
    expected = int8_reference(x, 256)
    codes, scale, *_ = kernels.quantize_and_save(x.to(device), "int8", "per_row", "none", 128)
    assert_bitwise(codes.cpu(), expected.codes)
    assert_bitwise(scale.cpu().nan_to_num(nan=1e6), expected.scale.nan_to_num(nan=1e6))
    down = torch.randn(4, 256, device=device).bfloat16()
    how = ("int8", "per_row", "none", 128, torch.bfloat16)
    _, codes, scale, *_ = mlp_activation_down(None, x.bfloat16().to(device), None, None, down, *how)
    assert scale.flatten().isnan().tolist() == [True, False, False, False, False, True]
    assert not codes[0, 0].any()


@pytest.mark.triton
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 16), (70, 272)])
def test_nvfp4_kernel_is_the_reference(n, k, transposed, device):
    """No E4M3 number is NaN in a weight that was quantized."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(1, 127, (n, k // 16), dtype=torch.uint8, device=device)
    scales[0], codes[-1] = 1, 0
    expected = reference(decode_nvfp4, codes, scales, transposed)
    assert_bitwise(kernels.decode_nvfp4(codes, scales, transposed).cpu(), expected)
    strided = torch.stack([codes, codes], dim=-1)[..., 0]
    assert_bitwise(kernels.decode_nvfp4(strided, scales, transposed).cpu(), expected)


@pytest.mark.triton
def test_nvfp4s_table_has_every_code_of_every_scale(device):
    codes = nvfp4.pack(torch.arange(16, dtype=torch.uint8).expand(126, 16)).to(device)
    scales = torch.arange(1, 127, dtype=torch.uint8, device=device)[:, None]
    assert_bitwise(kernels.decode_nvfp4(codes, scales, False).cpu(), reference(decode_nvfp4, codes, scales, False))
