"""FP8InputLinear: dA from the FP8 x, dx exact, one x shared with the base linears, and never another's x."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from coat_core import FP8Linear, FP8TrainableLinear
from coat_core.activation import FP8InputLinear
from coat_core.config import FP8LinearConfig
from coat_core.granularity import PER_ROW, Granularity, Storage
from coat_core.ops.quantize import _copies, quantize
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.saved_tensors import saved_by
from tests.tolerances import product_floor_db

K, N, R = 64, 48, 8


def adapter(base: nn.Module | None = None, granularity: Granularity = PER_ROW, fmt: str = "e4m3") -> FP8InputLinear:
    return FP8InputLinear.from_linear(nn.Linear(K, R, bias=False), Storage(fmt, granularity), base)


def base_linear(**config: object) -> FP8Linear:
    return FP8Linear.from_linear(nn.Linear(K, N), FP8LinearConfig(**config))


def saved_codes(forward) -> list[Tensor]:
    """FP8 tensors of K columns that `forward` saves for backward."""
    _, saved = saved_by(forward)
    return [t for t in saved if t.element_size() == 1 and t.shape[0] != N]


def grad_from(x: Tensor, dh: Tensor, granularity: Granularity = PER_ROW, fmt: str = "e4m3") -> Tensor:
    """dA = dhᵀ x_q."""
    x_hat = quantize(x, fmt, granularity).dequantize(dh.dtype)
    return dh.reshape(-1, R).t() @ x_hat.reshape(-1, K)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("name", ["per_tensor", "per_row", "per_group"])
def test_gradients(device, fmt, name):
    granularity = Granularity(name, 16)
    down = adapter(granularity=granularity, fmt=fmt).to(device)
    x = torch.randn(2, 64, K, device=device, requires_grad=True)
    dh = torch.randn(2, 64, R, device=device)
    h = down(x)
    h.backward(dh)
    assert_bitwise(h.detach(), nn.functional.linear(x, down.weight).detach())
    assert_bitwise(x.grad, dh @ down.weight)
    assert_bitwise(down.weight.grad, grad_from(x, dh, granularity, fmt))
    exact = dh.reshape(-1, R).t() @ x.detach().reshape(-1, K)
    assert_sqnr(exact, down.weight.grad, product_floor_db(fmt))


def test_a_bias_is_refused():
    with pytest.raises(ValueError, match="Linear with a bias: an adapter's down projection must have none"):
        FP8InputLinear.from_linear(nn.Linear(K, R), Storage("e4m3", PER_ROW))


@pytest.mark.parametrize("use_fp8_gemm", [True, False])
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("upstream", ["leaf", "graph", "frozen"])
def test_q_k_v_and_their_adapters_keep_one_x(use_fp8_gemm, cast, upstream):
    bases = [base_linear(use_fp8_gemm=use_fp8_gemm).bfloat16() for _ in range(3)]
    downs = [adapter(base).to(cast) for base in bases]
    x = torch.randn(2, 64, K).bfloat16().requires_grad_(upstream != "frozen")
    x = x * 1 if upstream == "graph" else x

    def forward() -> None:
        for base, down in zip(bases, downs, strict=True):
            base(x)
            down(x.to(cast))

    codes = saved_codes(forward)
    if upstream == "leaf" or (upstream == "frozen" and cast == x.dtype):  # x itself is kept
        assert codes == []
        return
    assert len(codes) == 3
    if upstream == "frozen":  # no graph: a cast cannot be told from another tensor
        assert len({t.untyped_storage().data_ptr() for t in codes}) == 3
        return
    assert len({t.untyped_storage().data_ptr() for t in codes}) == 1
    assert codes[0].untyped_storage().nbytes() == x.numel()


def test_a_frozen_linear_whose_weight_is_cast_at_each_use_shares_too():
    base = FP8TrainableLinear.from_linear(nn.Linear(K, N), FP8LinearConfig()).requires_grad_(False)
    down, x = adapter(base), torch.randn(8, K, requires_grad=True) * 1
    codes = saved_codes(lambda: (base(x), down(x.double().float())))
    assert len(codes) == 1
    assert codes[0].data_ptr() != _copies[x][1].codes.data_ptr()  # not x, nor one cast of it: its own copy
    assert saved_codes(lambda: (base(x), down(x)))[0].data_ptr() == _copies[x][1].codes.data_ptr()


def test_without_a_base_adapters_of_one_tensor_share():
    first, second, x = adapter(), adapter(), torch.randn(8, K, requires_grad=True) * 1
    codes = saved_codes(lambda: (first(x), second(x)))
    assert codes[0].data_ptr() == codes[1].data_ptr()


def used_gradient(down: FP8InputLinear, x: Tensor) -> Tensor:
    down.weight.grad = None
    h = down(x)
    h.backward(torch.ones_like(h))
    return down.weight.grad


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("upstream", ["leaf", "graph", "chunk", "frozen"])
def test_another_tensor_of_the_same_shape_is_not_taken_for_the_bases_input(cast, upstream):
    """The base ran alone (adapter switched off under grad), then the adapter alone."""
    base = base_linear()
    down = adapter(base)
    x1, x2 = (torch.randn(9, K, requires_grad=upstream != "frozen") for _ in range(2))
    if upstream == "graph":
        x1, x2 = x1 * 1, x2 * 1
    elif upstream == "chunk":  # two outputs of one node of the graph
        x1, x2 = torch.cat((x1, x2)).bfloat16().chunk(2) if cast else torch.cat((x1, x2)).chunk(2)
    if cast:
        x1, x2 = x1.bfloat16(), x2.bfloat16().float()  # .bfloat16() of bf16 is the tensor itself
    base(x1)
    assert_bitwise(used_gradient(down, x2), grad_from(x2, torch.ones(9, R)))


CHANGED = {
    "a product that widens": lambda x: x * torch.linspace(1, 2, K),
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_what_is_made_of_x_is_not_taken_for_a_cast(change):
    base = base_linear()
    down, x = adapter(base), torch.randn(9, K).bfloat16().requires_grad_()
    base(x)
    changed = change(x).float()
    assert_bitwise(used_gradient(down, changed), grad_from(changed, torch.ones(9, R)))


def test_a_later_call_without_grad_withdraws_the_hand_over():
    base = base_linear()
    down, x1, x2 = adapter(base), torch.randn(9, K).bfloat16(), torch.randn(9, K).bfloat16()
    base(x1)
    with torch.no_grad():
        base(x2)
    assert base.adapter_input is None
    assert_bitwise(used_gradient(down, x2.float()), grad_from(x2, torch.ones(9, R)))


def test_x_changed_in_place_after_the_base_is_quantized_again():
    base = base_linear()
    down, x = adapter(base), torch.randn(9, K)
    base(x)
    x.mul_(torch.linspace(1, 2, K))
    assert_bitwise(used_gradient(down, x), grad_from(x, torch.ones(9, R)))


def test_nothing_is_left_behind():
    base = base_linear()
    down = adapter(base)
    with torch.no_grad():
        x = torch.randn(9, K)
        down(base(x)[:, :1] + x)
    assert base.adapter_input is None
    x = torch.randn(9, K, requires_grad=True) * 1
    base(x)  # the adapter is switched off, grad is not
    codes = weakref.ref(_copies[x][1].codes)
    del x
    gc.collect()
    assert codes() is None
    x = torch.randn(9, K)
    h = down(x + 0 * base(x)[:, :1])
    codes = weakref.ref(h.grad_fn.saved_tensors[0])
    h.sum().backward()
    del h, x
    assert codes() is None
    pickle.dumps(down)
    assert copy.deepcopy(nn.ModuleList([base, down]))[1].source[0] is not base


def test_frozen_adapter_and_no_tokens():
    base = base_linear()
    down = adapter(base)
    empty = torch.randn(0, K)
    base(empty)
    down(empty).sum().backward()
    assert_bitwise(down.weight.grad, torch.zeros(R, K))
    down.weight.requires_grad_(False)
    x = torch.randn(3, K, requires_grad=True)
    base(x)
    assert saved_codes(lambda: down(x)) == []


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_autocast(x_dtype):
    base = base_linear()
    down = adapter(base)
    x = torch.randn(64, K).to(x_dtype).requires_grad_()
    dh = torch.randn(64, R).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        base(x)
        h = down(x.float())
    h.backward(dh)
    assert h.dtype == torch.bfloat16
    assert_bitwise(down.weight.grad, grad_from(x.detach(), dh).float())
    assert_bitwise(x.grad, (dh @ down.weight.bfloat16()).to(x_dtype))


def test_under_torch_checkpoint():
    base = base_linear()
    down, x, dh = adapter(base), torch.randn(9, K, requires_grad=True), torch.randn(9, R)

    def block(x: Tensor) -> Tensor:
        return down(torch.sigmoid(base(x * 1).mean() + x))

    block(x).backward(dh)
    plain = down.weight.grad.clone(), x.grad.clone()
    down.weight.grad = x.grad = None
    checkpoint(block, x, use_reentrant=False).backward(dh)
    assert_bitwise(down.weight.grad, plain[0])
    assert_bitwise(x.grad, plain[1])
