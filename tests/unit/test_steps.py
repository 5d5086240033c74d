"""`train_step` where the device decides alone: the same run, each step judged and reported under its own number."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coat_core.optim import FP8AdamW
from coat_flux.config.job_sections import EMASection
from coat_flux.trainers.standalone import trainer as steps
from coat_flux.trainers.standalone.network import LoraEMA
from coat_flux.trainers.standalone.trainer import settle, train_step
from coat_flux.trainers.standalone.workers import Workers
from coat_flux.watch.guard import DeadRunError
from coat_flux.watch.run_tables import StepStats
from tests.helpers.asserts import assert_all_bitwise
from tests.helpers.guard_limits import set_limits
from tests.helpers.step_watch import step_watch

NAMES = ("transformer.a.lora_A.weight", "transformer.a.lora_B.weight")
COAT = "memory: {log_memory_stats: false}"


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, health_every=50, dead_lora_steps=40, nonfinite_steps=3)


class Run:
    """The parts of a session that a step touches, around two matrices; it is its own objective.

    Numbers are read one step late if `late`, and steps are replayed if `captures`; `spoil`: draw → a factor of its
    loss; `tokens`: rows of a batch's latents, of each step in turn.
    """

    def __init__(
        self, late: bool, spoil: dict[int, float], *, captures: bool = False, tokens: tuple[int, ...] = (8,)
    ) -> None:
        self._spoil, self._tokens = spoil, tokens
        draw = torch.Generator().manual_seed(0)
        self.lora = {name: nn.Parameter(torch.randn(4, 4, generator=draw)) for name in NAMES}
        self.watch, self.lines = step_watch(COAT, lora=self.lora)
        self.rows: list[StepStats] = []
        self.read_at: list[int] = []  # steps done when each row came
        optimizer = FP8AdamW(self.lora.values(), lr=1e-3, capturable=True)
        train = SimpleNamespace(gradient_accumulation=2, max_grad_norm=1.0)
        self.session: Any = SimpleNamespace(
            job=SimpleNamespace(train=train, seed=3, coat=SimpleNamespace(fallback="auto")),
            transformer=nn.Identity(),
            workers=Workers("cpu"),
            watch=self.watch,
            lora=self.lora,
            dataset=SimpleNamespace(batch=lambda batch: {}),
            objective=self,
            optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
            ema=LoraEMA(self.lora, EMASection(ema_decay=0.9)),
            live=SimpleNamespace(poll=frozenset),
            log=SimpleNamespace(step=self._record, info=self.lines.info),
            epoch=0,
            step=0,
            outstanding=None,
            skips_on_device=late,
            captures=captures,
            fused=None,
            graphs=None,
        )

    def draw(self, batch: dict[str, Tensor], draw: int) -> dict[str, Tensor]:
        tokens = self._tokens[draw // 2 % len(self._tokens)]
        x = torch.randn(tokens, 4, generator=torch.Generator().manual_seed(draw))
        return {"latents": x, "factor": torch.tensor(self._spoil.get(draw, 1.0))}

    def loss(self, drawn: dict[str, Tensor]) -> Tensor:
        x = drawn["latents"]
        down, up = self.lora.values()
        return (x @ down.t() @ up.t() - x).square().mean() * drawn["factor"]

    def __call__(self, batch: dict[str, Tensor], draw: int) -> Tensor:
        return self.loss(self.draw(batch, draw))

    def _record(self, stats: StepStats) -> None:
        self.rows.append(stats)
        self.read_at.append(self.session.step)

    def train(self, count: int) -> None:
        batches = (SimpleNamespace(draw=draw) for draw in range(self.session.step * 2, 1000))
        for _ in range(count):
            train_step(self.session, batches, SimpleNamespace(asked=False))

    def tensors(self) -> dict[str, Tensor]:
        averages = {f"average {name}": x for name, x in self.session.ema.shadow.items()}
        states = {
            f"{key} of {name}": value
            for name, parameter in self.lora.items()
            for key, value in self.session.optimizer.state[parameter].items()
        }
        return {**self.lora, **averages, **states}


@pytest.mark.parametrize("spoil", [{}, {9: math.nan}, {8: math.inf, 10: math.nan, 15: math.inf}], ids=str)
def test_a_late_run_is_the_same_run(spoil: dict[int, float]) -> None:
    late, prompt = Run(True, spoil), Run(False, spoil)
    for run in (late, prompt):
        run.train(9)
    assert late.session.outstanding[0].step == 9
    assert late.read_at == [1, 2, 4, 5, 6, 7, 8, 9]  # the first two at once, the others when the next is under way
    settle(late.session)
    assert late.session.outstanding is None
    assert_all_bitwise(late.tensors(), prompt.tensors())
    exact = [[repr(replace(row, seconds=0.0)) for row in run.rows] for run in (late, prompt)]
    assert exact[0] == exact[1]
    assert late.lines.said == prompt.lines.said
    assert late.watch.state_dict() == prompt.watch.state_dict()
    assert len(late.lines.said) == len(spoil)


@pytest.mark.parametrize(("norm", "clipped"), [(4.0, 1.0), (0.25, 0.25)])
def test_gradients_are_scaled_to_max_grad_norm_and_shorter_ones_stay(norm: float, clipped: float) -> None:
    run = Run(False, {})
    for param in run.lora.values():
        param.grad = torch.full((4, 4), norm / math.sqrt(32))
    assert steps._clipped(run.session, torch.tensor(2.0)).tolist() == pytest.approx([2.0, norm])
    grads = torch.cat([param.grad.flatten() for param in run.lora.values() if param.grad is not None])
    assert grads.norm().item() == pytest.approx(clipped, rel=1e-4)


def test_a_dead_run_ends_under_the_right_number() -> None:
    run = Run(True, {10: math.nan, 12: math.nan, 14: math.nan})
    with pytest.raises(DeadRunError, match=r"step 8: loss=nan.* for 3 steps in a row") as error:
        run.train(12)
    assert (error.value.since, run.session.step) == (6, 9)
    assert run.watch.guard.doubt is not None


def test_what_is_outstanding_is_judged_before_anything_is_saved() -> None:
    run = Run(True, {10: math.nan, 12: math.nan})
    run.train(7)
    assert run.watch.guard.doubt is None  # only step 6 is known
    settle(run.session)
    assert run.watch.guard.doubt == "the last 2 steps were not finite"


def test_parameters_are_checked_under_the_step_that_broke_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for late in (True, False):
        run = Run(late, {})
        with suppress(DeadRunError):
            run.train(38)
        monkeypatch.setattr(run.watch.guard, "_check", lambda step, dead: found.append((step, dead)))
        run.train(4)
    assert found == [(40, True)] * 2
