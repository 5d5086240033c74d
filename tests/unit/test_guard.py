"""`RunGuard`: each check by its values and thresholds; runs that explode are doubted, then ended."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from coat_flux.config.coat import GuardOptions
from coat_flux.watch.guard import WINDOW, DeadRunError, RunGuard, tensor_norms

A, B = "transformer.block.to_q.lora_A.weight", "transformer.block.to_q.lora_B.weight"


def guard_of(lines: list[str] | None = None, **options: Any) -> RunGuard:
    lora = {A: torch.nn.Parameter(torch.ones(2, 4)), B: torch.nn.Parameter(torch.zeros(4, 2))}
    log = [].append if lines is None else lines.append
    return RunGuard(dataclasses.replace(GuardOptions(), **options), lora, log)


def test_norms_of_no_tensor_and_of_one_without_elements() -> None:
    assert tensor_norms([]).shape == (0,)
    assert tensor_norms([torch.empty(0), torch.tensor([3.0, -4.0])]).tolist() == [0.0, 5.0]
    assert tensor_norms([torch.tensor([3.0, -4.0])], math.inf).tolist() == [4.0]


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (0.5, math.inf)])
def test_a_single_step_that_is_not_finite_is_skipped_and_counted(loss: float, norm: float) -> None:
    lines: list[str] = []
    guard = guard_of(lines)
    assert [guard.allows_update(*step) for step in ((1, 0.5, 1.0), (2, loss, norm), (3, 0.4, 1.0))] == [1, 0, 1]
    assert (guard.skipped, guard.doubt) == (1, None)
    assert len(lines) == 1
    assert lines[0].startswith(f"step 2: loss={loss}, gradient norm {norm}: not finite")


STREAKS: dict[str, tuple[dict[str, int], list[tuple[float, float]], str]] = {
    "not finite": (
        {"nonfinite_steps": 3},
        [(loss, 1.0) for loss in (math.nan, math.nan, 0.5, math.nan, math.inf, math.nan)],
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
def test_a_streak_ends_the_run_and_an_interrupted_one_does_not(name: str) -> None:
    options, steps, message = STREAKS[name]
    guard = guard_of(**options)
    for number, (loss, norm) in enumerate(steps[:-1], 1):
        assert guard.allows_update(number, loss, norm) is math.isfinite(loss)
    with pytest.raises(DeadRunError, match=message) as end:
        guard.allows_update(len(steps), *steps[-1])
    assert end.value.since == (4 if name == "not finite" else None)
    assert guard.skipped == (5 if name == "not finite" else 0)


@pytest.mark.parametrize("name", [B, "transformer$$block$$to_q.lora_up.weight"])
def test_a_lora_b_that_stays_zero_ends_the_run_in_either_trainers_names(name: str) -> None:
    guard = guard_of(dead_lora_steps=3)
    guard.lora = {A: guard.lora[A], name: guard.lora[B]}
    guard.after_update(1)
    guard.after_update(2)
    with pytest.raises(DeadRunError, match=r"step 3: every lora_B is still zero after 3 updates.*train\.lr"):
        guard.after_update(3)


def test_one_living_lora_b_is_enough_and_a_warm_up_has_two_updates() -> None:
    guard = guard_of(dead_lora_steps=1)
    guard.lora = {**guard.lora, "other.lora_B.weight": torch.zeros(4, 2)}
    guard.after_update(1)  # lr 0 in the first step of a warm-up
    guard.lora["other.lora_B.weight"][3, 1] = -1e-20
    guard.after_update(2)
    guard.check_save(2, final=True)
    assert guard.updates == 2


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_parameter_that_is_not_finite_is_found_before_a_save_and_at_intervals(value: float) -> None:
    guard = guard_of(health_every=2, dead_lora_steps=100)
    guard.lora[A].data[1, 3] = value
    message = f"step 7: 1 of 2 trained tensors are not finite .{A}.*lower train.lr"
    with pytest.raises(DeadRunError, match=message):
        guard.check_save(7)
    guard.after_update(6)
    with pytest.raises(DeadRunError, match=message):
        guard.after_update(7)


def test_switched_off_it_skips_and_checks_the_end_and_nothing_else() -> None:
    guard = guard_of(enabled=False, nonfinite_steps=1, zero_gradient_steps=1, pinned_loss_steps=2, dead_lora_steps=2)
    with pytest.raises(DeadRunError, match="every lora_B is still zero after 0 updates"):
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


def test_counters_go_on_after_a_resume() -> None:
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


def test_parameters_are_read_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
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


def healthy_loss(rng: random.Random) -> float:
    """Of one photo at a random noise level, as the mini-FLUX's at batch 1: 0.15 to 1.1, 0.35 on average."""
    return min(max(rng.lognormvariate(-1.1, 0.5), 0.15), 1.1)


def noise_loss(rng: random.Random) -> float:
    """As of models that predict noise: rarely 45 times as large as usual."""
    return (0.9 if rng.random() < 0.1 else 0.02) * rng.uniform(0.5, 1.5)


def grown(guard: RunGuard, factor: float) -> RunGuard:
    guard.lora[A].data.fill_(factor)
    return guard


Losses = Callable[[random.Random, int], float]  # of a step, from 1
HEALTHY: dict[str, tuple[Losses, float]] = {  # and the growth of the weights in a step
    "one photo": (lambda rng, step: healthy_loss(rng), 0.01),  # to 11-fold: B trained from zero
    "noise": (lambda rng, step: noise_loss(rng), 0.003),
    "four photos, falling": (lambda rng, step: (0.3 + 0.35 * 0.98**step) * rng.lognormvariate(0, 0.25), 0.003),
    "falling tenfold": (lambda rng, step: (0.06 + 0.6 * 0.99**step) * rng.lognormvariate(0, 0.5), 0.01),
    "a plateau": (lambda rng, step: 0.4 * rng.uniform(0.9, 1.1), 0.01),
    "spikes": (lambda rng, step: 5.0 if rng.random() < 0.03 else healthy_loss(rng), 0.01),
    "noisier later": (lambda rng, step: rng.lognormvariate(-1.1, 0.2 + 0.3 * min(step / 300, 1)), 0.01),
    "experts in turn": (lambda rng, step: (0.2 if step // 100 % 2 else 0.6) * rng.uniform(0.8, 1.2), 0.001),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_not_stopped_and_hardly_ever_doubted(name: str) -> None:
    """25 runs of each kind, 200 in all."""
    loss_of, grows = HEALTHY[name]
    doubts = 0
    for seed in range(25):
        rng, guard = random.Random(seed), guard_of()
        guard.lora[B].data.fill_(1e-3)
        for step in range(1, 401):
            assert grown(guard, 1 + step * grows).allows_update(step, loss_of(rng, step), 1.0)
            doubts += guard.doubt is not None
        guard.check_save(400, final=True)
        guard.check_end(400, 0.6, 0.62)
    assert doubts <= 40  # of 10,000 steps; a save would wait for the next one


def diverged_loss(rng: random.Random, photos: int) -> float:
    """Of a FLUX whose output has nothing to do with its input any more: 2, whatever the noise level."""
    return 2.0 * rng.lognormvariate(0, 0.2 / math.sqrt(photos))


def outcome(good: int, photos: int, ramp: int, save_every: int, seed: int) -> str:
    """What comes of `good` steps at a good rate, then a resume at one 25 to 500 times too high.

    The first bad update is that of step good + 1, the loss of the step after next shows it; as on the mini-FLUX, the
    healthy loss is 0.6 and `ramp` updates ruin it. Sets are kept as `commit` keeps them.
    """
    rng, guard = random.Random(seed), guard_of()
    sets: list[int] = []
    for step in range(1, good + 71):
        bad = max(step - good - 1, 0)
        loss = 0.6 * rng.lognormvariate(-0.06 / photos, 0.35 / math.sqrt(photos))
        loss += min(bad / ramp, 1.0) * (diverged_loss(rng, photos) - loss)
        try:
            grown(guard, 1 + bad / 2).allows_update(step, loss, 1.0)
        except DeadRunError as error:
            older = [saved for saved in sets if saved < (error.since or 0)]
            if older:
                return "back to a good one" if older[-1] <= good else "back to a bad one"
            return "start over" if good < save_every else "lost"
        if step == good:
            state = json.loads(json.dumps(guard.state_dict()))
            guard = guard_of()
            guard.load_state_dict(state)
        if step % save_every == 0 and guard.doubt is None:
            apart = max(min(save_every, WINDOW), guard.apart(step))
            far = [saved for saved in sets if step - saved >= apart]
            sets = [*(far[-1:] or sets[:1]), step]
    return "missed"


@pytest.mark.parametrize(
    ("good", "photos", "most"),  # `most`: outcomes other than the best, of 80
    [
        (0, 4, {"missed": 4}),
        (
            0,
            1,
            {"back to a bad one": 1, "missed": 12},
        ),  # a first loss high by luck; the stand-alone trainer measures the end
        (4, 4, {"back to a bad one": 3}),
        (18, 1, {"back to a bad one": 1}),
        (18, 4, {}),
        (60, 1, {"back to a bad one": 1}),
        (60, 4, {}),
    ],
)
def test_a_rate_too_high_ends_the_run_and_the_good_state_is_kept(good: int, photos: int, most: dict[str, int]) -> None:
    cases = itertools.product((1, 2), (1, 2, 4, 10), range(10))
    counts = Counter(outcome(good, photos, *case) for case in cases)
    best = {"back to a good one", "start over"}
    assert {name: count for name, count in counts.items() if name not in best and count > most.get(name, 0)} == {}


def test_a_validation_loss_above_the_starts_ends_the_run() -> None:
    guard = guard_of()
    for step in range(1, 21):
        guard.allows_update(step, 0.5, 1.0)
    guard.check_end(20, 0.6, 0.63)
    guard_of(enabled=False).check_end(20, 0.6, 6.0)
    for loss in (0.64, math.nan):
        with pytest.raises(DeadRunError, match=r"step 20: the validation loss is .* it was 0\.6:.*train\.lr") as end:
            guard.check_end(20, 0.6, loss)
        assert end.value.since == 1  # no loss says where it began
    for step in range(21, 25):
        guard.allows_update(step, 2.0, 1.0)
    with pytest.raises(DeadRunError) as end:
        guard.check_end(24, 0.6, 2.0)
    assert end.value.since == 20
    assert guard.apart(24) == 7  # the state of step 17 or an older one is kept


def test_an_explosion_is_doubted_within_the_window_and_ends_the_run() -> None:
    rng, guard = random.Random(0), guard_of(diverging_steps=30)
    for step in range(1, 101):
        guard.allows_update(step, healthy_loss(rng), 1.0)
    grown(guard, 5.0)
    doubted: list[int] = []

    def explode() -> None:
        for step in range(101, 200):
            guard.allows_update(step, rng.uniform(1.4, 2.5), 1.0)  # what the mini-FLUX shows at ten times its lr
            doubted.extend([step] if guard.doubt else [])

    with pytest.raises(DeadRunError, match=r"last 16 steps .*5\.0-fold.*train\.lr") as end:
        explode()
    assert doubted[0] == 105
    assert 105 - WINDOW <= end.value.since <= 100  # before the update that shows in the loss of step 101
    assert doubted[-1] == end.value.since + 29
    guard.lora[B].data.fill_(1.0)
    with pytest.raises(DeadRunError, match="ends in doubt"):
        guard.check_save(doubted[-1], final=True)


def test_a_doubt_that_passes_leaves_the_run_alone_and_is_resumed_exactly() -> None:
    rng, guard, other = random.Random(0), guard_of(), guard_of()
    for step in range(1, 101):
        guard.allows_update(step, healthy_loss(rng), 1.0)
    grown(other, 5.0).load_state_dict(grown(guard, 5.0).state_dict())
    doubts = []
    for step in range(101, 161):
        for one in (guard, other):
            one.allows_update(step, 2.0 if step <= 120 else 0.35, 1.0)
        assert guard.doubt == other.doubt
        doubts.append(guard.doubt)
    assert any(doubts)
    assert doubts[-1] is None


def test_high_losses_alone_are_no_explosion_nor_are_large_weights_alone() -> None:
    guard = guard_of()
    for step in range(1, 200):
        guard.allows_update(step, (0.3 if step < 100 else 3.0) + step * 1e-6, 1.0)  # another expert's turn, say
        assert guard.doubt is None
    for factor, message in ((99.0, ""), (101.0, r"101-fold .*largest now 101.*train\.lr")):  # broken beyond 100-fold
        guard = guard_of()
        guard.allows_update(1, 0.3, 1.0)  # measures the weights before the first step
        grown(guard, factor)
        if not message:
            guard.check_save(7)
            continue
        with pytest.raises(DeadRunError, match=message) as end:
            guard.check_save(7)
        assert end.value.since == 7


def test_a_streak_that_is_not_finite_is_doubted_and_a_single_step_is_not() -> None:
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
