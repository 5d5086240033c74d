"""The engine's step on a GPU that is not there: every option of the `coat:` block in turn."""

import itertools
import logging
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from coat_core import FP8TrainableLinear
from coat_core.activation import Saving
from coat_core.config import FP8LinearConfig, FP8QuantizationConfig
from coat_core.linear.function import fp8_gemm_obstacle
from coat_core.optim import FP8AdamW, offload
from coat_flux.blocks.fused.chooser import fused_block
from coat_flux.blocks.held import HeldTensors
from coat_flux.saves.state import execution_of

pytest.importorskip("triton", reason="the kernels' signatures are Triton's")
from coat_core.ops import scaled_mm
from tests.helpers.changes import change
from tests.helpers.dry_gpu import COMPARED, dry_gpu, dry_session
from tests.helpers.dry_gpu.card import CARD
from tests.helpers.families import FAMILIES, OTHERS, made, results
from tests.helpers.step_watch import set_limits

pytestmark = [pytest.mark.triton, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")]


# without what takes time and has a test of its own: the measurement, and the second step's look at the casts
BASE = {"speed.measure": "never", "guard.enabled": False}
CASES = [  # values of each option of a step but its default; those of a line are free of each other
    "enabled=false",
    "optimizer.use_fp8=false memory.checkpointing=all memory.enable_efficient_checkpoint=false weight.use_fp8=false",
    "optimizer.use_fp8_m1=false memory.checkpointing=none activation.grad_format=e4m3 weight.format=e5m2",
    "optimizer.use_fp8_m2=false activation.grad_format=e4m3 weight.format=nvfp4 activation.group_size=64",
    "optimizer.m1_format=e5m2 memory.budget_gb=1.0 weight.format=int8 activation.format=int8 activation.group_size=256",
    "optimizer.m1_format=int8_ratio memory.transposed_weights=always weight.format=auto activation.attention=bf16",
    "optimizer.m2_format=e5m2 memory.transposed_weights=never weight.granularity=per_row activation.include=[single*]",
    "optimizer.m2_format=uint8_log memory.stream_blocks=auto activation.format=e5m2 activation.exclude=['*proj_out']",
    "optimizer.block_size=64 speed.cuda_graphs=never activation.grad_format=e4m3 activation.min_sqnr_db=20.0",
    "optimizer.use_dynamic_range_expansion=false speed.measure=always activation.nonlinear_granularity=per_tensor",
    "optimizer.stochastic_rounding=true activation.grad_format=bf16 activation.linear_granularity=per_tensor",
    "optimizer.moment_rounding=nearest speed.kernels=all activation.flow=generic activation.group_size=16",
    "speed.kernels=none activation.use_fp8=false",
    "speed.kernels_left_out=[gated_sum] speed.attention=cudnn activation.group_size=32",
    "speed.attention=flash",
    "speed.attention=efficient",
]


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """A coat block from dotted keys."""
    block: dict[str, Any] = {}
    change(block, flat)
    return block


@pytest.mark.parametrize("options", CASES)
def test_two_steps_with_every_option(options, monkeypatch):
    """From the batch to AdamW and EMA, with one block of each kind."""
    flat: dict[str, Any] = {**BASE}
    for option in options.split():
        key, _, value = option.partition("=")
        flat[key] = yaml.safe_load(value)
    with dry_gpu(monkeypatch) as gpu:
        session = dry_session(nested(flat), monkeypatch, blocks=(1, 1))
        gpu.steps(session, 2)
    assert session.step == 2
    assert gpu.launches["_fp8_adamw_step_kernel"] == (0 if options == "enabled=false" else 2)


def test_two_steps_with_every_option_of_the_run(monkeypatch):
    """At once; the guard on, the second step a health step, images masked."""
    flat = {"data.background": "black", "data.transparency": "mask", "resume.allow": ["data"], "fallback": "error"}
    flat |= {"memory.log_memory_stats": False, "memory.log_every": 1, "guard.enabled": True, "speed.measure": "never"}
    set_limits(monkeypatch, health_every=2)
    with dry_gpu(monkeypatch) as gpu:
        gpu.steps(dry_session(nested(flat), monkeypatch, blocks=(1, 1)), 2)
    assert gpu.operators.waits["coat_flux/watch/casts.py:rows"] == 1
    assert gpu.operators.waits["coat_flux/watch/guard.py:_check"] > 0


@pytest.mark.parametrize("case", ["kept", "recomputed", "flux2"])
def test_a_step_can_be_captured(case, monkeypatch):
    """Steps 1 to 3 run eagerly, the 4th both ways; inside the capture the host waits nowhere. The 5th is a replay."""
    memory = {"memory.checkpointing": "all"} if case == "recomputed" else {}
    geometry = {}
    if case == "flux2":  # at dev's widths; klein has no guidance
        pytest.importorskip("diffusers.models.transformers.transformer_flux2", reason="this diffusers has no FLUX.2")
        geometry = {"arch": "flux2"}
    with dry_gpu(monkeypatch) as gpu:
        session = dry_session(nested({**BASE, **memory}), monkeypatch, blocks=(1, 1), **geometry)
        gpu.steps(session, 3)
        before = gpu.launches.copy()
        gpu.steps(session, 1, closer=COMPARED)
        both = gpu.launches - before
        gpu.steps(session, 1, closer={})
    assert gpu.captures == 1
    assert both["_fp8_adamw_step_kernel"] == 2
    assert both["_qkv_rope_bwd_kernel"] == (0 if case == "recomputed" else 2 * 3)  # those run the blocks' own code
    assert gpu.launches - before == both


def test_attention_without_a_kernel(monkeypatch):
    with dry_gpu(monkeypatch, "plain") as gpu:
        gpu.steps(dry_session(nested(BASE), monkeypatch, blocks=(1, 0)), 2)
    assert gpu.launches["_qkv_rope_bwd_kernel"] > 0


# --- FP8 GEMMs ---
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LAYOUTS = {
    "rows": lambda m, k, dtype: torch.empty(m, k, dtype=dtype, device="cuda"),
    "columns": lambda m, k, dtype: torch.empty(k, m, dtype=dtype, device="cuda").t(),
    "a slice of rows": lambda m, k, dtype: torch.empty(m, 2 * k, dtype=dtype, device="cuda")[:, k:],
    "every other row": lambda m, k, dtype: torch.empty(m, 2, k, dtype=dtype, device="cuda")[:, 0],
}


def scale(rows: int, row_wise: bool) -> Tensor:
    return torch.empty((rows, 1) if row_wise else (), device="cuda")


@pytest.mark.parametrize("rows_b", [False, True], ids=["b per tensor", "b per row"])
@pytest.mark.parametrize("rows_a", [False, True], ids=["a per tensor", "a per row"])
@pytest.mark.parametrize(("a", "b"), [*itertools.product(DTYPES, DTYPES)])
def test_every_fp8_gemm_of_a_config_is_one_that_torch_takes(a, b, rows_a, rows_b, monkeypatch):
    """On fake CUDA tensors, by the strictest of torch's kernels; those that no GPU has are refused by the config."""
    k, n = 3072, 12288
    exists = (a, b) != ("e5m2", "e5m2") and not ((rows_a or rows_b) and b == "e5m2")
    with dry_gpu(monkeypatch) as gpu:
        bias = torch.empty(n, dtype=torch.bfloat16, device="cuda")
        cases = [(1, "rows", "rows", torch.float16, bias), (1, "rows", "rows", torch.float32, bias)]
        cases += [(m, *of, torch.bfloat16, None) for m in (1, 512) for of in itertools.product(LAYOUTS, LAYOUTS)]
        for m, of_a, of_b, out, addend in cases:
            x, w = LAYOUTS[of_a](m, k, DTYPES[a]), LAYOUTS[of_b](n, k, DTYPES[b])
            arguments = x, scale(m, rows_a), w, scale(n, rows_b), addend, out, True
            if exists:
                y = torch.ops.coat.fp8_mm(*arguments)
                assert (y.shape, y.dtype, y.is_contiguous()) == ((m, n), out, True)
            else:
                with pytest.raises(RuntimeError, match=r"not supported|row-wise scaling"):
                    torch.ops.coat.fp8_mm(*arguments)
        reason = scaled_mm.unsupported_reason(CARD, DTYPES[a], DTYPES[b], rows_a or rows_b)
    assert gpu.operators.calls["coat::fp8_mm"] > 0
    assert (reason is None) == exists


@pytest.mark.parametrize("asked", ["per_tensor", "per_row"])
def test_a_card_that_refuses_row_wise_products_multiplies_fp8(asked, monkeypatch):
    """As sm_120 with torch 2.10 (pytorch #192707); INT8 is neither tried nor taken, whatever was asked for."""
    multiply = torch._scaled_mm

    def per_tensor_only(*args: Any, scale_a: Tensor, **kwargs: Any) -> Tensor:
        if scale_a.numel() > 1:
            raise RuntimeError("Rowwise scaling is not currently supported on your device")
        return multiply(*args, scale_a=scale_a, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", per_tensor_only)
    options = {**BASE, "activation.linear_granularity": asked, "speed.measure": "auto"}
    with dry_gpu(monkeypatch) as gpu:
        session = dry_session(nested(options), monkeypatch, blocks=(1, 1))
        gpu.steps(session, 2)
    coat = session.job.coat
    assert (coat.weight.format, coat.activation.linear_granularity) == ("e4m3", "per_tensor")
    assert execution_of(session.transformer)["gemm"] == "per_tensor"
    assert gpu.operators.calls["coat::fp8_mm"] > 20
    assert gpu.operators.calls["coat::int8_mm"] == 0


def test_formats_are_timed_on_the_card_before_the_load_and_attention_in_the_first_step(monkeypatch, caplog):
    """Both formats and every kernel as they run; all takes a millisecond, so that it is e4m3 and torch's attention."""
    options = {**BASE, "weight.format": "auto", "speed.measure": "auto"}
    with dry_gpu(monkeypatch) as gpu, caplog.at_level(logging.INFO):
        session = dry_session(nested(options), monkeypatch, blocks=(1, 1))
        assert gpu.launches["_int8_mm_fwd_kernel"] > 10
        gpu.steps(session, 2)
    assert session.job.coat.chosen.milliseconds == {"e4m3": 1.0, "int8": 1.0}
    found = execution_of(session.transformer)
    assert (found["weight_format"], found["weight_ms"]) == ("e4m3", {"e4m3": 1.0, "int8": 1.0})
    lines = [line for line in caplog.messages if line.startswith("attention: ")]
    others = "; ".join(f"{kernel} 1.00 ms" for kernel in ("flash", "efficient", "fa3", "fa4"))
    assert lines == [f"attention: cudnn 1.00 ms (fastest at 4608 tokens; {others})"]
    assert found["attention"] == "cudnn"


# --- blocks of other models ---
LAUNCHES = {"SingleBlock": (1, 1, 1), "StreamBlock": (1, 2, 2), "last": (2, 3, 2), "DoubleBlock": (2, 4, 4)}


@pytest.mark.parametrize("name", OTHERS)
def test_a_block_of_another_family(name, monkeypatch):
    """Forward and backward through the launchers, with a mask, at the models' width."""
    with dry_gpu(monkeypatch) as gpu:
        size, tokens = FAMILIES[name].hidden, (FAMILIES[name].text, 1024)
        of = made(name, torch.bfloat16, size, tokens, FP8LinearConfig(), "toolkit", 16, "cuda")
        form = fused_block(of.block, Saving())
        with gpu.operators.step({f"coat_flux/blocks/models/{file}.py:_mask": 0.0 for file in ("qwen_image", "krea2")}):
            found = results(form, of)
    assert [found[each].shape for each in of.leaves] == [x.shape for x in of.leaves.values()]
    kind = "last" if "last" in name else type(form).__name__
    streams, norms, gates = LAUNCHES[kind]
    kernels = ("_qkv_rope_bwd_kernel", "_norm_modulate_bwd_kernel", "_gated_sum_bwd_kernel")
    assert [gpu.launches[kernel] for kernel in kernels] == [streams, norms, gates]
    if name.startswith("flux2"):  # SwiGLU, of one linear of up to 55,296 columns
        kernels = ("_cast_down_fwd_kernel", "_mlp_activation_bwd_kernel", "_mlp_down_gradient_kernel")
        assert [gpu.launches[kernel] for kernel in kernels] == [streams] * 3


def test_a_trained_linear_casts_its_weight_once_and_in_every_graph(monkeypatch):
    config = FP8LinearConfig(cache_weight=True, wgrad_format="e4m3")
    per_tensor = {"_share_amax_fwd_kernel": 1, "_cast_by_amax_fwd_kernel": 1}
    per_batch = {"_quantize_rows_fwd_kernel": 3, "_transpose_codes_fwd_kernel": 2}  # x, dy, dy by feature; W, x
    with dry_gpu(monkeypatch) as gpu:
        layer = torch.nn.Linear(3072, 1024, device="cuda", dtype=torch.bfloat16)
        FP8TrainableLinear.from_linear(layer, config)
        assert fp8_gemm_obstacle(CARD, config) is None
        gpu.launches.clear()

        def batches(count: int) -> None:
            for _ in range(count):
                x = torch.zeros(3, 7, 3072, device="cuda", dtype=torch.bfloat16, requires_grad=True)  # padded to 32
                layer(x * 1).sum().backward()  # a result: an input would be cast again in backward

        batches(2)
        assert gpu.launches == {name: 2 * n for name, n in per_batch.items()} | per_tensor
        gpu.launches.clear()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        batches(1)
        assert gpu.launches == per_batch | {name: 2 * n for name, n in per_tensor.items()}  # forward and dgrad


# -- what is in CPU memory: `memory.stream_blocks` and `optimizer.offload` --------------------------------------------
@pytest.mark.parametrize("memory", [{}, {"memory.checkpointing": "all"}], ids=["kept", "recomputed"])
def test_codes_are_copied_while_blocks_run(memory, monkeypatch):
    """Copies and products wait for each other, and the host for neither; in a capture as well."""
    with dry_gpu(monkeypatch) as gpu:
        session = dry_session(nested({**BASE, **memory, "memory.stream_blocks": "all"}), monkeypatch, blocks=(1, 3))
        gpu.steps(session, 3)
        before = gpu.operators.memory.copies
        gpu.steps(session, 1, closer=COMPARED)  # eagerly, then captured
        gpu.steps(session, 1, closer={})
    assert gpu.captures == 1
    assert not session.graphs.failed
    # of four blocks two are there when backward begins, and two when the next step does; a capture trusts in none
    assert gpu.operators.memory.copies - before == 4 + 6


class HeldByCard(HeldTensors):
    """Counts what operators make on the card."""

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "meta":
            super()._add(storage)


CONFIG = FP8QuantizationConfig(moment_rounding="stochastic", stochastic_rounding=True)
SIZES = (5008, 64, 2048, 48)


def updates(optimizer: FP8AdamW, params: list[torch.nn.Parameter], steps: int) -> None:
    for _ in range(steps):
        for param in reversed(params):
            param.grad = torch.empty_like(param)
            optimizer.step_parameter(param)
            param.grad = None


def test_the_card_holds_no_moments_but_the_slots(monkeypatch):
    """Neither at the start nor in updates, for which the host does not wait."""
    with dry_gpu(monkeypatch) as gpu:
        monkeypatch.setattr(offload, "chunk_elements", lambda _: 1024)  # of a slot
        params = [torch.nn.Parameter(torch.empty(size, device="cuda", dtype=torch.bfloat16)) for size in SIZES]
        optimizer = FP8AdamW(params, capturable=True, fp8_config=CONFIG, offload="cpu")
        with HeldByCard() as held:
            optimizer.make_states()
            slots = offload.staging_bytes(CONFIG, SIZES, params[0].device)
            counted = len(SIZES) * (4 + 2 * 2 * 4)  # steps and draws
            assert held.now == slots + counted
            assert optimizer.state_bytes() > 2 * sum(SIZES)
            with gpu.operators.step({}):
                updates(optimizer, params, 2)
            assert held.peak < slots + counted + 2 * 5000 + 5000  # a gradient, tables
        state = optimizer.state_dict()["state"]
        assert {x.device.type for one in state.values() for key, x in one.items() if key != "step"} == {"cpu"}
        assert gpu.operators.memory.copies == 2 * (5 + 1 + 2 + 1) * 8  # two kinds of codes, six rows of numbers
        assert gpu.launches["_fp8_adamw_step_kernel"] == 2 * (5 + 1 + 2 + 1)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        params[0].grad = torch.empty_like(params[0])
        with pytest.raises(RuntimeError, match="offload='cpu': a CUDA graph cannot hold the copies of moments"):
            optimizer.step()


@pytest.mark.parametrize("fused", [True, False], ids=["in backward", "after it"])
def test_full_fine_tuning_with_moments_in_host_memory(fused, monkeypatch):
    """Two steps of the engine; the update waits for nothing but its gradient."""
    flat = {**BASE, "optimizer.offload": "cpu", "include": ["single_transformer_blocks.0.attn.*"]}
    with dry_gpu(monkeypatch) as gpu:
        train = {"fused_backward": fused, "ema_config": {"use_ema": False}}
        session = dry_session(nested(flat), monkeypatch, blocks=(0, 1), train=train, full=True)
        gpu.steps(session, 2)
        gpu.steps(session, 1, closer={})
    elements = sum(param.numel() for param in session.lora.values())
    assert elements > 3 * 3072**2
    assert session.optimizer.state_bytes() > 2 * elements
    assert sum(x.nbytes for x in session.optimizer.staging) < session.optimizer.state_bytes() * 3
    assert gpu.launches["_fp8_adamw_step_kernel"] >= 3 * (len(session.lora) if fused else 2)
