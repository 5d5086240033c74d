"""Parameters, gradients and a plain reference for the optimizer tests."""

import io
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from coat_core.config import FP8QuantizationConfig
from coat_core.expansion import dequantize_blocks, quantize_blocks
from coat_core.formats import INT8_RATIO, UINT8_LOG
from coat_core.moments import dequantize_log, dequantize_ratio, quantize_log, quantize_ratio, update_ratio
from coat_core.optim.state import MOMENTS, Storage, storages
from coat_core.quantize import split_groups
from tests.helpers.asserts import assert_all_bitwise, assert_bitwise

# One element, 0 dimensions, tails shorter than any block, whole blocks, several dimensions, and no element at all.
SHAPES = [(16, 64), (1,), (), (7,), (129,), (3, 5, 11), (128, 16), (0, 4)]

nearest = partial(FP8QuantizationConfig, moment_rounding="nearest")  # the same code for the same value
UNQUANTIZED = FP8QuantizationConfig(use_fp8_m1=False, use_fp8_m2=False)
CONFIGS = {
    "default": nearest(),
    "unquantized": UNQUANTIZED,
    "plain": nearest(use_dynamic_range_expansion=False),
    "e5m2_e4m3": nearest(m1_format="e5m2"),
    "e4m3_e5m2": nearest(m2_format="e5m2"),
    "only_m1": nearest(use_fp8_m2=False),
    "only_m2": nearest(use_fp8_m1=False),
    "integers": nearest(m1_format="int8_ratio", m2_format="uint8_log"),
    "integers_block_48": nearest(m1_format="int8_ratio", m2_format="uint8_log", block_size=48),
    "ratio_e4m3": nearest(m1_format="int8_ratio"),
    "ratio_fp32": nearest(m1_format="int8_ratio", use_fp8_m2=False),
    "e4m3_log": nearest(m2_format="uint8_log"),
    "block_16": nearest(block_size=16),
    "block_4096": nearest(block_size=4096),
}


def make_params(
    shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32, seed: int = 1
) -> list[Parameter]:
    """Those with an even number that have two dimensions lie in memory as their transpose does."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [Parameter(x.t().contiguous().t() if x.ndim == 2 and i % 2 == 0 else x) for i, x in enumerate(values)]


def set_grads(params: list[Parameter], step: int) -> None:
    """Gradients that depend on the step only, of magnitudes from 1e-6 to 1."""
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        decade = torch.randint(-6, 1, (), generator=generator).item()
        param.grad = torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator) * 10.0**decade)


def run(optimizer: torch.optim.Optimizer, params: list[Parameter], steps: range, gaps: bool = False) -> None:
    """Some steps; with `gaps` every third parameter, others each time, has no gradient."""
    for step in steps:
        set_grads(params, step)
        for param in params[step % 3 :: 3] if gaps else ():
            param.grad = None
        optimizer.step()


def params_of(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def copies(params: list[Parameter]) -> list[Parameter]:
    return [Parameter(param.detach().clone()) for param in params]


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def assert_same(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Parameters and states, to the bit."""
    for a, b in zip(params_of(one), params_of(other), strict=True):
        assert_bitwise(a.detach().contiguous(), b.detach().contiguous())
        assert_all_bitwise(one.state.get(a, {}), other.state.get(b, {}))


def quantize_like(name: str, m: Tensor, v: Tensor, storage: Storage) -> tuple[Tensor, ...]:
    """Quantize one moment of one tensor by itself, without any packing."""
    values = {"exp_avg": m, "exp_avg_sq": v}[name]
    if storage.format is INT8_RATIO:
        return quantize_ratio(split_groups(update_ratio(m, v).reshape(-1), storage.block_size))
    blocks = split_groups(values.reshape(-1), storage.block_size)
    if storage.format is UINT8_LOG:
        return quantize_log(blocks)
    assert storage.format is not None
    return quantize_blocks(blocks, storage.format, storage.expansion)


def stored(name: str, state: dict[str, Tensor]) -> Tensor:
    """The 8-bit codes of a moment, or its fp32 values."""
    (key,) = state.keys() & {name, f"{name}_codes"}
    assert (state[key].dtype == torch.float32) == (key == name)
    return state[key]


class ReferenceAdamW:
    """One parameter at a time, one obvious line per formula: what FP8AdamW must equal to the last bit."""

    def __init__(self, params: list[Parameter], config: FP8QuantizationConfig, lr: float, weight_decay: float) -> None:
        self.params, self.storages = params, storages(config)
        self.lr, self.weight_decay, self.step_count = lr, weight_decay, 0
        self.moments = {name: [torch.zeros(p.shape, device=p.device) for p in params] for name in MOMENTS}

    def round_trip(self, name: str, m: Tensor, v: Tensor) -> Tensor:
        storage, values = self.storages[name], {"exp_avg": m, "exp_avg_sq": v}[name]
        if storage.format is None or not values.numel():
            return values
        dequantize = {INT8_RATIO: dequantize_ratio, UINT8_LOG: dequantize_log}.get(storage.format, dequantize_blocks)
        back = dequantize(*quantize_like(name, m, v, storage))
        back = back.reshape(-1)[: values.numel()].reshape(values.shape)
        return back * self.round_trip("exp_avg_sq", m, v).sqrt() if storage.format is INT8_RATIO else back

    def step(self) -> None:
        self.step_count += 1
        step_size = self.lr / (1 - 0.9**self.step_count)
        root = (1 - 0.999**self.step_count) ** 0.5
        for i, param in enumerate(self.params):
            grad, w = param.grad.float(), param.detach().float()
            w = w * (1 - self.lr * self.weight_decay)
            m = torch.lerp(self.moments["exp_avg"][i], grad, 1 - 0.9)
            v = (self.moments["exp_avg_sq"][i] * 0.999).addcmul(grad, grad, value=1 - 0.999)
            w = w.addcdiv(m, v.sqrt() / root + 1e-8, value=-step_size)
            param.data.copy_(w)
            self.moments["exp_avg"][i] = self.round_trip("exp_avg", m, v)
            self.moments["exp_avg_sq"][i] = self.round_trip("exp_avg_sq", m, v)
