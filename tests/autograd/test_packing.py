"""PackedSavedTensors: same values forward, gradients near the exact ones, fewer bytes, and nothing exact touched."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils.weak import WeakTensorKeyDictionary

from coat_core import FP8Linear
from coat_core.activation import FP8InputLinear, PackedSavedTensors, Saving
from coat_core.granularity import PER_TENSOR, Storage, per_group
from coat_core.quantize import quantize
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.saved_tensors import recording
from tests.tolerances import ATTENTION_GRADIENT_FLOOR_DB, PACKED_GRADIENT_FLOOR_DB

T, D, HEADS = 96, 64, 2
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


def gradients(block: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    inputs = {name: p for name, p in block.named_parameters() if p.requires_grad} | {"x": x}
    torch.manual_seed(3)
    return dict(zip(inputs, torch.autograd.grad(y, inputs.values(), torch.randn_like(y)), strict=True))


@pytest.mark.parametrize("attention", ["fp8", "bf16"])
@pytest.mark.parametrize(
    ("fmt", "granularity", "autocast"), [("e4m3", per_group(32), True), ("e5m2", PER_TENSOR, False)], ids=str
)
def test_forward_is_untouched_and_gradients_are_near(device, fmt, granularity, attention, autocast) -> None:
    block, x = Block().to(device), torch.randn(2, T, D, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        exact = block(x)
        with PackedSavedTensors(Saving(Storage(fmt, granularity), attention, 64)):
            y = block(x)
    assert_bitwise(y, exact)
    expected = gradients(block, x, exact)
    for name, gradient in gradients(block, x, y).items():
        assert_sqnr(expected[name], gradient, PACKED_GRADIENT_FLOOR_DB[fmt])


def test_keeps_fewer_bytes_and_each_storage_once() -> None:
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


def test_what_is_left_alone() -> None:
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


def codes_of_a_wide_adapter() -> nn.Module:
    """Its 1×G scales are as large as an activation: 8 tokens × 4096 / 16 groups."""
    return FP8InputLinear.from_linear(nn.Linear(4096, 64, bias=False), Storage("e4m3", per_group(16)))


@pytest.mark.parametrize("make", [codes_of_a_wide_adapter, lambda: FP8Linear.from_linear(nn.Linear(4096, 64))])
def test_codes_and_scales_are_left_alone(make) -> None:
    layer, x, dy = make(), draw(8, 4096), draw(8, 64, grad=False)
    inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
    exact, ours = (torch.autograd.grad(y, inputs, dy) for y in (layer(x), packed(layer, x)))
    for expected, gradient in zip(exact, ours, strict=True):
        assert_bitwise(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_lora_weights_are_never_packed_not_even_autocasts_copies(dtype: torch.dtype, in_fp8: bool) -> None:
    """dx = dh A with the A that was multiplied by, whatever its size and whichever dtype it was cast to."""
    down, up = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    if in_fp8:
        FP8InputLinear.from_linear(down, Storage("e4m3", per_group(16)))
    x = torch.randn(32, 64, requires_grad=True)
    with torch.autocast("cpu", dtype), recording() as saved, PackedSavedTensors(SMALL):
        y = up(down(x * 1))
    assert [s.shape for s in saved.packed] == [(32, 64)] * (1 if in_fp8 else 2)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    dh = torch.ones_like(y) @ up.weight.to(dtype)
    assert_bitwise(dx, (dh @ down.weight.to(dtype)).float())


def saved_by_product(make) -> tuple[Tensor, Tensor, int]:
    """(gradient of w, the gradient from packed groups along the storage, packed storages) of make(x)·w, twice saved."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    view = make(x)
    w, v = (torch.ones(view.shape, requires_grad=True) for _ in range(2))
    with recording() as saved, PackedSavedTensors(SMALL):
        y = view * w + make(x) * v
    y.sum().backward()
    assert_bitwise(w.grad, v.grad)
    storage = quantize(x.reshape(-1), "e4m3", per_group(32)).dequantize().view(8, 64)
    return w.grad, make(storage), len({id(s.packed) for s in saved.packed})


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
def test_views_share_one_packed_storage(make) -> None:
    measured, expected, storages = saved_by_product(make)
    assert_bitwise(measured, expected)
    assert storages == 1


def test_a_change_in_place_makes_a_second_copy_and_the_first_stays_right() -> None:
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
    assert_bitwise(first.grad, quantize(before, "e4m3", per_group(32)).dequantize())
    assert_bitwise(second.grad, quantize(changed, "e4m3", per_group(32)).dequantize())


def test_an_address_used_again_is_not_taken_for_the_old_tensor() -> None:
    gates = [torch.ones(8, 64, requires_grad=True) for _ in range(16)]
    total, values = torch.zeros(()), []
    with PackedSavedTensors(SMALL):
        for i, gate in enumerate(gates):
            x = torch.full((8, 64), float(i + 1))
            values.append(float(i + 1))
            total = total + (x * gate).sum()
            del x
    total.backward()
    assert [gate.grad.mean().item() for gate in gates] == pytest.approx(values)


def near(found: Tensor, exact: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Whether attention's gradients are."""
    dy = torch.randn_like(exact)
    pairs = zip(*(torch.autograd.grad(y, inputs, dy) for y in (exact, found)), strict=True)
    for expected, gradient in pairs:
        assert_sqnr(expected, gradient, ATTENTION_GRADIENT_FLOOR_DB)


@pytest.mark.parametrize("call", ["function", "operator", "multi-head module"])
def test_log_sum_exp_stays_exact(call: str) -> None:
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


def test_bf16_attention_keeps_q_k_v_out_as_they_are() -> None:
    q, k, v = (torch.randn(1, HEADS, T, 32, requires_grad=True) for _ in range(3))
    with recording() as saved, PackedSavedTensors(Saving(min_elements=64, attention="bf16")):
        y = attend(q * 1, k * 1, v * 1)
    assert saved.packed == []
    dy = torch.randn_like(y)
    for exact, gradient in zip(
        torch.autograd.grad(attend(q, k, v), (q, k, v), dy), torch.autograd.grad(y, (q, k, v), dy), strict=True
    ):
        assert_bitwise(gradient, exact)


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
def test_log_sum_exp_of_other_kernels(out: tuple[int, ...], statistics: tuple[int, ...]) -> None:
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
def test_masks_stay_exact(dtype: torch.dtype) -> None:
    """−inf beside finite biases: in one FP8 group it would become the largest of these, and what is masked show."""
    q, k, v = (draw(1, HEADS, T, 32) for _ in range(3))
    mask = torch.rand(1, HEADS, T, T) < 0.5
    mask[..., 0] = True
    if dtype == torch.float32:
        mask = torch.where(mask, 3 * torch.rand(1, HEADS, T, T), -torch.inf)
    y = packed(lambda: attend(q * 1, k * 1, v * 1, attn_mask=mask.clone()))
    near(y, attend(q, k, v, mask), (q, k, v))


def test_layers_with_the_same_mask_keep_one() -> None:
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


def test_heads_folded_into_the_batch() -> None:
    """Three-dimensional q, k, v take torch's unfused path, whose probabilities are the largest tensor of all."""
    q, k, v = (draw(HEADS, T, 32) for _ in range(3))
    with recording() as saved:
        y = packed(lambda: attend(q * 1, k * 1, v * 1))
    assert (HEADS, T, T) in [s.shape for s in saved.packed]
    near(y, attend(q, k, v), (q, k, v))


@pytest.mark.parametrize("config", [SMALL, Saving(min_elements=10**9)], ids=["packs", "packs nothing"])
def test_a_graph_dropped_without_backward_is_freed(config: Saving) -> None:
    """A NaN loss, an exception, a validation pass: tensors that are left as they are must not hold their own node."""
    block, x = Block(), torch.randn(2, T, D, requires_grad=True)
    with PackedSavedTensors(config):
        hidden = torch.tanh(x * 1)
        y = torch.softmax(block(hidden), dim=-1)
    nodes = [weakref.ref(hidden.untyped_storage()), weakref.ref(y.untyped_storage())]
    del hidden, y
    assert [node() for node in nodes] == [None, None]
