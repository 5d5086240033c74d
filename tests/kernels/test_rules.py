"""What torch.compile and callers may rely on, of every operator and its launcher.

opcheck asks the body alone; the launchers are asked over views and dtypes that differ.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from coat_core.granularity import PER_ROW, PER_TENSOR, per_group
from coat_core.ops import dispatch, gate, gelu, lora, norm, scaled_mm
from coat_core.ops import quantize as codes
from coat_core.quantize import quantize
from tests.helpers.operators import bits, check_layout, check_operator, moved, tensors_in
from tests.helpers.rows import assert_follows, read_cases, turned
from tests.kernels import test_norm, test_qkv

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
Case = tuple[Any, tuple[Any, ...]]
SAVED = [("e4m3", 128), ("none", 0), ("e5m2", 16), ("e4m3", 32), ("none", 0), ("e4m3", 16)]  # one for each of SPECS
SWIGLU = "silu_and_mul"


def quantize_cases() -> Iterator[Case]:
    for granularity in (PER_TENSOR, PER_ROW, per_group(16)):
        how = (granularity.name, granularity.group_size)
        yield codes._quantize, (turned(3, 40).bfloat16(), "e4m3", *how, None)
        yield codes._quantize, (torch.randn(2, 3, 40, dtype=FP16), "e5m2", *how, torch.rand(40))
        stored, scale, _ = quantize(torch.randn(3, 40), "e4m3", granularity)
        yield codes._dequantize, (stored.t().contiguous().t(), scale, *how, BF16)
    for how, saved in zip((("e4m3", "per_row"), ("e5m2", "per_tensor"), ("none", "none")), SAVED, strict=False):
        for x in (turned(3, 40).bfloat16(), torch.randn(2, 5, 48, dtype=FP16)[:, 2:, 8:], torch.randn(1, 1)):
            yield codes.quantize_and_save, (x, *how, *saved)
    for shape in ((16, 48), (1, 32), (32, 1)):
        yield codes.transpose_codes, (torch.randn(shape).to(torch.float8_e4m3fn),)
    for x, factors in ((turned(3, 64), None), (torch.randn(2, 3, 96, dtype=BF16)[..., 32:], torch.rand(64))):
        yield codes.quantize_int8, (x, 16, factors)
        yield codes.rotate, (x, 1 if factors is None else 16)
    for transposed in (False, True):
        packed = torch.randint(0, 256, (32, 24), dtype=torch.uint8)
        yield codes.decode_nvfp4, (packed, torch.randint(1, 127, (32, 3), dtype=torch.uint8), transposed)


def mlp_cases() -> Iterator[Case]:
    for dtype, dtype_down in ((FP32, BF16), (BF16, FP32), (FP16, FP16)):
        mlp, attention = turned(2, 7, 34), torch.randn(2, 7, 88)[..., 48:]
        pair, down = (torch.randn(2, 7, 4), torch.randn(34, 4)), torch.randn(5, 82)[:, 8:]
        inputs, half = (attention, mlp, *pair), (None, mlp.bfloat16(), None, None)
        yield gelu.mlp_activation, (*inputs, "e5m2", "per_tensor", "e4m3", 16, FP32)
        yield gelu.mlp_activation, (*half, "int8", "per_row", "none", 0, BF16, SWIGLU)
        yield gelu.mlp_activation_down, (*inputs, down, "e4m3", "per_row", "e4m3", 16, FP32)
        narrow = down.bfloat16()[:, 57:]
        yield gelu.mlp_activation_down, (*half, narrow, "e5m2", "per_row", "none", 0, BF16, SWIGLU)
        yield gelu.mlp_activation_backward, (mlp, pair[0], pair[1].t(), mlp, None, 0, BF16)
        dh = torch.randn(2, 7, 12).to(dtype)[..., 4:]
        for a, b in zip(read_cases(attention.to(dtype)), read_cases(mlp.to(dtype)), strict=True):
            yield gelu.mlp_down_gradient, (dh, *a[:2], *b, dtype, dtype_down)
    yield gelu.mlp_down_gradient, (dh[:, :0], None, None, mlp[:, :0].to(dtype), None, 16, dtype, dtype_down)


def lora_cases() -> Iterator[Case]:
    for tokens, dtype, dtype_up, rank in ((7, BF16, FP32, 4), (1, FP32, FP32, 40), (0, FP16, BF16, 4)):
        dy, h = torch.randn(2, tokens, 64)[..., 8:], torch.randn(2, tokens, 3 * rank)[..., rank:]
        rest = (h.to(dtype), torch.randn(56, rank).to(dtype), [48, 8], dtype_up)
        yield lora.lora_up_gradients, (torch.where(torch.arange(56) == 50, torch.nan, dy), *rest)


def product_cases() -> Iterator[Case]:
    for granularity in (PER_TENSOR, PER_ROW):
        stored, scale, _ = quantize(torch.randn(48, 32), "e4m3", granularity)
        for x in (turned(4, 32), torch.randn(32), torch.randn(2, 9, 32, dtype=BF16), torch.randn(0, 32)):
            yield scaled_mm.weight_only_linear, (x, stored, scale, torch.randn(48), BF16)
            yield scaled_mm.weight_only_linear, (x, stored, scale, None, FP32)
    a, b = (torch.randint(-127, 128, (rows, 48), dtype=torch.int8) for rows in (17, 32))
    for bias in (torch.randn(32), None):
        yield scaled_mm.int8_mm, (a, torch.rand(17, 1), b, torch.rand(32, 1), bias, BF16, True)


GROUPS = [quantize_cases, mlp_cases, lora_cases, product_cases]


def first_cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    elsewhere = (test_norm.norm_calls("rms"), test_norm.gate_calls(True), test_qkv.calls())  # which check the rest
    for cases in (*(cases() for cases in GROUPS), *elsewhere):
        for op, args, *_ in cases:
            found.setdefault(op._qualname, (op, args))
    return found


def test_every_operator_has_a_case():
    assert set(dispatch.launchers) - set(first_cases()) == {"coat::fp8_adamw_step"}  # tests/kernels/test_adamw.py


@pytest.mark.triton
@pytest.mark.parametrize("cases", GROUPS)
def test_launchers_return_what_the_fakes_promise(cases, device):
    for op, args in cases():
        launch = dispatch.launcher_of(op._qualname)
        given = moved(args, device)
        results, references = launch(*given), op._init_fn(*given)
        check_layout(op, given, results)
        check_layout(op, given, references)
        for found, expected in zip(tensors_in(results), tensors_in(references), strict=True):
            assert (found.float().isnan() == expected.float().isnan()).all(), op._qualname


@pytest.mark.parametrize("name", sorted(first_cases()))
def test_operators_keep_torch_library_rules(name):
    check_operator(*first_cases()[name])


@pytest.mark.gpu
@pytest.mark.triton
def test_two_launches_agree():
    for op, args in first_cases().values():
        given = moved(args, torch.device("cuda"))
        first, second = (tensors_in(dispatch.launcher_of(op._qualname)(*given)) for _ in range(2))
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, second, strict=True)), op._qualname


@pytest.mark.triton
@pytest.mark.parametrize("programs", [2, 5])
def test_backward_kernels_share_rows_among_programs(programs, device, monkeypatch):
    monkeypatch.setattr("coat_core.ops.device.PROGRAMS", programs)
    monkeypatch.setattr("coat_core.ops.device.TILE_ELEMENTS", 128)  # two rows at once
    grad, x, of_image = torch.randn(2, 13, 48), torch.randn(2, 13, 48), torch.randn(2, 48)
    gated = (grad, of_image, x, None, 128, FP32, "e5m2", "per_row")
    for op, args in (
        (norm.norm_modulate_backward, (grad, *quantize(x, "e4m3", per_group(16))[:2], 16, of_image, 1e-6, x, FP32)),
        (gate.gated_sum_backward, gated),
        (gate.gated_sum_backward, (*gated, torch.rand(48) + 0.5, 1e-5)),  # behind an RMSNorm
    ):
        assert_follows(op, args, device)


WIDE = torch.zeros(1, 1, 16385)
TOO_WIDE = [  # for one program
    (norm.norm_modulate, (WIDE, None, 0, WIDE[0], WIDE[0], 1e-6, FP32)),
    (norm.norm_modulate_backward, (WIDE, WIDE, None, 0, WIDE[0], 1e-6, None, FP32)),
    (gate.gated_sum_backward, (WIDE, WIDE[0], None, None, 128, FP32, "e5m2", "none")),
    (codes.quantize_and_save, (WIDE, "e4m3", "per_row", "none", 128)),
]


@pytest.mark.triton
@pytest.mark.parametrize("case", TOO_WIDE, ids=lambda case: case[0]._qualname)
def test_rows_that_no_program_holds_are_an_error(case):
    op, args = case
    with pytest.raises(ValueError, match=r"16385.*16384"):
        dispatch.launcher_of(op._qualname)(*args)
