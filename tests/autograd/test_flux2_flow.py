"""FLUX.2's blocks in the fused flow: their own code's gradients, what they keep, and what is left to their own code."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from coat_core.activation import Saving
from coat_core.granularity import PER_GROUP, Granularity, Storage
from coat_core.metrics import sqnr_db
from coat_flux.blocks.apply import apply_coat
from coat_flux.blocks.fused.chooser import attention_query, fused_block
from coat_flux.blocks.fused.linears import NotFusable
from coat_flux.blocks.held import HeldTensors
from coat_flux.blocks.sizes import LINEARS, Block, FlowSettings, Tokens, block_bytes
from coat_flux.config.coat import COATConfig
from tests.helpers.flux2 import (
    IMAGE,
    RANK,
    TEXT,
    adapt,
    diffusers_module,
    given,
    gradients,
    in_fp8,
    linears,
    make_block,
)
from tests.helpers.saved_tensors import recording_fused
from tests.tolerances import (
    ARCH_GRADIENT_COSINE,
    BLOCK_GRADIENT_FLOOR_DB,
    BLOCK_OUTPUT_FLOOR_DB,
    FUSED_FP32_RTOL,
    SMALL_BLOCK_GRADIENT_FLOOR_DB,
)

HIDDEN, HEADS = 64, 2
FP32, BF16 = torch.float32, torch.bfloat16
EXACT = Saving(None)
OF = ["diffusers", pytest.param("ai-toolkit", marks=pytest.mark.aitk)]
KINDS = ["double", "single"]
# of FLUX.1's blocks, with gates that are trained: docs/memory.md
TOKENS = Tokens(1, 512, 4096)
FLUX1_BYTES = {"double": 12.5, "single": 10.4}


def assert_equal_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> None:
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        error = float((found[name].double() - wanted.double()).norm() / wanted.double().norm())
        assert error <= rtol, f"{name}: relative error {error:.1e} above {rtol:.0e}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("by", ["peft", "ai-toolkit's"])
def test_gradients_are_autograds(of: str, kind: str, by: str) -> None:
    block = make_block(of, kind, HIDDEN, HEADS)
    holder = adapt(block, by)
    for trained in (True, False):  # streams and vectors, or adapters alone
        call = given(of, kind, HIDDEN, HEADS, streams=trained, vectors=trained)
        expected = gradients(block, call, holder)
        found = gradients(fused_block(block, call.args, EXACT), call, holder)
        assert_equal_gradients(found, expected, FUSED_FP32_RTOL)
        outputs = 2 if kind == "double" else 1
        assert len(found) == outputs + len(call.leaves) + 2 * len(linears(make_block(of, kind, HIDDEN, HEADS)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", OF)
def test_in_fp8_outputs_and_every_gradient_are_as_near_as_flux1s(of: str, kind: str) -> None:
    block, call = make_block(of, kind, 256, 4, BF16), given(of, kind, 256, 4, BF16)
    expected = gradients(block, call, adapt(block, "peft", 16))
    block = in_fp8(make_block(of, kind, 256, 4, BF16))
    holder = adapt(block, "peft", 16)
    found = gradients(fused_block(block, call.args, Saving()), call, holder)
    decibels = {name: sqnr_db(wanted, found[name]) for name, wanted in expected.items()}
    assert min(db for name, db in decibels.items() if name.startswith("out")) > BLOCK_OUTPUT_FLOOR_DB
    rest = [db for name, db in decibels.items() if not name.startswith("out")]
    assert statistics.median(rest) > BLOCK_GRADIENT_FLOOR_DB
    assert min(rest) > SMALL_BLOCK_GRADIENT_FLOOR_DB, decibels
    together = [torch.cat([x.flatten().double() for x in each.values()]) for each in (found, expected)]
    assert float(torch.nn.functional.cosine_similarity(*together, dim=0)) > ARCH_GRADIENT_COSINE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trained", [True, False], ids=["gates trained", "adapters alone"])
def test_what_is_kept(kind: str, trained: bool) -> None:
    block, call = make_block("diffusers", kind, HIDDEN, HEADS), given("diffusers", kind, HIDDEN, HEADS, vectors=trained)
    adapt(block, "peft")
    packing = Saving(Storage(granularity=Granularity("per_group", 32)))
    with recording_fused() as kept:
        fused_block(block, call.args, packing)(*call.args)
    found: dict[str, float] = {}
    for name, tensors in kept:
        what = name.split("_")[-1].rstrip("01")
        if tensors and what not in ("modulation", "h", "statistics"):
            found[what] = found.get(what, 0) + tensors[0].numel() / (2 * (TEXT + IMAGE) * HIDDEN)
    streams = 1 if kind == "single" else 2  # x before attention, and before the MLP
    assert found == {"qkv": 3, "out": 1, "x": streams, "mlp": 6} | ({"result": streams} if trained else {})


def kept_bytes(of: str, kind: str, hidden: int, heads: int, trained: bool) -> float:
    """Per token and hidden element, of a block at full width on the meta device, with adapters of rank 16."""
    with torch.device("meta"):
        block = in_fp8(make_block(of, kind, hidden, heads, BF16))
        adapt(block, "peft", 16)
        call = given(of, kind, hidden, heads, BF16, batch=1, tokens=(512, 4096), vectors=trained)
        streams = [x for name, x in call.leaves.items() if "of" not in name and name != "vectors"]
    run = fused_block(block, call.args, Saving(Storage(granularity=PER_GROUP)))
    with HeldTensors() as held:
        outputs = tree_leaves(run(*call.args))
        kept = held.now - sum(x.untyped_storage().nbytes() for x in outputs)
    return kept / sum(x.numel() for x in streams)


@pytest.mark.parametrize(("hidden", "heads"), [(6144, 48), (3072, 24)], ids=["dev", "klein 4B"])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_at_full_width_are_near_flux1s(kind: str, hidden: int, heads: int) -> None:
    for trained in (False, True):
        found = kept_bytes("diffusers", kind, hidden, heads, trained)
        assert FLUX1_BYTES[kind] / 1.2 < found < FLUX1_BYTES[kind] * 1.2
        ranks = tuple((name, 16) for name in LINEARS[f"flux2_{kind}"])
        block = Block(f"flux2_{kind}", hidden, heads, 3 * hidden, ranks, trained_embedding=trained)
        counted = block_bytes(block, TOKENS, FlowSettings()).kept / (TOKENS.rows * hidden)
        assert counted == pytest.approx(found, rel=0.01)  # what `checkpointing: auto` and `plan` count with


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_of_vectors_for_all_images(kind: str) -> None:
    block, call = make_block("diffusers", kind, HIDDEN, HEADS), given("diffusers", kind, HIDDEN, HEADS)
    rows = {id(x): x[:1].detach().clone().requires_grad_() for x in call.leaves.values() if x.ndim == 2}
    call = call._replace(
        args=tuple(rows.get(id(x), x) for x in call.args),
        leaves={name: rows.get(id(x), x) for name, x in call.leaves.items()},
    )
    fused = fused_block(block, call.args, EXACT)
    assert all(len(vectors) == 2 for vectors in fused.reader.call(call.args).vectors)  # kernels read each image's
    assert_equal_gradients(gradients(fused, call, block), gradients(block, call, block), FUSED_FP32_RTOL)


def test_the_kernel_of_attention_is_chosen_by_its_shape() -> None:
    for kind in KINDS:
        call = given("diffusers", kind, HIDDEN, HEADS)
        like, mask = attention_query(make_block("diffusers", kind, HIDDEN, HEADS), call.args)
        assert like.shape == (2, HEADS, TEXT + IMAGE, HIDDEN // HEADS)
        assert mask is None


REFUSED: dict[str, tuple[str, Any, str]] = {
    "reference images": ("double", lambda b, a: (*a[:5], {"kv_cache_mode": "cached"}), "joint_attention_kwargs"),
    "streams that come apart": ("single", lambda b, a: (*a, True), "streams that come apart"),
    "streams apart": ("single", lambda b, a: (a[0][:, TEXT:], a[0][:, :TEXT], *a[2:]), "handed in apart"),
    "no rotation": ("single", lambda b, a: (*a[:3], None), "no rotary embedding"),
    "vectors per token": ("single", lambda b, a: (*a[:2], a[2][:, None].expand(-1, 64, -1), *a[3:]), "modulation of"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_calls_that_are_not_fused(reason: str) -> None:
    kind, changed, message = REFUSED[reason]
    block, call = make_block("diffusers", kind, HIDDEN, HEADS), given("diffusers", kind, HIDDEN, HEADS)
    fused_block(block, call.args, EXACT)
    with pytest.raises(NotFusable, match=message):
        fused_block(block, changed(block, call.args), EXACT)


UNFUSABLE: dict[str, tuple[Any, str]] = {
    "dropout": (lambda b: setattr(b.attn.to_out[1], "p", 0.5), "dropout"),
    "another activation": (lambda b: setattr(b.ff, "act_fn", nn.Identity()), "not FLUX.2's SwiGLU"),
    "another gate": (lambda b: setattr(b.ff_context.act_fn, "gate_fn", nn.GELU()), "not FLUX.2's SwiGLU"),
    "another processor": (lambda b: setattr(b.attn, "processor", nn.Identity()), "attention by Identity"),
    "a trained norm": (lambda b: b.attn.norm_q.weight.requires_grad_(), "trained"),
    "a trained weight": (lambda b: b.attn.to_k.weight.requires_grad_(), "weight is trained"),
}


@pytest.mark.parametrize("reason", UNFUSABLE)
def test_blocks_that_are_not_fused(reason: str) -> None:
    change, message = UNFUSABLE[reason]
    block = make_block("diffusers", "double", HIDDEN, HEADS)
    change(block)
    with pytest.raises(NotFusable, match=message):
        fused_block(block, None, EXACT)


@pytest.mark.aitk
def test_images_with_positions_of_their_own_are_not_fused() -> None:
    block, call = make_block("ai-toolkit", "single", HIDDEN, HEADS), given("ai-toolkit", "single", HIDDEN, HEADS)
    tables = call.args[1].clone()
    tables[1] = tables[1].flip(1)
    with pytest.raises(NotFusable, match="at different positions"):
        fused_block(block, (call.args[0], tables, call.args[2]), EXACT)


def tiny_model(coat: dict[str, Any]) -> tuple[Any, Any]:
    """The whole model under a `coat:` block with adapters on its blocks, and the report."""
    diffusers_module()
    from diffusers import Flux2Transformer2DModel

    sizes = {"in_channels": 16, "joint_attention_dim": 48, "timestep_guidance_channels": 32, "axes_dims_rope": [8] * 4}
    heads = {"attention_head_dim": 32, "num_attention_heads": HEADS, "num_layers": 1, "num_single_layers": 2}
    torch.manual_seed(3)
    model = Flux2Transformer2DModel(**sizes, **heads).to(BF16).requires_grad_(False)
    report = apply_coat(model, COATConfig.from_dict(coat))
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and "transformer_blocks." in n]
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names))
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn(parameter.shape) * 0.1 if "lora_" in name else parameter.data
    return model.train(), report


def step(model: Any) -> dict[str, Tensor]:
    """Output, and gradients of the adapters."""
    draw = torch.Generator().manual_seed(4)
    latents, prompt, target = (torch.randn(1, *size, generator=draw) for size in ((IMAGE, 16), (TEXT, 48), (IMAGE, 16)))
    ids = torch.zeros(1, IMAGE, 4), torch.zeros(1, TEXT, 4)
    ids[0][0, :, 1] = torch.arange(IMAGE)
    rest = {"timestep": torch.tensor([0.5]), "guidance": torch.tensor([4.0]), "img_ids": ids[0], "txt_ids": ids[1]}
    out = model(latents.to(BF16), prompt.to(BF16), return_dict=False, **rest)[0]
    (out.float() - target).square().mean().backward()
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"out": out.detach().float(), **found}


@pytest.mark.parametrize("checkpointing", ["none", "all"])
def test_a_model_takes_the_fused_flow(checkpointing: str) -> None:
    expected = step(tiny_model({"enabled": False})[0])
    model, report = tiny_model({"memory": {"checkpointing": checkpointing}})
    found = step(model)
    assert found.keys() == expected.keys()
    assert len(found) == 1 + 2 * 16
    got = next(row.got for row in report.parts() if row.part == "saved tensors")
    assert got == ("3 kept in FP8, fused flow, attention fp8" if checkpointing == "none" else "3 recomputed")
    together = [torch.cat([x.flatten() for x in each.values()]) for each in (found, expected)]
    assert float(torch.nn.functional.cosine_similarity(*together, dim=0)) > ARCH_GRADIENT_COSINE
