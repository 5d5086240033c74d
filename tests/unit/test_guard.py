"""`RunGuard`: each check by its values, thresholds, and what the messages name."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from coat_flux.config.coat import GuardOptions
from coat_flux.watch.guard import DeadRunError, RunGuard

A, B = "transformer.block.to_q.lora_A.weight", "transformer.block.to_q.lora_B.weight"


def guard_of(said: list[str] | None = None, **options: Any) -> RunGuard:
    """A guard over one adapter, A ones and B zeros, with these options."""
    lora = {A: torch.nn.Parameter(torch.ones(2, 4)), B: torch.nn.Parameter(torch.zeros(4, 2))}
    return RunGuard(dataclasses.replace(GuardOptions(), **options), lora, [].append if said is None else said.append)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (0.5, math.nan), (0.5, math.inf)])
def test_a_single_step_that_is_not_finite_is_skipped_and_counted(loss: float, norm: float) -> None:
    said: list[str] = []
    guard = guard_of(said)
    assert guard.allows_update(1, 0.5, 1.0) is True
    assert guard.allows_update(2, loss, norm) is False
    assert guard.allows_update(3, 0.4, 1.0) is True
    assert guard.skipped == 1
    assert said == [f"step 2: loss={loss}, gradient norm {norm}: not finite, the update is skipped (1 so far)"]


def test_steps_in_a_row_that_are_not_finite_end_the_run() -> None:
    guard = guard_of(nonfinite_steps=3)
    for step, loss in enumerate([math.nan, math.nan, 0.5, math.nan, math.nan], 1):
        assert guard.allows_update(step, loss, 1.0) is (loss == 0.5)
    with pytest.raises(DeadRunError, match=r"step 6: loss=nan, .* 3 steps in a row"):
        guard.allows_update(6, math.nan, 1.0)
    assert guard.skipped == 5


def test_zero_gradients_in_a_row_end_the_run() -> None:
    guard = guard_of(zero_gradient_steps=2)
    for step, norm in enumerate([0.0, 1e-30, 0.0], 1):
        assert guard.allows_update(step, 0.1 * step, norm)
    with pytest.raises(DeadRunError, match=r"step 4: gradient norm 0 for 2 steps in a row.*activation\.grad_format"):
        guard.allows_update(4, 0.9, 0.0)


def test_a_pinned_loss_ends_the_run_and_its_neighbour_does_not() -> None:
    guard = guard_of(pinned_loss_steps=3)
    for step, loss in enumerate([0.5, 0.5, math.nextafter(0.5, 1), 0.5, 0.5], 1):
        assert guard.allows_update(step, loss, 1.0)
    with pytest.raises(DeadRunError, match=r"step 6: loss=0.5 for 3 steps in a row"):
        guard.allows_update(6, 0.5, 1.0)


@pytest.mark.parametrize("name", [B, "lora_unet_block_to_q.lora_up.weight", "transformer$$block$$to_q.lora_up.weight"])
def test_a_lora_b_that_stays_zero_ends_the_run_in_either_hosts_names(name: str) -> None:
    guard = guard_of(dead_lora_steps=3)
    guard.lora = {A: guard.lora[A], name: guard.lora[B]}
    guard.after_update(1)
    guard.after_update(2)
    with pytest.raises(DeadRunError, match=r"step 3: every lora_B is still zero after 3 updates.*raise train\.lr"):
        guard.after_update(3)


def test_one_living_lora_b_is_enough_and_a_warm_up_has_two_updates() -> None:
    guard = guard_of(dead_lora_steps=1)
    guard.lora = {**guard.lora, "other.lora_B.weight": torch.zeros(4, 2)}
    guard.after_update(1)  # lr 0 in the first step of a warm-up
    guard.lora["other.lora_B.weight"][3, 1] = -1e-20
    guard.after_update(2)
    guard.check_end(2)
    assert guard.updates == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_parameter_that_is_not_finite_is_found_before_a_save_and_at_intervals(value: float) -> None:
    guard = guard_of(health_every=2, dead_lora_steps=100)
    guard.lora[A].data[1, 3] = value
    message = f"step 7: 1 of 2 trained tensors are not finite .{A}.*lower train.lr"
    with pytest.raises(DeadRunError, match=message):
        guard.check_now(7)
    guard.after_update(6)
    with pytest.raises(DeadRunError, match=message):
        guard.after_update(7)


def test_the_end_of_a_run_is_checked_however_short_it_was() -> None:
    guard = guard_of(enabled=False)
    with pytest.raises(DeadRunError, match="every lora_B is still zero after 0 updates"):
        guard.check_end(1)
    guard.lora[B].data[0, 0] = 1.0
    guard.check_end(1)
    assert not guard.lora[B].grad_fn


def test_switched_off_it_skips_and_nothing_else() -> None:
    guard = guard_of(enabled=False, nonfinite_steps=1, zero_gradient_steps=1, pinned_loss_steps=2, dead_lora_steps=2)
    guard.lora[A].data[0, 0] = math.nan
    for step in range(1, 6):
        assert guard.allows_update(step, 0.5, 0.0) is True
        guard.after_update(step)
    guard.check_now(5)
    assert [guard.allows_update(6, math.nan, 1.0), guard.allows_update(7, 0.5, math.inf)] == [False, False]
    assert guard.skipped == 2


def test_counters_go_on_after_a_resume() -> None:
    first = guard_of(nonfinite_steps=3, pinned_loss_steps=4, zero_gradient_steps=4)
    for step, loss in enumerate([0.25, 0.25, math.nan, math.nan], 1):
        first.allows_update(step, loss, 0.0)
    state = json.loads(json.dumps(first.state_dict()))
    assert state["skipped"] == 2
    second = guard_of(nonfinite_steps=3, pinned_loss_steps=4, zero_gradient_steps=4)
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
