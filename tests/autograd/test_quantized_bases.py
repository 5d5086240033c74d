"""Linears that ai-toolkit quantized its own way are left alone, in the fused flow and in the generic one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from coat_flux.blocks.apply import apply_coat
from coat_flux.blocks.fused.chooser import fused_block
from coat_flux.blocks.lora import SHARED
from coat_flux.blocks.quantized import adopt, input_gradient, quantization_of
from coat_flux.blocks.runner import BlockRunner
from coat_flux.config.coat import COATConfig
from tests.helpers.asserts import assert_bitwise
from tests.helpers.families import FLUX1, made, results
from tests.helpers.flux import lora_gradients, predict, tiny_flux, tiny_lora
from tests.helpers.saved_tensors import saved_by
from tests.tolerances import FUSED_FP32_RTOL

FORMS = ("codes", "subclass")  # a class swapped in place, whose backend holds the weight; a weight of another class
CONFIG = COATConfig.from_dict({"memory": {"checkpointing": "none"}, "fallback": "error"})


class RotatedCodes:
    """A backend like ai-toolkit's: W in 8 bits and in another basis, straight through the cast of x."""

    qtype = "turned8"

    def quantize_(self, module: nn.Module, weight: Tensor) -> None:
        scale = weight.abs().amax(1, keepdim=True) / 127
        module.register_buffer("codes", (weight.flip(1) / scale).round().to(torch.int8), persistent=False)
        module.register_buffer("scale_bits", scale.float().view(torch.int32), persistent=False)

    def turned(self, module: Any) -> Tensor:
        return module.codes.float() * module.scale_bits.view(torch.float32)

    def dequantize(self, module: Any) -> Tensor:
        raise AssertionError("a weight that reads another basis than x")

    def dequantize_folded(self, module: Any) -> Tensor:
        return self.turned(module).flip(1)

    def forward(self, module: Any, x: Tensor) -> Tensor:
        turned = x.flip(-1)
        if x.requires_grad:
            step = turned.detach().abs().amax(-1, keepdim=True) / 127
            turned = turned + ((turned / step).round() * step - turned).detach()
        return linear(turned, self.turned(module).to(x.dtype), module.bias)


class OstrisLinear(nn.Linear):
    """Of ai-toolkit's name."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        quantizer: Any = self.ostris_quantizer
        weight: Tensor = quantizer.dequantize_folded(self)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.ostris_quantizer.forward(self, x)  # type: ignore[operator,union-attr]
        return y


class HalvedWeight(Tensor):
    """A weight kept as something else, which torch's own linear accepts."""

    @staticmethod
    def __new__(cls, kept: Tensor, dtype: torch.dtype) -> HalvedWeight:
        wrapper = Tensor._make_wrapper_subclass
        return wrapper(cls, kept.shape, dtype=dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, kept: Tensor, dtype: torch.dtype) -> None:
        self.kept = kept

    def dequantize(self) -> Tensor:
        return self.kept.to(self.dtype) * 2

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return HalvedWeight(args[0].kept, args[0].dtype)
        return func(*[x.dequantize() if isinstance(x, HalvedWeight) else x for x in args], **(kwargs or {}))


@torch.no_grad()
def quantize_linear(module: Any, form: str) -> None:
    """Quantize a plain nn.Linear in place."""
    weight = module.weight.detach()
    if form == "subclass":
        module.weight = nn.Parameter(HalvedWeight((weight / 2).to(torch.float16), weight.dtype), requires_grad=False)
        return
    module.ostris_quantizer = RotatedCodes()
    module.ostris_quantizer.quantize_(module, weight)
    del module.weight
    module.__class__ = OstrisLinear


def quantized(model: nn.Module, form: str, part: str = "") -> nn.Module:
    """The model with every linear below `part` quantized; adapters left alone."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and part in name and ".lora_" not in name:
            quantize_linear(module, form)
    return model


def quantized_linear(form: str = "codes") -> Any:
    torch.manual_seed(0)
    module = nn.Linear(64, 32).requires_grad_(False)
    quantize_linear(module, form)
    return module


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", FLUX1)
def test_a_fused_block_is_autograd_s(form, kind):
    plain, adopted = made(kind), made(kind)
    for of in (plain, adopted):
        quantized(of.block, form)
    for module in adopted.block.modules():
        if isinstance(module, nn.Linear) and quantization_of(module) is not None:
            adopt(module, CONFIG.linear_config())
    expected, found = results(plain.block, plain), results(fused_block(adopted.block), adopted)
    assert found.keys() == expected.keys()
    # x is cast where its last bit differs: a code more or less
    rtol = FUSED_FP32_RTOL if form == "subclass" else 100 * FUSED_FP32_RTOL
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= rtol * float(value.norm()), name


@pytest.mark.parametrize("form", FORMS)
def test_by_itself_it_has_its_own_output_and_gradient_and_keeps_nothing(form):
    plain, adopted = quantized_linear(form), quantized_linear(form)
    adopt(adopted, CONFIG.linear_config())
    x = torch.randn(3, 5, 64, requires_grad=True)
    expected, kept_by_plain = saved_by(lambda: plain(x))
    y, kept = saved_by(lambda: adopted(x))
    assert_bitwise(y, expected)
    assert kept_by_plain
    assert kept == []
    grad = torch.randn_like(y)
    (dx,), (reference,) = (torch.autograd.grad(out, x, grad) for out in (y, expected))
    torch.testing.assert_close(dx, reference)
    torch.testing.assert_close(input_gradient(adopted, grad.bfloat16()).float(), reference, rtol=0.02, atol=0.02)
    assert_bitwise(adopted(x.detach()), plain(x.detach()))  # where nothing is trained it does not cast x


@pytest.mark.parametrize(("form", "flow"), [("codes", "fused"), ("subclass", "fused"), ("codes", "generic")])
def test_a_model_trains_on_them(form, flow):
    config = COATConfig.from_dict(
        {"memory": {"checkpointing": "none"}, "activation": {"flow": flow}, "fallback": "error"}
    )
    found: list[dict[str, Tensor]] = []
    for with_coat in (False, True):
        model = quantized(tiny_flux(), form, "blocks.")
        names = {name for name, module in model.named_modules() if quantization_of(module) is not None}
        if with_coat:
            report = apply_coat(model, config)
            assert {name for name, module in model.named_modules() if quantization_of(module) is not None} == names
        lora = tiny_lora(model, config if with_coat else COATConfig.from_dict({"enabled": False}))
        found.append(lora_gradients(model))
    assert report.quantized.keys() == names
    assert not report.converted
    assert list(lora.values()) == [SHARED] * (len(found[0]) // 2)
    runner: Any = BlockRunner.of(model)
    assert set(runner.ran.values()) == {"fused" if flow == "fused" else "own"}
    expected, got = found
    for name, value in expected.items():
        cosine = nn.functional.cosine_similarity(got[name].flatten(), value.flatten(), dim=0)
        assert cosine > 0.99, (name, cosine)
    how = "turned8" if form == "codes" else "tests HalvedWeight"
    rows = {row.part: row for row in report.parts()}
    assert rows["transformer_blocks.*"].got.startswith(f"W {how}, its own products")
    assert rows["GEMMs"].got.startswith("its own products")
    assert "transposed weights" not in rows
    assert report.metadata()["coat.why.gemms"] == "quantized by ai-toolkit"


def test_what_ai_toolkit_left_plain_becomes_fp8():
    model = tiny_flux()
    quantize_linear(model.transformer_blocks[0].attn.to_q, "codes")
    report = apply_coat(model, CONFIG)
    assert list(report.quantized) == ["transformer_blocks.0.attn.to_q"]
    assert "transformer_blocks.0.attn.to_k" in report.converted
    tiny_lora(model, CONFIG)
    assert torch.isfinite(predict(model)).all()
    assert set(BlockRunner.of(model).ran.values()) == {"fused"}  # type: ignore[union-attr]


def test_an_adapter_that_is_on_one_already_calls_the_adopted_one():
    class Adapter:
        def __init__(self, module: Any) -> None:
            self.org_forward, module.forward = module.forward, self.forward

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.org_forward(x)
            return y

    module = quantized_linear()
    Adapter(module)
    Adapter(module)
    adopt(module, CONFIG.linear_config())
    assert saved_by(lambda: module(torch.randn(2, 4, 64, requires_grad=True)))[1] == []
    assert type(module).__name__ == "OstrisLinear"
    assert isinstance(module, OstrisLinear)


def test_adopting_again_changes_the_config_alone():
    module = quantized_linear()
    adopt(module, CONFIG.linear_config())
    kind, other = type(module), COATConfig.from_dict({"activation": {"format": "e5m2"}}).linear_config()
    adopt(module, other)
    assert type(module) is kind
    assert module.coat_input_config is other


def test_plain_and_our_own_linears_are_no_one_else_s():
    model = tiny_flux()
    apply_coat(model, CONFIG)
    assert {quantization_of(module) for module in model.modules()} == {None}
