"""A run that explodes is doubted, then ended; healthy ones never are, whatever their losses do."""

from __future__ import annotations

import random

import pytest
import torch

from coat_flux.config.coat import GuardOptions
from coat_flux.watch.guard import WINDOW, DeadRunError, RunGuard


def guard_of(**options: object) -> RunGuard:
    lora = {"x.lora_A.weight": torch.full((4, 16), 0.09), "x.lora_B.weight": torch.full((16, 4), 1e-3)}
    return RunGuard(GuardOptions(**options), lora, lambda line: None)


def grow(guard: RunGuard, factor: float) -> None:
    guard.lora["x.lora_A.weight"].fill_(0.09 * factor)


def healthy_loss(rng: random.Random) -> float:
    """Of one photo at a random noise level, as the mini-FLUX's at batch 1: 0.15 to 1.1, 0.35 on average."""
    return min(max(rng.lognormvariate(-1.1, 0.5), 0.15), 1.1)


@pytest.mark.parametrize("seed", range(2))
def test_healthy_runs_are_never_doubted(seed: int) -> None:
    rng, guard = random.Random(seed), guard_of()
    for step in range(1, 1001):
        grow(guard, 1 + step / 100)  # to 11-fold: B trained from zero
        rare = rng.random() < 0.1
        epsilon = (0.9 if rare else 0.02) * rng.uniform(0.5, 1.5)  # as of models that predict noise
        loss = healthy_loss(rng) if seed % 2 else epsilon
        assert guard.allows_update(step, loss, 1.0)
        assert guard.doubt is None
    guard.check_end(1000)


def test_an_explosion_is_doubted_within_the_window_and_ends_the_run() -> None:
    rng, guard = random.Random(0), guard_of(diverging_steps=30)
    for step in range(1, 101):
        guard.allows_update(step, healthy_loss(rng), 1.0)
    grow(guard, 5.0)
    doubted: list[int] = []

    def explode() -> None:
        for step in range(101, 200):
            guard.allows_update(step, rng.uniform(1.4, 2.5), 1.0)  # what the mini-FLUX shows at ten times its lr
            doubted.extend([step] if guard.doubt else [])

    with pytest.raises(DeadRunError, match=r"last 16 steps .*5\.0-fold.*train\.lr") as end:
        explode()
    assert doubted[0] <= 100 + WINDOW
    assert 90 < end.value.since <= doubted[0]
    with pytest.raises(DeadRunError, match="ends in doubt"):
        guard.check_end(doubted[-1])


def test_a_doubt_that_passes_leaves_the_run_alone_and_is_resumed_exactly() -> None:
    rng, guard = random.Random(0), guard_of(diverging_steps=30)
    for step in range(1, 101):
        guard.allows_update(step, healthy_loss(rng), 1.0)
    other = guard_of()
    grow(guard, 5.0)
    grow(other, 5.0)
    other.load_state_dict(guard.state_dict())
    seen = []
    for step in range(101, 161):
        loss = 2.0 if step <= 120 else 0.35
        for one in (guard, other):
            one.allows_update(step, loss, 1.0)
        assert guard.doubt == other.doubt
        seen.append(guard.doubt is not None)
    assert any(seen)
    assert not seen[-1]


def test_high_losses_alone_are_no_explosion_nor_are_large_weights_alone() -> None:
    guard = guard_of()
    for step in range(1, 200):
        guard.allows_update(step, (0.3 if step < 100 else 3.0) + step * 1e-6, 1.0)  # another expert's turn, say
        assert guard.doubt is None
    guard = guard_of()
    guard.allows_update(1, 0.3, 1.0)  # measures the weights before the first step
    grow(guard, 50.0)
    guard.check_now(1)
    guard = guard_of()
    guard.allows_update(1, 0.3, 1.0)
    grow(guard, 93.8 / 0.09)  # such weights are not saved
    with pytest.raises(DeadRunError, match=r"1,042-fold .*93\.8.*train\.lr") as end:
        guard.check_now(7)
    assert end.value.since == 7


def test_a_streak_that_is_not_finite_is_doubted_and_a_single_step_is_not() -> None:
    guard = guard_of()
    guard.allows_update(1, 0.3, 1.0)
    doubts = []
    for step, loss in enumerate((float("nan"), 0.3, float("inf"), float("nan"), 0.3), 2):
        guard.allows_update(step, loss, 1.0)
        doubts.append(guard.doubt)
    assert doubts == [None, None, None, "the last 2 steps were not finite", None]
    for _ in range(2):
        guard.allows_update(8, float("nan"), 1.0)
    with pytest.raises(DeadRunError, match="last 2 steps were not finite") as end:
        guard.check_end(8)
    assert end.value.since == 7


def test_switched_off_it_doubts_nothing() -> None:
    guard = guard_of(enabled=False)
    for step in range(1, 100):
        guard.allows_update(step, 0.3 if step < 50 else float("nan"), 1.0)
    grow(guard, 1e6)
    guard.check_end(100)
    assert guard.doubt is None
