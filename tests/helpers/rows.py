"""What kernels that make and quantize rows are tested with: inputs of every kind, and codes that are their values'."""

from __future__ import annotations

import torch
from diffusers.models.normalization import RMSNorm
from torch import Tensor

from coat_core.formats import get_format
from coat_core.granularity import PER_ROW, PER_TENSOR, Granularity, per_group
from coat_core.quantize import quantize
from tests.helpers.asserts import assert_bitwise
from tests.tolerances import NORM_BACKWARD_BF16_FLOOR_DB, NORM_BACKWARD_FP32_FLOOR_DB

CPU = torch.device("cpu")
FLOOR = {torch.float32: NORM_BACKWARD_FP32_FLOOR_DB, torch.bfloat16: NORM_BACKWARD_BF16_FLOOR_DB}
GRANULARITIES = [PER_TENSOR, PER_ROW, per_group(16), per_group(128)]
SAVED = [("none", 128), ("e4m3", 128), ("e5m2", 16), ("e4m3", 256)]
SHAPES = [(2, 7, 48), (1, 19, 40), (3, 5, 130), (1, 3, 2100)]
KINDS = ["plain", "zero row", "outlier", "heavy tails", "strided", "slice"]
SPECS = [("e4m3", "none"), ("e4m3", "per_row"), ("e5m2", "per_row"), ("e4m3", "per_tensor"), ("e5m2", "per_tensor")]
CASES = [(kind, "e4m3", "per_row") for kind in KINDS] + [("plain", *spec) for spec in SPECS if spec != SPECS[1]]


def extreme_values(kind: str, shape: tuple[int, ...]) -> Tensor:
    """Draw x of `shape`, fp32, for a kernel that quantizes; "bf16" is that."""
    x = torch.randn(shape)
    if kind == "zeros":
        x[0] = 0
    elif kind == "outlier":
        x.view(-1)[x.numel() // 2] = 1e9
    elif kind == "heavy tails":
        x = x / torch.rand(shape).clamp_min(1e-4)
    elif kind == "tiny":
        x = x * 1e-42
    elif kind == "not finite":
        x.view(-1)[0], x.view(-1)[-1] = float("inf"), float("nan")
    elif kind == "strided":
        x = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    elif kind == "rows apart":
        x = torch.randn(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]
    elif kind == "bf16":
        x = x.to(torch.bfloat16)
    return x


def rows_of_kind(kind: str, shape: tuple[int, ...]) -> Tensor:
    """fp32 [..., K]: one row of zeros, one huge value, heavy tails, strided, or the end of wider rows."""
    x = torch.randn(shape)
    if kind == "zero row":
        x[0, -1] = 0
    elif kind == "outlier":
        x.view(-1)[x.numel() // 2] = -1e4
    elif kind == "heavy tails":
        x = x / torch.rand(shape).clamp_min(1e-3)
    elif kind == "strided":
        x = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    elif kind == "slice":
        x = torch.randn(*shape[:-1], shape[-1] + 16)[..., 16:]
    return x


def assert_codes_of(values: Tensor, codes: Tensor, scale: Tensor, fmt: str, granularity: str) -> None:
    """Assert that values came with their own codes and scale, to the bit: those of the CPU on every device."""
    assert values.is_contiguous()
    if granularity == "none":
        assert codes.shape == scale.shape == (0,)
        assert (codes.dtype, scale.dtype) == (get_format(fmt).dtype, torch.float32)
        return
    expected = quantize(values.cpu(), fmt, Granularity(granularity))
    assert_bitwise(scale.cpu(), expected.scale)
    assert_bitwise(codes.cpu().view(torch.uint8), expected.codes.view(torch.uint8))


def assert_saved(values: Tensor, codes: Tensor, scale: Tensor, saved_format: str, group_size: int) -> None:
    """Assert that these are the values' codes as they are saved for backward, to the bit; empty without a format."""
    assert codes.is_contiguous()
    assert scale.is_contiguous()
    if saved_format == "none":
        assert codes.shape == scale.shape == (0,)
        return
    expected = quantize(values.cpu(), saved_format, per_group(group_size))
    assert_bitwise(scale.cpu(), expected.scale)
    assert codes.dtype == expected.codes.dtype
    assert_bitwise(codes.cpu().view(torch.uint8), expected.codes.view(torch.uint8))


def assert_rows_close(found: Tensor, expected: Tensor, rtol: float) -> None:
    """Assert same dtype and shape, and that no element is off by more than `rtol` of its row's largest magnitude."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    off = (found.cpu().double() - expected.cpu().double()).abs()
    allowed = rtol * expected.cpu().double().abs().amax(-1, keepdim=True)
    assert bool((off <= allowed).all()), f"off by {float((off / allowed).max()):.3g} of what is allowed"


def diffusers_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of diffusers."""
    norm = RMSNorm(len(weight), eps)
    norm.weight.data = weight
    return norm(x).detach()
