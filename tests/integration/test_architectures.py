"""COAT on diffusers models other than FLUX, through the generic flow: SDXL's UNet, SD3, CogVideoX."""

from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

from coat_core import FP8Linear
from coat_flux.blocks.apply import apply_coat
from coat_flux.blocks.hook import hook_of, own_forward
from coat_flux.blocks.lora import SHARED, attach_lora
from coat_flux.blocks.models import family_of
from coat_flux.blocks.models.others import IN_AND_OUT
from coat_flux.blocks.runner import BlockRunner
from coat_flux.config.coat import COATConfig
from coat_flux.trainers.standalone.network import lora_parameters
from scripts.bench_memory import kept_bytes
from tests.helpers.asserts import assert_bitwise, assert_sqnr, cosine
from tests.helpers.flux import loss_of
from tests.helpers.saved_tensors import recording
from tests.tolerances import (
    ARCHITECTURE_GRADIENT_COSINE,
    ARCHITECTURE_KEPT_RATIO,
    ARCHITECTURE_OUTPUT_FLOOR_DB,
    PACKED_GRADIENT_COSINE,
)

BF16 = {"enabled": False}
KEEP = {"memory": {"checkpointing": "none"}}
PACKING_ONLY = KEEP | {"weight": {"use_fp8": False}, "activation": {"exclude": ["*"]}}
RANK = 4


class Architecture(NamedTuple):
    """A small random model: diffusers' class, its config, and the shapes of its inputs for one image.

    `outside` and `one_row` are patterns of linears outside the blocks, and of those with one row per image.
    """

    cls: str
    options: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    outside: set[str]
    one_row: set[str]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def inputs_of(name: str, config: Any) -> dict[str, Any]:
    """Latents and text tokens; of SDXL sizes, of CogVideoX, whose latents are three frames, rotary tables."""
    inputs = {key: draw(1, *shape) for key, shape in ARCHITECTURES[name].shapes.items()}
    if name == "SDXL":
        sizes = torch.tensor([[1024.0, 1024.0, 0.0, 0.0, 1024.0, 1024.0]])
        return {**inputs, "added_cond_kwargs": {"text_embeds": draw(1, 32), "time_ids": sizes}}
    if name == "CogVideoX":
        angles = draw(3 * (16 // config.patch_size) ** 2, config.attention_head_dim)
        return {**inputs, "image_rotary_emb": (angles.cos(), angles.sin())}
    return inputs


ARCHITECTURES = {
    # no attention at the first level, linear projections, size and pooled text added to the time's
    "SDXL": Architecture(
        "UNet2DConditionModel",
        {
            "block_out_channels": (32, 64), "layers_per_block": 1, "transformer_layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": (1, 2),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 64,
            "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 80,
        },
        {"sample": (4, 32, 32), "encoder_hidden_states": (77, 64)},
        {"time_embedding.*", "add_embedding.*", "*.proj_in", "*.proj_out"},
        {"*.time_emb_proj"},
    ),
    # RMSNorm on q and k, a second attention in some blocks; the last has no text output
    "SD3": Architecture(
        "SD3Transformer2DModel",
        {
            "sample_size": 64, "pos_embed_max_size": 64, "qk_norm": "rms_norm", "pooled_projection_dim": 32,
            "num_layers": 3, "num_attention_heads": 2, "caption_projection_dim": 128, "joint_attention_dim": 64,
            "dual_attention_layers": (0,),
        },
        {"hidden_states": (16, 32, 32), "encoder_hidden_states": (77, 64), "pooled_projections": (32,)},
        {"time_text_embed.*", "context_embedder", "norm_out.linear", "proj_out"},
        {"*.norm1.linear", "*.norm1_context.linear"},
    ),
    # rotary positions, as the 5B model has them
    "CogVideoX": Architecture(
        "CogVideoXTransformer3DModel",
        {
            "in_channels": 16, "out_channels": 16, "sample_frames": 9, "use_rotary_positional_embeddings": True,
            "num_attention_heads": 2, "time_embed_dim": 32, "text_embed_dim": 64, "num_layers": 2, "sample_width": 16,
            "sample_height": 16, "max_text_seq_length": 32,
        },
        {"hidden_states": (3, 16, 16, 16), "encoder_hidden_states": (32, 64)},
        {"time_embedding.*", "patch_embed.text_proj", "norm_out.linear", "proj_out"},
        {"*.norm1.linear", "*.norm2.linear"},
    ),
}  # fmt: skip
ALL = pytest.mark.parametrize("name", ARCHITECTURES)


def frozen_model(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    cls = getattr(diffusers, ARCHITECTURES[name].cls)
    return cls(**{**ARCHITECTURES[name].options, **options}).to(torch.bfloat16).requires_grad_(False)


def coat_model(name: str, coat: dict[str, Any], **options: Any) -> tuple[nn.Module, Any, Any]:
    """The model under a coat block, in the generic flow, with an fp32 LoRA whose A and B are random; both reports."""
    config = COATConfig.from_dict({**coat, "activation": {"flow": "generic", **coat.get("activation", {})}})
    model = frozen_model(name, **options)
    report = apply_coat(model, config)
    one_row = ("norm1.linear", "norm1_context.linear", "norm2.linear", "time_emb_proj")  # adapters there keep nothing
    targets = []
    for target, module in model.named_modules():
        if isinstance(module, nn.Linear) and "block" in target.split(".")[0] and not target.endswith(one_row):
            targets.append(target)
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets))
    generator = torch.Generator().manual_seed(1)
    for parameter_name, parameter in lora_parameters(model).items():
        spread = 0.05 if ".lora_B." in parameter_name else 0.1
        parameter.data = torch.empty(parameter.shape).normal_(0.0, spread, generator=generator)
    return model.train(), report, attach_lora(model, config)


def to_bf16(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: to_bf16(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(to_bf16, value))
    return value.to(torch.bfloat16) if value.is_floating_point() else value


def predict(name: str, model: Any) -> Tensor:
    inputs = {**inputs_of(name, model.config), "timestep": torch.tensor([400.0])}
    return model(**to_bf16(inputs), return_dict=False)[0]


def step(name: str, model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    prediction = predict(name, model)
    loss_of(prediction).backward()
    gradients = {key: parameter.grad.detach().clone() for key, parameter in lora_parameters(model).items()}
    model.zero_grad(set_to_none=True)
    return prediction.detach(), gradients


def matching(names: set[str], patterns: set[str]) -> set[str]:
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def dead(gradients: dict[str, Tensor]) -> set[str]:
    return {name for name, gradient in gradients.items() if not gradient.any()}


@pytest.fixture(scope="module")
def in_bf16() -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    return {name: step(name, coat_model(name, BF16)[0]) for name in ARCHITECTURES}


@ALL
def test_what_is_converted_what_is_left_and_why(name):
    model, architecture = frozen_model(name), ARCHITECTURES[name]
    linears = {key for key, module in model.named_modules() if isinstance(module, nn.Linear)}
    convolutions = {key for key, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Conv3d)}
    report = apply_coat(model, COATConfig.from_dict(KEEP))
    outside = matching(linears, architecture.outside)
    assert set(report.converted) == linears - outside
    assert set(report.skipped) == outside | convolutions
    assert set(report.why) == matching(linears, architecture.one_row)
    assert all(not model.get_submodule(key).config.use_fp8_gemm for key in report.why)
    assert all(type(model.get_submodule(key)) is FP8Linear for key in report.converted)
    assert {key for key, module in model.named_modules() if "_conv_forward" in vars(module)} == convolutions
    left = {key for key, why in report.skipped.items() if why == IN_AND_OUT}
    assert left == matching(linears, {"*.proj_in", "*.proj_out"} if name == "SDXL" else set())


@ALL
def test_the_blocks_that_are_listed_are_called_and_inference_never_reaches_the_runner(name, monkeypatch):
    model, _, _ = coat_model(name, KEEP)
    trained = predict(name, model).detach()
    reached: list[nn.Module] = []
    with monkeypatch.context() as patch:
        patch.setattr(BlockRunner, "__call__", lambda self, block, *args: reached.append(block) or block(*args))
        with torch.no_grad(), recording() as saved:
            inferred = predict(name, model.eval())
    assert reached == saved.tensors == []
    assert_bitwise(inferred, trained)
    runners = {id(hook.run): hook.run for hook in filter(None, map(hook_of, model.modules()))}
    (runner,) = runners.values()  # every part of the model calls the same one
    called: list[nn.Module] = []
    for block in runner.blocks.values():
        hook_of(block).run = lambda block, *args: called.append(block) or own_forward(block)(*args)
    predict(name, model.train())
    assert {id(block) for block in called} == set(map(id, runner.blocks.values()))
    assert len(called) == len(runner.blocks)


@ALL
@pytest.mark.parametrize("checkpointing", ["none", "all"])
def test_a_lora_step_stays_near_bf16(name, checkpointing, in_bf16):
    """Whatever is recomputed: the forward values are the same, and the gradients near those of bf16."""
    model, _, attached = coat_model(name, {"memory": {"checkpointing": checkpointing}})
    assert len(attached) == len(lora_parameters(model)) // 2
    own = {key for key, x in attached.items() if x != SHARED}
    assert own == matching(own, {"*.proj_in.*", "*.proj_out.*"})  # outside a UNet's blocks
    with torch.no_grad():
        without_gradients = predict(name, model)
    output, gradients = step(name, model)
    exact_output, exact = in_bf16[name]
    assert_bitwise(output, without_gradients)
    assert_sqnr(exact_output, output, ARCHITECTURE_OUTPUT_FLOOR_DB)
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert dead(gradients) == dead(exact)
    # SD3's last block computes text queries whose output it drops
    last_text_query = {f"transformer.transformer_blocks.2.attn.add_q_proj.lora_{side}.weight" for side in "AB"}
    assert dead(exact) == (last_text_query if name == "SD3" else set())
    alive = sorted(exact.keys() - dead(exact))
    cosines = {key: float(cosine(gradients[key], exact[key])) for key in alive}
    cancelling = [value for key, value in cosines.items() if "attn1.to_v.lora_A" in key]
    ordered = sorted(cosines.values())
    measured = {
        "together": float(cosine(*(torch.cat([of[key].flatten() for key in alive]) for of in (gradients, exact)))),
        "mean": sum(ordered) / len(ordered),
        "5 % quantile": ordered[len(ordered) // 20],
        "lowest": min(value for key, value in cosines.items() if "attn1.to_v.lora_A" not in key),
        "self-attention's v": min(cancelling, default=1.0),
    }
    floors = ARCHITECTURE_GRADIENT_COSINE["UNet" if name == "SDXL" else "transformer"]
    assert {key: value for key, value in measured.items() if value < floors[key]} == {}


@ALL
def test_packing_alone(name, in_bf16):
    """With weights and GEMMs in bf16 the output is bf16's bit for bit, and the gradients differ by what is packed."""
    model, _, _ = coat_model(name, PACKING_ONLY)
    with recording() as saved:
        output, gradients = step(name, model)
    assert saved.packed
    exact_output, exact = in_bf16[name]
    assert_bitwise(output, exact_output)
    cosines = {key: float(cosine(gradients[key], exact[key])) for key in exact.keys() - dead(exact)}
    worst = min(cosines, key=cosines.__getitem__)
    assert cosines[worst] >= PACKED_GRADIENT_COSINE, f"{worst}: {cosines[worst]:.4f}"


def test_kept_bytes():
    name, kept = "SDXL", []
    for coat in (BF16, KEEP, {"memory": {"checkpointing": "all"}}):
        model = coat_model(name, coat)[0]
        kept.append(kept_bytes(lambda model=model: (predict(name, model),)))
    bf16, packed, recomputed = kept
    floors = ARCHITECTURE_KEPT_RATIO["UNet"]
    assert bf16 / packed >= floors[0], f"{bf16 / packed:.2f}"
    assert bf16 / recomputed >= floors[1], f"{bf16 / recomputed:.2f}"


class Unknown(nn.Module):
    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(2))
        self.norms = nn.ModuleList([nn.LayerNorm(16)])
        self.inner = nn.ModuleDict({"layers": blocks}) if wrapped else nn.Linear(16, 16)
        if not wrapped:
            self.blocks = blocks


@pytest.mark.parametrize(("wrapped", "name"), [(False, "blocks"), (True, "inner.layers")])
def test_unknown_class_gets_the_cautious_policy(wrapped, name):
    family = family_of(Unknown(wrapped))
    assert (family.convert, family.one_row, family.blocks) == ((f"{name}.*",), (), (name,))


def test_a_class_without_block_lists_is_told_the_nearest_known_ones_and_a_known_one_what_it_lacks():
    class FluxTransformer3DModel(nn.Linear):
        pass

    with pytest.raises(ValueError, match=r"FluxTransformer3DModel: .*FluxTransformer2DModel, .*docs/models\.md"):
        family_of(FluxTransformer3DModel(4, 4))
    model = frozen_model("SD3")
    model.layers = model.transformer_blocks
    del model.transformer_blocks
    with pytest.raises(ValueError, match=r"SD3Transformer2DModel: .*transformer_blocks"):
        apply_coat(model, COATConfig.from_dict(KEEP))
