"""The FP8 AdamW step of many tensors: the kernel against the reference, over what may be asked for."""

import math
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from coat_core.config import PAPER_EXPANSION, ExpansionConfig
from coat_core.formats import M1_FORMATS, M2_FORMATS
from coat_core.ops import adamw
from coat_core.ops.adamw import fp8_adamw_step, hyper_of_step, hyper_table
from coat_core.ops.launch import n_blocks
from coat_core.optim.state import Storage, empty_moment
from coat_core.quantize import finite_abs
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import WITHOUT_SCHEMA, bits
from tests.tolerances import (
    ADAMW_KERNEL_CODES_OFF,
    ADAMW_KERNEL_ERROR_RTOL,
    ADAMW_KERNEL_NUMBERS_RTOL,
    ADAMW_KERNEL_UPDATE_RTOL,
)

with suppress(ImportError):  # without triton
    from coat_core.ops.adamw_kernel import fp8_adamw_step as kernel

SHAPES = [(1,), (), (128,), (40, 25), (16, 64), (0, 3)]
FEW = [(), (40, 25), (0, 3), (3, 5, 11)]
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.05


class Problem:
    """Parameters with their packed moments."""

    def __init__(
        self,
        device: torch.device,
        formats: tuple[str | None, str | None] = ("e4m3", "e4m3"),
        *,
        expanded: bool = True,
        block_size: int = 128,
        dtype: torch.dtype = torch.float32,
        shapes: list[tuple[int, ...]] = SHAPES,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.params = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
        sizes = [n_blocks(param.numel(), block_size) for param in self.params]
        self.first_blocks = [sum(sizes[:i]) for i in range(len(sizes))]
        self.moments = []
        for name in formats:
            fmt = {None: None, **M1_FORMATS, **M2_FORMATS}[name]
            expansion = ExpansionConfig() if expanded and fmt is not None and fmt.dtype.is_floating_point else None
            self.moments.append(empty_moment(sum(sizes), Storage(fmt, block_size, expansion), device))

    def grads(self, step: int) -> list[Tensor]:
        """Of magnitudes from 1e-6 to 1; those of every third parameter are zero in the first step."""
        generator = torch.Generator().manual_seed(100 + step)
        decades = torch.randint(-6, 1, (len(self.params),), generator=generator).tolist()
        return [
            (torch.randn(param.shape, generator=generator) * 10.0**decade * (step > 1 or i % 3 > 0)).to(param)
            for i, (param, decade) in enumerate(zip(self.params, decades, strict=True))
        ]

    def step(self, step: int, grads: list[Tensor], run: Any, **options: Any) -> None:
        """One step by `run`, a kernel's launcher or the reference."""
        options = {"expansion": ExpansionConfig(), "betas": BETAS, **options}
        hyper = hyper_of_step(LR, step, options.pop("betas"), EPS, DECAY)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adamw, "_fp8_adamw_step", run)
            fp8_adamw_step(self.params, grads, *self.moments, self.first_blocks, hyper, **options)


reference = adamw._fp8_adamw_step._init_fn


def code_places(codes: Tensor) -> Tensor:
    """Codes by their order: neighbours differ by 1; NaN is one place."""
    if not codes.is_floating_point():
        return codes.to(torch.int32)
    raw = codes.view(torch.uint8).to(torch.int32)
    magnitude = torch.where(codes.to(torch.float32).isnan(), 0x7F, raw & 0x7F)
    return torch.where((raw & 0x80 > 0) & ~codes.to(torch.float32).isnan(), -magnitude, magnitude)


def assert_codes_agree(ours: Tensor, theirs: Tensor) -> None:
    """At most one step between codes, and that in few of them."""
    off = (code_places(ours.cpu()) - code_places(theirs)).abs()
    assert off.max() <= 1
    assert (off > 0).sum() <= 1 + ADAMW_KERNEL_CODES_OFF * off.numel()


def assert_near(ours: Tensor, theirs: Tensor, unit: Tensor) -> None:
    """Same places of NaN, else within ADAMW_KERNEL_UPDATE_RTOL of `unit`, the size of what may be in error."""
    ours = ours.cpu()
    off = (ours.float() - theirs.float()).abs()
    assert (
        (off <= ADAMW_KERNEL_UPDATE_RTOL * unit + torch.finfo(theirs.dtype).eps * theirs.float().abs())
        .logical_or(theirs.isnan() & ours.isnan())
        .all()
    )


def assert_same_step(ours: Problem, theirs: Problem, before: list[Tensor]) -> None:
    """After one step from the same state: codes and numbers of both moments, and how far the parameters went."""
    for mine, other in zip(ours.moments, theirs.moments, strict=True):
        if len(mine.numbers) == 0:
            assert_near(mine.codes, other.codes, finite_abs(other.codes).amax())
            continue
        torch.testing.assert_close(mine.numbers.cpu(), other.numbers, rtol=ADAMW_KERNEL_NUMBERS_RTOL, atol=0)
        assert_codes_agree(mine.codes, other.codes)
    for mine, other, start in zip(ours.params, theirs.params, before, strict=True):
        if other.numel():
            assert_near(mine, other, finite_abs(other.float() - start.float()).amax())


def run_both(
    device: torch.device, steps: int = 2, spoil: Any = None, drawn: bool = False, **options: Any
) -> tuple[Problem, Problem]:
    """Steps of the reference on a CPU; before each, the kernel's problem gets its state."""
    call = {k: options.pop(k) for k in ("expansion", "maximize", "betas") if k in options}
    ours, theirs = Problem(device, **options), Problem(torch.device("cpu"), **options)
    for step in range(1, steps + 1):
        copy_state(theirs, ours)
        grads = theirs.grads(step)
        if spoil is not None and step == steps:
            spoil(grads)
        before = [param.clone() for param in theirs.params]
        for problem, body in ((theirs, reference), (ours, kernel)):
            draws = torch.tensor([[number * 977, step, number] for number in range(len(grads))], dtype=torch.int32)
            call["draws"] = draws.to(problem.params[0].device) if drawn else None
            problem.step(step, [grad.to(problem.params[0].device) for grad in grads], body, **call)
        assert_same_step(ours, theirs, before)
    return ours, theirs


def copy_state(source: Problem, target: Problem) -> None:
    for a, b in zip(source.params, target.params, strict=True):
        b.copy_(a)
    for moment, other in zip(source.moments, target.moments, strict=True):
        for a, b in zip(moment, other, strict=True):
            bits(b).copy_(bits(a))


INTEGERS = ("int8_ratio", "uint8_log")
LONG = [(5,), (40, 5), (), (1100,)]


@pytest.mark.triton
@pytest.mark.parametrize(
    "options",
    [
        *({"formats": pair} for pair in (("e5m2", "e4m3"), ("e4m3", None), (None, "e5m2"), INTEGERS)),
        *({"formats": pair} for pair in (("int8_ratio", "e4m3"), ("int8_ratio", None), (None, "uint8_log"))),
        {"block_size": 48, "shapes": LONG},
        {"block_size": 16, "expanded": False, "shapes": LONG},
        *({"block_size": 4096, "formats": pair, "shapes": [(5,), (4100,)]} for pair in (("e4m3", "e4m3"), INTEGERS)),
        *({"dtype": dtype, "shapes": SHAPES} for dtype in (torch.bfloat16, torch.float16)),
        *({"expansion": ex} for ex in (PAPER_EXPANSION, ExpansionConfig(range_fraction=1.0, exponent_max=2.0))),
        *({"maximize": True}, {"betas": (0.4, 0.95)}),
        *({"drawn": True}, {"drawn": True, "formats": INTEGERS, "block_size": 48}),
        {"drawn": True, "formats": ("e4m3", "e5m2"), "expanded": False},
    ],
    ids=str,
)
def test_kernel_follows_the_reference(options, device):
    """In formats, blocks of any size, parameters that are rounded once, constants of the expansion, and draws."""
    run_both(device, **{"shapes": FEW, **options})


@pytest.mark.triton
@pytest.mark.parametrize("device", ["cpu"])  # so that it is left out where Triton does not interpret
def test_without_expansion_moments_have_the_references_bits_on_a_cpu(device):
    """In blocks of 128, where torch's vector loops have no rest; on a GPU torch itself rounds otherwise."""
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        pytest.skip(f"Triton {triton.__version__}'s interpreter rounds an fma twice; 3.9 and up once")
    for formats, drawn in [(("e4m3", "e5m2"), False), (("e5m2", "e4m3"), True), ((None, None), False)]:
        ours, theirs = run_both(torch.device(device), formats=formats, expanded=False, drawn=drawn)
        for mine, other in zip(ours.moments, theirs.moments, strict=True):
            assert torch.equal(bits(mine.codes), bits(other.codes))
            assert_bitwise(mine.numbers, other.numbers)


def _nan_and_inf(grads: list[Tensor]) -> None:
    grads[3][0, 0], grads[3][20, 3], grads[4][0] = float("inf"), float("nan"), float("inf")
    grads[2].fill_(float("nan"))


def _zeros_and_extremes(grads: list[Tensor]) -> None:
    for grad in grads:
        grad.zero_()
    grads[3].view(-1)[:512] = torch.logspace(-22, 15, 512).to(grads[3])
    grads[4].fill_(1e-3)


@pytest.mark.triton
@pytest.mark.parametrize(
    "stored",
    [{"expanded": False, "steps": 1}, *({"drawn": True, "steps": 1}, {"drawn": True, "formats": INTEGERS, "steps": 1})],
    ids=str,
)
@pytest.mark.parametrize("spoil", [_nan_and_inf, _zeros_and_extremes])
def test_kernel_on_special_gradients(spoil, stored, device):
    ours, theirs = run_both(device, spoil=spoil, **stored)
    for mine, other in zip(*(adamw.read_moments(*x.moments, slice(None)) for x in (ours, theirs)), strict=True):
        assert torch.equal(mine.isnan().cpu(), other.isnan())
        assert torch.equal((mine == 0).cpu(), other == 0)
        assert not mine.isinf().any()


@pytest.mark.triton
@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), INTEGERS], ids=str)
def test_many_steps_are_as_accurate_as_the_reference(formats, device):
    """The bits part (a block's grid hangs on its smallest value), the distance to unquantized moments does not."""
    shapes = [(32, 40)]
    ours, theirs, exact = (Problem(device, kind, shapes=shapes) for kind in (formats, formats, (None, None)))
    for step in range(1, 11):
        grads = theirs.grads(step)
        for problem, run in ((ours, kernel), (theirs, reference), (exact, reference)):
            problem.step(step, grads, run)
    mine, other, best = (torch.cat([p.double().view(-1) for p in x.params]) for x in (ours, theirs, exact))
    error, expected = torch.linalg.vector_norm(mine - best).item(), torch.linalg.vector_norm(other - best).item()
    assert error == pytest.approx(expected, rel=ADAMW_KERNEL_ERROR_RTOL)


@pytest.mark.triton
def test_kernel_writes_tensors_that_are_not_contiguous(device):
    ours, theirs = (Problem(device, shapes=[(40, 24), (7,)]) for _ in range(2))
    grads = theirs.grads(2)
    ours.params[0] = ours.params[0].t().contiguous().t()
    ours.step(2, [grads[0].t().contiguous().t(), torch.stack([grads[1]] * 2, -1)[:, 0]], kernel)
    theirs.step(2, grads, kernel)
    for mine, other in zip(ours.params, theirs.params, strict=True):
        assert_bitwise(mine.contiguous(), other)


@pytest.mark.triton
def test_a_table_of_scalars_has_the_effect_of_the_scalars(device):
    """Each tensor at a step of its own, numbers on the device."""
    steps = [1.0, 7.0, 3000.0]
    together, alone, start = (Problem(device, shapes=[(40,), (300,), (128, 3)]) for _ in range(3))
    grads = alone.grads(2)
    table = hyper_table(torch.tensor(LR, dtype=torch.float64), torch.tensor(steps), BETAS, DECAY).to(device)
    for run in (reference, kernel):
        copy_state(start, together)
        together.step(1, grads, run, table=table)
        copy_state(start, alone)
        for i, step in enumerate(steps):
            hyper = hyper_of_step(LR, step, BETAS, EPS, DECAY)
            args = alone.params[i : i + 1], grads[i : i + 1], *alone.moments, alone.first_blocks[i : i + 1], hyper
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(adamw, "_fp8_adamw_step", run)
                fp8_adamw_step(*args, expansion=ExpansionConfig())
        for mine, other in zip(together.params, alone.params, strict=True):  # within an ulp, or of a step 10·LR long
            torch.testing.assert_close(mine, other, rtol=2.0**-22, atol=10 * LR * 2.0**-22)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernel_rounds_stochastically_as_the_reference(dtype, device):
    """Up and down from one value between two neighbours; how often: tests/optim/test_state.py."""
    shape, draws = {"dtype": dtype, "shapes": [(20_000,)]}, torch.tensor([[12345, 1, 0]], dtype=torch.int32)
    problem, twin = (Problem(place, (None, None), **shape) for place in (device, torch.device("cpu")))
    for one, body in ((problem, kernel), (twin, reference)):
        param = one.params[0].fill_(1.0)
        one.step(1, [torch.full_like(param, -1.0)], body, param_draws=draws.to(param.device))
    assert torch.equal(problem.params[0].cpu(), twin.params[0])
    assert len(problem.params[0].unique()) == 2


def test_operator_passes_opcheck_and_changes_what_it_says():
    problem = Problem(torch.device("cpu"), ("e4m3", "e5m2"), shapes=[(40,), (3, 50)])
    hyper, draws = list(hyper_of_step(LR, 1, BETAS, EPS, DECAY)), torch.zeros((2, 3), dtype=torch.int32)
    m, v = problem.moments
    grads = problem.grads(2)
    args = (problem.params, grads, *m, *v, problem.first_blocks, hyper, None, draws, draws, [0.5, 0.0, 256.0], False)
    torch.library.opcheck(adamw._fp8_adamw_step, args, test_utils=WITHOUT_SCHEMA)
    before = [x.clone() for x in (*grads, *problem.params)]
    adamw._fp8_adamw_step(*args)
    same = [torch.equal(x, copy) for x, copy in zip((*grads, *problem.params), before, strict=True)]
    assert same == [True, True, False, False]


@pytest.mark.triton
@pytest.mark.parametrize("formats", [("e4m3", "e5m2"), (None, None)])
def test_a_row_of_nan_skips_its_tensor(formats, device):
    """The reference: tests/optim/test_capturable.py."""
    before, after = (Problem(device, formats, shapes=[(40,), (300,), (128, 3)]) for _ in range(2))
    before.step(1, before.grads(2), kernel)
    copy_state(before, after)
    table = hyper_table(LR, torch.tensor([2.0] * 3), BETAS, DECAY).to(device)
    table[1] = math.nan
    grads = after.grads(3)
    grads[1].fill_(math.inf)
    after.step(2, grads, kernel, table=table)
    rows = slice(before.first_blocks[1], before.first_blocks[2])
    for mine, other in zip(after.moments, before.moments, strict=True):
        assert torch.equal(bits(mine.codes[rows]), bits(other.codes[rows]))
        assert torch.equal(mine.numbers[:, rows], other.numbers[:, rows])
        assert not torch.equal(bits(mine.codes), bits(other.codes))
    same = [torch.equal(mine, other) for mine, other in zip(after.params, before.params, strict=True)]
    assert same == [False, True, False]
    assert all(param.isfinite().all() for param in after.params)


@pytest.mark.triton
def test_tensors_one_by_one_have_the_bits_of_one_launch_and_equal_sizes_share_a_table(device, monkeypatch):
    from coat_core.ops import adamw_kernel as kernels
    from coat_core.ops import launch as tables

    made: list[tuple[int, ...]] = []
    launches: list[Any] = []
    programs, launch = kernels._programs, kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda *args, **kwargs: (launches.append(args[0]), launch(*args, **kwargs)))
    monkeypatch.setattr(kernels, "_programs", lambda *args: (made.append(args[0]), programs(*args))[1])
    monkeypatch.setattr(tables, "_uploaded", type(tables._uploaded)())
    together, apart = (Problem(device, INTEGERS, shapes=[(40, 25), (300,), (40, 25), (25, 40)]) for _ in range(2))
    for step in (1, 2):
        grads = together.grads(step)
        together.step(step, grads, kernel)
        assert len(launches) == 1
        made.clear()
        every = apart.params, apart.first_blocks
        for i, grad in enumerate(grads):
            apart.params, apart.first_blocks = [every[0][i]], [every[1][i]]
            apart.step(step, [grad], kernel)
        apart.params, apart.first_blocks = every
        assert made == ([(1000,), (300,)] if step == 1 else [])
        launches.clear()
    for ours, theirs in zip(apart.params, together.params, strict=True):
        assert_bitwise(ours, theirs)
    for ours, theirs in zip(apart.moments, together.moments, strict=True):
        assert torch.equal(bits(ours.codes), bits(theirs.codes))
        assert_bitwise(ours.numbers, theirs.numbers)


@pytest.mark.triton
def test_tables_are_uploaded_when_they_change_and_forgotten_in_time(device):
    from coat_core.ops import launch as tables

    made: list[int] = []

    def table(*numbers: int) -> Tensor:
        return tables.device_table(("test", numbers), lambda: (made.append(1), numbers)[1], device)

    assert table(1, 2**40).tolist() == [1, 2**40]
    assert table(1, 2**40) is table(1, 2**40)
    assert table(3).tolist() == [3]
    assert len(made) == 2
    for number in range(tables.KEPT_TABLES):
        table(number, 0)
    assert len(tables._uploaded) == tables.KEPT_TABLES
    table(3)
    assert len(made) == 3 + tables.KEPT_TABLES
