"""SpillWatch: the Windows driver's spill is named once, and nothing else is taken for it."""

from __future__ import annotations

import pytest

from coat_flux.watch.step_watch import BASELINE, IN_A_ROW, SLOWER, WARM_UP, SpillWatch

GB = 10**9
CARD = 24 * GB
FULL, ROOMY = 23 * GB, 15 * GB


def watched(seconds: list[float], reserved: int = FULL, platform: str = "win32", total: int = CARD) -> list[str]:
    watch = SpillWatch(platform)
    return [line for line in (watch.on_step(s, reserved, total) for s in seconds) if line is not None]


def steps(*later: float, first: float = 30.0) -> list[float]:
    """Slow first steps, those of the baseline at about 2 s, then `later`."""
    usual = [2.0 + 0.1 * (i % 3) for i in range(BASELINE)]
    return [first] * WARM_UP + usual + list(later)


def test_a_spill_is_said_once_with_numbers_and_remedies() -> None:
    lines = watched(steps(*[8.0] * 40))
    assert len(lines) == 1
    assert "8.0 s instead of 2.1 s, and torch holds 23.0 GB of a card of 24.0 GB" in lines[0]


def test_more_than_the_card_has_is_a_spill_from_the_first_step() -> None:
    lines = watched([2.0, 2.0], reserved=CARD + GB)
    assert len(lines) == 1
    assert lines[0].startswith("torch holds 25.0 GB of a card of 24.0 GB")


@pytest.mark.parametrize(
    "seconds",
    [
        steps(*[2.0] * 50, first=600.0),  # compilation and measurement at the start
        steps(*([2.0] * 9 + [90.0]) * 5),  # a sample or a save between steps
        steps(*([2.0] * 5 + [9.0] * (IN_A_ROW - 1)) * 6),  # a few larger pictures in a row
        steps(*[2.1 * SLOWER * 0.95] * 50),  # slower, but not threefold
        [9.0] * 60,  # slow throughout
        steps(*[9.0] * (IN_A_ROW - 1)),
    ],
    ids=["first steps", "interruptions", "larger pictures", "twofold", "slow throughout", "too few"],
)
def test_other_slow_steps_are_none(seconds: list[float]) -> None:
    assert watched(seconds) == []


@pytest.mark.parametrize(
    ("reserved", "platform", "total"), [(ROOMY, "win32", CARD), (FULL, "linux", CARD), (FULL, "win32", 0)]
)
def test_neither_with_room_nor_elsewhere(reserved: int, platform: str, total: int) -> None:
    assert watched(steps(*[20.0] * 30), reserved, platform, total) == []


def test_one_slow_step_in_the_baseline_does_not_hide_a_spill() -> None:
    slow = steps(*[8.0] * IN_A_ROW)
    slow[WARM_UP + 2] = 500.0
    assert len(watched(slow)) == 1
