"""What PackedSavedTensors must leave exact: scales, statistics, masks, weights, what is small; and what it must not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from coat_core.activation import FP8InputLinear, Saving
from coat_core.granularity import Storage, per_group
from coat_core.linear import FP8Linear
from coat_core.quantize import quantize
from tests.autograd.test_generic_flow import draw, packed
from tests.autograd.test_packing import HEADS, T
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.saved_tensors import recording
from tests.tolerances import ATTENTION_GRADIENT_FLOOR_DB


class TestWhatIsLeftAlone:
    def test_scales_of_fp8_codes(self) -> None:
        """A wide linear's 1×G scales are as large as an activation: 4 tokens × 4096 / 16 groups."""
        config, x, dh = per_group(16), draw(4, 4096), draw(4, 8, grad=False)
        down = FP8InputLinear.from_linear(nn.Linear(4096, 8, bias=False), Storage("e4m3", config))
        expected = torch.autograd.grad(down(x), down.weight, dh)[0]
        assert_bitwise(torch.autograd.grad(packed(down, x), down.weight, dh)[0], expected)

    def test_weight_codes_and_row_scales(self) -> None:
        layer, x = FP8Linear.from_linear(nn.Linear(64, 64)), draw(8, 64)
        dy = draw(8, 64, grad=False)
        expected = torch.autograd.grad(layer(x), x, dy)[0]
        assert_bitwise(torch.autograd.grad(packed(layer, x), x, dy)[0], expected)

    @pytest.mark.parametrize("autocast", [False, True])
    def test_an_adapter_s_weight(self, autocast: bool) -> None:
        down, x = FP8InputLinear.from_linear(nn.Linear(64, 32, bias=False), Storage("e4m3", per_group(16))), draw(8, 64)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected, y = torch.autograd.grad(down(x).float().sum(), x)[0], packed(down, x * 1)
        assert_bitwise(torch.autograd.grad(y.float().sum(), x)[0], expected)

    @pytest.mark.parametrize(
        ("shape", "packs"),
        [
            ((2, 64, 8, 8), True),
            ((1, 16, 4, 4, 4), False),  # planes of 16
            ((1, 16, 4, 8, 8), True),
            ((2, 96, 16), False),  # rank-r activations of a LoRA
            ((2, 4, 96, 1), False),  # statistics of rows by head
        ],
    )
    def test_feature_maps_are_large_though_their_rows_are_short(self, shape: tuple[int, ...], packs: bool) -> None:
        x, w = draw(*shape, grad=False), draw(*shape)
        y = packed(lambda: x * w)
        y.sum().backward()
        storage = quantize(x.reshape(-1), "e4m3", per_group(32)).dequantize().view(shape)
        assert_bitwise(w.grad, storage if packs else x)

    def test_few_values_expanded_to_many(self) -> None:
        few, w = draw(1, 32, grad=False), draw(64, 32)
        packed(lambda: few.expand(64, 32) * w).sum().backward()
        assert_bitwise(w.grad, few.expand(64, 32).contiguous())

    def test_tensors_without_dimensions(self) -> None:
        x, w = draw(), draw()
        packed(lambda: x * w, config=Saving(min_elements=1)).backward()
        assert_bitwise(w.grad, x.detach())


class TestAttention:
    @pytest.mark.parametrize("call", ["operator", "multi-head module"])
    def test_log_sum_exp_stays_exact_where_the_function_is_bypassed(self, call: str) -> None:
        q, k, v = (draw(1, HEADS, T, 32) for _ in range(3))
        module = nn.MultiheadAttention(HEADS * 32, HEADS, batch_first=True)

        def run() -> Tensor:
            if call == "operator":
                operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
                return operator(q * 1, k * 1, v * 1)[0]
            x, y, z = (t.transpose(1, 2).flatten(2) for t in (q, k, v))
            return module(x, y, z, need_weights=False)[0]

        with recording() as saved:
            y = packed(run)
        statistics = [s for s in saved.tensors if s.shape == (1, HEADS, T)]
        assert [s.packed for s in statistics] == [None]
        assert len([s for s in saved.packed if s.shape == (1, HEADS, T, 32)]) >= 4
        dy = torch.randn_like(y)
        exact = torch.autograd.grad(run(), (q, k, v), dy)
        for expected, gradient in zip(exact, torch.autograd.grad(y, (q, k, v), dy), strict=True):
            assert_sqnr(expected, gradient, ATTENTION_GRADIENT_FLOOR_DB)

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
    def test_log_sum_exp_of_other_kernels(self, out: tuple[int, ...], statistics: tuple[int, ...]) -> None:
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
    def test_masks_stay_exact(self, dtype: torch.dtype) -> None:
        """−inf beside finite biases: in one FP8 group it would become the largest of these, and what is masked show."""
        q, k, v = (draw(1, HEADS, T, 32) for _ in range(3))
        mask = torch.rand(1, HEADS, T, T) < 0.5
        mask[..., 0] = True
        if dtype == torch.float32:
            mask = torch.where(mask, 3 * torch.rand(1, HEADS, T, T), -torch.inf)
        exact = torch.autograd.grad(attend(q, k, v, mask).sum(), (q, k, v))
        y = packed(lambda: attend(q * 1, k * 1, v * 1, attn_mask=mask.clone()))
        for expected, gradient in zip(exact, torch.autograd.grad(y.sum(), (q, k, v)), strict=True):
            assert_sqnr(expected, gradient, ATTENTION_GRADIENT_FLOOR_DB)

    def test_layers_with_the_same_mask_keep_one(self) -> None:
        """Attention makes what it adds of a bool mask, [B, heads, T, T] again for each layer; here once, and small."""
        q = draw(1, HEADS, T, 32)
        rows = torch.rand(1, 1, 1, T) < 0.5
        rows[..., 0] = True
        whole = (torch.rand(1, HEADS, T, T) < 0.5) | rows
        for mask, kept in ((rows.expand(1, HEADS, T, T), T), (whole, HEADS * T * T)):
            y = packed(lambda mask=mask: [attend(q * 1, q * 1, q * 1, attn_mask=mask) for _ in range(2)])
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

    def test_heads_folded_into_the_batch(self) -> None:
        """Three-dimensional q, k, v take torch's unfused path, whose probabilities are the largest tensor of all."""
        q, k, v = (draw(HEADS, T, 32) for _ in range(3))
        with recording() as saved:
            y = packed(lambda: attend(q * 1, k * 1, v * 1))
        assert (HEADS, T, T) in [s.shape for s in saved.packed]
        dy = torch.randn_like(y)
        exact = torch.autograd.grad(attend(q, k, v), (q, k, v), dy)
        for expected, gradient in zip(exact, torch.autograd.grad(y, (q, k, v), dy), strict=True):
            assert_sqnr(expected, gradient, ATTENTION_GRADIENT_FLOOR_DB)
