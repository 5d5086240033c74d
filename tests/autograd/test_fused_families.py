"""Blocks of every family: their fused form computes what the block's own code does, and keeps what FLUX.1's keeps."""

import inspect
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from coat_core import sqnr_db
from coat_core.activation import Saving
from coat_core.config import FP8LinearConfig
from coat_flux.blocks.apply import apply_coat
from coat_flux.blocks.fused.chooser import fused_block
from coat_flux.blocks.fused.linears import NotFusable
from coat_flux.blocks.models import block_name, read_list
from coat_flux.blocks.report import CoatReport
from coat_flux.blocks.sizes import LINEARS, Block, FlowSettings, Tokens, block_bytes
from coat_flux.config.coat import COATConfig
from tests.helpers.families import FAMILIES, FLUX1, OTHERS, STRENGTHS, TOOLKITS_OWN, Made, made, results
from tests.helpers.flux import tiny_lora
from tests.helpers.fused_blocks import assert_as_own_code, assert_gradients_near, kept_per_element
from tests.helpers.toolkit_lora import ROOT_VARIABLE
from tests.tolerances import (
    ARCH_GRADIENT_COSINE,
    BLOCK_OUTPUT_FLOOR_DB,
    FP8_OUTPUT_LOSS_DB,
    FUSED_BF16_RTOL,
    FUSED_FP32_RTOL,
    FUSED_NORMED_BF16_RTOL,
)

REPOSITORY = Path(__file__).resolve().parents[2]
PER_ROW = FP8LinearConfig(weight_granularity="per_row", input_granularity="per_row")
# bytes per token and hidden element of what is counted on the meta device, and not written in `blocks.models`
# with gates that are trained, and without
KEPT_BY_FLUX2 = {"flux2 double": (14.5, 12.44), "flux2 single": (12.4, 11.39)}
# the same of FLUX.1, RESULTS.md; a StreamBlock is like a stream of a double block
KEPT_BY_FLUX = {"DoubleBlock": 12.5, "StreamBlock": 12.5, "SingleBlock": 10.4}
IMAGE_TOKENS = 4096  # at 1024 x 1024


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_are_those_of_the_blocks_own_code(name):
    in_bf16 = FUSED_NORMED_BF16_RTOL if name.startswith("z-image") else FUSED_BF16_RTOL
    for adapters, dtype, rtol in (("peft", torch.float32, FUSED_FP32_RTOL), ("toolkit", torch.bfloat16, in_bf16)):
        assert_as_own_code(made(name, dtype, adapters=adapters), rtol, adapters)


def apart(vectors: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    return vectors[:, None].chunk(count, dim=-1)


def joined(parts: tuple) -> torch.Tensor:
    return torch.cat(tree_leaves(parts), dim=-1)


def with_joint_mask(image: torch.Tensor, text: torch.Tensor, seen: torch.Tensor, *rest: Any) -> tuple:
    joint = torch.cat([seen, seen.new_ones(image.shape[:2])], dim=1)
    return image, text, None, *rest[:2], {"attention_mask": joint[:, None, None]}, None


QWEN = "hidden_states encoder_hidden_states encoder_hidden_states_mask temb image_rotary_emb joint_attention_kwargs"
ATTENDS = "image_rotary_emb joint_attention_kwargs"
# block and diffusers → arguments of its forward; the newest's call → its own; and back
EARLIER: dict[tuple[str, str], tuple[str, Callable[..., tuple], Callable[..., tuple]]] = {
    ("qwen image", "0.36"): (QWEN, lambda *of: of[:6], lambda *of: (*of[:2], None, *of[3:])),
    ("qwen image", "0.38"): (
        f"{QWEN} modulate_index",
        with_joint_mask,
        lambda *of: (*of[:2], of[5]["attention_mask"].flatten(1)[:, : of[1].shape[1]], *of[3:5], None, None),
    ),
    ("z-image", "0.36"): ("x attn_mask freqs_cis adaln_input", lambda *of: of[:4], lambda *of: of),
    ("flux2 double", "0.36"): (
        f"hidden_states encoder_hidden_states temb_mod_params_img temb_mod_params_txt {ATTENDS}",
        lambda *of: (*of[:2], *((x[:3], x[3:]) for x in (apart(of[2], 6), apart(of[3], 6))), *of[4:]),
        lambda *of: (*of[:2], joined(of[2]), joined(of[3]), *of[4:]),
    ),
    ("flux2 single", "0.36"): (
        f"hidden_states encoder_hidden_states temb_mod_params {ATTENDS} split_hidden_states text_seq_len",
        lambda *of: (*of[:2], apart(of[2], 3), *of[3:]),
        lambda *of: (*of[:2], joined(of[2]), *of[3:]),
    ),
}


@pytest.mark.parametrize(("name", "version"), EARLIER)
def test_blocks_with_the_arguments_of_earlier_diffusers(name, version):
    if name not in FAMILIES:
        pytest.skip(f"this diffusers' {name} block has no reader")
    names, earlier, newest = EARLIER[name, version]
    of = made(name)
    kind = type(of.block)

    def forward(self: nn.Module, *given: Any) -> Any:
        return kind.forward(self, *newest(*given))

    each = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names.split())]
    forward.__signature__ = inspect.Signature(each)
    of.block.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    of.args = earlier(*of.args)
    assert_as_own_code(of, FUSED_FP32_RTOL)
    if version == "0.36":  # a block of another origin with these arguments may compute something else
        assert read_list(type(kind.__name__, (kind,), {"forward": forward, "__module__": "somewhere"})) is None


@pytest.mark.aitk
def test_ai_toolkits_own_blocks_and_lora():
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
    blocks = {name for name in FAMILIES if name.startswith("toolkit")} | TOOLKITS_OWN.keys()
    assert found.keys() == blocks | {f"{name}, {case}" for name in FLUX1 for case in STRENGTHS}
    for name, (error, worst) in found.items():
        assert error < FUSED_FP32_RTOL, (name, worst)


@pytest.mark.parametrize("name", ["z-image", "sd3's last", "flux2 single", "krea2", "krea2 text"])
def test_in_fp8_every_gradient_is_within_flux1s_bounds(name):
    """Weights, products and kept tensors; at the small width of tests/integration/test_apply_coat.py."""
    if name not in FAMILIES:
        pytest.skip(f"this diffusers' {name} block has no reader")
    exact = made(name, torch.bfloat16, FAMILIES[name].small, (32, 96), rank=16)
    fp8 = made(name, torch.bfloat16, FAMILIES[name].small, (32, 96), PER_ROW, rank=16)
    expected = results(exact.block, exact)
    found = results(fused_block(fp8.block, Saving()), fp8)
    with torch.no_grad():
        own = [x for x in tree_leaves(fp8.block(*fp8.args)) if x is not None]
    gradients = {}
    for key, wanted in expected.items():
        if key.startswith("output"):
            by_own_code = float(sqnr_db(wanted, own[int(key.split()[1])]))
            assert sqnr_db(wanted, found[key]) > min(BLOCK_OUTPUT_FLOOR_DB, by_own_code - FP8_OUTPUT_LOSS_DB), key
        elif not wanted.any():  # q of text in SD3's last block: nobody reads what those tokens attend to
            assert name == "sd3's last"
            assert not found[key].any(), key
        elif "lora" in key:
            gradients[key] = wanted
    assert_gradients_near(gradients, found)


def kept_at_real_width(name: str, trained: bool = True) -> tuple[float, Made]:
    """Bytes per token and hidden element with rank 16 on every linear, on the meta device."""
    hidden, tokens = FAMILIES[name].hidden, (FAMILIES[name].text, IMAGE_TOKENS)
    trains = ("text", "image", "both", "vectors")[: None if trained else -1]
    of = made(name, torch.bfloat16, hidden, tokens, PER_ROW, rank=16, device="meta", trains=trains)
    return kept_per_element(of, sum(tokens) * hidden), of


@pytest.mark.parametrize("name", OTHERS)
def test_kept_bytes_at_real_width(name):
    """At most a fifth above FLUX.1; and what `checkpointing: auto` and `plan` count with."""
    per_element, of = kept_at_real_width(name)
    assert 0.8 < per_element / KEPT_BY_FLUX[type(fused_block(of.block)).__name__] < 1.2
    known = read_list(type(of.block))
    if not known.kind:
        off = 0.05 if name == "sd3's last" else 0.01  # which keeps less of the text; counted as the others
        assert known.fused_bytes == pytest.approx(per_element, rel=off)
        return
    hidden, tokens = FAMILIES[name].hidden, Tokens(1, FAMILIES[name].text, IMAGE_TOKENS)
    ranks = tuple((linear, 16) for linear in LINEARS[known.kind])
    for trained, expected in zip((True, False), KEPT_BY_FLUX2[name], strict=True):
        per_element, _ = kept_at_real_width(name, trained)
        assert per_element == pytest.approx(expected, rel=0.01)
        block = Block(known.kind, hidden, hidden // 128, 3 * hidden, ranks, trained_embedding=trained)
        counted = block_bytes(block, tokens, FlowSettings()).kept / (tokens.rows * hidden)
        assert counted == pytest.approx(per_element, rel=0.01)


def args(change: Callable[..., tuple]) -> Callable[[Made], None]:
    """A change of the block's arguments."""
    return lambda of: setattr(of, "args", change(*of.args))


def attribute(path: str, value: object) -> Callable[[Made], None]:
    """A change of an attribute inside the block."""
    owner, _, name = path.rpartition(".")
    return lambda of: setattr(of.block.get_submodule(owner), name, value)


def trained(part: str) -> Callable[[Made], None]:
    """The first parameter whose name has this part, and no LoRA's, is trained."""

    def apply(of: Made) -> None:
        names = (name for name, _ in of.block.named_parameters() if part in name and "lora" not in name)
        of.block.get_parameter(next(names)).requires_grad_()

    return apply


def with_other_activation(of: Made) -> None:
    for module in of.block.modules():
        if type(module).__name__ == "GELU":
            module.approximate = "none"


def of_two_positions(of: Made) -> None:
    of.args = tuple(torch.cat([x[:1], x[:1] + 1]) if torch.is_tensor(x) and x.ndim == 6 else x for x in of.args)


no_rotary = args(lambda *given: tuple(None if isinstance(x, tuple) else x for x in given))
kwargs = args(lambda *given: tuple({"ip_hidden_states": 1} if i == 5 else x for i, x in enumerate(given)))


def without_lora(of: Made) -> None:
    linear = of.block.attn.to_k = of.block.attn.to_k.base_layer
    linear.forward = linear.forward


def with_unknown_adapter(of: Made) -> None:
    """As ai-toolkit's are, but of a kind that is not read."""
    linear = of.block.attn.to_k = of.block.attn.to_k.base_layer
    linear.forward = type("LohaModule", (nn.Module,), {"forward": lambda self, x: x})().forward


NOISY = r"tokens of one block with different modulations \(noise_mask\)"
ZERO_COND = r"different modulations \(zero_cond_t\)"
NOT_FUSED = [
    ("flux single", args(lambda *given: (*given[:4], {"ip_hidden_states": 1})), "joint_attention_kwargs ip_hidden"),
    ("flux single", no_rotary, "no rotary embedding"),
    ("flux single", attribute("attn.processor", type("OtherProcessor", (), {})()), "attention by OtherProcessor"),
    ("flux single", lambda of: of.block.attn.to_q.register_forward_hook(lambda *_: None), "hooks on attn.to_q"),
    ("flux single", lambda of: setattr(of.block, "forward", of.block.forward), "its forward was replaced"),
    ("flux single", without_lora, "was replaced by something other than a LoRA"),
    ("flux single", with_unknown_adapter, "a LohaModule"),
    ("flux single", trained("to_v.base_layer.weight"), "a linear whose weight is trained"),
    ("flux single", trained("norm_q"), "its QK norm is a RMSNorm that is trained"),
    ("flux single", attribute("attn.to_q.lora_dropout.default", nn.Dropout(0.1)), "LoRA dropout"),
    ("flux single", lambda of: of.block.attn.to_q.merge(), "a LoRA is merged into its base"),
    ("flux single", attribute("act_mlp", nn.GELU()), "its activation is a GELU, not GELU-tanh"),
    ("z-image", args(lambda x, m, r, t, *_: (x, m, r, t, torch.zeros(2, 64, dtype=torch.long), t, t)), NOISY),
    ("z-image", args(lambda x, mask, _, *rest: (x, mask, None, *rest)), "no rotary embedding"),
    ("z-image", trained("norm"), "its QK norm is a RMSNorm that is trained"),
    ("z-image", trained("ffn_norm2"), "its norm is a RMSNorm that is trained"),
    ("z-image", lambda of: of.block.adaLN_modulation.insert(0, nn.SiLU()), "a modulation of more than a linear"),
    ("z-image refiner", attribute("attention.to_out.1.p", 0.1), "dropout"),
    ("sd3", args(lambda *given: (*given[:3], {"skip": 1})), "joint_attention_kwargs skip"),
    ("sd3", attribute("use_dual_attention", True), "attend to themselves a second time"),
    ("sd3", lambda of: of.block.set_chunk_feed_forward(1), "its feed-forward runs in chunks"),
    ("sd3", attribute("attn.norm_q", None), "q and k are not normed"),
    ("qwen image", args(lambda *given: (*given[:6], torch.zeros(2, 40, dtype=torch.int))), ZERO_COND),
    ("qwen image", attribute("zero_cond_t", True), ZERO_COND),
    ("qwen image", attribute("txt_mod.0", nn.GELU()), "a modulation of more than SiLU and a linear"),
    ("qwen image", kwargs, "joint_attention_kwargs ip_hidden_states"),
    ("qwen image", no_rotary, "no rotary embedding"),
    ("chroma double", kwargs, "joint_attention_kwargs ip_hidden_states"),
    ("chroma single", no_rotary, "no rotary embedding"),
    ("toolkit's chroma double", trained("norm"), "a QK norm that is trained"),
    ("toolkit's chroma double", of_two_positions, "images of one batch at different positions"),
    ("toolkit's chroma single", with_other_activation, "its activation is a GELU, not GELU-tanh"),
    ("flux2 double", args(lambda *given: (*given[:5], {"kv_cache_mode": "cached"})), "joint_attention_kwargs"),
    ("flux2 single", args(lambda *given: (*given, True)), "or come apart"),
    ("flux2 single", args(lambda x, _, *rest: (x[:, 24:], x[:, :24], *rest)), "handed in apart"),
    ("flux2 single", args(lambda x, text, vectors, *_: (x, text, vectors, None)), "no rotary embedding"),
    ("flux2 single", args(lambda x, t, v, *rest: (x, t, v[:, None].expand(-1, 64, -1), *rest)), "modulation of"),
    ("flux2 double", attribute("attn.to_out.1.p", 0.5), "dropout"),
    ("flux2 double", attribute("ff.act_fn", nn.Identity()), "its activation is a Identity"),
    ("flux2 double", attribute("ff_context.act_fn.gate_fn", nn.GELU()), "its activation is a Flux2SwiGLU"),
    ("flux2 double", attribute("attn.processor", nn.Identity()), "attention by Identity"),
    ("flux2 double", trained("norm"), "trained"),
    ("krea2", trained("norm_k"), "a norm or a table of the modulation is trained"),
    ("krea2", trained("scale_shift_table"), "a norm or a table of the modulation is trained"),
    ("krea2", attribute("attn.processor", nn.Identity()), "attention by Identity"),
    ("krea2", args(lambda x, temb, _, mask: (x, temb, None, mask)), "no rotary embedding"),
    ("krea2 text", trained("ff.gate"), "a linear whose weight is trained"),
]


@pytest.mark.parametrize(("name", "change", "reason"), NOT_FUSED)
def test_what_a_block_does_beyond_is_not_fused(name, change, reason):
    if name not in FAMILIES:
        pytest.skip(f"this diffusers' {name} block has no reader")
    of = made(name)
    change(of)
    with pytest.raises(NotFusable, match=reason):
        fused_block(of.block)(*of.args)


def test_other_modules_and_variants_of_lora_are_not_fused():
    with pytest.raises(NotFusable, match="a Linear has no reader"):
        fused_block(nn.Linear(2, 2))
    with pytest.raises(NotFusable, match="a LoRA variant"):
        fused_block(made("flux single", use_dora=True).block)


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_of_a_pass_share_tables_and_mask(name):
    of = made(name)
    one, other = (fused_block(of.block).reader.call(*of.args).shared for _ in range(2))
    assert (one.mask is None) == name.startswith(("sd3", "flux"))  # they have none
    assert one.mask is other.mask
    assert one.cos is other.cos


def test_a_mask_that_hides_nothing_is_left_out():
    """Kernels without one are faster."""
    if "qwen image" not in FAMILIES:
        pytest.skip("this diffusers' block has no reader")
    of = made("qwen image")
    form = fused_block(of.block)
    seen = torch.ones_like(of.args[2])
    args = (*of.args[:2], seen, *of.args[3:])
    assert form.reader.call(*args).shared.mask is None
    seen[0, 3] = False  # in place, as a buffer may be filled again
    mask = form.reader.call(*args).shared.mask
    assert mask[0, 0, 0, 3] == -torch.inf
    assert mask.isinf().sum() == 1


def test_a_class_of_another_model_under_the_same_name_has_no_reader():
    """As Krea 2's SingleStreamBlock has, which takes other arguments."""
    own = type(made("toolkit's chroma single").block)
    other = type("SingleStreamBlock", (nn.Module,), {"forward": lambda self, x, vec, freqs, mask: x})
    assert read_list(own) is not None
    assert read_list(other) is None
    assert (block_name(own), block_name(other)) == ("SingleStreamBlock", "test_fused_families.SingleStreamBlock")


@pytest.mark.parametrize("name", ["flux2 double", "flux2 single"])
def test_one_row_of_vectors_for_all_images(name):
    if name not in FAMILIES:
        pytest.skip("this diffusers has no FLUX.2")
    of = made(name)
    row = of.leaves["vectors"][:1].detach().clone().requires_grad_()
    of.leaves["vectors"] = row
    vectors = row.flatten(1).chunk(2, dim=1) if name == "flux2 double" else (row.flatten(1),)
    of.args = (*of.args[:2], *vectors, *of.args[2 + len(vectors) :])
    vectors = fused_block(of.block).reader.call(*of.args).vectors
    assert all(len(each) == 2 for each in vectors)  # kernels read each image's
    assert_as_own_code(of, FUSED_FP32_RTOL)


@pytest.mark.parametrize("checkpointing", ["none", "all"])
def test_a_whole_flux2_takes_the_fused_flow(checkpointing):
    transformer_flux2 = pytest.importorskip("diffusers.models.transformers.transformer_flux2")

    def step(coat: dict) -> tuple[dict[str, torch.Tensor], CoatReport]:
        torch.manual_seed(3)
        sizes = {"in_channels": 16, "joint_attention_dim": 48, "timestep_guidance_channels": 32}
        sizes |= {"attention_head_dim": 32, "num_attention_heads": 2, "num_layers": 1, "num_single_layers": 2}
        model = transformer_flux2.Flux2Transformer2DModel(**sizes, axes_dims_rope=[8] * 4).to(torch.bfloat16)
        report = apply_coat(model.requires_grad_(False), COATConfig.from_dict(coat))
        tiny_lora(model, COATConfig.from_dict(coat))
        ids = torch.zeros(1, 40, 4)
        ids[0, :, 1] = torch.arange(40)
        latents, prompt, target = torch.randn(1, 40, 16), torch.randn(1, 24, 48), torch.randn(1, 40, 16)
        rest = {"timestep": torch.tensor([0.5]), "guidance": torch.tensor([4.0])}
        rest |= {"img_ids": ids, "txt_ids": torch.zeros(1, 24, 4), "return_dict": False}
        out = model.train()(latents.bfloat16(), prompt.bfloat16(), **rest)[0]
        (out.float() - target).square().mean().backward()
        found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
        return {"out": out.detach().float(), **found}, report

    expected, _ = step({"enabled": False})
    found, report = step({"memory": {"checkpointing": checkpointing}})
    assert found.keys() == expected.keys()
    assert len(found) == 1 + 2 * 16
    got = next(row.got for row in report.parts() if row.part == "saved tensors")
    assert got == ("3 kept in FP8, fused flow, attention fp8" if checkpointing == "none" else "3 recomputed")
    together = [torch.cat([x.flatten() for x in each.values()]) for each in (found, expected)]
    assert float(nn.functional.cosine_similarity(*together, dim=0)) > ARCH_GRADIENT_COSINE
