"""LoKr in a linear, y + factor·(W1 ⊗ W2) x, forward and backward, without the Kronecker product.

With a row of x as a matrix X [c, d], its row of y as Y [a, b], and factor in W1:

    Z = X W2ᵀ,   Y += W1 Z
    U = dY W2,   dX += W1ᵀ U,   dW1 = Σ U Xᵀ,   dW2 = Σ dYᵀ V,   V = W1 X

Two products of about 1/c of the linear's in backward, and one in forward; those with W1 are small. Nothing but x is
kept. A matrix that is a product of two is multiplied out, as in the adapter's own forward.

Shapes: x [..., c·d], y [..., a·b] (or a slice of its columns), W1 [a, c], W2 [b, d], Z [T, c, b], U and V [T, a, d].
"""

from __future__ import annotations

from torch import Tensor

from coat_core.ops.codes import product

from ..lora import KroneckerAdapter


def add_kronecker(y: Tensor, x: Tensor, adapter: KroneckerAdapter) -> None:
    """Add the adapter's part to y, in place."""
    first, second = adapter.matrices(y.dtype)
    rows = x.to(y.dtype).reshape(-1, second.shape[1])
    z = (rows @ second.t()).view(-1, first.shape[1], len(second))
    by_rows = y.flatten(0, -2).unflatten(1, (len(first), len(second)))
    by_rows.baddbmm_(first.expand(len(z), *first.shape), z)


def kronecker_gradients(dy: Tensor, x: Tensor, adapter: KroneckerAdapter) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of the adapter's matrices in turn, in their dtype, and U for `add_kronecker_dx`."""
    first, second = adapter.matrices(dy.dtype)
    (a, c), (b, d) = first.shape, second.shape
    by_rows, of_outputs = x.to(dy.dtype).reshape(-1, c, d), dy.reshape(-1, b)
    v = first.expand(len(by_rows), a, c) @ by_rows
    of_second = product(of_outputs.t(), v.view(-1, d), adapter.second[0].dtype)
    del v  # as large as x
    u = (of_outputs @ second).view(-1, a, d)
    of_first = u.new_zeros((a, c), dtype=adapter.first[0].dtype)
    step = max(len(u) * d // (8 * a), 1)  # products of so many rows are at most a quarter of x
    for some_u, some_x in zip(u.split(step), by_rows.split(step), strict=True):
        of_first += product(some_u, some_x.transpose(1, 2), of_first.dtype).sum(0)
    of_first *= adapter.factor
    gradients: list[Tensor] = []
    for grad, factors in ((of_first, adapter.first), (of_second, adapter.second)):
        if len(factors) == 1:
            gradients.append(grad)
        else:
            gradients += [grad @ factors[1].t(), factors[0].t() @ grad]
    return gradients, u


def add_kronecker_dx(dx: Tensor, u: Tensor, adapter: KroneckerAdapter) -> None:
    """Add the adapter's part to dx [..., c·d], in place."""
    first, second = adapter.matrices(dx.dtype)
    by_rows = dx.view(-1, first.shape[1], second.shape[1])
    by_rows.baddbmm_(first.t().expand(len(u), *first.t().shape), u.to(dx.dtype))
