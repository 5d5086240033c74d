"""Linears that ai-toolkit quantized its own way stay as they are, in the fused flow as in the generic one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coat_flux.blocks.apply import apply_coat
from coat_flux.blocks.fused.chooser import fused_block
from coat_flux.blocks.lora import SHARED, attach_lora
from coat_flux.blocks.quantized import adopt, input_gradient, quantization_of
from coat_flux.blocks.runner import BlockRunner
from coat_flux.config.coat import COATConfig
from tests.autograd.test_fused_flow import arguments, blocks, gradients, make_model
from tests.helpers.asserts import assert_bitwise
from tests.helpers.flux import lora_gradients, predict, tiny_flux, tiny_lora
from tests.helpers.quantized_linears import FORMS, OstrisLinear, quantize_linear
from tests.tolerances import FUSED_FP32_RTOL

CONFIG = COATConfig.from_dict({"memory": {"checkpointing": "none"}, "fallback": "error"})


def quantized(model: nn.Module, form: str) -> nn.Module:
    """The model with every linear of its blocks quantized; adapters left alone."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and "blocks." in name and ".lora_" not in name:
            quantize_linear(module, form)
    return model


def quantized_linear(form: str = "codes") -> Any:
    torch.manual_seed(0)
    linear = nn.Linear(64, 32).requires_grad_(False)
    quantize_linear(linear, form)
    return linear


def kept_of(linear: Any, x: Tensor) -> tuple[Tensor, list[torch.Size]]:
    """Its output, and the shapes of what is kept for backward."""
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        return linear(x), kept


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["double", "single"])
def test_a_fused_block_is_autograd_s(form: str, kind: str) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(quantized(make_model(), form))
    plain, adopted = models
    for module in adopted.modules():
        if isinstance(module, nn.Linear) and quantization_of(module) is not None:
            adopt(module, CONFIG.linear_config())
    args, block = arguments(plain), blocks(plain)[kind]
    fused = fused_block(blocks(adopted)[kind], args)
    expected = gradients(block, block, args)
    found = gradients(fused, blocks(adopted)[kind], args)
    assert found.keys() == expected.keys()
    # x is cast where its last bit differs: a code more or less
    rtol = FUSED_FP32_RTOL if form == "subclass" else 100 * FUSED_FP32_RTOL
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= rtol * float(value.norm()), name


@pytest.mark.parametrize("form", FORMS)
def test_by_itself_it_has_its_own_output_and_gradient_and_keeps_nothing(form: str) -> None:
    plain, adopted = quantized_linear(form), quantized_linear(form)
    adopt(adopted, CONFIG.linear_config())
    x = torch.randn(3, 5, 64, requires_grad=True)
    expected, kept_by_plain = kept_of(plain, x)
    y, kept = kept_of(adopted, x)
    assert_bitwise(y, expected)
    assert kept_by_plain
    assert kept == []
    grad = torch.randn_like(y)
    (dx,), (reference,) = (torch.autograd.grad(out, x, grad) for out in (y, expected))
    torch.testing.assert_close(dx, reference)
    torch.testing.assert_close(input_gradient(adopted, grad.bfloat16()).float(), reference, rtol=0.02, atol=0.02)
    assert_bitwise(adopted(x.detach()), plain(x.detach()))  # where nothing is trained it does not cast x


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flow", ["fused", "generic"])
def test_a_model_trains_on_them(form: str, flow: str) -> None:
    config = COATConfig.from_dict(
        {"memory": {"checkpointing": "none"}, "activation": {"flow": flow}, "fallback": "error"}
    )
    found: list[dict[str, Tensor]] = []
    for with_coat in (False, True):
        model = quantized(tiny_flux(), form)
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


def test_what_ai_toolkit_left_plain_becomes_fp8() -> None:
    model = tiny_flux()
    quantize_linear(model.transformer_blocks[0].attn.to_q, "codes")
    report = apply_coat(model, CONFIG)
    assert list(report.quantized) == ["transformer_blocks.0.attn.to_q"]
    assert "transformer_blocks.0.attn.to_k" in report.converted
    tiny_lora(model, CONFIG)
    assert torch.isfinite(predict(model)).all()
    assert set(BlockRunner.of(model).ran.values()) == {"fused"}  # type: ignore[union-attr]


def test_an_adapter_that_is_on_one_already_calls_the_adopted_one() -> None:
    class Adapter:
        def __init__(self, linear: Any) -> None:
            self.org_forward, linear.forward = linear.forward, self.forward

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.org_forward(x)
            return y

    linear = quantized_linear()
    Adapter(linear)
    Adapter(linear)
    adopt(linear, CONFIG.linear_config())
    assert kept_of(linear, torch.randn(2, 4, 64, requires_grad=True))[1] == []
    assert type(linear).__name__ == "OstrisLinear"
    assert isinstance(linear, OstrisLinear)


def test_adopting_again_changes_the_config_alone() -> None:
    linear = quantized_linear()
    adopt(linear, CONFIG.linear_config())
    kind, other = type(linear), COATConfig.from_dict({"activation": {"format": "e5m2"}}).linear_config()
    adopt(linear, other)
    assert type(linear) is kind
    assert linear.coat_input_config is other


def test_plain_and_our_own_linears_are_no_one_else_s() -> None:
    model = tiny_flux()
    apply_coat(model, CONFIG)
    assert {quantization_of(module) for module in model.modules()} == {None}
    with pytest.raises(ValueError, match="no LoRA adapter"):
        attach_lora(model, CONFIG)
