"""LayerNorm+modulate and RMSNorm+rotary: against diffusers' modules to the bit, against autograd in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import AdaLayerNormZero
from torch import Tensor

from coat_core.kernels.norm import (
    layer_norm_modulate,
    layer_norm_modulate_backward,
    rms_norm_rope,
    rms_norm_rope_backward,
)
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.tolerances import NORM_BACKWARD_BF16_FLOOR_DB, NORM_BACKWARD_FP32_FLOOR_DB

EPS = 1e-6
FLOOR = {torch.float32: NORM_BACKWARD_FP32_FLOOR_DB, torch.bfloat16: NORM_BACKWARD_BF16_FLOOR_DB}
TOKENS, HIDDEN, HEADS, HEAD_DIM = 7, 48, 3, 16


def modulated(kind: str, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x [2, 7, 48], scale and shift [2, 48]; rows of zeros, one huge channel, heavy tails, not contiguous."""
    x = torch.randn(2, TOKENS, HIDDEN)
    if kind == "zero row":
        x[0, 3] = 0
    elif kind == "outlier":
        x[..., 5] *= 1000
    elif kind == "heavy tails":
        x = x / torch.rand_like(x).clamp_min(1e-3)
    elif kind == "strided":
        x = torch.randn(2, HIDDEN, TOKENS).transpose(1, 2)
    scale, shift = torch.randn(2, HIDDEN), torch.randn(2, HIDDEN)
    return x.to(device, dtype), scale.to(device, dtype), shift.to(device, dtype)


KINDS = ["plain", "zero row", "outlier", "heavy tails", "strided"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_layer_norm_modulate_has_diffusers_bits(kind: str, dtype: torch.dtype) -> None:
    x, _, _ = modulated(kind, dtype, torch.device("cpu"))
    norm = AdaLayerNormZero(HIDDEN).to(dtype)
    emb = torch.randn(2, HIDDEN).to(dtype)
    with torch.no_grad():
        expected = norm(x, emb=emb)[0]
        shift, scale, *_ = norm.linear(norm.silu(emb)).chunk(6, dim=1)
        assert_bitwise(layer_norm_modulate(x, scale, shift, EPS), expected)


def exact_layer_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, (HIDDEN,), eps=EPS) * (1 + scale[:, None]) + shift[:, None]


def gradients(function: Any, leaves: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of `function(*leaves)` in float64."""
    doubled = [leaf.detach().double().requires_grad_() for leaf in leaves]
    return torch.autograd.grad(function(*doubled), doubled, grad.double())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "zero row"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_norm_modulate_backward(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    x, scale, shift = modulated(kind, dtype, device)
    grad = torch.randn_like(x)
    found = layer_norm_modulate_backward(grad, x, scale, EPS)
    for expected, gradient in zip(gradients(exact_layer_norm, [x, scale, shift], grad), found, strict=True):
        assert gradient.dtype == dtype
        assert_sqnr(expected, gradient, FLOOR[dtype])


def test_a_row_of_zeros_gets_a_finite_gradient(device: torch.device) -> None:
    x, scale, _ = modulated("zero row", torch.float32, device)
    grad = torch.randn_like(x)
    dx, dscale, dshift = layer_norm_modulate_backward(grad, x, scale, EPS)
    dz = grad[0, 3] * (1 + scale[0])
    torch.testing.assert_close(dx[0, 3], EPS**-0.5 * (dz - dz.mean()))
    assert dscale.isfinite().all()
    assert torch.equal(dshift, grad.sum(1))


def rotary(device: torch.device) -> tuple[Tensor, Tensor]:
    angles = (torch.arange(TOKENS)[:, None] * torch.logspace(0, -2, HEAD_DIM // 2)).repeat_interleave(2, dim=1)
    return angles.cos().to(device), angles.sin().to(device)


def heads(kind: str, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """x [2, 7, 3, 16], weight [16]."""
    x = torch.randn(2, TOKENS, HEADS, HEAD_DIM)
    if kind == "zero row":
        x[0, 3, 1] = 0
    elif kind == "outlier":
        x[..., 5] *= 1000
    elif kind == "heavy tails":
        x = x / torch.rand_like(x).clamp_min(1e-3)
    elif kind == "strided":
        x = torch.randn(2, HEADS, TOKENS, HEAD_DIM).transpose(1, 2)
    return x.to(device, dtype), torch.randn(HEAD_DIM).to(device, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_rms_norm_rope_has_diffusers_bits(kind: str, dtype: torch.dtype) -> None:
    x, weight = heads(kind, dtype, torch.device("cpu"))
    norm = torch.nn.RMSNorm(HEAD_DIM, eps=EPS).to(dtype)
    cos, sin = rotary(torch.device("cpu"))
    with torch.no_grad():
        norm.weight.copy_(weight)
        expected = apply_rotary_emb(norm(x), (cos, sin), sequence_dim=1)
    assert_bitwise(rms_norm_rope(x, weight, cos, sin, EPS), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_rope_backward(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = heads(kind, dtype, device)
    cos, sin = rotary(device)

    def exact(values: Tensor) -> Tensor:
        normed = torch.nn.functional.rms_norm(values, (HEAD_DIM,), weight.double(), EPS)
        return apply_rotary_emb(normed.double(), (cos.double(), sin.double()), sequence_dim=1)

    grad = torch.randn_like(x)
    found = rms_norm_rope_backward(grad, x, weight, cos, sin, EPS)
    assert found.dtype == dtype
    # apply_rotary_emb goes through fp32; its gradient is exact to that
    assert_sqnr(gradients(exact, [x], grad)[0], found, FLOOR[dtype])


def test_autocast_changes_nothing() -> None:
    x, scale, shift = modulated("plain", torch.float32, torch.device("cpu"))
    y, weight = heads("plain", torch.float32, torch.device("cpu"))
    cos, sin = rotary(torch.device("cpu"))
    plain = layer_norm_modulate(x, scale, shift, EPS), rms_norm_rope(y, weight, cos, sin, EPS)
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer_norm_modulate(x, scale, shift, EPS), rms_norm_rope(y, weight, cos, sin, EPS)
    for expected, found in zip(plain, cast, strict=True):
        assert_bitwise(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operators_keep_torch_library_rules(dtype: torch.dtype, device: torch.device) -> None:
    x, scale, shift = modulated("strided", dtype, device)
    y, weight = heads("strided", dtype, device)
    cos, sin = rotary(device)
    torch.library.opcheck(layer_norm_modulate, (x, scale, shift, EPS))
    torch.library.opcheck(layer_norm_modulate_backward, (x, x, scale, EPS))
    torch.library.opcheck(rms_norm_rope, (y, weight, cos, sin, EPS))
    torch.library.opcheck(rms_norm_rope_backward, (y, y, weight, cos, sin, EPS))
