"""The statistics of `verify`: every outcome, on numbers that can be checked by hand or in a table."""

from __future__ import annotations

import math

import pytest

from coat_flux.study.judgement import LOSSLESS, NOT_LOSSLESS, UNDECIDED, Judgement, broken, judge, student_quantile
from tests import tolerances

BF16 = [1.00, 1.02, 1.04]  # standard deviation 0.02


def judged(*gaps: float, bf16: list[float] = BF16, base: float | None = 2.0) -> Judgement:
    return judge(bf16, [loss + gap for loss, gap in zip(bf16, gaps, strict=True)], base)


TABLE = {1: 12.7062047362, 2: 4.3026527297, 3: 3.1824463053, 4: 2.7764451052, 9: 2.2621571628, 10: 2.2281388520}
TABLE |= {14: 2.1447866879, 15: 2.1314495456, 30: 2.0422724563, 99: 1.9842169516}


@pytest.mark.parametrize(("freedom", "table"), TABLE.items())
def test_student_quantiles_are_those_of_the_tables(freedom: int, table: float) -> None:
    assert student_quantile(freedom) == pytest.approx(table, rel=tolerances.STUDENT_RTOL)


def test_the_interval_is_students() -> None:
    found = judged(0.001, 0.002, 0.003)
    half = 4.3026527297 * 0.001 / math.sqrt(3)
    assert found.gap == pytest.approx(0.002)
    assert (found.low, found.high) == pytest.approx((0.002 - half, 0.002 + half))
    assert found.spread == pytest.approx(0.02)
    assert found.seeds == 3


def test_an_interval_inside_the_spread_is_lossless() -> None:
    found = judged(0.001, 0.002, 0.003)
    assert found.outcome == LOSSLESS
    assert found.sentence == (
        "lossless here: over 3 seeds, COAT's held-out loss is on average 0.002 above bf16's (95% confidence interval "
        "-0.00048 to +0.0045), within the spread of bf16 runs that differ only in the seed (±0.02)"
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_an_interval_outside_the_spread_is_not_lossless_on_either_side(sign: int) -> None:
    found = judged(sign * 0.099, sign * 0.1, sign * 0.101)
    assert found.outcome == NOT_LOSSLESS
    assert found.sentence.startswith("not lossless here: ")
    assert f"0.1 {'above' if sign > 0 else 'below'} bf16's" in found.sentence


@pytest.mark.parametrize("gaps", [(0.018, 0.019, 0.024), (0.03, 0.021, 0.022), (-0.05, 0.0, 0.05)])
def test_an_interval_over_an_end_of_the_spread_is_undecided_and_says_how_many_seeds_decide(gaps) -> None:
    found = judged(*gaps)
    assert found.outcome == UNDECIDED
    assert found.sentence.startswith("undecided: ")
    assert found.low <= 0.02 <= found.high or found.low <= -0.02 <= found.high
    if found.more_seeds is not None:
        assert found.more_seeds > 3
        assert f"run with --seeds {found.more_seeds}" in found.sentence


def test_the_number_of_seeds_is_the_least_that_decides() -> None:
    found = judged(-0.01, 0.0, 0.01)  # half width t · 0.01 / sqrt(n): 0.0248 at 3 seeds, 0.0159 at 4
    assert found.outcome == UNDECIDED
    assert found.more_seeds == 4


def test_no_number_of_seeds_is_promised_where_it_would_be_senseless() -> None:
    found = judged(0.01, 0.02, 0.03)
    assert found.more_seeds is None
    assert "it would take more than 50 seeds to decide" in found.sentence


def test_bf16_seeds_that_end_equal_are_named_not_divided_by() -> None:
    found = judged(0.1, 0.2, 0.3, bf16=[1.0, 1.0, 1.0])
    assert found.outcome == UNDECIDED
    assert "exactly the same loss" in found.sentence
    assert found.spread == 0.0


def test_a_bf16_run_that_learned_nothing_is_named() -> None:
    found = judged(0.0, 0.0, 0.0, base=1.03)
    assert found.outcome == UNDECIDED
    assert "1 of 3 bf16 runs (first: number 3, loss 1.040000) did not bring the held-out loss below" in found.sentence


def test_equal_pairs_are_lossless() -> None:
    assert judged(0.0, 0.0, 0.0).outcome == LOSSLESS


def test_coat_that_is_not_finite_is_not_lossless() -> None:
    assert judge(BF16, [1.0, math.nan, 1.0]).outcome == NOT_LOSSLESS
    assert broken("it died", 3).sentence == "not lossless here: it died"


@pytest.mark.parametrize(("bf16", "coat"), [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([math.inf, 1.0], [1.0, 1.0])])
def test_refuses_what_cannot_be_compared(bf16: list[float], coat: list[float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        judge(bf16, coat)
