"""fp8_checkpoint: exact forward, recomputation of what ran from FP8 inputs that are really all that is kept."""

from __future__ import annotations

import weakref

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from coat_core import activation
from coat_core.activation import PackedSavedTensors, fp8_checkpoint
from coat_core.granularity import PER_TENSOR, Storage, per_group
from coat_core.quantize import quantize
from tests.autograd.test_packing import SMALL as PACKS
from tests.autograd.test_packing import Block, D, T, gradients
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.tolerances import CHECKPOINT_GRADIENT_FLOOR_DB

SMALL = {"min_elements": 64, "storage": Storage(granularity=per_group(32))}
EXACT = {"min_elements": 10**9}


def in_fp8(x: Tensor) -> Tensor:
    return quantize(x, "e4m3", per_group(32)).dequantize()


def lora_block(dropout: float) -> nn.Module:
    """A frozen block with PEFT adapters, B nonzero so that every gradient is."""
    config = LoraConfig(r=4, lora_dropout=dropout, target_modules=["qkv", "out", "up", "down"], init_lora_weights=False)
    block: nn.Module = inject_adapter_in_model(config, Block().requires_grad_(False))
    return block


@pytest.fixture
def keepers(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """What holds the inputs."""
    made: list[weakref.ref] = []

    class Recorded(activation._Keeper):
        def __init__(self, x: Tensor, storage: Storage) -> None:
            super().__init__(x, storage)
            made.append(weakref.ref(self))

    monkeypatch.setattr(activation, "_Keeper", Recorded)
    return made


@pytest.mark.parametrize(
    ("fmt", "granularity", "autocast"), [("e4m3", per_group(32), True), ("e5m2", PER_TENSOR, False)], ids=str
)
def test_forward_is_exact_and_gradients_are_near(device, fmt, granularity, autocast) -> None:
    block, x = Block().to(device), torch.randn(2, T, D, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        exact = block(x)
        y = fp8_checkpoint(block, x, storage=Storage(fmt, granularity), min_elements=64)
    assert_bitwise(y, exact)
    expected = gradients(block, x, exact)
    for name, gradient in gradients(block, x, y).items():
        assert_sqnr(expected[name], gradient, CHECKPOINT_GRADIENT_FLOOR_DB[fmt])


def test_recomputes_from_the_fp8_values_of_its_input() -> None:
    seen, x = [], torch.randn(8, D, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        seen.append(x.detach().clone())
        return x.square()

    hidden = x * 1
    y = fp8_checkpoint(block, hidden, **SMALL).sum()
    hidden.detach().zero_()  # which recomputation does not see
    (dx,) = torch.autograd.grad(y, x, retain_graph=True)
    assert_bitwise(seen[0], x.detach())
    assert_bitwise(seen[1], in_fp8(x))
    assert_bitwise(dx, 2 * in_fp8(x))
    assert_bitwise(torch.autograd.grad(y, x)[0], dx)
    with torch.no_grad():
        assert_bitwise(fp8_checkpoint(block, x, **SMALL), x.square())
    assert len(seen) == 4


@pytest.mark.parametrize(("options", "autocast"), [(SMALL, True), (EXACT, False)], ids=["fp8 input", "exact input"])
def test_lora_dropout_draws_the_same_mask(options: dict, autocast: bool) -> None:
    """With inputs kept exactly it is torch's checkpoint, to the last bit, masks and generator included."""
    block, x = lora_block(0.3), torch.randn(2, T, D, requires_grad=True)
    masks: list[Tensor] = []
    block.up.lora_dropout["default"].register_forward_hook(lambda module, args, out: masks.append(out == 0))
    outputs, states = [], []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for run in (block, lambda x: fp8_checkpoint(block, x, **options)):
            torch.manual_seed(7)
            outputs.append(run(x))
            states.append(torch.get_rng_state())
    assert_bitwise(*outputs)
    assert_bitwise(*states)
    expected, found = (gradients(block, x, y) for y in outputs)
    assert len(masks) == 3
    assert 0.2 < masks[0].float().mean() < 0.4
    for mask in masks[1:]:
        assert_bitwise(mask, masks[0])
    for name, value in expected.items():
        if options is EXACT:
            assert_bitwise(found[name], value)
        else:
            assert_sqnr(value, found[name], CHECKPOINT_GRADIENT_FLOOR_DB["e4m3"])


# -- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [True, False])
def test_the_input_is_really_freed(backward: bool, keepers: list[weakref.ref]) -> None:
    block, x = Block().bfloat16(), torch.randn(2, T, D).bfloat16().requires_grad_()
    hidden = x * 1
    alive = weakref.ref(hidden.untyped_storage())
    y = fp8_checkpoint(block, hidden, **SMALL)
    del hidden
    assert alive() is None
    (kept,) = keepers
    assert kept()._exact is None
    assert kept()._quantized.codes.dtype == torch.float8_e4m3fn
    if backward:  # else the graph is dropped without
        y.sum().backward()
        assert x.grad.isfinite().all()
    del y
    assert kept() is None


def test_constants_stay_as_they_are_and_keywords_are_kept_as_positions_are() -> None:
    """What requires no gradient is shared by all blocks: an FP8 copy per block would cost, not save."""
    x, other = (torch.randn(8, D, requires_grad=True) for _ in range(2))
    mask, seen = torch.randn(8, D), []

    def block(x: Tensor, mask: Tensor, none: None, *, other: Tensor, scale: float) -> tuple[Tensor, float]:
        seen.append((mask, none, other.detach().clone()))
        return x.sigmoid() * other * mask * scale, scale

    y, scale = fp8_checkpoint(block, x, mask, None, other=other * 1, scale=2.0, **SMALL)
    assert scale == 2.0
    y.sum().backward()
    for (constant, none, value), expected in zip(seen, (other.detach(), in_fp8(other)), strict=True):
        assert constant.data_ptr() == mask.data_ptr()
        assert none is None
        assert_bitwise(value, expected)
    torch.testing.assert_close(other.grad, in_fp8(x).sigmoid() * mask * 2)


@pytest.mark.parametrize(
    "x", [torch.randn(8, D, dtype=torch.float64), torch.randn(()), torch.randn(0, D)], ids=["fp64", "scalar", "empty"]
)
def test_what_fp8_has_no_place_for_is_kept_exactly(x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(fp8_checkpoint(torch.sigmoid, x, min_elements=0).sum(), x)
    assert_bitwise(dx, torch.autograd.grad(x.sigmoid().sum(), x)[0])


# -- inside other contexts --------------------------------------------------------------------------------------------


def test_inside_packed_saved_tensors() -> None:
    """A recomputed part of a packed block: its constants are not packed, so that it recomputes from what ran."""
    mask, x, dy = torch.randn(8, D), torch.randn(8, D, requires_grad=True), torch.randn(8, D)

    def run() -> Tensor:
        return fp8_checkpoint(lambda a, b: a.sigmoid() * b, x, mask, **SMALL)

    with PackedSavedTensors(PACKS):
        packed = run()
    assert_bitwise(torch.autograd.grad(packed, x, dy)[0], torch.autograd.grad(run(), x, dy)[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_torch_checkpoint(reentrant: bool) -> None:
    block, x = lora_block(0.3), torch.randn(2, T, D, requires_grad=True)
    torch.manual_seed(7)
    exact = gradients(block, x, block(x.tanh()))
    torch.manual_seed(7)
    y = checkpoint(lambda t: fp8_checkpoint(block, t.tanh(), **SMALL), x, use_reentrant=reentrant)
    torch.manual_seed(3)
    y.backward(torch.randn_like(y))
    found = {name: p.grad for name, p in block.named_parameters() if p.requires_grad} | {"x": x.grad}
    for name, value in exact.items():
        assert_sqnr(value, found[name], CHECKPOINT_GRADIENT_FLOOR_DB["e4m3"])


def test_around_a_packed_block() -> None:
    """What is recomputed is used at once: packing it would only add an error."""
    block, x = Block(), torch.randn(2, T, D, requires_grad=True)

    def packed(x: Tensor) -> Tensor:
        with PackedSavedTensors(PACKS):
            return block(x)

    expected = gradients(block, x, fp8_checkpoint(block, x, **SMALL))
    for name, gradient in gradients(block, x, fp8_checkpoint(packed, x, **SMALL)).items():
        assert_bitwise(gradient, expected[name])
