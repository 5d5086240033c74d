"""COAT on diffusers models other than FLUX, through the generic flow: SDXL's and Kolors' UNet, SD3, CogVideoX, Wan."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coat_core.linear import FP8Linear
from coat_core.metrics import cosine
from coat_flux.blocks.apply import apply_coat
from coat_flux.blocks.hook import hook_of, own_forward
from coat_flux.blocks.models import family_of
from coat_flux.blocks.models.others import IN_AND_OUT
from coat_flux.blocks.runner import BlockRunner
from coat_flux.config.coat import COATConfig
from coat_flux.trainers.optimizer import build_optimizer
from scripts.bench_memory import kept_bytes
from tests.helpers.architectures import (
    ARCHITECTURES,
    WAN,
    Architecture,
    coat_model,
    frozen_model,
    lora_parameters,
    loss_of,
    predict,
    step,
    with_options,
)
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.saved_tensors import recording
from tests.tolerances import (
    ARCHITECTURE_GRADIENT_COSINE,
    ARCHITECTURE_KEPT_RATIO,
    ARCHITECTURE_LOSS_FRACTION,
    ARCHITECTURE_OUTPUT_FLOOR_DB,
    PACKED_GRADIENT_COSINE,
)

BF16 = {"enabled": False}
KEEP = {"memory": {"checkpointing": "none"}}
PACKING_ONLY = KEEP | {"weight": {"use_fp8": False}, "activation": {"exclude": ["*"]}}
ALL = pytest.mark.parametrize("name", [*ARCHITECTURES, "Wan"])
OUTSIDE = {
    "SDXL": {"time_embedding.*", "add_embedding.*", "*.proj_in", "*.proj_out"},
    "Kolors": {"time_embedding.*", "add_embedding.*", "encoder_hid_proj", "*.proj_in", "*.proj_out"},
    "SD3": {"time_text_embed.*", "context_embedder", "norm_out.linear", "proj_out"},
    "CogVideoX": {"time_embedding.*", "patch_embed.text_proj", "norm_out.linear", "proj_out"},
    "Wan": {"condition_embedder.*", "proj_out"},
}
ROW_PER_IMAGE = {
    "SDXL": {"*.time_emb_proj"},
    "Kolors": {"*.time_emb_proj"},
    "SD3": {"*.norm1.linear", "*.norm1_context.linear"},
    "CogVideoX": {"*.norm1.linear", "*.norm2.linear"},
    "Wan": set(),
}


def architecture(name: str) -> Architecture:
    return WAN if name == "Wan" else ARCHITECTURES[name]


def matching(names: set[str], patterns: set[str]) -> set[str]:
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def policy_of(model: nn.Module) -> BlockRunner:
    policies = {id(hook.run): hook.run for hook in filter(None, map(hook_of, model.modules()))}
    (policy,) = policies.values()  # every part of the model calls the same one
    return policy


def dead(gradients: dict[str, Tensor]) -> set[str]:
    return {name for name, gradient in gradients.items() if not gradient.any()}


@pytest.fixture(scope="module")
def in_bf16() -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Output and gradients of each model without COAT."""
    return {name: step(architecture(name), coat_model(architecture(name), BF16)[0]) for name in [*ARCHITECTURES, "Wan"]}


@pytest.fixture(scope="module")
def without_gradients() -> dict[str, Tensor]:
    """Output of each model with COAT, from a forward pass that keeps nothing."""
    names = [*ARCHITECTURES, "Wan"]
    with torch.no_grad():
        return {name: predict(architecture(name), coat_model(architecture(name), KEEP)[0]) for name in names}


@ALL
def test_what_is_converted_what_is_left_and_why(name: str) -> None:
    model = frozen_model(architecture(name))
    linears = {key for key, module in model.named_modules() if isinstance(module, nn.Linear)}
    convolutions = {key for key, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Conv3d)}
    report = apply_coat(model, COATConfig.from_dict(KEEP))
    outside = matching(linears, OUTSIDE[name])
    assert set(report.converted) == linears - outside
    assert set(report.skipped) == outside | convolutions
    assert set(report.why) == matching(linears, ROW_PER_IMAGE[name])
    assert all(not model.get_submodule(key).config.use_fp8_gemm for key in report.why)
    assert all(type(model.get_submodule(key)) is FP8Linear for key in report.converted)
    freed = {key for key, module in model.named_modules() if "_conv_forward" in vars(module)}
    assert freed == convolutions
    table = report.table()
    assert "outside the blocks: kept in high precision" in table
    assert table.count(": only linear layers become FP8") == len({key.split(".")[0] for key in convolutions})
    assert ("one row per image" in table) == bool(ROW_PER_IMAGE[name])
    left = {key for key, why in report.skipped.items() if why == IN_AND_OUT}
    assert left == matching(linears, {"*.proj_in", "*.proj_out"} if name in ("SDXL", "Kolors") else set())
    assert (IN_AND_OUT in table) == bool(left)


@ALL
def test_the_policy_lists_the_blocks_that_are_called(name: str) -> None:
    model, _, _ = coat_model(architecture(name), KEEP)
    policy, called = policy_of(model), []

    def note(block: nn.Module, *args: Any) -> Any:
        called.append(block)
        return own_forward(block)(*args)

    for block in policy.blocks.values():
        hook_of(block).run = note
    predict(architecture(name), model)
    assert {id(block) for block in called} == set(map(id, policy.blocks.values()))
    assert len(called) == len(policy.blocks)


@ALL
@pytest.mark.parametrize(
    "memory",
    [
        {"checkpointing": "none"},
        {"checkpointing": "all"},
        {"checkpointing": "all", "enable_efficient_checkpoint": False},
        {"checkpointing": "auto"},
        {"checkpointing": "auto", "budget_gb": 1e-3},
    ],
    ids=lambda memory: "-".join(str(value) for value in memory.values()),
)
def test_a_lora_step_stays_near_bf16(name: str, memory: dict[str, Any], in_bf16: Any, without_gradients: Any) -> None:
    """Whatever is recomputed: the forward values are the same, and the gradients near those of bf16."""
    model, _, attached = coat_model(architecture(name), {"memory": memory})
    assert len(attached.shared) + len(attached.own) == len(lora_parameters(model)) // 2
    assert set(attached.own) == matching(set(attached.own), {"*.proj_in.*", "*.proj_out.*"})  # outside a UNet's blocks
    output, gradients = step(architecture(name), model)
    exact_output, exact = in_bf16[name]
    assert_bitwise(output, without_gradients[name])
    assert_sqnr(exact_output, output, ARCHITECTURE_OUTPUT_FLOOR_DB)
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert dead(gradients) == dead(exact)
    alive = sorted(exact.keys() - dead(exact))
    cosines = {key: float(cosine(gradients[key], exact[key])) for key in alive}
    ordered = sorted(cosines.values())
    cancelling = [value for key, value in cosines.items() if "attn1.to_v.lora_A" in key]
    floors = ARCHITECTURE_GRADIENT_COSINE["UNet" if name in ("SDXL", "Kolors") else "transformer"]
    measured = {
        "together": float(cosine(*(torch.cat([of[key].flatten() for key in alive]) for of in (gradients, exact)))),
        "mean": sum(ordered) / len(ordered),
        "5 % quantile": ordered[len(ordered) // 20],
        "lowest": min(value for key, value in cosines.items() if "attn1.to_v.lora_A" not in key),
        "self-attention's v": min(cancelling, default=1.0),
    }
    assert {key: value for key, value in measured.items() if value < floors[key]} == {}


def test_only_what_the_model_throws_away_has_no_gradient(in_bf16: Any) -> None:
    """SD3's last block computes text queries whose output it drops."""
    last_text_query = {f"transformer_blocks.2.attn.add_q_proj.lora_{side}.default.weight" for side in "AB"}
    assert {name: dead(gradients) for name, (_, gradients) in in_bf16.items()} == {
        name: last_text_query if name == "SD3" else set() for name in in_bf16
    }


@ALL
def test_packing_alone(name: str, in_bf16: Any) -> None:
    """With weights and GEMMs in bf16 the output is bf16's bit for bit, and the gradients differ by what is packed."""
    model, _, _ = coat_model(architecture(name), PACKING_ONLY)
    with recording() as saved:
        output, gradients = step(architecture(name), model)
    assert saved.packed
    exact_output, exact = in_bf16[name]
    assert_bitwise(output, exact_output)
    cosines = {key: float(cosine(gradients[key], exact[key])) for key in exact.keys() - dead(exact)}
    worst = min(cosines, key=cosines.__getitem__)
    assert cosines[worst] >= PACKED_GRADIENT_COSINE, f"{worst}: {cosines[worst]:.4f}"


@pytest.mark.parametrize("name", ["SDXL", "SD3", "CogVideoX", "Wan"])
def test_kept_bytes(name: str) -> None:
    kept = []
    for block in (BF16, KEEP, {"memory": {"checkpointing": "all"}}):
        model, _, _ = coat_model(architecture(name), block)
        kept.append(kept_bytes(lambda model=model: (predict(architecture(name), model),)))
    bf16, packed, recomputed = kept
    floors = ARCHITECTURE_KEPT_RATIO["UNet" if name == "SDXL" else "transformer"]
    assert bf16 / packed >= floors[0], f"{bf16 / packed:.2f}"
    assert bf16 / recomputed >= floors[1], f"{bf16 / recomputed:.2f}"


@pytest.mark.parametrize(
    ("name", "mode"), [("SDXL", "all"), ("Kolors", "none"), ("SD3", "all"), ("CogVideoX", "none"), ("Wan", "all")]
)
def test_the_loss_goes_down(name: str, mode: str) -> None:
    block = {"memory": {"checkpointing": mode}}
    model, _, _ = coat_model(architecture(name), block)
    parameters = lora_parameters(model)
    optimizer = build_optimizer(parameters.values(), 2e-2, COATConfig.from_dict(block))
    losses = []
    for _ in range(4):
        loss = loss_of(predict(architecture(name), model, batch=2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < ARCHITECTURE_LOSS_FRACTION * losses[0], losses
    assert all(parameter.isfinite().all() for parameter in parameters.values())


@ALL
def test_inference_never_reaches_the_policy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = coat_model(architecture(name), KEEP)
    trained = predict(architecture(name), model).detach()
    called: list[nn.Module] = []
    monkeypatch.setattr(BlockRunner, "__call__", lambda self, block, *args: called.append(block) or block(*args))
    with torch.no_grad(), recording() as saved:
        inferred = predict(architecture(name), model.eval())
    assert called == []
    assert saved.tensors == []
    assert_bitwise(inferred, trained)


def test_text_states_of_an_odd_width() -> None:
    """Linears whose K is no multiple of 16 are left alone, by name and reason, and the rest trains."""
    odd = with_options(ARCHITECTURES["SDXL"], cross_attention_dim=40)
    model, report, attached = coat_model(odd, KEEP)
    left = {name for name, why in report.skipped.items() if why.startswith("fallback: ")}
    assert left == {name for name in left | set(report.converted) if ".attn2.to_k" in name or ".attn2.to_v" in name}
    projections = matching(set(attached.own), {"*.proj_in.*", "*.proj_out.*"})
    assert len(set(attached.own) - projections) == len(left) > 0
    assert "fallback: in and out features must be multiples of 16" in report.table()
    _, gradients = step(odd, model)
    assert dead(gradients) == set()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


class Unknown(nn.Module):
    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(2))
        self.norms = nn.ModuleList([nn.LayerNorm(16)])
        self.inner = nn.ModuleDict({"layers": blocks}) if wrapped else nn.Linear(16, 16)
        if not wrapped:
            self.blocks = blocks


@pytest.mark.parametrize(("wrapped", "name"), [(False, "blocks"), (True, "inner.layers")])
def test_unknown_class_gets_the_cautious_policy(wrapped: bool, name: str) -> None:
    policy = family_of(Unknown(wrapped))
    assert (policy.convert, policy.weight_only, policy.blocks) == ((f"{name}.*",), (), (name,))


def test_a_known_class_without_its_block_lists_is_an_error() -> None:
    model = frozen_model(ARCHITECTURES["SD3"])
    model.layers = model.transformer_blocks
    del model.transformer_blocks
    with pytest.raises(ValueError, match=r"SD3Transformer2DModel: has none of the block lists .*transformer_blocks"):
        apply_coat(model, COATConfig.from_dict(KEEP))
