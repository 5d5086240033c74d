"""`RunGuard`: each check by its values and thresholds; runs that explode are doubted, then ended."""

import dataclasses
import itertools
import json
import math
import random
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from coat_flux.config.coat import GuardOptions
from coat_flux.watch.guard import BROKEN_LORA, DeadRunError, RunGuard, tensor_norms

A, B = "transformer.block.to_q.lora_A.weight", "transformer.block.to_q.lora_B.weight"


def guard_of(lines: list[str] | None = None, growth: float = BROKEN_LORA, b: float = 0.0, **options: Any) -> RunGuard:
    lora = {A: torch.nn.Parameter(torch.ones(2, 4)), B: torch.nn.Parameter(torch.full((4, 2), b))}
    log = [].append if lines is None else lines.append
    return RunGuard(dataclasses.replace(GuardOptions(), **options), lora, log, broken_growth=growth)


STREAKS: dict[str, tuple[dict[str, int], list[tuple[float, float]], str]] = {
    "not finite": (
        {"nonfinite_steps": 3},
        [(math.nan, 1.0), (0.4, math.inf), (0.5, 1.0), (math.nan, 1.0), (math.inf, 1.0), (math.nan, 1.0)],
        r"step 6: loss=nan, .* 3 steps in a row",
    ),
    "zero gradients": (
        {"zero_gradient_steps": 2},
        [(0.1, 0.0), (0.2, 1e-30), (0.3, 0.0), (0.9, 0.0)],
        r"step 4: gradient norm 0 for 2 steps in a row.*activation\.grad_format",
    ),
    "a pinned loss": (
        {"pinned_loss_steps": 3},
        [(loss, 1.0) for loss in (0.5, 0.5, math.nextafter(0.5, 1), 0.5, 0.5, 0.5)],
        r"step 6: loss=0.5 for 3 steps in a row",
    ),
}


@pytest.mark.parametrize("name", STREAKS)
def test_a_streak_ends_the_run_and_an_interrupted_one_does_not(name):
    options, steps, message = STREAKS[name]
    lines: list[str] = []
    guard = guard_of(lines, **options)
    for number, (loss, norm) in enumerate(steps[:-1], 1):
        assert guard.allows_update(number, loss, norm) is (math.isfinite(loss) and math.isfinite(norm))
    with pytest.raises(DeadRunError, match=message) as end:
        guard.allows_update(len(steps), *steps[-1])
    assert end.value.since == (4 if name == "not finite" else None)
    assert (guard.skipped, len(lines)) == ((5, 4) if name == "not finite" else (0, 0))  # a line for each


@pytest.mark.parametrize("name", [B, "transformer$$block$$to_q.lora_up.weight"])
def test_a_lora_b_that_stays_zero_ends_the_run_in_either_trainers_names(name):
    guard = guard_of(dead_lora_steps=3)
    guard.lora = {A: guard.lora[A], name: guard.lora[B]}
    guard.after_update(1)
    guard.after_update(2)
    with pytest.raises(DeadRunError, match=r"step 3: every lora_B is still zero after 3 updates.*train\.lr"):
        guard.after_update(3)


def test_one_living_lora_b_is_enough_and_a_warm_up_has_two_updates():
    guard = guard_of(dead_lora_steps=1)
    guard.lora = {**guard.lora, "other.lora_B.weight": torch.zeros(4, 2)}
    guard.after_update(1)  # lr 0 in the first step of a warm-up
    guard.lora["other.lora_B.weight"][3, 1] = -1e-20
    guard.after_update(2)
    guard.check_save(2, final=True)
    assert guard.updates == 2


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_parameter_that_is_not_finite_is_found_before_a_save_and_at_intervals(value):
    guard = guard_of(health_every=2, dead_lora_steps=100)
    guard.lora[A].data[1, 3] = value
    message = f"step 7: 1 of 2 trained tensors are not finite .{A}.*lower train.lr"
    with pytest.raises(DeadRunError, match=message):
        guard.check_save(7)
    guard.after_update(6)
    with pytest.raises(DeadRunError, match=message):
        guard.after_update(7)


def test_switched_off_it_skips_and_checks_the_end_and_nothing_else():
    guard = guard_of(enabled=False, nonfinite_steps=1, zero_gradient_steps=1, pinned_loss_steps=2, dead_lora_steps=2)
    guard.updates = 1
    with pytest.raises(DeadRunError, match="every lora_B is still zero after 1 updates"):
        guard.check_save(1, final=True)
    guard.lora[A].data[0, 0] = math.nan
    for step in range(1, 6):
        assert guard.allows_update(step, 0.5, 0.0) is True
        guard.after_update(step)
    guard.check_save(5)
    assert [guard.allows_update(6, math.nan, 1.0), guard.allows_update(7, 0.5, math.inf)] == [False, False]
    assert (guard.skipped, guard.doubt) == (2, None)
    guard.lora[A].data.fill_(1e6)
    guard.lora[B].data[0, 0] = 1.0
    guard.check_save(7, final=True)


def test_counters_go_on_after_a_resume():
    options = {"nonfinite_steps": 3, "pinned_loss_steps": 4, "zero_gradient_steps": 4}
    first, second = guard_of(**options), guard_of(**options)
    for step, loss in enumerate([0.25, 0.25, math.nan, math.nan], 1):
        first.allows_update(step, loss, 0.0)
    state = json.loads(json.dumps(first.state_dict()))
    assert state["skipped"] == 2
    second.load_state_dict(state)
    assert second.state_dict() == state
    with pytest.raises(DeadRunError, match="3 steps in a row"):
        second.allows_update(5, math.nan, 0.0)
    third = guard_of()
    third.load_state_dict({})
    assert third.state_dict() == guard_of().state_dict()


def test_parameters_are_read_back_once(monkeypatch):
    reads: list[int] = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.numel()) or original(self))
    guard = guard_of(health_every=1)
    guard.lora = {f"{i}.lora_B.weight": torch.ones(3, dtype=(torch.float32, torch.bfloat16)[i % 2]) for i in range(9)}
    guard.allows_update(1, 0.5, 1.0)
    assert reads == []
    guard.after_update(1)
    assert reads == [9]


# -- divergence ------------------------------------------------------------------------------------------------------
# Losses of the mini-FLUX with the LoRA, relative to those without it, one photo a step; from its log.
GOOD = (  # 3 times the good rate, with EMA
    *(0.73, 0.36, 0.98, 0.91, 0.39, 1.04, 0.63, 1.07, 0.46, 0.43, 1.14, 0.78, 0.43, 0.86, 0.68, 0.75),
    *(0.39, 1.15, 0.71, 0.9, 0.97, 0.94, 0.4, 0.57, 1.2, 1.1, 1.13, 0.98, 0.51, 0.72, 0.62, 1.41),
)
BAD = (  # 10 times the good rate, from the third step after a resume on
    *(1.46, 1.3, 1.07, 1.42, 1.38, 1.34, 1.71, 1.63, 1.1, 0.82, 2.62, 2.11, 1.56, 3.06, 3.64, 2.81, 3.48, 3.1),
    *(1.71, 1.99, 2.59, 3.57, 3.89, 3.39, 3.18, 4.35, 6.32, 2.93, 4.8, 5.92, 5.43, 2.95, 3.21, 3.73, 3.28, 4.92, 2.69),
)


def compared(guard: RunGuard, step: int, until: int, ratio: float, without: float = 0.6, until_end: int = 1000) -> bool:
    """Do a step, `until` steps before a save; returns whether it was compared."""
    compares = guard.compares(step, until, until_end)
    guard.allows_update(step, ratio * without, 1.0, *[without] * compares)
    return compares


def drawn(rng: random.Random, ratios: tuple[float, ...], photos: int) -> float:
    return sum(rng.choices(ratios, k=photos)) / photos


def test_the_steps_that_are_compared():
    guard = guard_of()
    steps = [step for step in range(101, 1101) if guard.compares(step, (100 - step) % 1000, 1100 - step)]
    assert steps == [101, 104, 108, 116, 132, *range(150, 1100, 50), *range(1085, 1101)]
    assert not guard_of(enabled=False).compares(1, 0, 0)
    lines: list[str] = []
    guard = guard_of(lines)
    guard.lora = {"transformer_blocks.0.weight": torch.ones(2, 2)}
    assert [guard.compares(step, 0, 0) for step in (1, 2, 3)] == [False] * 3
    assert len(lines) == 1


def test_of_a_lokr_the_matrix_that_begins_with_zero_is_switched_off():
    guard = guard_of()
    names = ("a.lokr_w1", "a.lokr_w2", "b.lokr_w1", "b.lokr_w2_a", "b.lokr_w2_b")
    guard.lora = {name: torch.ones(2, 2) for name in names}
    assert guard.compares(1, 0, 0)
    with guard.without_lora():
        assert [name for name, matrix in guard.lora.items() if not matrix.any()] == ["a.lokr_w2", "b.lokr_w2_b"]
    assert all(matrix.all() for matrix in guard.lora.values())


@pytest.mark.parametrize("photos", [1, 4])
@pytest.mark.parametrize("effect", [0.1, 0.3, 0.6, 1.0])  # 1: the LoRA of 3 times the good rate
def test_healthy_runs_are_not_stopped(photos, effect):
    doubts = 0
    for seed in range(25):
        rng, guard = random.Random(seed), guard_of(b=1e-3)
        for step in range(1, 401):
            ratio = drawn(rng, GOOD, photos) ** (effect * min(step / 20, 1))
            compared(guard, step, -step % 100, ratio, rng.lognormvariate(-1.1, 1.5), 400 - step)
            doubts += guard.doubt is not None
        guard.check_save(400, final=True)
        guard.check_end(400, 0.6, 0.61)
    assert doubts <= 40  # of 10,000 steps; a save would wait for the next one


def outcome(good: int, photos: int, ramp: int, save_every: int, seed: int) -> str:
    """What comes of `good` steps, then 30 at a rate whose first `ramp` updates ruin the run; sets as `commit` keeps."""
    rng, guard = random.Random(seed), guard_of(b=1e-3)
    sets: list[int] = []
    end = good + 30
    for step in range(1, end + 1):
        share = min(max(step - good - 1, 0) / ramp, 1.0)
        ratio = drawn(rng, GOOD, photos) ** 0.5 if step > 1 else 1.0
        ratio += share * (drawn(rng, BAD, photos) - ratio)
        try:
            compared(guard, step, -step % save_every, ratio, until_end=end - step)
            if step == end:
                guard.check_save(step, final=True)
        except DeadRunError as error:
            older = [saved for saved in sets if saved < (error.since or 0)]
            if older:
                return "back to a good one" if older[-1] <= good else "back to a bad one"
            return "start over" if good < save_every else "lost"
        if step == good:
            state = json.loads(json.dumps(guard.state_dict()))
            guard = guard_of(b=1e-3)
            guard.load_state_dict(state)
        if step % save_every == 0 and guard.doubt is None:
            far = [saved for saved in sets if step - saved >= guard.apart(step)]
            sets = [*(far[-1:] or sets[:1]), step]
    return "missed"


@pytest.mark.parametrize("photos", [1, 4])
@pytest.mark.parametrize("good", [0, 4, 18, 60])
def test_a_rate_too_high_ends_the_run_and_the_good_state_is_kept(good, photos):
    cases = itertools.product((1, 2), (1, 2, 4, 10), range(10))
    counts = Counter(outcome(good, photos, *case) for case in cases)
    others = counts.pop("back to a bad one", 0) + counts.pop("lost", 0)
    assert others <= (4 if photos == 1 else 0)  # a first bad update may show little
    assert set(counts) <= {"back to a good one", "start over"}


def test_what_was_never_finite_is_not_put_down_to_the_rate():
    guard = guard_of(nonfinite_steps=3)
    assert not any(guard.allows_update(step, math.nan, math.nan) for step in (1, 2))
    with pytest.raises(DeadRunError, match=r"in each of 2 steps; nothing was trained yet.*model.*photos"):
        guard.check_save(2, final=True)
    with pytest.raises(DeadRunError, match=r"3 steps in a row; nothing was trained yet"):
        guard.allows_update(3, math.nan, math.nan)


def test_a_validation_loss_above_the_starts_ends_the_run():
    guard = guard_of()
    guard.check_end(20, 0.6, 0.61)
    guard_of(enabled=False).check_end(20, 0.6, 6.0)
    for loss in (0.62, math.nan):
        with pytest.raises(DeadRunError, match=r"step 20: the validation loss is .* it was 0\.6:.*train\.lr") as end:
            guard.check_end(20, 0.6, loss)
        assert end.value.since == 1  # no comparison says where it began


def test_a_doubt_ends_the_run_after_its_limit_and_a_passing_one_does_not():
    guard = guard_of(diverging_steps=20)
    assert sum(compared(guard, step, 1000, 0.9) for step in range(1, 51)) == 6
    other = guard_of(diverging_steps=20)
    other.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert other.state_dict() == guard.state_dict()
    for step in range(51, 60):
        assert compared(other, step, 100, 3.0 if step > 51 else 0.9) == (step in (51, *range(54, 60)))
        assert (other.doubt is not None) == (step >= 54)
    [compared(other, step, 100, 0.5) for step in range(60, 70)]
    assert other.doubt is None
    with pytest.raises(DeadRunError, match=r"step 120: .* 3 times that without it.*train\.lr") as end:
        [compared(guard, step, 1000, 3.0) for step in range(51, 140)]
    assert end.value.since == 50


@pytest.mark.parametrize(("ratio", "last", "verdict"), [(0.99, 0.98, 0), (1.1, 0.98, 1.04), (0.6, 1.2, 1.2)])
def test_the_last_16_steps_are_compared_and_their_mean_or_that_of_8_decides_at_the_end(ratio, last, verdict):
    guard = guard_of(b=1e-3)
    done = [compared(guard, step, 1000, ratio if step > 14 else 0.99, until_end=30 - step) for step in range(1, 23)]
    assert done == [step in (1, 4, 8, *range(15, 23)) for step in range(1, 23)]
    assert all(compared(guard, step, 1000, last, until_end=30 - step) for step in range(23, 31))
    guard.check_save(30)
    message = rf"step 30: .* {verdict} times that without it.*train\.lr"
    with pytest.raises(DeadRunError, match=message) if verdict else nullcontext():
        guard.check_save(30, final=True)


def test_few_comparisons_decide_by_a_tenth():
    for ratio, in_doubt in ((1.15, False), (1.25, True)):  # of the second of two steps
        guard = guard_of()
        compared(guard, 1, 0, 1.0)
        compared(guard, 2, 0, ratio)
        assert (guard.doubt is not None) == in_doubt
    for step in range(3, 9):
        compared(guard, step, 0, 0.95)
    assert guard.doubt is None
    compared(guard, 9, 0, 1.3)
    assert guard.doubt  # 1.03, the mean of eight


def test_a_loaded_lora_is_compared_with_its_own_start():
    guard = guard_of()
    assert all(compared(guard, step, 0, 1.5) for step in range(1, 20))
    assert guard.doubt is None
    compared(guard, 20, 0, 4.0)
    assert guard.doubt
    assert all(guard.allows_update(step, 2.4, 0.0) for step in range(21, 40))  # not for want of a gradient


@pytest.mark.parametrize("limit", [1.1, 100.0])  # of a whole model, of adapters
def test_weights_that_have_grown_far_are_broken(limit):
    guard = guard_of(growth=limit)
    guard.allows_update(1, 0.3, 1.0)  # measures the weights before the first step
    guard.lora[A].data.fill_(0.99 * limit)
    guard.check_save(7)
    guard.lora[A].data.fill_(1.01 * limit)
    with pytest.raises(DeadRunError, match=r"-fold .*train\.lr") as end:
        guard.check_save(8)
    assert end.value.since == 8


def test_a_streak_that_is_not_finite_is_doubted_and_a_single_step_is_not():
    guard = guard_of()
    doubts = []
    for step, loss in enumerate((0.3, math.nan, 0.3, math.inf, math.nan, 0.3), 1):
        guard.allows_update(step, loss, 1.0)
        doubts.append(guard.doubt)
    assert doubts == [None, None, None, None, "the last 2 steps were not finite", None]
    guard.lora[B].data.fill_(1.0)
    for step in (7, 8):
        guard.allows_update(step, math.nan, 1.0)
    with pytest.raises(DeadRunError, match="last 2 steps were not finite") as end:
        guard.check_save(8, final=True)
    assert end.value.since == 7


def test_norms_of_no_tensor_and_of_one_without_elements():
    assert tensor_norms([]).shape == (0,)
    assert tensor_norms([torch.empty(0), torch.tensor([3.0, -4.0])]).tolist() == [0.0, 5.0]
    assert tensor_norms([torch.tensor([3.0, -4.0])], math.inf).tolist() == [4.0]
