"""Every row of the `coat:` block changes something in the tensors of a training step: YAML in, tensors out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml

from coat_flux.config.coat import BY_KEY, COATConfig
from coat_flux.trainers.optimizer import build_optimizer
from coat_flux.watch.casts import CastProbe
from coat_flux.watch.precision import PrecisionWatch
from tests.helpers.flux import TEXT_TOKENS
from tests.helpers.option_run import LAYER, Run, run

E4M3, E5M2, FP32, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.bfloat16
TOKENS = 64
KEPT = "memory: {checkpointing: none}"
N_LINEARS, N_GEMMS = 40, 34  # in the blocks; of these all but the modulation multiply in FP8


def weight_dtype(r: Run) -> Any:
    return r.weight_dtype


def weight_scale_shape(r: Run) -> Any:
    return tuple(r.layer.weight_scale_bits.shape)


def float_weights(r: Run) -> Any:
    return r.float_weights > 0


def adapter_input(r: Run) -> Any:
    """(dtype of the x kept for dA, shape of its scale)."""
    return (r.saved_for_layer[0].dtype, tuple(r.saved_for_layer[1].shape)) if r.saved_for_layer else None


def forward_gemms(r: Run) -> Any:
    return set(r.forward_gemms.calls)


def forward_gemm_count(r: Run) -> Any:
    return len(r.forward_gemms.calls)


def backward_gemm_dtypes(r: Run) -> Any:
    return {dtype for dtype, _ in r.backward_gemms.calls}


def packed_dtypes(r: Run) -> Any:
    """Of what norms, GELU, gates and attention saved."""
    return {s.packed.codes.dtype for s in r.saved.packed}


def elements_per_scale(r: Run) -> Any:
    """Of what norms, GELU, gates and attention saved; 0 is one scale for all."""
    packed = [s.packed for s in r.saved.packed]
    return {0 if p.scale.ndim == 0 else p.codes.numel() // p.scale.numel() for p in packed}


def attention_inputs(r: Run) -> Any:
    """How q, k, v and out are kept for attention's backward."""
    shape = (1, 2, TOKENS + TEXT_TOKENS, 32)
    return {s.packed.codes.dtype if s.packed else s.dtype for s in r.saved.tensors if s.shape == shape}


def block_runs(r: Run) -> Any:
    """Forward passes through 4 blocks, recomputations included."""
    return r.block_calls


def kept_block_inputs(r: Run) -> Any:
    """(whether block inputs outlive the forward pass, dtypes of their FP8 copies)."""
    return set(r.inputs_alive), r.kept_inputs


def moment_dtypes(r: Run) -> Any:
    return r.state["exp_avg"].dtype, r.state["exp_avg_sq"].dtype


def fused_dtypes(r: Run) -> Any:
    """Of what the fused flow keeps of a block's own tensors."""
    return {tensors[0].dtype for _, tensors in r.fused_tensors()}


def fused_elements_per_scale(r: Run) -> Any:
    """Of the residual stream's x [1, 64, 64]; 0 is one scale for all."""
    _, (codes, scale) = next(found for found in r.fused_tensors() if found[0] == "x")
    return 0 if scale.ndim == 0 else codes.numel() // scale.numel()


def fused_attention(r: Run) -> Any:
    """How q, k, v and out are kept."""
    return {tensors[0].dtype for name, tensors in r.fused_tensors() if name in ("qkv", "out")}


def packed_by_hooks(r: Run) -> Any:
    return len(r.saved.packed) > 0


def rows_in(dtype: torch.dtype) -> set[tuple[torch.dtype, tuple[int, ...]]]:
    """FP8 GEMMs with a scale for each row."""
    return {(dtype, (n, 1)) for n in (TOKENS, TEXT_TOKENS, TOKENS + TEXT_TOKENS)}


def coat(weight: str = "", activation: str = "", memory: str = "checkpointing: none", flow: str = "generic") -> str:
    parts = f"flow: {flow}" + (f", {activation}" if activation else "")
    return f"{{weight: {{{weight}}}, activation: {{{parts}}}, memory: {{{memory}}}}}"


Expected = dict[str, dict[Callable[[Run], Any], Any]]
# a run → option → what it shows; options that meet in no tensor share a run
CASES: dict[str, Expected] = {
    coat(): {
        "enabled": {float_weights: False},
        "weight.use_fp8": {float_weights: False},
        "weight.format": {weight_dtype: E4M3},
        "weight.granularity": {weight_scale_shape: ()},
        "activation.flow": {fused_dtypes: set(), packed_by_hooks: True},
        "activation.use_fp8": {forward_gemm_count: N_GEMMS},
        "activation.format": {
            adapter_input: (E4M3, (1, TOKENS, 1)), packed_dtypes: {E4M3}, forward_gemms: rows_in(E4M3),
        },
        "activation.grad_format": {backward_gemm_dtypes: {E5M2}},
        "activation.nonlinear_granularity": {elements_per_scale: {128}},
        "activation.attention": {attention_inputs: {E4M3}},
        "memory.checkpointing": {block_runs: 4},
    },
    "{enabled: false}": {
        "enabled": {float_weights: True, forward_gemm_count: 0, adapter_input: None, block_runs: 4},
        "optimizer.use_fp8": {moment_dtypes: (FP32, FP32)},
    },
    coat("use_fp8: false", "group_size: 16, grad_format: e4m3"): {
        "weight.use_fp8": {float_weights: True},
        "activation.group_size": {elements_per_scale: {16}},
        "activation.grad_format": {backward_gemm_dtypes: {E4M3}},
    },
    coat("format: e5m2", "group_size: 32, grad_format: e4m3, attention: bf16"): {
        "weight.format": {weight_dtype: E5M2},
        "activation.group_size": {elements_per_scale: {32}},
        "activation.attention": {attention_inputs: {BF16}},
    },
    coat("format: nvfp4", "nonlinear_granularity: per_tensor"): {
        "weight.format": {weight_dtype: torch.uint8},
        "activation.nonlinear_granularity": {elements_per_scale: {0}},
    },
    coat("granularity: per_row", "linear_granularity: per_tensor, include: ['single*'], group_size: 256"): {
        "weight.granularity": {weight_scale_shape: (64, 1)},
        "activation.linear_granularity": {adapter_input: (E4M3, ()), forward_gemms: {(E4M3, ())}},
        "activation.include": {forward_gemm_count: 10},
        "activation.group_size": {elements_per_scale: {256}},
    },
    coat(activation="use_fp8: false"): {
        "activation.use_fp8": {forward_gemm_count: 0, adapter_input: None, packed_dtypes: set()},
    },
    coat(activation="format: e5m2, grad_format: bf16, exclude: ['single*'], group_size: 64"): {
        "activation.format": {
            adapter_input: (E5M2, (1, TOKENS, 1)), packed_dtypes: {E5M2},
            forward_gemms: {gemm for gemm in rows_in(E5M2) if gemm[1] != (TOKENS + TEXT_TOKENS, 1)},
        },
        "activation.grad_format": {backward_gemm_dtypes: set()},
        "activation.exclude": {forward_gemm_count: 24},
        "activation.group_size": {elements_per_scale: {64}},
    },
    coat(activation="format: e5m2", memory="checkpointing: all"): {
        "activation.format": {kept_block_inputs: ({False}, {E5M2})},
        "memory.checkpointing": {block_runs: 8},
    },
    coat(memory="checkpointing: all"): {
        "memory.enable_efficient_checkpoint": {kept_block_inputs: ({False}, {E4M3})},
    },
    coat(memory="checkpointing: all, enable_efficient_checkpoint: false"): {
        "memory.enable_efficient_checkpoint": {kept_block_inputs: ({True}, set())},
    },
    coat(memory="budget_gb: 0.001"): {"memory.budget_gb": {block_runs: 8}},
    coat(memory="checkpointing: auto, budget_gb: 1000.0"): {"memory.budget_gb": {block_runs: 4}},
    coat(flow="fused"): {
        "activation.flow": {packed_by_hooks: False, fused_dtypes: {E4M3}},
        "activation.attention": {fused_attention: {E4M3}},
        "activation.grad_format": {backward_gemm_dtypes: {E5M2}},
        "activation.linear_granularity": {forward_gemms: rows_in(E4M3)},
    },
    coat(activation="use_fp8: false", flow="fused"): {"activation.use_fp8": {fused_dtypes: set()}},
    coat(
        activation="format: e5m2, group_size: 16, grad_format: e4m3, linear_granularity: per_tensor", flow="fused"
    ): {
        "activation.format": {fused_dtypes: {E5M2}},
        "activation.group_size": {fused_elements_per_scale: 16},
        "activation.grad_format": {backward_gemm_dtypes: {E4M3}},
        "activation.linear_granularity": {forward_gemms: {(E5M2, ())}},
    },
    coat("use_fp8: false", "nonlinear_granularity: per_tensor, attention: bf16", flow="fused"): {
        "weight.use_fp8": {float_weights: True},
        "activation.nonlinear_granularity": {fused_elements_per_scale: 0},
        "activation.attention": {fused_attention: {BF16}},
    },
}  # fmt: skip
# options of the optimizer, which needs no model: → what its state shows
STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "use_fp8": ("use_fp8: false", {"dtypes": (FP32, FP32), "scales": {}}),
    "use_fp8_m1": ("use_fp8_m1: false", {"dtypes": (FP32, E4M3)}),
    "use_fp8_m2": ("use_fp8_m2: false", {"dtypes": (E4M3, FP32)}),
    "m1_format": ("m1_format: int8_ratio", {"dtypes": (torch.int8, E4M3)}),
    "m2_format": ("m2_format: uint8_log", {"dtypes": (E4M3, torch.uint8)}),
    "block_size": (
        "block_size: 32, m1_format: e5m2",
        {"dtypes": (E5M2, E4M3), "scales": {"exp_avg_scale": 8, "exp_avg_sq_scale": 8}},
    ),
    "use_dynamic_range_expansion": ("use_dynamic_range_expansion: false", {"expanded": False}),
    "": (
        "m2_format: e5m2",
        {"dtypes": (E4M3, E5M2), "scales": {"exp_avg_scale": 2, "exp_avg_sq_scale": 2}, "expanded": True},
    ),
}
ROUNDING = {"optimizer.stochastic_rounding", "optimizer.moment_rounding"}  # below, and tests/optim
SEPARATE = {*ROUNDING, "memory.log_memory_stats", "memory.log_every", "fallback"}  # test_memory.py, test_apply_coat.py
# change no tensor of a step: test_compile.py, test_(speed_pick|attention_pick|transposed_weights|streaming).py
SPEED = {"speed.cuda_graphs", "speed.measure", "speed.attention", "memory.transposed_weights", "memory.stream_blocks"}
# of the run, not of a step: tests/reliability; of full fine-tuning: test_engine_full.py
FULL = ("include", "exclude", "activation.wgrad_format", "optimizer.offload")
RELIABILITY = {key for key in BY_KEY if key.startswith(("data.", "guard.", "resume.", *FULL))}
CHOSEN = {"activation.min_sqnr_db"}  # in a run's second step: test_precision_runs.py, and below


@pytest.mark.parametrize("text", CASES)
def test_options_are_visible_in_the_tensors(text: str) -> None:
    alive = any(kept_block_inputs in shown for shown in CASES[text].values())
    # a fresh model where a probe is about what lives after the forward pass
    made = Run(text, find_inputs=True) if alive else run(text)
    for key, shown in CASES[text].items():
        assert {probe.__name__: probe(made) for probe in shown} == {p.__name__: value for p, value in shown.items()}, (
            key
        )


@pytest.mark.parametrize("option", STATES)
def test_options_of_the_optimizer_are_visible_in_its_state(option: str) -> None:
    text, expected = STATES[option]
    param = torch.nn.Parameter(torch.randn(64, 4))
    param.grad = torch.randn(64, 4)
    optimizer = build_optimizer([param], 1e-3, COATConfig.from_dict({"optimizer": yaml.safe_load(f"{{{text}}}")}))
    optimizer.step()
    state = optimizer.state[param]
    found = {
        "dtypes": (state["exp_avg"].dtype, state["exp_avg_sq"].dtype),
        "scales": {name: t.numel() for name, t in state.items() if name.endswith("_scale")},
        "expanded": any(name.endswith(("_exponent", "_center")) for name in state),
    }
    assert {name: found[name] for name in expected} == expected


def test_every_option_has_a_case() -> None:
    cases = {key for shown in CASES.values() for key in shown} | {f"optimizer.{key}" for key in STATES if key}
    assert cases | SEPARATE | SPEED | RELIABILITY | CHOSEN == set(BY_KEY)


def test_the_number_of_linears_is_what_the_cases_count_on() -> None:
    assert len(run(coat()).report.converted) == N_LINEARS
    assert N_LINEARS - len(run(coat()).report.why) == N_GEMMS


def test_numerical_options_change_the_gradients() -> None:
    """Each of them rounds something else, so no two runs agree."""
    name, runs = f"{LAYER}.lora_A.weight", [text for text in CASES if "budget" not in text]
    runs.remove(coat(activation="use_fp8: false", flow="fused"))  # which is that of the generic flow
    gradients = [run(text).gradients[name] for text in runs]
    for i, one in enumerate(gradients):
        assert not any(torch.equal(one, other) for other in gradients[:i]), runs[i]
    assert torch.equal(gradients[0], Run(coat()).gradients[name])


def test_bytes_kept_for_backward() -> None:
    default, fewer_scales = run(coat()), run(coat("format: nvfp4", "nonlinear_granularity: per_tensor"))
    more = run(coat("format: e5m2", "group_size: 32, grad_format: e4m3, attention: bf16"))
    assert fewer_scales.saved.bytes() < default.saved.bytes() < more.saved.bytes()


def test_stochastic_rounding_is_visible_in_bf16_parameters() -> None:
    """optimizer.stochastic_rounding: the seed decides which way a parameter is rounded, or does not."""

    def updated(rounding: bool, seed: int) -> torch.Tensor:
        torch.manual_seed(7)
        param = torch.nn.Parameter(torch.randn(64, 4, dtype=BF16))
        param.grad = torch.randn(64, 4, dtype=BF16)
        config = COATConfig.from_dict({"optimizer": {"stochastic_rounding": rounding}})
        build_optimizer([param], 1e-3, config, seed=seed).step()
        return param.detach()

    assert torch.equal(updated(False, 0), updated(False, 1))
    assert not torch.equal(updated(True, 0), updated(True, 1))


@pytest.mark.parametrize(("flow", "weights"), [("fused", "true"), ("generic", "false")])
def test_layers_below_the_minimum_leave_the_fp8_gemms(flow: str, weights: str) -> None:
    """activation.min_sqnr_db: after a look, those layers and no others multiply in high precision, in both passes."""
    made = Run(coat(f"use_fp8: {weights}", flow=flow))
    said: list[str] = []
    with CastProbe(made.model, made.lora) as probe:
        made._step()
    rows = {row.layer: row.sqnr_db for row in probe.rows(2) if row.kind == "input"}
    assert len(rows) == N_GEMMS
    minimum = sorted(rows.values())[4] + 1e-4
    below = {layer for layer, value in rows.items() if value < minimum}
    assert 5 <= len(below) < N_GEMMS  # layers that read one x have one value
    watch = PrecisionWatch(made.model, minimum, made.report, said.append)
    watch.choose(probe.rows(2))
    with CastProbe(made.model, made.lora) as probe:
        made._step()
    for kind in ("input", "gradient"):
        assert {row.layer for row in probe.rows(3) if row.kind == kind} == rows.keys() - below
    assert {layer for layer, why in made.report.why.items() if "min_sqnr_db" in why} == below
    assert all(layer in said[-1] for layer in below)
    assert not watch.pending


def test_optimizer_params_of_the_host_override_the_block() -> None:
    config = COATConfig.from_dict(yaml.safe_load("optimizer: {m1_format: e4m3, block_size: 32}"))
    param = torch.nn.Parameter(torch.randn(64))
    param.grad = torch.randn(64)
    optimizer = build_optimizer([param], 1e-3, config, {"m1_format": "e5m2", "use_fp8_m2": False})
    optimizer.step()
    state = optimizer.state[param]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (E5M2, FP32)
    assert state["exp_avg_scale"].numel() == 2
