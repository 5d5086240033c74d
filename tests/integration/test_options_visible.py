"""Every row of the `coat:` block changes something in the tensors of a training step: YAML in, tensors out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from coat_flux.blocks.apply import apply_coat
from coat_flux.config.coat import BY_KEY, COATConfig
from coat_flux.trainers.optimizer import build_optimizer
from coat_flux.watch.casts import CastProbe
from coat_flux.watch.precision import PrecisionWatch
from tests.helpers.flux import TEXT_TOKENS, tiny_flux
from tests.helpers.option_run import LAYER, Run, run
from tests.helpers.step_watch import step_watch

E4M3, E5M2, FP32, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.bfloat16
TOKENS = 64
KEPT = "memory: {checkpointing: none}"
N_LINEARS, N_GEMMS = 40, 34  # in the blocks; of these all but the modulation multiply in FP8


class Case(NamedTuple):
    key: str
    yaml: str
    probe: Callable[[Run], Any]
    expected: Any


def weight_dtype(r: Run) -> Any:
    return r.weight_dtype


def weight_scale_shape(r: Run) -> Any:
    return tuple(r.layer.weight_scale_bits.shape)


def float_weights(r: Run) -> Any:
    return r.float_weights > 0


def adapter_input(r: Run) -> Any:
    """(dtype of the x kept for dA, shape of its scale)."""
    return (r.saved_for_layer[0].dtype, tuple(r.saved_for_layer[1].shape)) if r.saved_for_layer else None


ROW_SCALES = {(n, 1) for n in (TOKENS, TEXT_TOKENS, TOKENS + TEXT_TOKENS)}


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


def moment_scales(r: Run) -> Any:
    return {name: t.numel() for name, t in r.state.items() if name.endswith("_scale")}


def moment_expansion(r: Run) -> Any:
    return sorted(name for name in r.state if name.endswith(("_exponent", "_center")))


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


def fused(options: str = "") -> str:
    return f"{{activation: {{flow: fused{options}}}, {KEPT}}}"


FUSED = [
    ("activation.flow", fused(), packed_by_hooks, False),
    ("activation.flow", fused(), fused_dtypes, {E4M3}),
    ("activation.flow", f"{{activation: {{flow: generic}}, {KEPT}}}", fused_dtypes, set()),
    ("activation.flow", f"{{activation: {{flow: generic}}, {KEPT}}}", packed_by_hooks, True),
    ("activation.use_fp8", fused(", use_fp8: false"), fused_dtypes, set()),
    ("activation.format", fused(", format: e5m2"), fused_dtypes, {E5M2}),
    ("activation.nonlinear_granularity", fused(", nonlinear_granularity: per_tensor"), fused_elements_per_scale, 0),
    ("activation.group_size", fused(", group_size: 16"), fused_elements_per_scale, 16),
    ("activation.group_size", fused(", group_size: 32"), fused_elements_per_scale, 32),
    ("activation.attention", fused(), fused_attention, {E4M3}),
    ("activation.attention", fused(", attention: bf16"), fused_attention, {BF16}),
    ("activation.grad_format", fused(), backward_gemm_dtypes, {E5M2}),
    ("activation.grad_format", fused(", grad_format: e4m3"), backward_gemm_dtypes, {E4M3}),
    ("activation.linear_granularity", fused(), forward_gemms, {(E4M3, shape) for shape in ROW_SCALES}),
    ("activation.linear_granularity", fused(", linear_granularity: per_tensor"), forward_gemms, {(E4M3, ())}),
    ("weight.use_fp8", f"{{activation: {{flow: fused}}, weight: {{use_fp8: false}}, {KEPT}}}", float_weights, True),
]
CASES = [
    Case("enabled", f"{{enabled: true, {KEPT}}}", float_weights, False),
    Case("enabled", "{enabled: false}", float_weights, True),
    Case("enabled", "{enabled: false}", forward_gemm_count, 0),
    Case("enabled", "{enabled: false}", adapter_input, None),
    Case("enabled", "{enabled: false}", moment_dtypes, (FP32, FP32)),
    Case("enabled", "{enabled: false}", block_runs, 4),
    # optimizer
    Case("optimizer.use_fp8", KEPT, moment_dtypes, (E4M3, E4M3)),
    Case("optimizer.use_fp8", f"{{optimizer: {{use_fp8: false}}, {KEPT}}}", moment_dtypes, (FP32, FP32)),
    Case("optimizer.use_fp8", f"{{optimizer: {{use_fp8: false}}, {KEPT}}}", moment_scales, {}),
    Case("optimizer.use_fp8_m1", f"{{optimizer: {{use_fp8_m1: false}}, {KEPT}}}", moment_dtypes, (FP32, E4M3)),
    Case("optimizer.use_fp8_m2", f"{{optimizer: {{use_fp8_m2: false}}, {KEPT}}}", moment_dtypes, (E4M3, FP32)),
    Case("optimizer.m1_format", f"{{optimizer: {{m1_format: e5m2}}, {KEPT}}}", moment_dtypes, (E5M2, E4M3)),
    Case("optimizer.m2_format", f"{{optimizer: {{m2_format: e5m2}}, {KEPT}}}", moment_dtypes, (E4M3, E5M2)),
    Case("optimizer.m1_format", f"{{optimizer: {{m1_format: int8_ratio}}, {KEPT}}}", moment_dtypes, (torch.int8, E4M3)),
    Case("optimizer.m2_format", f"{{optimizer: {{m2_format: uint8_log}}, {KEPT}}}", moment_dtypes, (E4M3, torch.uint8)),
    Case("optimizer.block_size", KEPT, moment_scales, {"exp_avg_scale": 2, "exp_avg_sq_scale": 2}),
    Case(
        "optimizer.block_size",
        f"{{optimizer: {{block_size: 32}}, {KEPT}}}",
        moment_scales,
        {"exp_avg_scale": 8, "exp_avg_sq_scale": 8},
    ),
    Case(
        "optimizer.use_dynamic_range_expansion",
        KEPT,
        moment_expansion,
        ["exp_avg_center", "exp_avg_exponent", "exp_avg_sq_center", "exp_avg_sq_exponent"],
    ),
    Case(
        "optimizer.use_dynamic_range_expansion",
        f"{{optimizer: {{use_dynamic_range_expansion: false}}, {KEPT}}}",
        moment_expansion,
        [],
    ),
    # weight
    Case("weight.use_fp8", KEPT, float_weights, False),
    Case("weight.use_fp8", f"{{weight: {{use_fp8: false}}, {KEPT}}}", float_weights, True),
    Case("weight.format", f"{{weight: {{format: e4m3}}, {KEPT}}}", weight_dtype, E4M3),
    Case(
        "weight.format",
        f"{{weight: {{format: e5m2}}, activation: {{grad_format: e4m3}}, {KEPT}}}",
        weight_dtype,
        E5M2,
    ),
    Case("weight.format", f"{{weight: {{format: nvfp4}}, {KEPT}}}", weight_dtype, torch.uint8),
    Case("weight.granularity", f"{{weight: {{granularity: per_tensor}}, {KEPT}}}", weight_scale_shape, ()),
    Case("weight.granularity", f"{{weight: {{granularity: per_row}}, {KEPT}}}", weight_scale_shape, (64, 1)),
    # activation
    Case("activation.use_fp8", KEPT, forward_gemm_count, N_GEMMS),
    Case("activation.use_fp8", f"{{activation: {{use_fp8: false}}, {KEPT}}}", forward_gemm_count, 0),
    Case("activation.use_fp8", f"{{activation: {{use_fp8: false}}, {KEPT}}}", adapter_input, None),
    Case("activation.use_fp8", f"{{activation: {{use_fp8: false}}, {KEPT}}}", packed_dtypes, set()),
    Case("activation.format", KEPT, adapter_input, (E4M3, (1, TOKENS, 1))),
    Case("activation.format", KEPT, packed_dtypes, {E4M3}),
    Case("activation.format", KEPT, forward_gemms, {(E4M3, shape) for shape in ROW_SCALES}),
    Case("activation.format", f"{{activation: {{format: e5m2}}, {KEPT}}}", adapter_input, (E5M2, (1, TOKENS, 1))),
    Case("activation.format", f"{{activation: {{format: e5m2}}, {KEPT}}}", packed_dtypes, {E5M2}),
    Case(
        "activation.format", f"{{activation: {{format: e5m2}}, {KEPT}}}", forward_gemms, {(E5M2, x) for x in ROW_SCALES}
    ),
    Case(
        "activation.format",
        "{activation: {format: e5m2}, memory: {checkpointing: all}}",
        kept_block_inputs,
        ({False}, {E5M2}),
    ),
    Case("activation.grad_format", KEPT, backward_gemm_dtypes, {E5M2}),
    Case("activation.grad_format", f"{{activation: {{grad_format: e4m3}}, {KEPT}}}", backward_gemm_dtypes, {E4M3}),
    Case("activation.grad_format", f"{{activation: {{grad_format: bf16}}, {KEPT}}}", backward_gemm_dtypes, set()),
    Case(
        "activation.linear_granularity",
        f"{{activation: {{linear_granularity: per_tensor}}, {KEPT}}}",
        adapter_input,
        (E4M3, ()),
    ),
    Case(
        "activation.linear_granularity",
        f"{{activation: {{linear_granularity: per_tensor}}, {KEPT}}}",
        forward_gemms,
        {(E4M3, ())},
    ),
    Case("activation.nonlinear_granularity", KEPT, elements_per_scale, {128}),
    Case(
        "activation.nonlinear_granularity",
        f"{{activation: {{nonlinear_granularity: per_tensor}}, {KEPT}}}",
        elements_per_scale,
        {0},
    ),
    *(
        Case("activation.group_size", f"{{activation: {{group_size: {g}}}, {KEPT}}}", elements_per_scale, {g})
        for g in (16, 32, 64, 128, 256)
    ),
    Case("activation.attention", KEPT, attention_inputs, {E4M3}),
    Case("activation.attention", f"{{activation: {{attention: bf16}}, {KEPT}}}", attention_inputs, {BF16}),
    *(Case(key, text, probe, expected) for key, text, probe, expected in FUSED),
    Case("activation.include", f"{{activation: {{include: ['single*']}}, {KEPT}}}", forward_gemm_count, 10),
    Case("activation.exclude", f"{{activation: {{exclude: ['single*']}}, {KEPT}}}", forward_gemm_count, 24),
    # memory
    Case("memory.enable_efficient_checkpoint", "memory: {checkpointing: all}", kept_block_inputs, ({False}, {E4M3})),
    Case(
        "memory.enable_efficient_checkpoint",
        "memory: {checkpointing: all, enable_efficient_checkpoint: false}",
        kept_block_inputs,
        ({True}, set()),
    ),
    Case("memory.checkpointing", "memory: {checkpointing: none}", block_runs, 4),
    Case("memory.checkpointing", "memory: {checkpointing: all}", block_runs, 8),
    Case("memory.checkpointing", "memory: {checkpointing: auto}", block_runs, 4),
    Case("memory.budget_gb", "memory: {budget_gb: 0.001}", block_runs, 8),
    Case("memory.budget_gb", "memory: {budget_gb: 1000.0}", block_runs, 4),
]
ROUNDING = {"optimizer.stochastic_rounding", "optimizer.moment_rounding"}  # below, and tests/optim
SEPARATE = {*ROUNDING, "memory.log_memory_stats", "memory.log_every", "fallback"}
# change no tensor of a step: test_compile.py, test_(speed_pick|attention_pick|transposed_weights|streaming).py
SPEED = {"speed.cuda_graphs", "speed.measure", "speed.attention", "memory.transposed_weights", "memory.stream_blocks"}
# of the run, not of a step: tests/reliability; of full fine-tuning: test_engine_full.py
FULL = ("include", "exclude", "activation.wgrad_format", "optimizer.offload")
RELIABILITY = {key for key in BY_KEY if key.startswith(("data.", "guard.", "resume.", *FULL))}
CHOSEN = {"activation.min_sqnr_db"}  # in a run's second step: test_precision_runs.py, and below


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.key}: {case.probe.__name__} of {case.yaml}")
def test_option_is_visible_in_the_tensors(case: Case) -> None:
    # a fresh model where the probe is about what lives after the forward pass
    made = Run(case.yaml, find_inputs=True) if case.probe is kept_block_inputs else run(case.yaml)
    assert case.probe(made) == case.expected


def test_every_option_has_a_case() -> None:
    assert {case.key for case in CASES} | SEPARATE | SPEED | RELIABILITY | CHOSEN == set(BY_KEY)


def test_the_number_of_linears_is_what_the_cases_count_on() -> None:
    assert len(run(KEPT).report.converted) == N_LINEARS
    assert N_LINEARS - len(run(KEPT).report.why) == N_GEMMS


CHANGES_GRADIENTS = [
    fused(),
    "{activation: {grad_format: e4m3}, memory: {checkpointing: none}}",
    "{activation: {grad_format: bf16}, memory: {checkpointing: none}}",
    "{activation: {format: e5m2}, memory: {checkpointing: none}}",
    "{activation: {attention: bf16}, memory: {checkpointing: none}}",
    "{activation: {linear_granularity: per_tensor}, memory: {checkpointing: none}}",
    "{activation: {nonlinear_granularity: per_tensor}, memory: {checkpointing: none}}",
    "{weight: {format: e5m2}, activation: {grad_format: e4m3}, memory: {checkpointing: none}}",
    "{weight: {granularity: per_row}, memory: {checkpointing: none}}",
    "{memory: {checkpointing: all}}",
]


@pytest.mark.parametrize("text", CHANGES_GRADIENTS)
def test_numerical_options_change_the_gradients(text: str) -> None:
    """Each of them rounds something else, so no two runs agree."""
    default, changed = run(KEPT).gradients, run(text).gradients
    name = f"{LAYER}.lora_A.weight"
    assert not torch.equal(default[name], changed[name])
    assert torch.equal(default[name], Run(KEPT).gradients[name])


def test_bytes_kept_for_backward() -> None:
    default = run(KEPT).saved.bytes()
    assert run(f"{{activation: {{attention: bf16}}, {KEPT}}}").saved.bytes() > default
    assert run(f"{{activation: {{group_size: 16}}, {KEPT}}}").saved.bytes() > default  # more scales
    assert run(f"{{activation: {{nonlinear_granularity: per_tensor}}, {KEPT}}}").saved.bytes() < default


def bf16_lora(rounding: bool, seed: int) -> torch.Tensor:
    text = f"{{optimizer: {{stochastic_rounding: {str(rounding).lower()}}}, {KEPT}}}"
    return run(text, BF16, seed).lora[f"{LAYER}.lora_A.weight"].detach()


def test_stochastic_rounding_is_visible_in_bf16_parameters() -> None:
    """optimizer.stochastic_rounding: the seed decides which way a parameter is rounded, or does not."""
    assert bf16_lora(True, 0).dtype == BF16
    assert torch.equal(bf16_lora(False, 0), bf16_lora(False, 1))
    assert not torch.equal(bf16_lora(True, 0), bf16_lora(True, 1))


def memory_lines(text: str, steps: int = 6) -> list[str]:
    watch, log = step_watch(text)
    for step in range(1, steps + 1):
        watch.mark("after_forward", step)
    return [line.split(": ")[0] for line in log.details if line.startswith("[")]


def test_memory_lines_are_visible() -> None:
    """memory.log_memory_stats and memory.log_every."""
    assert memory_lines("memory: {log_every: 2}") == [f"[after_forward] Step {n}" for n in (2, 4, 6)]
    assert memory_lines("memory: {log_every: 5}") == ["[after_forward] Step 5"]
    assert memory_lines("memory: {log_every: 2, log_memory_stats: false}") == []
    assert memory_lines("{}", steps=200) == ["[after_forward] Step 100", "[after_forward] Step 200"]


def test_fallback_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """fallback: on a device without FP8 GEMMs the run ends, or multiplies in high precision and says so."""
    monkeypatch.setattr("coat_core.linear.function.unsupported_reason", lambda *_: "cuda: compute capability 8.0")
    made = Run(f"{{fallback: bf16, {KEPT}}}")
    assert made.forward_gemms.calls == []
    assert made.saved_for_layer[0].dtype == E4M3  # the x kept for dA needs no GEMM
    assert "fallback: cuda: compute capability 8.0" in made.report.table()
    config = COATConfig.from_dict({"fallback": "error"})
    with pytest.raises(RuntimeError, match=r"coat.fallback='error': 34 layers cannot be FP8"):
        apply_coat(tiny_flux(), config)


@pytest.mark.parametrize("weights", ["true", "false"])
@pytest.mark.parametrize("flow", ["fused", "generic"])
def test_layers_below_the_minimum_leave_the_fp8_gemms(flow: str, weights: str) -> None:
    """activation.min_sqnr_db: after a look, those layers and no others multiply in high precision, in both passes."""
    text = f"{{activation: {{flow: {flow}}}, weight: {{use_fp8: {weights}}}, {KEPT}}}"
    made = Run(text)
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
