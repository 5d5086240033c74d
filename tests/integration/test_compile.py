"""coat.speed.compile: blocks without a graph break, one compilation per kind and shape, gradients as in eager.

Where inductor's code is not the point, the backend is aot_eager: it runs the same operators in the same order as eager,
in the same forward and backward parts as inductor, so that gradients must have the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from coat_core.activation import PackingConfig
from coat_flux.blocks.fused.chooser import fused_block
from coat_flux.blocks.fused.compiled import CompiledBlocks
from coat_flux.blocks.held import HeldTensors
from coat_flux.blocks.runner import BlockRunner
from coat_flux.config.coat import COATConfig
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.families import made, results
from tests.helpers.flux import coat_flux_model, lora_gradients, loss_of, predict
from tests.tolerances import COMPILED_EXACT_FLOOR_DB, COMPILED_FLOOR_DB, COMPILED_RECOMPUTED_FLOOR_DB

TEXT, IMAGE = 24, 40
KEPT = {"memory": {"checkpointing": "none"}}
compile_for_real = torch.compile


def by_backend(backend: Any) -> Callable[..., Any]:
    """torch.compile with another backend in place of the mode."""

    def compile_by(function: Any, *, mode: str | None = None, **options: Any) -> Any:
        return compile_for_real(function, backend=backend, **options)

    return compile_by


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled before, nothing counted; aot_eager."""
    monkeypatch.setattr(torch, "compile", by_backend("aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compilations() -> int:
    assert not counters["graph_break"]
    return int(counters["stats"]["unique_graphs"])


class Single:
    """The two single blocks of the tiny FLUX, one after the other, under a coat block."""

    def __init__(
        self, block: dict[str, Any], speed: str = "blocks", fallback: str = "error", device: str = "cpu"
    ) -> None:
        config = {**block, "speed": {"compile": speed}, "fallback": fallback}
        self.model = coat_flux_model(config)[0].to(device)
        self.blocks = list(self.model.single_transformer_blocks)
        self.runner = BlockRunner({str(i): b for i, b in enumerate(self.blocks)}, COATConfig.from_dict(config), True)
        draw = torch.Generator().manual_seed(6)
        width = self.model.inner_dim
        shapes = (2, IMAGE, width), (2, TEXT, width), (2, width)
        self.inputs = [torch.randn(shape, generator=draw).to(device, self.model.dtype) for shape in shapes]
        self.rotary = self.model.pos_embed(torch.arange(3.0 * (TEXT + IMAGE), device=device).view(-1, 3))

    def forward(self) -> tuple[Tensor, Tensor]:
        hidden, text, temb = self.inputs
        for block in self.blocks:
            text, hidden = self.runner(block, hidden, text, temb, self.rotary, None)
        return text, hidden

    def step(self) -> dict[str, Tensor]:
        """Outputs and gradients of the adapters."""
        outputs = dict(zip(("text", "image"), self.forward(), strict=True))
        sum(loss_of(x.cpu()) for x in outputs.values()).backward()
        found = {name: x.detach() for name, x in outputs.items()}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                found[name], parameter.grad = parameter.grad, None
        return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], floor_db: float | None = None) -> None:
    """Bit-equal, or (with a floor) near."""
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        if floor_db is None:
            assert_bitwise(found[name], wanted)
        else:
            assert_sqnr(wanted, found[name], floor_db)


def kept_bytes(model: nn.Module) -> int:
    """Bytes kept for backward by a pass, parameters and buffers apart."""
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        loss = loss_of(predict(model))  # the graph lives while bytes are counted
    assert loss.requires_grad
    return sum(x.untyped_storage().nbytes() for address, x in kept.items() if address not in own)


def test_a_model_is_compiled_once_per_kind_of_block_and_keeps_what_eager_keeps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    eager, _, _ = coat_flux_model(KEPT)
    model, report, _ = coat_flux_model({**KEPT, "speed": {"compile": "blocks"}, "fallback": "error"})
    assert report.checkpointing.endswith("compiled blocks")
    expected = lora_gradients(eager)
    with caplog.at_level(logging.INFO, logger="coat_flux"):
        assert_same(lora_gradients(model), expected)
    assert "blocks: 4 kept in FP8, fused flow, attention fp8, compiled" in caplog.messages
    assert compilations() == 2
    assert_same(lora_gradients(model), expected)
    rotary = 2 * 128 * 32 * 4  # cos and sin, which all blocks share; eager holds them by name
    casts = 2 * sum(p.numel() for p in model.parameters() if p.requires_grad)  # eager casts adapters anew in backward
    assert kept_bytes(model) <= kept_bytes(eager) + rotary + casts
    assert compilations() == 2


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_shapes_are_compiled_apart_and_blocks_are_not(autocast: bool) -> None:
    eager, run = Single(KEPT, "none"), Single(KEPT)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert_same(run.step(), eager.step())
        assert compilations() == 1
        for one in (eager, run):
            one.inputs = [x[:1] for x in one.inputs]
        assert_same(run.step(), eager.step())
        assert compilations() == 2


def test_adapters_that_change_between_steps_are_honoured() -> None:
    eager, run = Single(KEPT, "none"), Single(KEPT)
    before = run.step()
    for one in (eager, run):
        for module in one.model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", 0.5)
    stronger = run.step()
    assert_same(stronger, eager.step())
    assert not torch.equal(stronger["image"], before["image"])
    for one in (eager, run):
        one.model.disable_adapters()
    with torch.no_grad():
        for found, expected in zip(run.forward(), eager.forward(), strict=True):
            assert_bitwise(found, expected)
            assert not torch.equal(found, stronger["text" if found.shape[1] == TEXT else "image"])


@pytest.mark.parametrize(
    ("block", "floor_db", "got"),
    [
        ({"memory": {"checkpointing": "all"}}, COMPILED_RECOMPUTED_FLOOR_DB, "recomputed"),
        (
            {
                "memory": {"checkpointing": "every_n", "enable_efficient_checkpoint": False},
                "activation": {"use_fp8": False},
            },
            COMPILED_EXACT_FLOOR_DB,
            "kept in high precision",
        ),
    ],
    ids=["recomputed from FP8", "high precision"],
)
def test_blocks_that_keep_no_fp8(
    block: dict[str, Any], floor_db: float, got: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Single(block)
    with caplog.at_level(logging.INFO, logger="coat_flux"):
        found = run.step()
    assert f"{got}, compiled" in caplog.text
    assert compilations() == 1
    assert_same(found, Single(block, "none").step(), floor_db)


@pytest.mark.slow
def test_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", compile_for_real)
    found = Single(KEPT).step()
    assert compilations() == 1
    assert_same(found, Single(KEPT, "none").step(), COMPILED_FLOOR_DB)


def test_a_block_with_norms_after_linears() -> None:
    """Z-Image's, as eager to the bit: x1 added up again in backward, each image's own angles."""
    of = made("z-image", torch.bfloat16, tokens=(7, 13))
    form = fused_block(of.block, of.args, PackingConfig())
    expected = results(form, of)
    assert_same(results(CompiledBlocks("error").form_of(form), of), expected)
    assert compilations() == 1


def test_a_second_derivative_is_refused() -> None:
    run = Single(KEPT)
    text, _ = run.forward()
    adapter = run.blocks[0].attn.to_q.lora_A["default"].weight
    with pytest.raises(RuntimeError, match=r"create_graph=True.*coat.activation.use_fp8: false"):
        torch.autograd.grad(text.float().square().sum(), adapter, create_graph=True)


def test_a_pass_whose_operators_are_counted_runs_eager() -> None:
    run = Single(KEPT)
    with HeldTensors() as held:
        found = run.step()
    assert held.peak > 0
    assert compilations() == 0
    assert_same(run.step(), found)
    assert compilations() == 1


def failing(graph: Any, inputs: Any) -> Any:
    raise FileNotFoundError("no C++ compiler\nsearched everywhere")


def test_a_compiler_that_fails_is_told_and_eager_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", by_backend(failing))
    run = Single(KEPT, fallback="bf16")
    with caplog.at_level(logging.INFO, logger="coat_flux"):
        caplog.clear()
        found = run.step()
        run.step()
    assert_same(found, Single(KEPT, "none").step())
    (warning,) = [m for m in caplog.messages if m.startswith("blocks run")]
    assert warning.startswith("blocks run eager: torch.compile: ")
    assert "no C++ compiler" in warning
    assert warning.endswith("set coat.speed.compile: none")
    assert "blocks: 2 kept in FP8, fused flow, attention fp8, eager" in caplog.messages
    with pytest.raises(RuntimeError, match=r"fallback='error': torch.compile: .*set coat.speed.compile: none"):
        Single(KEPT).step()


def test_errors_of_the_block_itself_are_not_taken_for_the_compilers() -> None:
    run = Single(KEPT, fallback="bf16")
    run.step()
    run.inputs[2] = run.inputs[2][:, :16]
    with pytest.raises(Exception, match="16"):
        run.step()


def test_a_block_that_cannot_be_fused_runs_eager_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    run = Single(KEPT, fallback="bf16")
    for block in run.blocks:
        block.register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.INFO, logger="coat_flux"):
        run.step()
    reason = "speed.compile='blocks': a FluxSingleTransformerBlock that cannot be fused is not compiled"
    assert f"{reason}, it runs eager" in caplog.messages
    assert "blocks: 2 kept in FP8, generic flow, attention fp8, eager" in caplog.messages
    assert compilations() == 0
    run.runner = BlockRunner(
        run.runner.blocks, COATConfig.from_dict({"speed": {"compile": "blocks"}, "fallback": "error"}), True
    )
    with pytest.raises(RuntimeError, match=reason):
        run.step()


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps; gradients of a step outlive the next one."""
    monkeypatch.setattr(torch, "compile", compile_for_real)
    run, expected = Single(KEPT, device="cuda"), Single(KEPT, "none", device="cuda").step()
    steps = [run.step() for _ in range(4)]
    for found in steps:
        assert_same(
            {k: v for k, v in found.items() if "lora" in k},
            {k: v for k, v in expected.items() if "lora" in k},
            COMPILED_FLOOR_DB,
        )
    assert compilations() == 1
