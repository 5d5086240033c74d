"""LoRA targets, adapters around FP8 linears, and loading of saved tensors."""

from __future__ import annotations

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import nn

from coat_core.linear.module import FP8Linear
from coat_flux.blocks.apply import apply_coat
from coat_flux.config.coat import COATConfig
from coat_flux.saves.errors import ResumeError
from coat_flux.saves.state import restore_tensors
from coat_flux.trainers.standalone.network import add_lora, lora_parameters, lora_targets
from tests.helpers.asserts import assert_bitwise

DOUBLE = (
    *(f"attn.{part}" for part in ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out", "to_out.0")),
    *(f"attn.to_{part}" for part in "qkv"),
    *(f"{ff}.net.{part}" for ff in ("ff", "ff_context") for part in ("0.proj", "2")),
    "norm1.linear",
    "norm1_context.linear",
)
SINGLE = ("attn.to_k", "attn.to_q", "attn.to_v", "norm.linear", "proj_mlp", "proj_out")


@pytest.fixture
def model() -> FluxTransformer2DModel:
    sizes = {"num_layers": 2, "num_single_layers": 1, "attention_head_dim": 32, "num_attention_heads": 2}
    widths = {"in_channels": 16, "joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": (8, 12, 12)}
    return FluxTransformer2DModel(**sizes, **widths, guidance_embeds=True).bfloat16()


def test_default_targets_are_every_linear_of_the_blocks(model: FluxTransformer2DModel) -> None:
    wanted = {f"transformer_blocks.{i}.{part}" for i in range(2) for part in DOUBLE}
    wanted |= {f"single_transformer_blocks.0.{part}" for part in SINGLE}
    assert set(lora_targets(model)) == wanted


def test_transformer_only_false_takes_every_linear(model: FluxTransformer2DModel) -> None:
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert set(lora_targets(model, transformer_only=False)) == linears
    assert {"x_embedder", "proj_out", "norm_out.linear"} <= linears


@pytest.mark.parametrize(
    ("only", "ignore", "count"),
    [
        (["transformer.single_transformer_blocks.0."], None, 6),
        (["transformer_blocks$$1$$attn$$to_q"], None, 1),
        (["proj_out"], None, 1),
        (None, ["attn"], 28 + 6 - 16 - 3),
        (["to_q", "to_k"], ["single"], 4),
        (None, [], 34),
    ],
)
def test_words_are_matched_as_in_ai_toolkit(model: FluxTransformer2DModel, only, ignore, count: int) -> None:
    assert len(lora_targets(model, only_if_contains=only, ignore_if_contains=ignore)) == count


def test_nothing_left_is_an_error_that_shows_a_name(model: FluxTransformer2DModel) -> None:
    with pytest.raises(ValueError, match=r"only_if_contains=\['to_qq'\].*transformer\.transformer_blocks\.0"):
        lora_targets(model, only_if_contains=["to_qq"])


def test_only_the_adapters_train_in_fp32_and_start_as_the_identity(model: FluxTransformer2DModel) -> None:
    add_lora(model, lora_targets(model), 4, seed=1)
    params = lora_parameters(model)
    assert len(params) == 2 * 34
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in params.values()}
    assert {p.dtype for p in params.values()} == {torch.float32}
    down = params["transformer.transformer_blocks.0.ff.net.2.lora_A.weight"]
    assert down.shape == (4, 256)
    assert 0.5 / 16 < down.abs().max() <= 1 / 16
    assert all(p.count_nonzero() == 0 for name, p in params.items() if "lora_B" in name)


def test_start_values_follow_the_seed_and_not_the_base(model: FluxTransformer2DModel) -> None:
    import copy

    fp8, other = copy.deepcopy(model), copy.deepcopy(model)
    apply_coat(fp8, COATConfig())
    targets = lora_targets(model)
    for base, seed in ((model, 3), (fp8, 3), (other, 4)):
        add_lora(base, targets, 4, seed=seed)
    name = "transformer.transformer_blocks.1.attn.to_v.lora_A.weight"
    assert_bitwise(lora_parameters(fp8)[name], lora_parameters(model)[name])
    assert not torch.equal(lora_parameters(other)[name], lora_parameters(model)[name])


def test_peft_wraps_fp8_linears(model: FluxTransformer2DModel) -> None:
    apply_coat(model, COATConfig())
    assert len(lora_targets(model)) == 34
    add_lora(model, lora_targets(model), 4, seed=0)
    layer = model.transformer_blocks[0].attn.to_q
    assert type(layer.base_layer) is FP8Linear
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert_bitwise(layer(x), layer.base_layer(x))


def test_saved_tensors_come_back_and_misfits_are_refused(model: FluxTransformer2DModel) -> None:
    add_lora(model, lora_targets(model, only_if_contains=["to_q"]), 4, seed=0)
    tensors = {name: torch.randn_like(p) for name, p in lora_parameters(model).items()}
    restore_tensors(lora_parameters(model), tensors, "x.safetensors")
    for name, param in lora_parameters(model).items():
        assert_bitwise(param.detach(), tensors[name])
    first = next(iter(tensors))
    with pytest.raises(ResumeError, match=r"x\.safetensors: 1 LoRA names differ"):
        restore_tensors(lora_parameters(model), {k: v for k, v in tensors.items() if k != first}, "x.safetensors")
    with pytest.raises(ResumeError, match=r"has shape \(8, 64\), this run's is \(4, 64\)"):
        restore_tensors(lora_parameters(model), tensors | {first: torch.zeros(8, 64)}, "x.safetensors")


def test_a_target_outside_the_blocks_is_not_the_ending_of_others(model: FluxTransformer2DModel) -> None:
    targets = lora_targets(model, transformer_only=False, ignore_if_contains=["transformer_blocks."])
    assert "proj_out" in targets
    add_lora(model, targets, 4, seed=1)
    adapted = {name.rpartition(".lora_")[0].removeprefix("transformer.") for name in lora_parameters(model)}
    assert adapted == set(targets)
