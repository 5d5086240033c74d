"""apply_coat on the real FLUX (embedded tiny geometry); attach_lora shares one FP8 x per tensor."""

import copy
import gc
import statistics
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from coat_core import FP8Linear, replace_linear_with_fp8, restore_linear, sqnr_db
from coat_flux.blocks.apply import apply_coat
from coat_flux.blocks.lora import OWN, SHARED, attach_lora
from coat_flux.blocks.runner import BlockRunner
from coat_flux.config.coat import COATConfig
from coat_flux.watch.casts import INPUT, CastProbe, weight_rows
from tests.helpers.asserts import assert_all_bitwise, assert_bitwise, assert_sqnr, cosine
from tests.helpers.flux import (
    coat_flux_model,
    flux_inputs,
    lora_gradients,
    loss_of,
    predict,
    step_of,
    tiny_flux,
    tiny_lora,
)
from tests.helpers.flux_block import block_call, block_inputs, lora_parameters, make_model, prepare
from tests.helpers.toolkit_lora import Network
from tests.tolerances import (
    BLOCK_GRADIENT_FLOOR_DB,
    BLOCK_OUTPUT_FLOOR_DB,
    FLUX_GRADIENT_COSINE,
    FLUX_GRADIENT_COSINE_MEAN,
    FLUX_OUTPUT_FLOOR_DB,
    SMALL_BLOCK_GRADIENT_FLOOR_DB,
    product_floor_db,
)

KEEP = {"checkpointing": "none"}


def config(**block: Any) -> COATConfig:
    return COATConfig.from_dict({"memory": KEEP, **block})


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def test_which_linears_are_converted():
    model = tiny_flux()
    report = apply_coat(model, config())
    found = linears(model)
    blocks = {name for name in found if "transformer_blocks." in name}
    modulation = {name for name in blocks if ".norm" in name}
    assert (len(found), len(blocks), len(modulation)) == (50, 40, 6)
    assert (set(report.converted), set(report.skipped)) == (blocks, set(found) - blocks)
    assert all(type(found[name]) is FP8Linear for name in report.converted)
    assert all(type(found[name]) is nn.Linear for name in report.skipped)
    assert {name for name in report.converted if not found[name].config.use_fp8_gemm} == modulation
    assert set(report.why) == modulation
    assert model.dtype == torch.bfloat16


def test_disabled_is_a_bit_exact_no_op():
    plain, model = tiny_flux(), tiny_flux()
    report = apply_coat(model, COATConfig.from_dict({"enabled": False, "activation": {"include": ["nothing.*"]}}))
    assert (report.converted, report.skipped) == ({}, {})
    assert not model.is_gradient_checkpointing
    disabled = COATConfig.from_dict({"enabled": False})
    tiny_lora(plain, disabled)
    tiny_lora(model, disabled)
    assert {type(m) for m in model.modules()} == {type(m) for m in plain.modules()}
    (output, expected), (found, gradients) = step_of(plain), step_of(model)
    assert_bitwise(found, output)
    assert_all_bitwise(gradients, expected)
    with pytest.raises(ValueError, match=r"already has an adapter; call apply_coat before adding the LoRA"):
        apply_coat(model, config())


def test_a_second_application_reconfigures_but_never_misreads_codes():
    model = tiny_flux()
    apply_coat(model, config())
    codes = model.transformer_blocks[0].attn.to_q.weight_codes.clone()
    apply_coat(model, config(activation={"format": "e5m2"}))
    assert model.transformer_blocks[0].attn.to_q.config.input_format == "e5m2"
    assert_bitwise(model.transformer_blocks[0].attn.to_q.weight_codes, codes)
    with pytest.raises(ValueError, match=r"coat.weight.format='e5m2': transformer_blocks.*is already stored as 'e4m3'"):
        apply_coat(model, config(weight={"format": "e5m2"}, activation={"grad_format": "e4m3"}))


def test_a_model_with_codes_is_not_saved_before_it_is_restored(tmp_path):
    model = tiny_flux()
    apply_coat(model, config())
    assert model.num_parameters() == tiny_flux().num_parameters()
    assert model.state_dict()["transformer_blocks.0.attn.to_q.weight"].shape == (64, 64)  # for load_lora_weights
    with pytest.raises(RuntimeError, match="restore_linear"):
        model.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())
    restore_linear(model).save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert_all_bitwise(again.state_dict(), model.state_dict())
    apply_coat(again, config(weight={"use_fp8": False}))
    again.save_pretrained(tmp_path)  # weights in high precision


class Odd(nn.Linear):
    pass


@pytest.mark.parametrize("layer", [nn.Linear(24, 24), Odd(64, 64)], ids=["size", "subclass"])
def test_fallback_for_a_layer(layer, caplog):
    model = tiny_flux()
    model.transformer_blocks[0].attn.extra = layer
    with pytest.raises(RuntimeError, match=r"fallback='error': 1 layers cannot be FP8 \(first transformer_b.*extra"):
        apply_coat(model, config(fallback="error"))
    model = tiny_flux()
    model.transformer_blocks[0].attn.extra = layer
    report = apply_coat(model, config())
    assert report.skipped["transformer_blocks.0.attn.extra"].startswith("fallback: ")
    assert "1 layers stay in high precision: fallback: " in caplog.text


def test_fallback_for_a_device(monkeypatch, caplog):
    monkeypatch.setattr("coat_core.linear.function.unsupported_reason", lambda *_: "cuda: compute capability 8.0")
    with pytest.raises(RuntimeError, match=r"34 layers .*compute capability 8.0.*set coat.fallback: bf16"):
        apply_coat(tiny_flux(), config(fallback="error"))
    model, report, _ = coat_flux_model({"memory": KEEP, "fallback": "bf16"})
    why = "fallback: cuda: compute capability 8.0"
    assert report.why["transformer_blocks.0.attn.to_q"] == why
    assert f"34 layers stay in high precision: {why}" in caplog.text
    assert why in report.table(1000)
    assert predict(model).isfinite().all()


def test_without_fp8_products_all_is_int8(monkeypatch, caplog):
    """`fallback: int8` is the run that asks for INT8, to the bit, and the table at the start says why."""
    int8 = {"weight": {"format": "int8"}, "activation": {"format": "int8"}}
    expected = predict(coat_flux_model({"memory": KEEP, **int8})[0])
    monkeypatch.setattr("coat_core.linear.function.unsupported_reason", lambda *_: "cuda: compute capability 8.6")
    model, report, _ = coat_flux_model({"memory": KEEP, "activation": {"linear_granularity": "per_tensor"}})
    for scaling in ("per_tensor", "per_row"):
        assert f"e4m3 {scaling}: cuda: compute capability 8.6" in caplog.text
    assert "products are in int8" in caplog.text
    assert "INT8, forward int8, backward int8" in report.table(1000)
    assert_bitwise(predict(model), expected)
    monkeypatch.setattr("coat_core.linear.function.int8_unsupported_reason", lambda _: "no INT8 either")
    assert coat_flux_model({"memory": KEEP})[1].why["transformer_blocks.0.attn.to_q"].startswith("fallback: cuda")


@pytest.fixture(scope="module")
def in_bf16() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return step_of(coat_flux_model({"enabled": False})[0])


@pytest.mark.parametrize(
    "block",
    [
        {"memory": KEEP},
        {"memory": {"checkpointing": "all"}},
        {"memory": {"checkpointing": "all", "enable_efficient_checkpoint": False}},
        {"memory": KEEP, "weight": {"granularity": "per_row"}, "activation": {"linear_granularity": "per_row"}},
        {"memory": KEEP, "weight": {"use_fp8": False}},
        {"memory": KEEP, "activation": {"use_fp8": False}},
        {"memory": KEEP, "activation": {"nonlinear_granularity": "per_tensor", "attention": "bf16"}},
        "autocast",
    ],
    ids=str,
)
def test_a_training_step_stays_near_bf16(block, in_bf16):
    """Also of a model in fp32 under autocast, as ACCELERATE_MIXED_PRECISION=bf16 has it in ai-toolkit."""
    is_autocast = block == "autocast"
    dtype = torch.float32 if is_autocast else torch.bfloat16
    model, _, _ = coat_flux_model({"memory": KEEP} if is_autocast else block, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        output, gradients = step_of(model)
    expected_output, expected = in_bf16
    assert_sqnr(expected_output, output, FLUX_OUTPUT_FLOOR_DB)
    similarity = {name: cosine(expected[name], gradient) for name, gradient in gradients.items()}
    assert len(similarity) == 80
    assert min(similarity.values()) > FLUX_GRADIENT_COSINE
    assert sum(similarity.values()) / 80 > FLUX_GRADIENT_COSINE_MEAN


def live_objects(*names: str) -> int:
    gc.collect()
    return sum(type(o).__name__ in names for o in gc.get_objects())


@pytest.mark.parametrize("mode", ["none", "all"])
def test_a_forward_pass_without_backward_leaves_nothing_and_inference_is_deterministic(mode):
    model, _, _ = coat_flux_model({"memory": {"checkpointing": mode}})
    before = live_objects("Quantized", "_Keeper", "_BlockBackward")
    prediction = predict(model)
    assert live_objects("Quantized", "_Keeper", "_BlockBackward") > before
    del prediction
    assert live_objects("Quantized", "_Keeper", "_BlockBackward") == before
    lora_gradients(model)
    with torch.no_grad():
        first = predict(model)
    with torch.inference_mode():
        assert_bitwise(predict(model), first)


def test_nvfp4_layers_are_fused_and_have_names():
    model, report, _ = coat_flux_model({"weight": {"format": "nvfp4"}, "memory": KEEP})
    predict(model)  # weights are joined
    assert all(choice.flow == "fused" for choice in BlockRunner.of(model).plan.blocks)
    linears = {name.removesuffix(".base_layer"): m for name, m in model.named_modules() if isinstance(m, FP8Linear)}
    assert {m.config.weight_format for m in linears.values()} == {"nvfp4"}
    assert "W nvfp4, x e4m3/per_row, dy e5m2" in report.table(1000)
    with CastProbe(model, {}) as probe:
        loss_of(model(**flux_inputs())[0]).backward()
    layers = {row.layer for row in probe.rows(2) if row.kind == INPUT}
    assert layers == {name for name, m in linears.items() if m.config.use_fp8_gemm}
    weights = weight_rows(model)
    assert {row.layer for row in weights} == set(linears)
    assert all(19 < row.sqnr_db < 23 for row in weights)
    assert all(row.saturation == 0 for row in weights)


# -- adapters ---------------------------------------------------------------------------------------------------------
K, R = 64, 8
COAT = COATConfig.from_dict({"activation": {"linear_granularity": "per_row"}})


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(K, K) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(K, K), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        return self.to_out(self.to_q(x) + torch.tanh(self.to_k(x)) * self.to_v(x))


def peft_model(base_fp8: bool = True, **lora: Any) -> nn.Module:
    model = Attention().bfloat16()
    if base_fp8:
        replace_linear_with_fp8(model, COAT.linear_config())
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    return get_peft_model(model, LoraConfig(r=R, target_modules=targets, init_lora_weights=False, **lora)).train()


def saved_inputs(run: Any) -> list[Tensor]:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run()
    return [t for t in saved if t.element_size() == 1 and t.ndim == 3]


def some_x() -> Tensor:
    return torch.randn(2, 9, K).bfloat16().requires_grad_()


@pytest.mark.parametrize(
    ("base_fp8", "lora", "group"),
    [(False, {}, OWN), (True, {"lora_dropout": 0.5}, OWN), (True, {"use_dora": True}, OWN), (True, {}, SHARED)],
    ids=["plain base", "dropout", "dora", "vanilla"],
)
def test_who_shares_and_gradients_are_those_of_plain_adapters_from_the_fp8_input(base_fp8, lora, group):
    plain = peft_model(base_fp8, **lora)
    ours = copy.deepcopy(plain)
    assert list(attach_lora(ours, COAT).values()) == [group] * 4
    x, dy = some_x(), torch.randn(2, 9, K).bfloat16()
    if group == SHARED:
        inputs = saved_inputs(lambda: ours(x))
        assert len({t.untyped_storage().data_ptr() for t in inputs}) == 2  # one for q, k, v, one for to_out
    for model in (ours, plain):
        torch.manual_seed(0)
        model(x).backward(dy)
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if "lora_A" in name:
            assert_sqnr(q.grad, p.grad, product_floor_db("e4m3"))
        elif "lora_B" in name:
            assert_bitwise(p.grad, q.grad)


@pytest.mark.parametrize("weakly", [False, True])
def test_ai_toolkits_adapters_share_with_their_base_too(weakly):
    """Its newer versions hold a weak reference to the base in place of the list."""
    model = replace_linear_with_fp8(Attention().bfloat16(), COAT.linear_config()).requires_grad_(False)
    network = Network([module for module in model.modules() if isinstance(module, nn.Linear)], R)
    for lora in network.unet_loras if weakly else ():
        lora.orig_module_ref = weakref.ref(lora.org_module[0])
        del lora.org_module
    assert attach_lora(network, COAT) == {f"unet_loras.{i}": SHARED for i in range(4)}
    inputs = saved_inputs(lambda: model(some_x()))
    assert len(inputs) == 4
    assert len({t.untyped_storage().data_ptr() for t in inputs}) == 2
    for lora, down in zip(network.unet_loras, (nn.Conv2d(K, R, 1, bias=False), nn.Linear(K, R)), strict=False):
        lora.lora_down = down
    names = list(attach_lora(network, COAT).values())[:2]
    assert names == ["its down projection is a Conv2d", "its down projection is a Linear"]
    with pytest.raises(ValueError, match="Attention: no LoRA adapter found; attach after the LoRA network is made"):
        attach_lora(Attention(), COAT)


# -- precision of a block's gradients ---------------------------------------------------------------------------------
TEXT, IMAGE, RANK = 32, 96, 16


@pytest.mark.parametrize("outliers", [1.0, 30.0], ids=["plain", "outlier channels"])
@pytest.mark.parametrize("kind", ["double", "single"])
def test_gradient_errors_of_every_adapter(kind, outliers):
    """The fused flow with every scale per row, next to the same block in bf16."""
    rows = {"activation": {"linear_granularity": "per_row"}, "weight": {"granularity": "per_row"}}
    coat = {"memory": {"checkpointing": "none"}, **rows}
    base = make_model(2)
    expected, exact = run_block(prepare(base, {"enabled": False}, "peft", RANK), kind, outliers)
    output, gradients = run_block(prepare(base, coat, "peft", RANK), kind, outliers)
    assert_sqnr(output, expected, BLOCK_OUTPUT_FLOOR_DB)
    assert len(gradients) == {"double": 2 * 14, "single": 2 * 6}[kind]  # A and B of each linear
    decibels = [float(sqnr_db(exact[name], gradient)) for name, gradient in gradients.items()]
    assert statistics.median(decibels) > BLOCK_GRADIENT_FLOOR_DB
    assert min(decibels) > SMALL_BLOCK_GRADIENT_FLOOR_DB


def run_block(model: Any, kind: str, outliers: float) -> tuple[Tensor, dict[str, Tensor]]:
    block = {"double": model.transformer_blocks, "single": model.single_transformer_blocks}[kind][0]
    hidden, encoder, temb = block_inputs(model, TEXT, IMAGE, outliers)
    hidden.requires_grad_(), encoder.requires_grad_()
    streams = block_call(model)(block, hidden, encoder, temb, model.pos_embed(torch.zeros(TEXT + IMAGE, 3)))
    output = torch.cat(streams, dim=1)
    draw = torch.Generator().manual_seed(3)
    output.backward(torch.randn(output.shape, generator=draw).to(output.dtype))
    gradients = {name: p.grad for name, p in lora_parameters(model).items() if p.grad is not None}
    return output.detach(), gradients
