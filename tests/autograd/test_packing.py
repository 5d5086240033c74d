"""Values forward are the same, gradients near the exact ones, and fewer bytes saved; nothing exact is touched."""

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from coat_core import FP8Linear, activation
from coat_core.activation import FP8InputLinear, PackedSavedTensors, Saving, _thread, fp8_checkpoint, keep_no_input
from coat_core.granularity import PER_TENSOR, Storage, per_group
from coat_core.quantize import quantize
from tests.helpers.asserts import assert_all_bitwise, assert_bitwise, assert_sqnr
from tests.helpers.saved_tensors import SavedTensors, recording
from tests.tolerances import ATTENTION_GRADIENT_FLOOR_DB, CHECKPOINT_GRADIENT_FLOOR_DB, PACKED_GRADIENT_FLOOR_DB

T, D, HEADS = 96, 64, 2
SMALL_GROUPS = Storage("e4m3", per_group(16))
SMALL = Saving(Storage(granularity=per_group(32)), min_elements=64)


class Block(nn.Module):
    """Norm, GELU, gate and attention around plain linears: what a transformer block saves."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(D), nn.Linear(D, 3 * D)
        self.out, self.up, self.down = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.gate = nn.Parameter(torch.randn(D))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        x = x + torch.tanh(self.gate) * self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(x), approximate="tanh")))


def packed(block, *args, config: Saving = SMALL, keep: tuple[Tensor, ...] = ()):
    with PackedSavedTensors(config, keep):
        return block(*args)


def draw(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape).requires_grad_(grad)


def in_fp8(x: Tensor, fmt: str = "e4m3") -> Tensor:
    return quantize(x, fmt, per_group(32)).dequantize()


def assert_all_near(expected: dict[str, Tensor], found: dict[str, Tensor], floor_db: float) -> None:
    for name, value in expected.items():
        assert_sqnr(value, found[name], floor_db)


def gradients(block: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    inputs = {name: p for name, p in block.named_parameters() if p.requires_grad} | {"x": x}
    torch.manual_seed(3)
    return dict(zip(inputs, torch.autograd.grad(y, inputs.values(), torch.randn_like(y)), strict=True))


def backward(block: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The same by `Tensor.backward`, as torch's reentrant checkpoint needs it."""
    torch.manual_seed(3)
    y.backward(torch.randn_like(y))
    return {name: p.grad for name, p in block.named_parameters() if p.requires_grad} | {"x": x.grad}


@pytest.mark.parametrize("way", ["fp8", "bf16", "recomputed"])
@pytest.mark.parametrize(
    ("fmt", "granularity", "autocast"), [("e4m3", per_group(32), True), ("e5m2", PER_TENSOR, False)], ids=str
)
def test_forward_is_untouched_and_gradients_are_near(device, fmt, granularity, way, autocast):
    """Packed, with attention's tensors or without, and recomputed."""
    block, x = Block().to(device), torch.randn(2, T, D, device=device, requires_grad=True)
    storage = Storage(fmt, granularity)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        exact = block(x)
        if way == "recomputed":
            y, floors = fp8_checkpoint(block, x, storage=storage, min_elements=64), CHECKPOINT_GRADIENT_FLOOR_DB
        else:
            y, floors = packed(block, x, config=Saving(storage, way, 64)), PACKED_GRADIENT_FLOOR_DB
    assert_bitwise(y, exact)
    assert_all_near(gradients(block, x, exact), gradients(block, x, y), floors[fmt])


def test_keeps_fewer_bytes_and_each_storage_once():
    block, x = Block().bfloat16(), torch.randn(2, T, D).bfloat16().requires_grad_()
    block.out.requires_grad_(False)  # else it keeps attention's out a second time, as its own input
    kept = {}
    for name, config in {
        "fp8": SMALL,
        "bf16 attention": Saving(Storage(granularity=per_group(32)), "bf16", 64),
        "nothing": Saving(min_elements=10**9),
    }.items():
        with recording() as saved, PackedSavedTensors(config):
            block(x * 1)
        kept[name] = saved.bytes() - sum(2 * p.numel() for p in block.parameters())
        storages = [address for s in saved.packed for address in s.storages]
        assert len(set(storages)) <= 2 * len({id(s.packed) for s in saved.packed})
    rows = 2 * T * D
    # q, k, v are one storage in bf16 instead of FP8 with one fp32 scale per 32, attention's out another
    assert kept["bf16 attention"] - kept["fp8"] == pytest.approx(4 * rows * (2 - 1 - 4 / 32), rel=0.01)
    # bf16's 2 bytes an element become 1 and the scales
    assert kept["fp8"] < 0.65 * kept["nothing"]


def packs(tensor: Tensor, config: Saving = SMALL, keep: tuple[Tensor, ...] = ()) -> bool:
    """Whether `tensor`, saved by a product, is packed."""
    with recording() as saved, PackedSavedTensors(config, keep):
        _ = tensor.detach() * torch.ones((), requires_grad=True) if not tensor.requires_grad else tensor * tensor
    return bool(saved.packed)


def test_what_is_left_alone():
    big = torch.randn(8, 64)
    assert packs(big)
    assert not packs(big, Saving(min_elements=big.numel() + 1))
    assert not packs(torch.randn(64, 16))  # rank-r activations
    assert not packs(big.double())
    assert not packs(nn.Parameter(big.clone()))
    assert not packs(nn.Parameter(torch.randn(64, 16)).t())
    assert not packs(big, keep=(big,))
    assert not packs(big[:, ::2], keep=(big,))
    assert not packs(torch.randn(1, 32).expand(64, 32))  # few values
    assert not packs(torch.randn(()), Saving(min_elements=1))
    assert packs(torch.randn(2, 64, 8, 8))  # feature maps are large though their rows are short
    assert packs(torch.randn(1, 16, 4, 8, 8))
    assert not packs(torch.randn(1, 16, 4, 4, 4))  # planes of 16
    assert not packs(torch.randn(2, 96, 16))
    assert not packs(torch.randn(2, 4, 96, 1))  # statistics of rows by head


@pytest.mark.parametrize("adapter", [True, False])
def test_codes_and_scales_are_left_alone(adapter):
    """An adapter's 1×G scales are as large as an activation: 8 tokens × 4096 / 16 groups."""
    layer, x, dy = nn.Linear(4096, 64, bias=False), draw(8, 4096), draw(8, 64, grad=False)
    layer = FP8InputLinear.from_linear(layer, SMALL_GROUPS) if adapter else FP8Linear.from_linear(layer)
    inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
    exact, ours = (torch.autograd.grad(y, inputs, dy) for y in (layer(x), packed(layer, x)))
    for expected, gradient in zip(exact, ours, strict=True):
        assert_bitwise(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_lora_weights_are_never_packed_not_even_autocasts_copies(dtype, in_fp8):
    """dx = dh A with the A that was multiplied by, whatever its size and whichever dtype it was cast to."""
    down, up = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    if in_fp8:
        FP8InputLinear.from_linear(down, SMALL_GROUPS)
    x = torch.randn(32, 64, requires_grad=True)
    with torch.autocast("cpu", dtype), recording() as saved, PackedSavedTensors(SMALL):
        y = up(down(x * 1))
    assert [s.shape for s in saved.packed] == [(32, 64)] * (1 if in_fp8 else 2)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    dh = torch.ones_like(y) @ up.weight.to(dtype)
    assert_bitwise(dx, (dh @ down.weight.to(dtype)).float())


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.t()[:, ::2].t(),
        lambda x: x[2].expand(4, 64),
        lambda x: x.unflatten(-1, (2, 32)).transpose(0, 1),
        lambda x: x.as_strided((4, 64), (64, 1), 64),
    ],
    ids=["whole", "strided", "expanded", "heads", "offset"],
)
def test_views_share_one_packed_storage(make):
    """In groups along the storage, whatever the view."""
    x = draw(8, 64, grad=False)
    w, v = (torch.ones(make(x).shape, requires_grad=True) for _ in range(2))
    with recording() as saved, PackedSavedTensors(SMALL):
        y = make(x) * w + make(x) * v
    y.sum().backward()
    assert_bitwise(w.grad, v.grad)
    assert_bitwise(w.grad, make(in_fp8(x)))
    assert len({id(s.packed) for s in saved.packed}) == 1


def test_a_change_in_place_makes_a_second_copy_and_the_first_stays_right():
    x = torch.randn(8, 64)
    first, second = (torch.ones(8, 64, requires_grad=True) for _ in range(2))
    with recording() as saved, PackedSavedTensors(SMALL):
        y = x * first
        before = x.clone()
        x.mul_(-3)
        y = y + x * second
        changed = x.clone()
    x.zero_()
    y.sum().backward()
    assert len({id(s.packed) for s in saved.packed}) == 2
    assert_bitwise(first.grad, in_fp8(before))
    assert_bitwise(second.grad, in_fp8(changed))


def test_an_address_used_again_is_not_taken_for_the_old_tensor():
    gates = [torch.ones(8, 64, requires_grad=True) for _ in range(16)]
    total = torch.zeros(())
    with PackedSavedTensors(SMALL):
        for value, gate in enumerate(gates, start=1):
            total = total + (torch.full((8, 64), float(value)) * gate).sum()
    total.backward()
    assert [gate.grad.mean().item() for gate in gates] == pytest.approx(list(range(1, 17)))


def near(found: Tensor, exact: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Whether attention's gradients are."""
    dy = torch.randn_like(exact)
    pairs = zip(*(torch.autograd.grad(y, inputs, dy) for y in (exact, found)), strict=True)
    for expected, gradient in pairs:
        assert_sqnr(expected, gradient, ATTENTION_GRADIENT_FLOOR_DB)


@pytest.mark.parametrize("call", ["function", "operator", "multi-head module"])
def test_log_sum_exp_stays_exact(call):
    q, k, v = (draw(1, HEADS, T, 32) for _ in range(3))
    module = nn.MultiheadAttention(HEADS * 32, HEADS, batch_first=True)

    def run() -> Tensor:
        if call == "function":
            return attend(q * 1, k * 1, v * 1)
        if call == "operator":
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q * 1, k * 1, v * 1)[0]
        return module(*(t.transpose(1, 2).flatten(2) for t in (q, k, v)), need_weights=False)[0]

    with recording() as saved:
        y = packed(run)
    assert [s.packed for s in saved.tensors if s.shape == (1, HEADS, T)] == [None]
    assert len([s for s in saved.packed if s.shape == (1, HEADS, T, 32)]) >= 4
    near(y, run(), (q, k, v))


@pytest.mark.parametrize(
    ("out", "statistics"),
    [
        ((2, 4, 48, 32), (2, 4, 48)),
        ((2, 48, 4, 32), (2, 4, 48)),
        ((2, 4, 50, 32), (2, 4, 64)),
        ((96, 4, 32), (4, 96)),
    ],
    ids=["heads first", "tokens first", "padded", "packed sequences"],
)
def test_log_sum_exp_of_other_kernels(out, statistics):
    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, values: Tensor) -> Tensor:
            ctx.save_for_backward(x, values)
            return x * 1

        @staticmethod
        def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
            seen.extend(ctx.saved_tensors)
            return grad, None

    seen: list[Tensor] = []
    x, values = draw(*out), draw(*statistics, grad=False)
    packed(lambda: Kernel.apply(x * 1, values)).sum().backward()
    assert_bitwise(seen[1], values)
    assert not torch.equal(seen[0], x)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_stay_exact(dtype):
    """−inf beside finite biases: in one FP8 group it would become the largest of these, and what is masked show."""
    q, k, v = (draw(1, HEADS, T, 32) for _ in range(3))
    mask = torch.rand(1, HEADS, T, T) < 0.5
    mask[..., 0] = True
    if dtype == torch.float32:
        mask = torch.where(mask, 3 * torch.rand(1, HEADS, T, T), -torch.inf)
    y = packed(lambda: attend(q * 1, k * 1, v * 1, attn_mask=mask.clone()))
    near(y, attend(q, k, v, mask), (q, k, v))


def test_layers_with_the_same_mask_keep_one():
    """Attention makes what it adds of a bool mask, [B, heads, T, T] again for each layer; here once, and small."""
    q = draw(1, HEADS, T, 32)
    rows = torch.rand(1, 1, 1, T) < 0.5
    rows[..., 0] = True
    whole = (torch.rand(1, HEADS, T, T) < 0.5) | rows
    for mask, kept in ((rows.expand(1, HEADS, T, T), T), (whole, HEADS * T * T)):
        masks, y = WeakTensorKeyDictionary(), []
        for _ in range(2):  # blocks of one forward pass
            with PackedSavedTensors(SMALL, masks=masks):
                y.append(attend(q * 1, q * 1, q * 1, attn_mask=mask))
        first, second = (each.grad_fn._saved_attn_mask for each in y)
        assert first.data_ptr() == second.data_ptr()
        assert first.untyped_storage().nbytes() == kept * q.element_size()
        assert torch.equal(first == 0, mask)
        assert_bitwise(y[0], attend(q, q, q, attn_mask=mask))
    changed = whole.clone()
    packed(lambda: attend(q * 1, q * 1, q * 1, attn_mask=changed))
    changed[..., 1] = True  # in place
    y = packed(lambda: attend(q * 1, q * 1, q * 1, attn_mask=changed))
    assert torch.equal(y.grad_fn._saved_attn_mask == 0, changed)
    changed.numpy()[..., 2] = True  # without a new version
    y = packed(lambda: attend(q * 1, q * 1, q * 1, attn_mask=changed))
    assert torch.equal(y.grad_fn._saved_attn_mask == 0, changed)


def test_heads_folded_into_the_batch():
    """Three-dimensional q, k, v take torch's unfused path, whose probabilities are the largest tensor of all."""
    q, k, v = (draw(HEADS, T, 32) for _ in range(3))
    with recording() as saved:
        y = packed(lambda: attend(q * 1, k * 1, v * 1))
    assert (HEADS, T, T) in [s.shape for s in saved.packed]
    near(y, attend(q, k, v), (q, k, v))


@pytest.mark.parametrize("config", [SMALL, Saving(min_elements=10**9)], ids=["packs", "packs nothing"])
def test_a_graph_dropped_without_backward_is_freed(config):
    """A NaN loss, an exception, a validation pass: tensors that are left as they are must not hold their own node."""
    block, x = Block(), torch.randn(2, T, D, requires_grad=True)
    with PackedSavedTensors(config):
        hidden = torch.tanh(x * 1)
        y = torch.softmax(block(hidden), dim=-1)
    nodes = [weakref.ref(hidden.untyped_storage()), weakref.ref(y.untyped_storage())]
    del hidden, y
    assert [node() for node in nodes] == [None, None]


# -- in a training loop ------------------------------------------------------------------------------------------------
def test_a_block_run_twice_before_backward():
    block, batches = Block(), [draw(2, T, D) for _ in range(2)]
    single = [gradients(block, x, packed(block, x)) for x in batches]
    outputs = [packed(block, x) for x in batches]
    for expected, x, y in zip(single, batches, outputs, strict=True):
        assert_all_bitwise(gradients(block, x, y), expected)


def test_backward_one_after_the_other_frees_as_it_goes():
    block, x = Block(), draw(2, T, D)
    with recording() as saved:
        first = packed(block, x * 1)
        count = len(saved.packed)
        second = packed(block, x * 1)
    codes = [weakref.ref(s.packed.codes) for s in saved.packed]
    saved.tensors.clear()
    saved.alive.clear()
    first.sum().backward()
    gc.collect()
    assert [ref() is None for ref in codes] == [True] * count + [False] * (len(codes) - count)
    second.sum().backward()
    del first, second
    assert all(ref() is None for ref in codes)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_packed_without_grad(mode):
    block, x = Block(), draw(2, T, D)
    with recording() as saved, mode():
        y = packed(block.eval(), x)
    assert saved.tensors == []
    assert_bitwise(y.clone(), block(x).detach())


def test_backward_inside_autocast():
    """Hosts that call backward where autocast is on: what comes back has the dtype that was saved."""
    block, x = Block(), draw(2, T, D)
    with torch.autocast("cpu", torch.bfloat16):
        exact, y = gradients(block, x, block(x)), packed(block, x)
        inside = gradients(block, x, y)
    assert {gradient.dtype for gradient in inside.values()} == {torch.float32}
    assert_all_near(exact, inside, PACKED_GRADIENT_FLOOR_DB["e4m3"])


# -- around and inside torch's checkpoint ------------------------------------------------------------------------------
def test_reentrant_around_a_packed_block():
    block, x = Block(dropout=0.3), draw(2, T, D)
    torch.manual_seed(7)
    expected = gradients(block, x, packed(block, x))
    torch.manual_seed(7)
    y = checkpoint(packed, block, x, use_reentrant=True)
    assert_all_bitwise(backward(block, x, y), expected)


def test_inside_non_reentrant_checkpoint_it_leaves_all_to_checkpoint():
    """Its hooks would take the tensors away from checkpoint's, which would then keep all of them."""
    block, x = Block(dropout=0.3), draw(2, T, D)
    torch.manual_seed(7)
    expected = gradients(block, x, block(x))
    torch.manual_seed(7)
    hidden = []
    block.up.register_forward_hook(lambda module, args, out: hidden.append(weakref.ref(out.untyped_storage())))
    with recording() as saved:
        y = checkpoint(packed, block, x, use_reentrant=False)
    gc.collect()
    assert [ref() for ref in hidden] == [None]
    assert_all_bitwise(gradients(block, x, y), expected)
    assert saved.tensors == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_inside_a_packed_block(reentrant):
    """Attention's own hooks must not take its tensors away from a checkpoint that is open inside."""
    block, x = Block(dropout=0.3), draw(2, T, D)
    torch.manual_seed(7)
    expected = gradients(block, x, block(x.tanh()).exp())
    torch.manual_seed(7)
    with recording() as saved, PackedSavedTensors(SMALL):
        y = checkpoint(block, x.tanh(), use_reentrant=reentrant).exp()
    shapes = {s.shape for s in saved.tensors} - {(0,)}  # torch 2.9's checkpoint saves an empty tensor, too
    assert shapes == {(2, T, D)}  # of tanh, checkpoint's input, and of exp
    assert_all_near(expected, backward(block, x, y), PACKED_GRADIENT_FLOOR_DB["e4m3"])


# -- nested ------------------------------------------------------------------------------------------------------------
def test_the_inner_one_has_options_of_its_own_and_shares_storages_and_what_is_kept():
    x, kept = draw(8, 64, grad=False), draw(8, 64, grad=False)
    outer, inner, other, exact = (draw(8, 64) for _ in range(4))
    coarse = Saving(Storage("e5m2", per_group(32)), min_elements=64)
    with recording() as saved, PackedSavedTensors(SMALL, keep=(kept,)):
        y = x * outer + packed(lambda: x * inner + kept * exact) + x * outer
        y = y + packed(lambda: x * other, config=coarse)
    assert len(saved.packed) == 4
    assert len({id(s.packed) for s in saved.packed}) == 2
    y.sum().backward()
    x_hat = in_fp8(x)
    assert_bitwise(inner.grad, x_hat)
    assert_bitwise(outer.grad, 2 * x_hat)
    assert_bitwise(other.grad, in_fp8(x, "e5m2"))
    assert_bitwise(exact.grad, kept)


def test_the_outer_one_goes_on_after_the_inner_one():
    """Also after an exception, within the hooks of attention."""
    x, w = draw(8, 64, grad=False), draw(8, 64)
    for fails in (False, True):
        with recording() as saved, PackedSavedTensors(SMALL) as outer:
            if fails:
                with pytest.raises(RuntimeError):
                    packed(lambda: attend(w, w, torch.zeros(3, 5)))
            else:
                packed(lambda: x.exp() * w)
            before = len(saved.packed)
            y = x * w
        assert len(saved.packed) == before + 1
        assert outer._packed == {}
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert _thread.innermost is None
        y.sum().backward()


# -- changes in place --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", [lambda t: t.mul_(2), lambda t: t.view(-1)[0].zero_()], ids=["whole", "view"])
def test_a_change_of_what_was_left_alone_is_an_error_as_without_hooks(changes):
    for run in (lambda f: f(), lambda f: packed(f)):
        x, w = draw(2, 3, grad=False), draw(2, 3)
        y = run(lambda x=x, w=w: x * w)
        changes(x)
        with pytest.raises(RuntimeError, match=r"(?s)in.?place.*version"):
            y.sum().backward()


# -- threads -----------------------------------------------------------------------------------------------------------
def test_another_thread_packs_nothing_and_may_pack_its_own():
    x, w = draw(8, 64, grad=False), draw(8, 64)
    results: dict[str, Tensor] = {}
    counts: list[int] = []

    def elsewhere() -> None:
        results["plain"] = torch.autograd.grad((x * w).sum(), w)[0]
        with PackedSavedTensors(SMALL):
            z = x.exp() * w
            counts.append(len(packing._packed))
        results["packed"] = torch.autograd.grad(z.sum(), w)[0]
        results["of the other thread"] = torch.autograd.grad(y.sum(), w)[0]

    with PackedSavedTensors(SMALL) as packing:
        y = x * w
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert counts == [1]
    x_hat = in_fp8(x)
    assert_bitwise(results["plain"], x)
    assert_bitwise(results["packed"], in_fp8(x.exp()))
    assert_bitwise(results["of the other thread"], x_hat)


# -- fp8_checkpoint ----------------------------------------------------------------------------------------------------
FROM_FP8 = {"min_elements": 64, "storage": Storage(granularity=per_group(32))}
EXACT = {"min_elements": 10**9}


def lora_block(dropout: float) -> nn.Module:
    """A frozen block with PEFT adapters, B nonzero so that every gradient is."""
    config = LoraConfig(r=4, lora_dropout=dropout, target_modules=["qkv", "out", "up", "down"], init_lora_weights=False)
    block: nn.Module = inject_adapter_in_model(config, Block().requires_grad_(False))
    return block


def test_recomputes_from_the_fp8_values_of_its_input():
    seen, x = [], torch.randn(8, D, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        seen.append(x.detach().clone())
        return x.square()

    hidden = x * 1
    y = fp8_checkpoint(block, hidden, **FROM_FP8).sum()
    hidden.detach().zero_()  # which recomputation does not see
    (dx,) = torch.autograd.grad(y, x, retain_graph=True)
    assert_bitwise(seen[0], x.detach())
    assert_bitwise(seen[1], in_fp8(x))
    assert_bitwise(dx, 2 * in_fp8(x))
    assert_bitwise(torch.autograd.grad(y, x)[0], dx)
    with torch.no_grad():
        assert_bitwise(fp8_checkpoint(block, x, **FROM_FP8), x.square())
    assert len(seen) == 4


@pytest.mark.parametrize(("options", "autocast"), [(FROM_FP8, True), (EXACT, False)], ids=["fp8 input", "exact input"])
def test_lora_dropout_draws_the_same_mask(options, autocast):
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
    if options is EXACT:
        assert_all_bitwise(found, expected)
    else:
        assert_all_near(expected, found, CHECKPOINT_GRADIENT_FLOOR_DB["e4m3"])


# -- what is kept -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backward", [True, False])
def test_the_input_is_really_freed(backward, monkeypatch):
    keepers: list[weakref.ref] = []

    class Recorded(activation._Keeper):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            keepers.append(weakref.ref(self))

    monkeypatch.setattr(activation, "_Keeper", Recorded)
    block, x = Block().bfloat16(), torch.randn(2, T, D).bfloat16().requires_grad_()
    hidden = x * 1
    alive = weakref.ref(hidden.untyped_storage())
    y = fp8_checkpoint(block, hidden, **FROM_FP8)
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


def test_constants_stay_as_they_are_and_keywords_are_kept_as_positions_are():
    """What requires no gradient is shared by all blocks: an FP8 copy per block would cost, not save."""
    x, other = (torch.randn(8, D, requires_grad=True) for _ in range(2))
    mask, seen = torch.randn(8, D), []

    def block(x: Tensor, mask: Tensor, none: None, *, other: Tensor, scale: float) -> tuple[Tensor, float]:
        seen.append((mask, none, other.detach().clone()))
        return x.sigmoid() * other * mask * scale, scale

    y, scale = fp8_checkpoint(block, x, mask, None, other=other * 1, scale=2.0, **FROM_FP8)
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
def test_what_fp8_has_no_place_for_is_kept_exactly(x):
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(fp8_checkpoint(torch.sigmoid, x, min_elements=0).sum(), x)
    assert_bitwise(dx, torch.autograd.grad(x.sigmoid().sum(), x)[0])


# -- inside other contexts --------------------------------------------------------------------------------------------
def test_inside_packed_saved_tensors():
    """A recomputed part of a packed block: its constants are not packed, so that it recomputes from what ran."""
    mask, x, dy = torch.randn(8, D), torch.randn(8, D, requires_grad=True), torch.randn(8, D)

    def run() -> Tensor:
        return fp8_checkpoint(lambda a, b: a.sigmoid() * b, x, mask, **FROM_FP8)

    assert_bitwise(torch.autograd.grad(packed(run), x, dy)[0], torch.autograd.grad(run(), x, dy)[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_torch_checkpoint(reentrant):
    block, x = lora_block(0.3), torch.randn(2, T, D, requires_grad=True)
    torch.manual_seed(7)
    exact = gradients(block, x, block(x.tanh()))
    torch.manual_seed(7)
    y = checkpoint(lambda t: fp8_checkpoint(block, t.tanh(), **FROM_FP8), x, use_reentrant=reentrant)
    assert_all_near(exact, backward(block, x, y), CHECKPOINT_GRADIENT_FLOOR_DB["e4m3"])


def test_around_a_packed_block():
    """What is recomputed is used at once: packing it would only add an error."""
    block, x = Block(), draw(2, T, D)
    once = gradients(block, x, fp8_checkpoint(block, x, **FROM_FP8))
    twice = gradients(block, x, fp8_checkpoint(lambda x: packed(block, x), x, **FROM_FP8))
    assert_all_bitwise(twice, once)


# -- frozen convolutions -----------------------------------------------------------------------------------------------
LAYERS = {
    "3x3": (nn.Conv2d, {"padding": 1}, (2, 32, 8, 8)),
    "channels last": (nn.Conv2d, {"padding": 1}, (2, 32, 8, 8)),
    "stride": (nn.Conv2d, {"stride": 2, "padding": 1}, (2, 32, 8, 8)),
    "groups, dilated, no bias": (nn.Conv2d, {"groups": 4, "dilation": 2, "bias": False}, (1, 32, 8, 8)),
    "1d": (nn.Conv1d, {"stride": 2}, (2, 32, 64)),
    "3d": (nn.Conv3d, {"padding": 1}, (1, 32, 3, 8, 8)),
}


def frozen_layer(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    kind, options, shape = LAYERS[name]
    layer = kind(32, 64, 3, **options).to(dtype).requires_grad_(False)
    memory_format = torch.channels_last if name == "channels last" else torch.contiguous_format
    return layer, torch.randn(shape, dtype=dtype).to(memory_format=memory_format).requires_grad_()


def run_layer(layer: nn.Module, x: Tensor) -> tuple[Tensor, SavedTensors]:
    layer = copy.deepcopy(layer)  # `layer` stays torch's own
    keep_no_input(layer)
    with recording() as saved, PackedSavedTensors(SMALL, keep=layer.parameters()):
        return layer(x * 1), saved


@pytest.mark.parametrize("name", list(LAYERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_values_are_torchs_own_and_the_input_is_not_kept(name, dtype, autocast):
    layer, x = frozen_layer(name, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        exact, (y, saved) = layer(x), run_layer(layer, x)
    dy = torch.randn_like(exact)
    assert_bitwise(y, exact)
    dx, expected = (torch.autograd.grad(out, x, dy)[0] for out in (y, exact))
    assert_bitwise(dx, expected)
    assert dx.stride() == expected.stride()
    assert [kept.shape for kept in saved.tensors] == [tuple(layer.weight.shape)]
    assert not saved.packed


@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_what_is_trained_gets_its_gradient(trained):
    layer, x = frozen_layer("3x3")
    own = copy.deepcopy(layer)
    keep_no_input(layer)
    for each in (layer, own):
        getattr(each, trained).requires_grad_()
    y, exact = layer(x), own(x)
    dy = torch.randn_like(y)
    assert_bitwise(*(torch.autograd.grad(out, getattr(of, trained), dy)[0] for out, of in ((y, layer), (exact, own))))


def test_a_copy_of_a_layer_has_its_own_weights():
    layer, x = frozen_layer("3x3")
    keep_no_input(layer)
    other = copy.deepcopy(layer)
    other.weight.data.zero_()
    other.stride = (2, 2)
    assert other(x).shape[-1] == x.shape[-1] // 2
    assert_bitwise(other(x)[0, :, 0, 0], layer.bias)


@pytest.mark.parametrize("case", ["padding in words", "no batch", "no gradient"])
def test_what_runs_as_ever(case):
    layer, x = frozen_layer("3x3")
    layer.padding = "same" if case == "padding in words" else layer.padding
    x = {"no batch": x[0], "no gradient": x.detach()}.get(case, x)
    y, _ = run_layer(layer, x)
    assert_bitwise(y, layer(x))
    assert y.requires_grad == (case != "no gradient")
    if y.requires_grad:
        assert type(y.grad_fn).__name__ == ("SqueezeBackward1" if case == "no batch" else "ConvolutionBackward0")
