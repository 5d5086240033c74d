"""Frozen weights in INT8 and NVFP4, transposed copies of codes for dgrad, and several weights as one matrix."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coat_core import FP8Linear, FP8LinearConfig, FP8TrainableLinear, nvfp4
from coat_core.activation import FP8InputLinear
from coat_core.granularity import PER_ROW, Granularity, Storage
from coat_core.int8 import quantize_int8, rotate
from coat_core.linear.function import BUFFERS, keep_transposed, load_weight, store_weight, stored_bytes
from coat_core.ops.quantize import quantize
from coat_core.quantize import sqnr_db
from coat_flux.blocks.fused.chooser import fused_block
from coat_flux.blocks.fused.linears import join_buffers, read_group
from coat_flux.blocks.fused.parts import modulate_ahead
from coat_flux.trainers.standalone.network import lora_parameters
from tests.helpers.asserts import assert_all_bitwise, assert_bitwise, assert_sqnr
from tests.helpers.flux import coat_flux_model, predict
from tests.helpers.option_run import GemmLog
from tests.helpers.saved_tensors import saved_by
from tests.helpers.tiny_flux import TINY_TRANSFORMER_CONFIG
from tests.tolerances import (
    FP32_ORDER_ATOL,
    FP32_ORDER_FLOOR_DB,
    FP32_ORDER_RTOL,
    INT8_FLOOR_DB,
    INT8_FLUX_FLOOR_DB,
    INT8_GRADIENT_FLOOR_DB,
    product_floor_db,
)

N, K = 48, 320  # INT8 rotates blocks of 16 and 64
E4M3, NVFP4 = FP8LinearConfig(), FP8LinearConfig(weight_format="nvfp4")
E5M2 = FP8LinearConfig(weight_format="e5m2", weight_granularity="per_row")
INT8 = FP8LinearConfig(weight_format="int8", input_format="int8", grad_format="int8")
IN_INT8 = {"weight": {"format": "int8"}, "activation": {"format": "int8"}, "memory": {"checkpointing": "none"}}
CODES, TRANSPOSED = "weight_codes", "weight_codes_transposed"


def make(config: FP8LinearConfig, n: int = N, bias: bool = True) -> tuple[FP8Linear, Tensor]:
    linear = nn.Linear(K, n, bias)
    weight = linear.weight.detach().clone()
    layer = FP8Linear.from_linear(linear, config)
    assert layer is linear
    return layer, weight


def rotated(x: Tensor, size: int) -> Tensor:
    """X as its INT8 codes stand for it."""
    return rotate(quantize_int8(x, size).dequantize(), size)


@pytest.mark.parametrize(
    "config",
    [
        INT8,
        replace(INT8, grad_format="bf16"),
        replace(INT8, use_fp8_gemm=False),
        NVFP4,
        replace(NVFP4, input_granularity="per_tensor", grad_format="e4m3"),
        replace(NVFP4, grad_format="bf16"),
        replace(NVFP4, use_fp8_gemm=False),
    ],
    ids=lambda c: f"{c.weight_format} {c.input_granularity} {c.grad_format if c.use_fp8_gemm else 'none'}",
)
def test_products_are_those_of_the_dequantized_operands(config):
    layer, original = make(config)
    weight, in_int8 = layer.weight.data, config.weight_format == "int8"
    if in_int8:
        assert_sqnr(rotate(rotated(rotate(original.t(), 16).t(), 64).t(), 16).t(), weight, FP32_ORDER_FLOOR_DB)
    assert sqnr_db(original, weight) > 20
    x, dy = torch.randn(3, 5, K, requires_grad=True), torch.randn(3, 5, N)
    y = layer(x)
    y.backward(dy)
    x_hat, dy_hat, granularity = x.detach(), dy, Granularity(config.input_granularity)
    if config.use_fp8_gemm:
        x_hat = rotated(x, 64) if in_int8 else quantize(x, config.input_format, granularity).dequantize()
    if config.use_fp8_gemm and config.grad_format == "int8":
        scale = load_weight(layer, config).scale.t()
        dy_hat = rotate(rotated(rotate(dy, 16) * scale, 1) / scale, 16)
    elif config.use_fp8_gemm and config.grad_format != "bf16":
        dy_hat = quantize(dy, config.grad_format, granularity).dequantize()
    assert_sqnr(x_hat @ weight.t() + layer.bias.detach(), y.detach(), FP32_ORDER_FLOOR_DB)
    assert_sqnr(dy_hat @ weight, x.grad, FP32_ORDER_FLOOR_DB)


@pytest.mark.parametrize("kind", ["gaussian", "outlier channels", "after GELU"])
def test_int8_is_nearer_to_high_precision_than_e4m3(kind):
    """Of values of bf16, with the outliers that transformers have; of dy, too, which it is rotated against as x is."""
    x, weight, channels = torch.randn(32, 1024), torch.randn(256, 1024) / 32, torch.randperm(1024)[:10]
    dy = torch.randn(32, 256)
    if kind == "outlier channels":
        x[:, channels] *= 30
        dy[:, ::100] *= 100
    if kind == "after GELU":
        x[:, channels] += 10
        x = torch.nn.functional.gelu(1.5 * x)
    x, weight = x.bfloat16().float(), weight.bfloat16().float()
    errors = []
    for config in (INT8, FP8LinearConfig(weight_granularity="per_row")):
        linear = nn.Linear(1024, 256, False)
        linear.weight.data.copy_(weight)
        leaf = x.clone().requires_grad_()
        y = FP8Linear.from_linear(linear, config)(leaf)
        y.backward(dy)
        errors.append((sqnr_db(x @ weight.t(), y.detach()), sqnr_db(dy @ weight, leaf.grad)))
    (y_int8, dx_int8), (y_e4m3, dx_e4m3) = errors
    assert y_int8 > max(INT8_FLOOR_DB, y_e4m3 + 6)
    assert dx_int8 > max(INT8_GRADIENT_FLOOR_DB, dx_e4m3 + 6)


ONE_SCALE = {CODES: ((N, K), torch.uint8), "weight_scale_bits": ((), torch.int32)}
ROW_SCALES = {CODES: ((N, K), torch.uint8), "weight_scale_bits": ((N, 1), torch.int32)}
NVFP4_BUFFERS = {
    CODES: ((N, K // 2), torch.uint8),
    "weight_scale_bits": ((), torch.int32),
    "weight_block_scales": ((N, K // 16), torch.uint8),
}


@pytest.mark.parametrize(
    ("config", "stored", "buffers", "size"),
    [
        (E4M3, "e4m3/per_tensor", ONE_SCALE, N * K + 4),
        (E5M2, "e5m2/per_row", ROW_SCALES, N * K + 4 * N),
        (INT8, "int8", ROW_SCALES, N * K + 4 * N),
        (NVFP4, "nvfp4", NVFP4_BUFFERS, N * K * 9 // 16 + 4),
    ],
    ids=["e4m3", "e5m2", "int8", "nvfp4"],
)
def test_what_a_layer_holds_saves_and_restores(config, stored, buffers, size):
    layer, original = make(config)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    assert {name: (tuple(x.shape), x.dtype) for name, x in layer.named_buffers()} == buffers
    assert set(buffers) < set(BUFFERS)
    assert sum(stored_bytes(N, K, config).values()) == sum(x.nbytes for x in layer.buffers()) == size
    if config is NVFP4:
        assert_bitwise(layer.weight_codes, nvfp4.quantize(original)[0])
    before, kept = layer.weight.data, {name: x.clone() for name, x in layer.named_buffers()}
    for dtype in (torch.float64, torch.float16, torch.bfloat16):  # casts reach neither codes nor scales
        cast = layer.to(dtype).weight.data
        assert layer.bias.dtype == cast.dtype == dtype
        if config is not INT8:
            assert_bitwise(cast, before.to(dtype))
    assert_all_bitwise(dict(layer.named_buffers()), kept)
    twin, _ = make(config)
    twin.load_state_dict(layer.state_dict())
    assert_bitwise(twin.weight.data, before)
    other = FP8LinearConfig(weight_format="e5m2" if config is E4M3 else "e4m3")
    refusal = f"weight_format='{other.weight_format}': the loaded weight is '{config.weight_format}'; convert"
    with pytest.raises(ValueError, match=refusal):
        make(other)[0].set_extra_state(layer.get_extra_state())
    assert f"weight={stored}, input={config.input_format}/per_row" in repr(layer)
    restored = layer.to_linear()
    assert restored is layer
    assert type(restored) is nn.Linear
    assert type(restored.weight) is nn.Parameter
    assert not restored.weight.requires_grad
    assert not list(restored.buffers())
    assert_bitwise(restored.weight.detach(), cast)
    meta = FP8Linear.from_linear(nn.Linear(K, N, device="meta"), config)
    assert load_weight(meta, config).shape == meta.weight.shape == (N, K)
    assert meta(torch.empty(3, K, device="meta")).shape == (3, N)
    assert sum(x.nbytes for x in meta.buffers()) == size
    meta.to_empty(device="cpu").load_state_dict(twin.state_dict())
    assert_bitwise(meta.weight.data, before)
    if config in (INT8, NVFP4):
        with pytest.raises(ValueError, match=f"weight_format='{config.weight_format}': is for frozen weights"):
            FP8TrainableLinear.from_linear(nn.Linear(K, N), config)


def test_an_adapter_shares_int8_codes_and_turns_its_gradient_back():
    base, down = make(INT8)[0], nn.Linear(K, 4, False)
    FP8InputLinear.from_linear(down, Storage("int8", PER_ROW), base)
    x, dh = torch.randn(7, K, requires_grad=True) * 1, torch.randn(7, 4)
    (_, h), saved = saved_by(lambda: (base(x), down(x)))
    h.backward(dh)
    assert [t.dtype for t in saved if t.shape == (7, K)] == [torch.int8]
    assert_sqnr(dh.t() @ rotated(x, 64), down.weight.grad, FP32_ORDER_FLOOR_DB)


def flux_gradients(options: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    """Of the LoRA of tiny FLUX in fp32, with the prediction; and the start table."""
    model, report, _ = coat_flux_model(options, dtype=torch.float32)
    with GemmLog() as forward:
        prediction = predict(model)
    with GemmLog() as backward:
        prediction.square().mean().backward()
    for log in (forward, backward):
        assert {dtype for dtype, _ in log.calls} == ({torch.int8} if "weight" in options else set())
    grads = {name: parameter.grad for name, parameter in lora_parameters(model).items()}
    return {"prediction": prediction.detach(), **grads}, report.table(1000)


def test_gradients_of_tiny_flux_in_int8_come_near_those_without_coat(monkeypatch):
    """Of one block of each kind."""
    for blocks in ("num_layers", "num_single_layers"):
        monkeypatch.setitem(TINY_TRANSFORMER_CONFIG, blocks, 1)
    exact, _ = flux_gradients({"enabled": False})
    gradients, table = flux_gradients(IN_INT8)
    assert "W int8, x int8/per_row, dy int8" in table
    assert "INT8, forward int8, backward int8" in table
    for name, value in gradients.items():
        assert_sqnr(exact[name], value, INT8_FLUX_FLOOR_DB)


def test_modulations_of_int8_weights_are_the_same_together():
    model, *_ = coat_flux_model(IN_INT8, dtype=torch.float32)
    temb = torch.randn(2, 64)
    for block in (model.transformer_blocks[0], model.single_transformer_blocks[0]):
        modulations = fused_block(block).modulations
        for modulation in modulations:
            assert modulation.linear.bases[0].rotations[0] > 1
            torch.nn.init.normal_(modulation.linear.bases[0].bias)
        alone = [modulation(temb) for modulation in modulations]
        modulate_ahead(modulations, temb)
        for modulation, expected in zip(modulations, alone, strict=True):
            assert_sqnr(expected.detach(), modulation(temb).detach(), FP32_ORDER_FLOOR_DB)


def test_int8_keeps_the_bytes_of_fp8_for_backward():
    kept = []
    for options in (None, IN_INT8):
        model, *_ = coat_flux_model(options)
        predict(model)  # the first pass of a configuration also runs blocks to count what they keep
        _, saved = saved_by(lambda model=model: predict(model))
        kept.append(sum(x.numel() * x.itemsize for x in saved))
    assert kept[0] == kept[1] > 0


# -- a transposed copy of the codes ------------------------------------------------------------------------------------
def gradient(layer: FP8Linear) -> Tensor:
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(2)).requires_grad_()
    layer(x).square().sum().backward()
    return x.grad


@pytest.mark.parametrize(
    "config",
    [
        E4M3,
        FP8LinearConfig(weight_granularity="per_row", input_granularity="per_row", grad_format="e4m3"),
        FP8LinearConfig(input_granularity="per_tensor"),
        INT8,
    ],
    ids=lambda c: f"{c.weight_format} {c.weight_granularity} {c.input_granularity}",
)
def test_gradients_are_those_without_the_copy(config):
    layer, _ = make(config)
    keys, expected = set(layer.state_dict()), gradient(layer)
    keep_transposed(layer, config)
    copy = load_weight(layer, config).transposed
    assert copy.is_contiguous()
    assert torch.equal(copy.view(torch.uint8), load_weight(layer, config).codes.view(torch.uint8).t())
    # a CPU's products of fp32 add in the order their layout suggests, with the number of threads
    torch.testing.assert_close(gradient(layer), expected, rtol=FP32_ORDER_RTOL, atol=FP32_ORDER_ATOL)
    layer.weight_codes_transposed.zero_()
    assert not gradient(layer).any()
    layer.to(torch.bfloat16)
    assert layer.weight_codes_transposed.dtype == torch.uint8
    assert set(layer.state_dict()) == keys


def test_the_copy_goes_with_its_weight():
    layer, _ = make(E4M3)
    keep_transposed(layer, E4M3)
    store_weight(layer, torch.randn(N, K), E4M3)
    assert load_weight(layer, E4M3).transposed is None
    keep_transposed(layer, E4M3)
    assert not list(layer.to_linear().buffers())


# -- linears that read the same tensor multiply by one matrix ----------------------------------------------------------
def linears(*widths: int) -> list[Any]:
    group = [make(E4M3, width)[0] for width in widths]
    for linear in group:
        keep_transposed(linear, E4M3)
    return group


def test_each_keeps_its_values_and_the_memory_is_one():
    group = linears(16, 48, 32)
    before = [(linear.weight.clone(), linear.weight_codes_transposed.clone()) for linear in group]
    addresses = {linear.weight_codes.untyped_storage().data_ptr() for linear in group}
    for name, dim, shape in ((CODES, 0, (96, K)), (TRANSPOSED, 1, (K, 96))):
        whole = join_buffers(group, name, dim)
        assert whole.shape == shape
        assert whole.is_contiguous()
        assert join_buffers(group, name, dim).data_ptr() == whole.data_ptr()
        parts = whole.split([16, 48, 32], dim=dim)
        assert all(torch.equal(part, linear._buffers[name]) for part, linear in zip(parts, group, strict=True))
    for linear, (weight, transposed) in zip(group, before, strict=True):
        assert_bitwise(linear.weight.data, weight)
        assert torch.equal(linear.weight_codes_transposed, transposed)
        assert linear.weight_codes.untyped_storage().data_ptr() not in addresses


def test_views_that_are_not_side_by_side_are_joined_again_and_a_missing_copy_joins_nothing():
    group = linears(16, 32)
    first = join_buffers(group, CODES, 0)
    assert torch.equal(join_buffers(group[::-1], CODES, 0), torch.cat([first[16:], first[:16]]))
    moved = [linear._apply(lambda x: x.clone()) for linear in group]
    assert join_buffers(moved, CODES, 0) is not None
    group[1]._buffers.pop(TRANSPOSED)
    own = group[0].weight_codes_transposed
    assert join_buffers(group, TRANSPOSED, 1) is None
    assert group[0].weight_codes_transposed is own


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("config", [E4M3, INT8, NVFP4], ids=lambda c: c.weight_format)
def test_one_product_gives_what_each_gives(config, bias):
    group = [make(config, width, bias)[0] for width in (16, 48, 32)]
    weights = [linear.weight.data for linear in group]
    x, dy = torch.randn(2, 5, K), torch.randn(2, 5, 96)
    expected = torch.cat([linear(x) for linear in group], dim=-1)
    apart, joined = read_group(group, join=False), read_group(group, join=True)
    assert (len(apart.bases), len(joined.bases)) == (3, 1)
    for name in {CODES, "weight_block_scales"} & group[0]._buffers.keys():
        assert len({linear._buffers[name].untyped_storage().data_ptr() for linear in group}) == 1
    for linear, weight in zip(group, weights, strict=True):
        assert_bitwise(linear.weight.data, weight)
    floor = INT8_GRADIENT_FLOOR_DB if config is INT8 else product_floor_db("e5m2")
    for one in (apart, joined):
        y, h = one.forward(x, quantize(x, one.input_storage.format, one.input_storage.granularity))
        assert h is None
        torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
        assert_sqnr(dy @ torch.cat(weights), one.dgrad(dy), floor)


def test_linears_of_other_settings_stay_apart():
    group = linears(16, 32)
    group[1].config = FP8LinearConfig(use_fp8_gemm=False)
    assert len(read_group(group, join=True).bases) == 2
    for widths, joins in (((16, 64), False), ((64, 64, 64, 64), False), ((64, 64, 64), True)):  # blocks of a rotation
        group = [make(INT8, width)[0] for width in widths]
        assert len(read_group(group, join=True).bases) == (1 if joins else len(widths)), widths
    plain = [nn.Linear(32, 16).requires_grad_(False) for _ in range(2)]
    assert len(read_group(plain, join=True).bases) == 2
