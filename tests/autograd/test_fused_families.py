"""Blocks of other families than FLUX.1: their reader's form computes and keeps what FLUX.1's does."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from coat_core import sqnr_db
from coat_core.activation import Saving
from coat_core.config import FP8LinearConfig
from coat_flux.blocks.fused.chooser import fused_block
from coat_flux.blocks.fused.linears import NotFusable
from coat_flux.blocks.models import block_name, read_list
from tests.helpers.families import FAMILIES, Made, largest_difference, made, results
from tests.helpers.saved_tensors import recording_fused
from tests.helpers.toolkit_lora import ROOT_VARIABLE
from tests.tolerances import (
    ARCH_GRADIENT_COSINE,
    BLOCK_GRADIENT_FLOOR_DB,
    BLOCK_OUTPUT_FLOOR_DB,
    FP8_OUTPUT_LOSS_DB,
    FUSED_BF16_RTOL,
    FUSED_FP32_RTOL,
    FUSED_NORMED_BF16_RTOL,
    SMALL_BLOCK_GRADIENT_FLOOR_DB,
)

REPOSITORY = Path(__file__).resolve().parents[2]
PER_ROW = FP8LinearConfig(weight_granularity="per_row", input_granularity="per_row")
# bytes per token and hidden element, RESULTS.md; a StreamBlock is like a stream of a double block
KEPT_BY_FLUX = {"DoubleBlock": 12.5, "StreamBlock": 12.5, "SingleBlock": 10.4}
IMAGE_TOKENS = 4096  # at 1024 x 1024


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_are_those_of_the_blocks_own_code(name: str) -> None:
    in_bf16 = FUSED_NORMED_BF16_RTOL if name.startswith("z-image") else FUSED_BF16_RTOL
    for adapters in ("peft", "toolkit"):
        for dtype, rtol in ((torch.float32, FUSED_FP32_RTOL), (torch.bfloat16, in_bf16)):
            error, worst = largest_difference(name, dtype, adapters)
            assert error < rtol, (adapters, dtype, worst)


@pytest.mark.aitk
def test_ai_toolkits_own_blocks() -> None:
    done = subprocess.run(
        [os.environ["AI_TOOLKIT_PYTHON"], "-m", "tests.helpers.families"],
        cwd=os.environ[ROOT_VARIABLE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {name for name in FAMILIES if name.startswith("toolkit")}
    for name, (error, worst) in found.items():
        assert error < FUSED_FP32_RTOL, (name, worst)


@pytest.mark.parametrize("adapters", ["peft", "toolkit"])
@pytest.mark.parametrize("name", FAMILIES)
def test_in_fp8_every_gradient_is_within_flux1s_bounds(name: str, adapters: str) -> None:
    """Weights, products and kept tensors; at the small width of tests/integration/test_bench_memory.py."""
    width = FAMILIES[name].small
    exact = made(name, torch.bfloat16, width, (32, 96), adapters=adapters, rank=16)
    fp8 = made(name, torch.bfloat16, width, (32, 96), PER_ROW, adapters, rank=16)
    expected = results(exact.block, exact)
    found = results(fused_block(fp8.block, fp8.args, Saving()), fp8)
    with torch.no_grad():
        own = [x for x in tree_leaves(fp8.block(*fp8.args)) if x is not None]
    decibels, flat = [], ([], [])
    for (key, wanted), got in zip(expected.items(), found.values(), strict=True):
        db = float(sqnr_db(wanted, got))
        if key.startswith("output"):
            by_own_code = float(sqnr_db(wanted, own[int(key.split()[1])]))
            assert db > min(BLOCK_OUTPUT_FLOOR_DB, by_own_code - FP8_OUTPUT_LOSS_DB), key
        elif not wanted.any():  # q of text in SD3's last block: nobody reads what those tokens attend to
            assert name == "sd3's last"
            assert not got.any(), key
        elif "lora" in key:
            decibels.append(db)
            for of, x in zip(flat, (wanted, got), strict=True):
                of.append(x.double().flatten() / wanted.double().norm())
    cosine = nn.functional.cosine_similarity(torch.cat(flat[0]), torch.cat(flat[1]), dim=0)
    assert min(decibels) > SMALL_BLOCK_GRADIENT_FLOOR_DB
    assert statistics.median(decibels) > BLOCK_GRADIENT_FLOOR_DB
    assert cosine > ARCH_GRADIENT_COSINE


@pytest.mark.parametrize("name", FAMILIES)
def test_kept_bytes_at_real_width(name: str) -> None:
    """With rank 16 on every linear, on the meta device: at most a fifth above FLUX.1."""
    hidden, tokens = FAMILIES[name].hidden, (FAMILIES[name].text, IMAGE_TOKENS)
    of = made(name, torch.bfloat16, hidden, tokens, PER_ROW, rank=16, device="meta")
    form = fused_block(of.block, of.args, Saving())
    with recording_fused() as kept:
        form(*of.args)
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for _, tensors in kept for x in tensors}
    per_element = sum(storages.values()) / (sum(tokens) * hidden)
    assert 0.8 < per_element / KEPT_BY_FLUX[type(form.form).__name__] < 1.2
    known = read_list(type(of.block))
    assert known is not None
    off = 0.05 if name == "sd3's last" else 0.01  # which keeps less of the text; counted as the others
    assert known.fused_bytes == pytest.approx(per_element, rel=off)  # what `checkpointing: auto` counts with


def with_trained_norm(of: Made) -> None:
    next(p for name, p in of.block.named_parameters() if "norm" in name).requires_grad_()


def with_other_activation(of: Made) -> None:
    for module in of.block.modules():
        if type(module).__name__ == "GELU":
            module.approximate = "none"


def with_weight_that_is_trained(of: Made) -> None:
    next(p for name, p in of.block.named_parameters() if p.ndim == 2 and "lora" not in name).requires_grad_()


def without_rotary(of: Made) -> None:
    of.args = tuple(None if isinstance(x, tuple) else x for x in of.args)


def with_kwargs(of: Made) -> None:
    of.args = tuple({"ip_hidden_states": 1} if i == 5 else x for i, x in enumerate(of.args))


def of_two_positions(of: Made) -> None:
    of.args = tuple(torch.cat([x[:1], x[:1] + 1]) if torch.is_tensor(x) and x.ndim == 6 else x for x in of.args)


def with_index(of: Made) -> None:
    of.args = (*of.args[:6], torch.zeros(2, 40, dtype=torch.int))


def with_two_times(of: Made) -> None:
    of.block.zero_cond_t = True


def with_other_modulation(of: Made) -> None:
    of.block.txt_mod[0] = nn.GELU()


def with_chunks(of: Made) -> None:
    of.block.set_chunk_feed_forward(1)


def without_qk_norm(of: Made) -> None:
    of.block.attn.norm_q = None


def with_other_heads(of: Made) -> None:
    of.block.attn.heads *= 2


def with_dual_attention(of: Made) -> None:
    of.block.use_dual_attention = True


def with_guidance_of_parts(of: Made) -> None:
    of.args = (*of.args[:3], {"skip": 1})


def with_noisy_and_clean_tokens(of: Made) -> None:
    of.args = (*of.args[:4], torch.zeros(2, 64, dtype=torch.long), *[of.args[3]] * 2)


def without_rotations(of: Made) -> None:
    of.args = (*of.args[:2], None, *of.args[3:])


def with_trained_norm_of_the_stream(of: Made) -> None:
    of.block.ffn_norm2.weight.requires_grad_()


def with_silu_before_the_modulation(of: Made) -> None:
    of.block.adaLN_modulation.insert(0, nn.SiLU())


def with_dropout(of: Made) -> None:
    of.block.attention.to_out[1].p = 0.1


NOT_FUSED = [
    ("z-image", with_noisy_and_clean_tokens, r"tokens of one block with different modulations \(noise_mask\)"),
    ("z-image", without_rotations, "no rotary embedding is given"),
    ("z-image", with_trained_norm, "its QK norm is a RMSNorm that is trained"),
    ("z-image", with_trained_norm_of_the_stream, "its norm is a RMSNorm that is trained"),
    ("z-image", with_silu_before_the_modulation, "a modulation of more than a linear"),
    ("z-image refiner", with_dropout, "dropout"),
    ("z-image refiner", with_weight_that_is_trained, "a linear whose weight is trained"),
    ("sd3", with_guidance_of_parts, "joint_attention_kwargs skip"),
    ("sd3", with_dual_attention, "attend to themselves a second time"),
    ("sd3", with_chunks, "its feed-forward runs in chunks"),
    ("sd3", without_qk_norm, "q and k are not normed"),
    ("sd3", with_other_heads, "heads of 32, where SD3's have 64"),
    ("sd3's last", with_weight_that_is_trained, "a linear whose weight is trained"),
    ("qwen image", with_index, r"different modulations \(zero_cond_t\)"),
    ("qwen image", with_two_times, r"different modulations \(zero_cond_t\)"),
    ("qwen image", with_other_modulation, "a modulation of more than SiLU and a linear"),
    ("qwen image", with_kwargs, "joint_attention_kwargs ip_hidden_states"),
    ("qwen image", without_rotary, "no rotary embedding is given"),
    ("chroma double", with_trained_norm, "its QK norm is a RMSNorm that is trained"),
    ("toolkit's chroma double", with_trained_norm, "a QK norm that is trained"),
    ("toolkit's chroma single", with_other_activation, "its activation is a GELU, not GELU-tanh"),
    ("toolkit's chroma single", with_weight_that_is_trained, "a linear whose weight is trained"),
    ("toolkit's chroma double", of_two_positions, "images of one batch at different positions"),
    ("chroma single", without_rotary, "no rotary embedding is given"),
    ("chroma double", with_kwargs, "joint_attention_kwargs ip_hidden_states"),
]


@pytest.mark.parametrize(("name", "change", "reason"), NOT_FUSED)
def test_what_a_block_does_beyond_is_not_fused(name: str, change: Callable[[Made], None], reason: str) -> None:
    if name not in FAMILIES:
        pytest.skip(f"this diffusers' {name} block has no reader")
    of = made(name)
    change(of)
    with pytest.raises(NotFusable, match=reason):
        fused_block(of.block, of.args)


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_of_a_pass_share_tables_and_mask(name: str) -> None:
    of = made(name)
    one, other = (fused_block(of.block, of.args).reader.call(of.args).shared for _ in range(2))
    assert (one.mask is None) == name.startswith("sd3")  # it has none
    assert one.mask is other.mask
    assert one.cos is other.cos


def test_a_mask_that_hides_nothing_is_left_out() -> None:
    """Kernels without one are faster."""
    if "qwen image" not in FAMILIES:
        pytest.skip("this diffusers' block has no reader")
    of = made("qwen image")
    form = fused_block(of.block, of.args)
    seen = torch.ones_like(of.args[2])
    args = (*of.args[:2], seen, *of.args[3:])
    assert form.reader.call(args).shared.mask is None
    seen[0, 3] = False  # in place, as a buffer may be filled again
    mask = form.reader.call(args).shared.mask
    assert mask is not None
    assert mask[0, 0, 0, 3] == -torch.inf
    assert mask.isinf().sum() == 1


def test_a_class_of_another_model_under_the_same_name_has_no_reader() -> None:
    """As Krea 2's SingleStreamBlock has, which takes other arguments."""
    own = type(made("toolkit's chroma single").block)
    other = type("SingleStreamBlock", (nn.Module,), {"forward": lambda self, x, vec, freqs, mask: x})
    assert read_list(own) is not None
    assert read_list(other) is None
    assert (block_name(own), block_name(other)) == ("SingleStreamBlock", "test_fused_families.SingleStreamBlock")
