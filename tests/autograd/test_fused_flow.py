"""The fused flow's gradients are autograd's when nothing is rounded, and what it keeps is what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from coat_core.activation import Saving
from coat_core.granularity import Granularity, Storage
from coat_flux.blocks.apply import apply_coat
from coat_flux.blocks.fused.chooser import fused_block
from coat_flux.blocks.fused.linears import NotFusable
from coat_flux.config.coat import COATConfig
from tests.helpers.asserts import assert_bitwise
from tests.helpers.flux import tiny_flux
from tests.helpers.saved_tensors import recording_fused
from tests.tolerances import FUSED_BF16_RTOL, FUSED_FP32_RTOL

HIDDEN, TEXT, IMAGE, RANK, HEADS = 64, 24, 40, 4, 2
PACKING = Saving(Storage(granularity=Granularity("per_group", 32)))
ALL = ("attn.", "ff", "proj", "norm")
MODIFIED = {
    "lora": ALL,
    "no lora on modulation": ("attn.", "ff", "proj"),
    "only attention": ("attn.to_q", "attn.to_out"),
}


def make_model(targets: tuple[str, ...] = ALL, dtype: torch.dtype = torch.float32, **lora: Any) -> nn.Module:
    """Tiny FLUX with nonzero LoRA matrices on the linears whose names within a block start so."""
    model = tiny_flux(dtype)
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "blocks." in name and name.split(".", 2)[2].startswith(targets)
    ]
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=names, **lora))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def blocks(model: Any) -> dict[str, nn.Module]:
    return {"double": model.transformer_blocks[0], "single": model.single_transformer_blocks[0]}


def arguments(
    model: Any, batch: int = 2, needs_grad: bool = True, text: int = TEXT, image: int = IMAGE
) -> tuple[Any, ...]:
    """hidden, encoder, temb, rotary as the model passes them."""
    dtype = model.dtype
    streams = [torch.randn(batch, tokens, HIDDEN).to(dtype).requires_grad_(needs_grad) for tokens in (image, text)]
    ids = torch.zeros(text + image, 3)
    ids[text:, 1] = torch.arange(image)
    return *streams, torch.randn(batch, HIDDEN).to(dtype), model.pos_embed(ids), None


def gradients(run: Callable[..., Any], block: nn.Module, args: tuple[Any, ...]) -> dict[str, Tensor]:
    """Outputs, and gradients of both streams and of every adapter, for fixed output gradients."""
    text, hidden = run(*args)
    draw = torch.Generator().manual_seed(5)
    torch.autograd.backward(
        (text, hidden), [torch.randn(x.shape, generator=draw).to(x.dtype) for x in (text, hidden)], retain_graph=True
    )
    found = {"text out": text.detach(), "image out": hidden.detach()}
    for name, leaf in {"image": args[0], "text": args[1], **dict(block.named_parameters())}.items():
        if leaf.requires_grad:
            assert leaf.grad is not None, name
            found[name], leaf.grad = leaf.grad.clone(), None
    return found


EXACT = Saving(None)


def assert_equal_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> None:
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        error = float((found[name].double() - wanted.double()).norm() / wanted.double().norm())
        assert error <= rtol, f"{name}: relative error {error:.1e} above {rtol:.0e}"


@pytest.mark.parametrize("kind", ["double", "single"])
@pytest.mark.parametrize(
    ("case", "needs_grad"), [("lora", True), ("no lora on modulation", False), ("only attention", True)]
)
def test_gradients_are_autograds(kind: str, case: str, needs_grad: bool) -> None:
    model = make_model(MODIFIED[case])
    block, args = blocks(model)[kind], arguments(model, needs_grad=needs_grad)
    expected = gradients(block, block, args)
    found = gradients(fused_block(block, EXACT), block, args)
    assert_equal_gradients(found, expected, FUSED_FP32_RTOL)
    assert len(found) >= 4  # two outputs and an adapter at least


@pytest.mark.parametrize("kind", ["double", "single"])
def test_bf16_and_autocast(kind: str) -> None:
    model = make_model(dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    block, args = blocks(model)[kind], arguments(model)
    fused = fused_block(block, EXACT)
    assert_equal_gradients(gradients(fused, block, args), gradients(block, block, args), FUSED_BF16_RTOL)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = gradients(block, block, args), gradients(fused, block, args)
    assert_equal_gradients(found, expected, FUSED_BF16_RTOL)


@pytest.mark.parametrize("kind", ["double", "single"])
@pytest.mark.parametrize("attention_as", ["fp8", "bf16"])
def test_forward_values_are_diffusers_to_the_bit(kind: str, attention_as: str) -> None:
    """Whatever is kept: with FP8 weights and GEMMs too."""
    model = tiny_flux()
    apply_coat(model, COATConfig.from_dict({"memory": {"checkpointing": "none"}}))
    block, args = blocks(model)[kind], arguments(model)
    fused = fused_block(block, Saving(attention=attention_as))
    for found, expected in zip(fused(*args), block(*args), strict=True):
        assert_bitwise(found, expected)


def kept_by(kind: str, targets: tuple[str, ...] = ALL, config: Saving = PACKING) -> dict[str, int]:
    """Elements kept per token and hidden element, by the name they are kept under, after a pass of one block."""
    model = make_model(targets, torch.bfloat16)
    block, args = blocks(model)[kind], arguments(model)
    with recording_fused() as kept:
        fused_block(block, config)(*args)
    large: dict[str, int] = {}
    for name, tensors in kept:
        kind = name.split("_")[-1].rstrip("01")
        if tensors and kind not in ("modulation", "rows", "h"):
            large[kind] = large.get(kind, 0) + tensors[0].numel()
    return {name: count / (2 * (TEXT + IMAGE) * HIDDEN) for name, count in large.items()}


def test_a_single_block_keeps_ten_elements() -> None:
    kept = kept_by("single")
    assert kept.pop("statistics") == HEADS / HIDDEN  # the log-sum-exp
    assert kept == {"qkv": 3, "out": 1, "x": 1, "mlp": 4, "result": 1}


def test_a_double_block_keeps_twelve_elements() -> None:
    kept = kept_by("double")
    del kept["statistics"]
    assert kept == {"qkv": 3, "out": 1, "x": 2, "mlp": 4, "result": 2}


def test_the_gates_result_is_kept_only_where_the_gate_is_trained() -> None:
    assert "result" not in kept_by("single", ("attn.", "proj"))
    assert "result" not in kept_by("double", ("attn.", "ff"))


@pytest.mark.parametrize("kind", ["double", "single"])
def test_a_second_backward_pass_and_accumulation(kind: str) -> None:
    model = make_model(dtype=torch.bfloat16)
    block, args = blocks(model)[kind], arguments(model)
    text, hidden = fused_block(block, PACKING)(*args)
    loss = text.float().square().mean() + hidden.float().square().mean()
    parameters = [p for p in block.parameters() if p.requires_grad]
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in parameters]
    loss.backward()
    for parameter, gradient in zip(parameters, once, strict=True):
        assert_bitwise(parameter.grad, 2 * gradient)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("kind", ["double", "single"])
def test_inside_torchs_checkpoint(kind: str) -> None:
    model = make_model(dtype=torch.bfloat16)
    block, args = blocks(model)[kind], arguments(model)
    fused = fused_block(block, PACKING)
    expected = gradients(fused, block, args)
    found = gradients(lambda *inputs: checkpoint(fused, *inputs, use_reentrant=False), block, args)
    for name, wanted in expected.items():
        assert_bitwise(found[name], wanted)


def test_changing_an_adapter_before_backward_is_an_error() -> None:
    model = make_model(dtype=torch.bfloat16)
    block, args = blocks(model)["single"], arguments(model)
    text, _ = fused_block(block, PACKING)(*args)
    with torch.no_grad():
        block.attn.to_q.lora_B["default"].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        text.float().sum().backward()


def with_replaced_linear(block: Any) -> None:
    block.attn.to_k.base_layer.forward = block.attn.to_k.base_layer.forward
    block.attn.to_k = block.attn.to_k.base_layer


def with_lokr(block: Any) -> None:
    """As ai-toolkit's, which has other matrices than a LoRA."""
    linear = block.attn.to_k = block.attn.to_k.base_layer
    lokr = type("LokrModule", (nn.Module,), {"forward": lambda self, x: x})()
    linear.forward = lokr.forward


UNFUSABLE: dict[str, Callable[[Any], Any]] = {
    "attention by OtherProcessor": lambda block: setattr(block.attn, "processor", type("OtherProcessor", (), {})()),
    "hooks on attn.to_q": lambda block: block.attn.to_q.register_forward_hook(lambda *_: None),
    "its forward was replaced": lambda block: setattr(block, "forward", block.forward),
    "was replaced by something other than a LoRA": with_replaced_linear,
    "a LokrModule": with_lokr,
    "a linear whose weight is trained": lambda block: block.attn.to_v.base_layer.weight.requires_grad_(True),
    "its QK norm is a RMSNorm that is trained": lambda block: block.attn.norm_q.weight.requires_grad_(True),
    "LoRA dropout": lambda block: block.attn.to_q.lora_dropout.update({"default": nn.Dropout(0.1)}),
    "a LoRA is merged into its base": lambda block: block.attn.to_q.merge(),
    "its activation is a GELU, not GELU-tanh": lambda block: setattr(block, "act_mlp", nn.GELU()),
    "its activation is a SiLU, not GELU-tanh": lambda block: setattr(block, "act_mlp", nn.SiLU()),
}


@pytest.mark.parametrize("reason", UNFUSABLE)
def test_what_a_block_does_beyond_is_not_fused(reason: str) -> None:
    model = make_model()
    block = blocks(model)["single"]
    UNFUSABLE[reason](block)
    with pytest.raises(NotFusable, match=reason):
        fused_block(block, PACKING)


def test_calls_and_adapters_that_are_not_fused() -> None:
    model = make_model()
    block, args = blocks(model)["single"], arguments(model)
    with pytest.raises(NotFusable, match="joint_attention_kwargs ip_hidden_states"):
        fused_block(block, PACKING)(*args[:4], {"ip_hidden_states": 1})
    with pytest.raises(NotFusable, match="no rotary embedding"):
        fused_block(block, PACKING)(*args[:3], None)
    with pytest.raises(NotFusable, match="a Linear has no reader"):
        fused_block(nn.Linear(2, 2), PACKING)
    dora = make_model(use_dora=True)
    with pytest.raises(NotFusable, match="a LoRA variant"):
        fused_block(blocks(dora)["single"], PACKING)


def test_adapters_that_are_switched_off_are_left_out() -> None:
    model = make_model()
    block, args = blocks(model)["single"], arguments(model)
    model.disable_adapters()
    found = fused_block(block, PACKING)(*args)
    for one, other in zip(found, block(*args), strict=True):
        assert_bitwise(one, other)
