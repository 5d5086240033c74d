"""NVFP4 of frozen weights: rounding, packing, scales, how exact it is. INT8 per row after a rotation, and that."""

import pytest
import torch
from torch import Tensor

from coat_core import nvfp4
from coat_core.int8 import rotate, rotation_size
from coat_core.quantize import sqnr_db
from tests.helpers.asserts import assert_bitwise
from tests.tolerances import NVFP4_FLOOR_DB

WIDTH = 3072  # of FLUX.1's hidden states


def weights(kind: str, rows: int = 96) -> Tensor:
    torch.manual_seed(0)
    if kind == "student":
        return 0.02 * torch.distributions.StudentT(4.0).sample((rows, WIDTH))
    found = 0.02 * torch.randn(rows, WIDTH)
    if kind == "outlier columns":
        found[:, torch.randperm(WIDTH)[: WIDTH // 100]] *= 30
    return found


def decoded(packed: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    codes, block_scales, scale = packed
    codes = nvfp4.unpack(codes).unflatten(-1, (-1, nvfp4.BLOCK))
    return nvfp4.decode(codes, block_scales).to(torch.float32).flatten(-2) * scale


@pytest.mark.parametrize("kind", ["gauss", "student", "outlier columns"])
def test_how_exact_it_is(kind):
    weight = weights(kind, rows=32)
    assert sqnr_db(weight, decoded(nvfp4.quantize(weight))) >= NVFP4_FLOOR_DB[kind]


def test_each_number_goes_to_the_nearest_and_halfway_ones_to_the_even_code():
    sizes = torch.tensor(nvfp4.MAGNITUDES)
    one = torch.tensor(0x38, dtype=torch.uint8)  # 1.0
    values = torch.linspace(-7, 7, 1601)
    expected = sizes[(values.abs()[:, None] - sizes).abs().argmin(-1)]
    halfway = (sizes[1:] + sizes[:-1]) / 2
    apart = (values.abs()[:, None] - halfway).abs().amin(-1) > 1e-4
    assert_bitwise(nvfp4.nearest(values[apart], one).abs(), expected[apart])
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert_bitwise(nvfp4.nearest(halfway, one), even)
    assert nvfp4.encode(even).remainder(2).tolist() == [0] * 7
    assert_bitwise(nvfp4.encode(torch.cat([sizes, -sizes])), torch.arange(16, dtype=torch.uint8))


def test_decoded_numbers_are_the_product_of_magnitude_and_scale_to_four_significant_bits():
    scales = torch.arange(1, 127, dtype=torch.uint8)
    exact = scales.view(torch.float8_e4m3fn).double()[:, None] * torch.tensor(nvfp4.MAGNITUDES).double() / nvfp4.SHIFT
    found = nvfp4.decode(torch.arange(8, dtype=torch.uint8).expand(126, 8), scales).double()
    step = torch.clamp(torch.exp2(torch.floor(torch.log2(exact.clamp(min=1e-9)))), min=2.0**-6) / 8
    assert ((found - exact).abs() <= step / 2).all()
    simple = torch.tensor([0, 1, 2, 4, 6])  # 0 and powers of two
    normal = exact[:, simple] >= 2.0**-6
    assert torch.equal(found[:, simple][normal], exact[:, simple][normal])
    assert float(found.max()) == 320  # 6 · 448 / 8 = 336 to four bits, halfway


def test_special_weights():
    zeros = nvfp4.quantize(torch.zeros(16, 32))
    assert float(zeros[2]) > 0
    assert not decoded(zeros).any()
    weight = torch.randn(16, 32)
    weight[3, :16] = 0
    assert not decoded(nvfp4.quantize(weight))[3, :16].any()
    large = weight.clone()
    large[0, 0] = -torch.inf
    found = decoded(nvfp4.quantize(large))
    assert found.isfinite().all()
    assert found[0, 0] <= weight[0, 1:16].min()
    large[0, 0] = torch.nan
    assert decoded(nvfp4.quantize(large)).isnan().all()
    outlier = torch.full((1, 64), 1e-3)
    outlier[0, 0] = 1e4
    assert sqnr_db(outlier, decoded(nvfp4.quantize(outlier))) > 60  # the outlier alone counts
    assert decoded(nvfp4.quantize(outlier))[0, 1:16].eq(0).all()


def test_rows_searched_apart_in_bf16_give_the_same(monkeypatch):
    weight = torch.randn(48, 64).bfloat16()
    expected = nvfp4.quantize(weight.float())
    monkeypatch.setattr(nvfp4, "CHUNK", 5 * 64)
    for found, wanted in zip(nvfp4.quantize(weight), expected, strict=True):
        assert_bitwise(found, wanted)


@pytest.mark.parametrize("size", [1, 4, 16, 64, 256])
def test_the_rotation_is_orthonormal_and_its_own_inverse(size):
    matrix = rotate(torch.eye(size), size)
    assert_bitwise(matrix, matrix.t().contiguous())
    assert_bitwise(matrix @ matrix, torch.eye(size))
    assert set(matrix.abs().flatten().tolist()) == {size**-0.5}
    assert set(matrix.sum(0).tolist()) <= {1.0, -1.0}  # a constant stays one: it is not gathered in one number


def test_the_size_follows_from_the_width():
    sizes = {width: rotation_size(width) for width in (3072, 12288, 15360, 768, 256, 64, 320, 48, 16, 2, 3)}
    assert sizes == {3072: 256, 12288: 256, 15360: 256, 768: 256, 256: 256, 64: 64, 320: 64, 48: 16, 16: 16, 2: 1, 3: 1}


@pytest.mark.parametrize("size", [0, 2, 8, 1024, 256])
def test_other_sizes_are_refused(size):
    with pytest.raises(ValueError, match=f"size={size}: must be a power of 4 up to 256 that divides 64"):
        rotate(torch.ones(2, 64), size)
