"""The guard on the real model: runs that die end with the cause, healthy runs pass."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coat_flux.config.coat import COATConfig
from coat_flux.config.job_file import load_job_yaml
from coat_flux.mini_flux import EMBEDDED_MODEL, make_mini_flux
from coat_flux.saves.commit import committed_sets, set_step
from coat_flux.saves.repair import way_back
from coat_flux.trainers.optimizer import build_optimizer
from coat_flux.trainers.standalone.network import lora_parameters
from coat_flux.trainers.standalone.session import Session
from coat_flux.trainers.standalone.trainer import COATTrainer
from coat_flux.watch.guard import DeadRunError
from tests.helpers.aitk_standin.host import REPOSITORY
from tests.helpers.changes import change
from tests.helpers.engine_job import assert_same_end, train
from tests.helpers.flux import coat_flux_model, loss_of, predict
from tests.helpers.step_watch import step_watch

KEPT = {"memory": {"checkpointing": "none"}}


class Run:
    """A training loop around the tiny FLUX, which calls the guard as trainers do; real runs start with `zero_b`."""

    def __init__(self, lr: float, block: dict[str, Any] | None = None, *, zero_b: bool = False, **guard: Any) -> None:
        block = KEPT | (block or {})
        config = COATConfig.from_dict(block)
        self.model, _, _ = coat_flux_model(block)
        self.lora: dict[str, nn.Parameter] = lora_parameters(self.model)
        if zero_b:
            for name, param in self.lora.items():
                param.data *= ".lora_B." not in name
        self.optimizer = build_optimizer(list(self.lora.values()), lr, config, {})
        config = dataclasses.replace(config, guard=dataclasses.replace(config.guard, **guard))
        self.watch, self.log = step_watch(config, self.model, self.lora)
        self.guard = self.watch.guard
        self.step = 0

    def train(self, steps: int, change: Callable[[int, Tensor], Tensor] = lambda step, loss: loss) -> list[float]:
        """Do some steps, the loss of each changed by `change`; returns the losses."""
        losses = []
        for number in range(self.step + 1, self.step + steps + 1):
            self.optimizer.zero_grad(set_to_none=True)
            with self.watch.casts(number):
                loss = change(number, loss_of(predict(self.model)))
                loss.backward()
                norm = nn.utils.clip_grad_norm_(self.lora.values(), 1.0)
                losses.append(loss.item())
                updates = self.guard.allows_update(number, losses[-1], norm.item())
                if updates:
                    self.optimizer.step()
            self.step = number
            if updates:
                self.guard.after_update(number)
        return losses


def test_a_healthy_run_passes_and_is_told_what_its_casts_lose():
    run = Run(1e-3, zero_b=True, health_every=4, dead_lora_steps=2)
    losses = run.train(4)
    run.guard.check_save(4, final=True)
    assert losses[-1] < losses[0]
    assert run.guard.skipped == 0
    assert [line.split(":")[0] for line in run.log.details] == ["step 2", "step 4"]
    for kind in ("linear inputs", "gradients", "saved activations", "exp_avg", "exp_avg_sq"):
        assert f" {kind} " in run.log.details[0]
    assert "saturated" not in "".join(run.log.details)


@pytest.mark.parametrize(
    "block",
    [
        {"activation": {"grad_format": "e4m3"}},
        {"activation": {"flow": "generic"}},
        {"memory": {"checkpointing": "all"}},
    ],
    ids=["fused", "generic", "recomputed"],
)
def test_being_watched_changes_no_bit(block):
    watched, unwatched = Run(1e-3, block, health_every=1), Run(1e-3, block, health_every=1000)
    unwatched.step = watched.step = 9  # not the step of the first look
    assert watched.train(2) == unwatched.train(2)
    assert all(torch.equal(watched.lora[name], unwatched.lora[name]) for name in watched.lora)
    assert (len(watched.log.details), len(unwatched.log.details)) == (1, 0)  # the first step of a process is left alone


def test_a_cast_that_loses_too_much_ends_the_run():
    run = Run(1e-3)
    block = run.model.transformer_blocks[1]
    block.attn.to_out[0].base_layer.bias.data[0] = 1e7  # what follows has one huge channel
    with pytest.raises(DeadRunError, match=r"step 2: .* saved activations .* became zero .*activation\.format: e5m2"):
        run.train(2)


def test_gradients_that_vanish_in_e4m3_name_their_layer_and_pass_in_e5m2():
    def spiked(grad_format: str) -> Run:
        activation = {"grad_format": grad_format, "linear_granularity": "per_tensor"}  # rows have scales of their own
        run = Run(1e-3, {"activation": activation}, max_underflow=0.9)  # e5m2 loses 56 %, e4m3 98 %
        run.train(1)
        with run.watch.casts(2):
            prediction = predict(run.model).float()
            weight = torch.ones_like(prediction)
            weight[0, 0] = 1e9  # of one token's error
            (weight * prediction.square()).mean().backward()
        return run

    with pytest.raises(DeadRunError, match=r"exclude: \[single_transformer_blocks\.1\.proj_out\]") as caught:
        spiked("e4m3")
    assert "grad_format: e5m2" in str(caught.value)
    assert "gradients" in spiked("e5m2").log.details[0]


def clothing_run(root: Path, lr: float, steps: int, from_step: int | None = None) -> list[float]:
    """Run `flux_clothing_tiny.yaml`, one photo a step, two held out; returns losses on these at the start and now."""
    job = load_job_yaml(REPOSITORY / "configs" / "flux_clothing_tiny.yaml")
    entry = job["config"]["process"][0]
    train = {"lr": lr, "steps": steps, "batch_size": 1, "lr_scheduler": "constant", "disable_sampling": True}
    entry["train"].update(train)
    changes = {"training_folder": str(root), "model.name_or_path": str(root / EMBEDDED_MODEL), "save.save_every": 6}
    changes["coat.memory.checkpointing"] = "none"
    folder = str(REPOSITORY / "datasets_example" / "clothing")
    change(entry, {**changes, "datasets.0.folder_path": folder, "validation": {"hold_out": 2, "every": 100}})
    kept: list[Session] = []
    COATTrainer(job, observer=kept.append).train(from_step=from_step)
    return [loss for _, loss in kept[-1].record["held_out_loss"]]


def test_a_rate_too_high_ends_the_run_and_the_way_back_ends_well(tmp_path):
    make_mini_flux(tmp_path / EMBEDDED_MODEL)
    clothing_run(tmp_path, 2e-3, 18)
    with pytest.raises(DeadRunError, match=r"times that without it.*train\.lr.* --from-step 12") as end:
        clothing_run(tmp_path, 0.3, 30)
    kept = [set_step(folder) for folder in committed_sets(tmp_path / "flux_clothing_tiny")]
    assert (end.value.since, kept) == (19, [18, 12])
    assert "nothing has been saved yet" in way_back(tmp_path / "no run", 19, 4, str)
    start, *_, last = clothing_run(tmp_path, 2e-3, 18, from_step=12)
    assert last < start


def test_comparisons_change_no_bit_of_a_run(place):
    average = {"ema_config": {"use_ema": True, "ema_decay": 0.9}}
    blocks = {"network": {"dropout": 0.2}, "train": {"steps": 9, "gradient_accumulation": 2, **average}}
    runs = [train(f"guard_{on}", place, coat={"guard": {"enabled": on}}, **blocks).parent for on in (True, False)]
    assert_same_end(*runs)
