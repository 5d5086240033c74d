"""BlockRunner: a block's call reaches it, the model's own recomputation stays off, it decides what recomputes."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from coat_flux.blocks import runner as runner_module
from coat_flux.blocks.hook import hook_of, own_forward, release, take_over
from coat_flux.blocks.report import shared_rows
from coat_flux.blocks.runner import BlockRunner
from coat_flux.blocks.sizes import FP8_INPUT, UNKNOWN
from coat_flux.config.coat import COATConfig
from tests.helpers.asserts import assert_bitwise
from tests.helpers.saved_tensors import recording

WIDTH = 64


class Block(nn.Module):
    """Counts its calls: 2 where it is recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | None = None, **options: Any) -> Tensor:
        self.calls += 1
        return torch.tanh(x * self.gain) * scale + (0 if shift is None else shift)


class Host(nn.Module):
    """A model with a switch of its own: without arguments, or with a flag."""

    def __init__(self, blocks: int = 2, tail: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.tail = nn.ModuleList(Block() for _ in range(tail))
        self.gradient_checkpointing = False

    def enable_gradient_checkpointing(self) -> None:
        self.gradient_checkpointing = True

    def forward(self, x: Tensor, tail: bool = True) -> Tensor:
        for block in [*self.blocks, *(self.tail if tail else ())]:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, 2.0, use_reentrant=False)
            else:
                x = block(x=x, scale=2.0)
        return x


def inputs() -> Tensor:
    return torch.randn(1, 128, WIDTH, generator=torch.Generator().manual_seed(0))


def installed(fallback: str = "bf16", **memory: Any) -> tuple[Host, BlockRunner]:
    torch.manual_seed(0)
    model = Host()
    model.enable_gradient_checkpointing()
    config = COATConfig.from_dict({"memory": memory or {"checkpointing": "none"}, "fallback": fallback})
    return model, BlockRunner.install(model, ("blocks", "tail"), config, True)


def test_the_run_gets_what_forward_names_by_position():
    block, seen = Block(), []
    take_over(block, [block], lambda *args, **kwargs: seen.append((args, kwargs)), lambda _: None)
    x, shift = inputs(), torch.zeros(1)
    block(x)
    block(x, 3.0)
    block(scale=2.0, x=x, shift=shift, more=1)
    block(x, more=1)
    assert seen == [
        ((block, x), {}),
        ((block, x, 3.0), {}),
        ((block, x, 2.0), {"shift": shift, "more": 1}),
        ((block, x, 1.0), {"more": 1}),
    ]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"), torch.no_grad():
        block(scale=1.0)


def test_without_gradients_and_after_release_a_block_is_as_it_was():
    block, other = Block(), Block()
    other.forward = lambda x: x + 1  # type: ignore[method-assign]
    expected = block(inputs())
    take_over(nn.ModuleList([block, other]), [block, other], lambda *_: None, lambda _: None)
    assert block(inputs()) is None
    assert [hook_of(each).before is None for each in (block, other)] == [True, False]
    with torch.no_grad():
        assert_bitwise(block(inputs()), expected)
        assert_bitwise(other(inputs()), inputs() + 1)
    for each in (block, other):
        release(each)
        release(each)
        assert hook_of(each) is None
    assert "forward" not in vars(block)
    assert_bitwise(other(inputs()), inputs() + 1)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_forward_that_is_wrapped_around_the_hook_later_calls_it_once(recorded):
    """As accelerate's hooks and profilers wrap a module's forward."""
    block, calls = Block(), []
    expected = block(inputs())
    take_over(block, [block], lambda block, *args: own_forward(block)(*args), lambda _: None)
    inner = block.forward

    def wrapper(*args: Any) -> Any:
        calls.append(len(args))
        return inner(*args)

    block.forward = wrapper  # type: ignore[method-assign]
    with torch.set_grad_enabled(recorded):
        assert_bitwise(block(inputs()), expected)
    assert calls == [1]


@pytest.mark.parametrize("checkpointing", ["none", "all"])
def test_the_models_own_recomputation_stays_off(checkpointing):
    plain = installed()[0]
    for block in (*plain.blocks, *plain.tail):
        release(block)
    expected = plain(inputs())
    expected.sum().backward()
    model, runner = installed(checkpointing=checkpointing)
    assert not model.gradient_checkpointing
    model.enable_gradient_checkpointing()  # as a trainer may again, later
    assert not model.gradient_checkpointing
    output = model(inputs())
    output.sum().backward()
    assert_bitwise(output, expected)
    assert runner.ran == dict.fromkeys(range(4), "own")
    runner.check_step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.cosine_similarity(mine.grad, theirs.grad, dim=0) > 0.99


def test_a_block_that_its_trainer_has_compiled_is_run_here_all_the_same():
    """As ai-toolkit's block_compile does: the call is not traced, what runs is what the runner decides."""
    model, runner = installed()
    expected = model(inputs())
    expected.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    seen: list[bool] = []
    run = runner._run_own
    runner._run_own = lambda *args: (seen.append(torch.compiler.is_compiling()), run(*args))[1]
    for blocks in (model.blocks, model.tail):
        for i, block in enumerate(blocks):
            blocks[i] = torch.compile(block, backend="eager")
    output = model(inputs())
    output.sum().backward()
    torch.compiler.reset()
    assert seen == [False] * 4
    assert_bitwise(output, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert_bitwise(parameter.grad, gradient)


def saved_row(runner: BlockRunner) -> str:
    rows = shared_rows(runner.plan, torch.device("cpu"), runner.ran)
    return next(row.got for row in rows if row.part == "saved tensors")


def test_a_checkpoint_of_the_models_own_is_noticed(caplog):
    model, runner = installed()
    assert saved_row(runner).startswith("decided at the first step, expected: ")
    model.gradient_checkpointing = True  # past the switch
    model(inputs()).sum().backward()
    assert saved_row(runner) == "4 untouched, in a checkpoint of the model's own"
    with pytest.raises(RuntimeError, match=r"left COAT out of blocks.* 2 of 2 blocks are in a checkpoint of the model"):
        runner.check_step()
    assert not caplog.records


def test_a_list_that_a_step_does_not_use_is_warned_of(caplog):
    """As Wan 2.2's second transformer, which other steps use."""
    model, runner = installed("error")
    with caplog.at_level(logging.WARNING, logger="coat_flux"):
        model(inputs(), tail=False).sum().backward()
        runner.check_step()
    (warning,) = [line for line in caplog.messages if "left COAT out" in line]
    assert warning.endswith("stay in high precision: 2 of 2 tail were not called")
    assert saved_row(runner) == "2 kept in FP8, generic flow, attention fp8; 2 untouched, not called"
    model(inputs()).sum().backward()
    assert saved_row(runner) == "4 kept in FP8, generic flow, attention fp8"


def test_a_second_installation_replaces_the_first_and_a_copy_has_a_runner_of_its_own():
    model, first = installed()
    copied = copy.deepcopy(model)
    copied(inputs()).sum().backward()
    assert BlockRunner.of(copied).ran.keys() == {0, 1, 2, 3}
    assert all(block.gain.grad is None for block in model.blocks)
    second = BlockRunner.install(model, ("blocks",), COATConfig.from_dict({}), True)
    assert BlockRunner.of(model) is second
    model(inputs()).sum().backward()
    assert second.ran.keys() == {0, 1}
    assert first.ran == {}


# -- which blocks recompute -------------------------------------------------------------------------------------------
TOKENS, BLOCKS = 64, 6


def make(allow_recompute: bool = True, **memory: Any) -> Any:
    model = Host(BLOCKS, 0)
    config = COATConfig.from_dict({"memory": memory})
    model.runner = BlockRunner.install(model, ("blocks",), config, allow_recompute)
    return model


def recomputed(model: Any, tokens: int = TOKENS) -> list[int]:
    for block in model.blocks:
        block.calls = 0
    model(torch.randn(1, tokens, WIDTH)).sum().backward()
    assert all(block.gain.grad.isfinite().all() for block in model.blocks)
    return [i for i, block in enumerate(model.blocks) if block.calls == 2]


def test_host_that_forbids_recomputation():
    with pytest.raises(ValueError, match=r"coat\.memory\.checkpointing='all': train.gradient_checkpointing is false"):
        make(False, checkpointing="all")
    assert recomputed(make(False, checkpointing="auto", budget_gb=1e-6)) == []
    assert recomputed(make(False, checkpointing="none")) == []


def test_auto_chooses_again_when_images_grow_and_not_when_they_shrink(monkeypatch, caplog):
    monkeypatch.setattr(runner_module, "used_bytes", lambda device: (0.0, 0))
    # just enough for three of the six blocks, by the policy's own estimate; 1: the optimizer's states, and rounding
    saved = UNKNOWN.high_precision + 3 * UNKNOWN.packed + (BLOCKS - 3) * FP8_INPUT + 1
    model = make(budget_gb=TOKENS * WIDTH * saved / 1e9)
    with caplog.at_level(logging.INFO):
        chosen = []
        for tokens in (TOKENS, 2 * TOKENS, 2 * TOKENS, TOKENS):
            chosen.append(len(recomputed(model, tokens)))
            model.zero_grad()
    assert chosen[0] == 3 < chosen[1] == chosen[2] == chosen[3]
    assert len([m for m in caplog.messages if m.startswith("checkpointing auto: ")]) == 2


def test_constants_given_to_blocks_are_not_packed():
    config = COATConfig.from_dict({"memory": {"checkpointing": "none"}})
    cos, sin, mask = (torch.randn(TOKENS, WIDTH) for _ in range(3))

    class Rotated(nn.Module):
        def forward(self, x: Tensor, rotary: Any, options: Any) -> Tensor:
            return x * rotary[0] + x * rotary[1][:, :] * options["mask"].view(TOKENS, WIDTH)

    block = Rotated()
    runner = BlockRunner({"0": block}, config, True)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True) * 1
    with recording() as saved:
        runner(block, x, (cos, sin), {"mask": mask})
    assert len(saved.tensors) >= 3
    assert saved.packed == []
