"""Every row of the `coat:` block changes something in the tensors of a training step: YAML in, tensors out."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from coat_core.optim.state import MOMENT_OF
from coat_flux.config.coat import BY_KEY
from tests.helpers.flux import TEXT_TOKENS
from tests.helpers.option_run import LAYER, Run, run

E4M3, E5M2, FP32, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.bfloat16
TOKENS = 64
N_LINEARS, N_GEMMS = 20, 17  # in two blocks; of these all but the modulation multiply in FP8


@pytest.fixture(autouse=True, scope="module")
def _sizes() -> Iterator[None]:
    """Rough sizes of blocks: counting them takes longer than a step, and test_plan_measured.py counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coat_flux.blocks.sizes._counted", lambda *of_block: (2**18 if of_block[-1] else 2**22, 2**20))
        yield


def dtypes_of_hooks(r: Run, shape: tuple[int, ...]) -> set[torch.dtype]:
    """How tensors of a shape are kept for backward."""
    return {each.packed.codes.dtype if each.packed else each.dtype for each in r.saved.tensors if each.shape == shape}


def per_scale(codes: torch.Tensor, scale: torch.Tensor) -> int:
    """Elements that share a scale; 0: all."""
    return 0 if scale.ndim == 0 else codes.numel() // scale.numel()


# name → what a run shows
PROBES: dict[str, Callable[[Run], Any]] = {
    "weight_dtype": lambda r: r.weight_dtype,
    "weight_scale_shape": lambda r: tuple(r.layer.weight_scale_bits.shape),
    "float_weights": lambda r: r.float_weights > 0,
    # dtype of the x kept for dA, shape of its scale; of an x in high precision None
    "adapter_input": lambda r: (r.saved_for_layer[0].dtype, r.saved_for_layer[1].shape) if r.saved_for_layer else None,
    "forward_gemms": lambda r: set(r.forward_gemms.calls),
    "forward_gemm_count": lambda r: len(r.forward_gemms.calls),
    "backward_gemm_dtypes": lambda r: {dtype for dtype, _ in r.backward_gemms.calls},
    # of what norms, GELU, gates and attention saved
    "packed_dtypes": lambda r: {each.packed.codes.dtype for each in r.saved.packed},
    "elements_per_scale": lambda r: {per_scale(each.packed.codes, each.packed.scale) for each in r.saved.packed},
    "attention_inputs": lambda r: dtypes_of_hooks(r, (1, 2, TOKENS + TEXT_TOKENS, 32)),  # q, k, v, out
    "block_runs": lambda r: r.block_calls,  # through 2 blocks, recomputations included
    # whether block inputs outlive the forward pass, dtypes of their FP8 copies
    "kept_block_inputs": lambda r: (set(r.inputs_alive), r.kept_inputs),
    "moment_dtypes": lambda r: tuple(r.state[key].dtype for key in r.state if key in MOMENT_OF),
    # of what the fused flow keeps of a block's own tensors; of x [1, 64, 64]; of q, k, v and out
    "fused_dtypes": lambda r: {tensors[0].dtype for _, tensors in r.fused_tensors()},
    "fused_elements_per_scale": lambda r: per_scale(*dict(r.fused_tensors())["x"]),
    "fused_attention": lambda r: {x[0].dtype for name, x in r.fused_tensors() if name in ("qkv", "out")},
    "packed_by_hooks": lambda r: len(r.saved.packed) > 0,
}


def rows_in(dtype: torch.dtype) -> set[tuple[torch.dtype, tuple[int, ...]]]:
    """FP8 GEMMs with a scale for each row."""
    return {(dtype, (n, 1)) for n in (TOKENS, TEXT_TOKENS, TOKENS + TEXT_TOKENS)}


def coat(weight: str = "", activation: str = "", memory: str = "checkpointing: none", flow: str = "generic") -> str:
    parts = f"flow: {flow}" + (f", {activation}" if activation else "")
    return f"{{weight: {{{weight}}}, activation: {{{parts}}}, memory: {{{memory}}}}}"


Expected = dict[str, dict[str, Any]]
# a run → option → what it shows; options that meet in no tensor share a run
CASES: dict[str, Expected] = {
    coat(): {
        "enabled": {"float_weights": False},
        "weight.use_fp8": {"float_weights": False},
        "weight.format": {"weight_dtype": E4M3},
        "weight.granularity": {"weight_scale_shape": ()},
        "activation.flow": {"fused_dtypes": set(), "packed_by_hooks": True},
        "activation.use_fp8": {"forward_gemm_count": N_GEMMS},
        "activation.format": {
            "adapter_input": (E4M3, (1, TOKENS, 1)), "packed_dtypes": {E4M3}, "forward_gemms": rows_in(E4M3),
        },
        "activation.grad_format": {"backward_gemm_dtypes": {E5M2}},
        "activation.nonlinear_granularity": {"elements_per_scale": {128}},
        "activation.attention": {"attention_inputs": {E4M3}},
        "memory.checkpointing": {"block_runs": 2},
    },
    "{enabled: false}": {
        "enabled": {"float_weights": True, "forward_gemm_count": 0, "adapter_input": None, "block_runs": 2},
        "optimizer.use_fp8": {"moment_dtypes": (FP32, FP32)},
    },
    coat("use_fp8: false", "group_size: 16, grad_format: e4m3"): {
        "weight.use_fp8": {"float_weights": True},
        "activation.group_size": {"elements_per_scale": {16}},
        "activation.grad_format": {"backward_gemm_dtypes": {E4M3}},
    },
    coat("format: e5m2", "group_size: 32, grad_format: e4m3, attention: bf16"): {
        "weight.format": {"weight_dtype": E5M2},
        "activation.group_size": {"elements_per_scale": {32}},
        "activation.attention": {"attention_inputs": {BF16}},
    },
    coat("format: nvfp4", "nonlinear_granularity: per_tensor"): {
        "weight.format": {"weight_dtype": torch.uint8},
        "activation.nonlinear_granularity": {"elements_per_scale": {0}},
    },
    coat("granularity: per_row", "linear_granularity: per_tensor, include: ['single*'], group_size: 256"): {
        "weight.granularity": {"weight_scale_shape": (64, 1)},
        "activation.linear_granularity": {"adapter_input": (E4M3, ()), "forward_gemms": {(E4M3, ())}},
        "activation.include": {"forward_gemm_count": 5},
        "activation.group_size": {"elements_per_scale": {256}},
    },
    coat(activation="use_fp8: false"): {
        "activation.use_fp8": {"forward_gemm_count": 0, "adapter_input": None, "packed_dtypes": set()},
    },
    coat(activation="format: e5m2, grad_format: bf16, exclude: ['single*'], group_size: 64"): {
        "activation.format": {
            "adapter_input": (E5M2, (1, TOKENS, 1)), "packed_dtypes": {E5M2},
            "forward_gemms": {gemm for gemm in rows_in(E5M2) if gemm[1] != (TOKENS + TEXT_TOKENS, 1)},
        },
        "activation.grad_format": {"backward_gemm_dtypes": set()},
        "activation.exclude": {"forward_gemm_count": 12},
        "activation.group_size": {"elements_per_scale": {64}},
    },
    coat(activation="format: e5m2", memory="checkpointing: all"): {
        "activation.format": {"kept_block_inputs": ({False}, {E5M2})},
        "memory.checkpointing": {"block_runs": 4},
    },
    coat(memory="checkpointing: all"): {
        "memory.enable_efficient_checkpoint": {"kept_block_inputs": ({False}, {E4M3})},
    },
    coat(memory="checkpointing: all, enable_efficient_checkpoint: false"): {
        "memory.enable_efficient_checkpoint": {"kept_block_inputs": ({True}, set())},
    },
    coat(memory="budget_gb: 0.001"): {"memory.budget_gb": {"block_runs": 4}},
    coat(memory="checkpointing: auto, budget_gb: 1000.0"): {"memory.budget_gb": {"block_runs": 2}},
    coat(flow="fused"): {
        "activation.flow": {"packed_by_hooks": False, "fused_dtypes": {E4M3}},
        "activation.attention": {"fused_attention": {E4M3}},
        "activation.grad_format": {"backward_gemm_dtypes": {E5M2}},
        "activation.linear_granularity": {"forward_gemms": rows_in(E4M3)},
    },
    coat(activation="use_fp8: false", flow="fused"): {"activation.use_fp8": {"fused_dtypes": set()}},
    coat(
        activation="format: e5m2, group_size: 16, grad_format: e4m3, linear_granularity: per_tensor", flow="fused"
    ): {
        "activation.format": {"fused_dtypes": {E5M2}},
        "activation.group_size": {"fused_elements_per_scale": 16},
        "activation.grad_format": {"backward_gemm_dtypes": {E4M3}},
        "activation.linear_granularity": {"forward_gemms": {(E5M2, ())}},
    },
    coat("use_fp8: false", "nonlinear_granularity: per_tensor, attention: bf16", flow="fused"): {
        "weight.use_fp8": {"float_weights": True},
        "activation.nonlinear_granularity": {"fused_elements_per_scale": 0},
        "activation.attention": {"fused_attention": {BF16}},
    },
}  # fmt: skip
# of these other tests: of ai-toolkit and memory, of a run's second step, of full fine-tuning; bits stay with the rest
ELSEWHERE = {"memory.log_memory_stats", "memory.log_every", "activation.min_sqnr_db", "activation.wgrad_format"}
ELSEWHERE |= {"memory.transposed_weights", "memory.stream_blocks"}


@pytest.mark.parametrize("text", CASES)
def test_options_are_visible_in_the_tensors(text):
    for key, shown in CASES[text].items():
        assert {name: PROBES[name](run(text)) for name in shown} == shown, key


def test_every_option_of_a_step_has_a_case():
    options = {key for key in BY_KEY if key.startswith(("weight.", "activation.", "memory."))}
    assert options - {key for shown in CASES.values() for key in shown} == ELSEWHERE
    assert len(run(coat()).report.converted) == N_LINEARS


def test_numerical_options_change_the_gradients():
    """Each of them rounds something else, so no two runs agree."""
    name, runs = f"{LAYER}.lora_A.weight", [text for text in CASES if "budget" not in text]
    runs.remove(coat(activation="use_fp8: false", flow="fused"))  # which is that of the generic flow
    gradients = [run(text).gradients[name] for text in runs]
    for i, one in enumerate(gradients):
        assert not any(torch.equal(one, other) for other in gradients[:i]), runs[i]
