"""Full fine-tuning in the stand-alone trainer, on the embedded model: the update in backward, saves, resuming."""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file

from coat_flux.cli.entry import main
from coat_flux.config.findings import ConfigError
from coat_flux.plan.job import JobFacts
from coat_flux.plan.predict import optimizer_bytes
from coat_flux.saves.commit import newest_set
from coat_flux.saves.errors import ResumeError
from coat_flux.saves.repair import go_back
from coat_flux.trainers import full
from coat_flux.trainers.standalone import session, trainer
from coat_flux.trainers.standalone.trainer import COATTrainer
from tests.helpers.asserts import assert_all_bitwise, assert_bitwise
from tests.helpers.engine_job import assert_same_end, engine_job, full_job, tensors_in

WHOLE = {"steps": 3, "gradient_accumulation": 2, "max_grad_norm": 1e9}  # which no gradient reaches
EACH_STEP = {"dtype": "bf16", "save_every": 1}


@pytest.fixture(autouse=True, scope="module")
def _shards() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full, "SHARD_BYTES", 300_000)
        yield


@pytest.fixture(scope="module")
def separate(place: dict[str, Path]) -> Path:
    """A run of three steps of two micro-batches, all gradients first, then the update."""
    return COATTrainer(full_job("separate", place, coat={}, train=WHOLE, save=EACH_STEP)).train()


class Killed(BaseException):
    """Ends a process like SIGKILL: nothing of ours catches it."""


def test_updates_in_backward_are_the_separate_step_to_the_bit_wherever_moments_are(place, separate):
    """Killed and resumed twice, with moments in CPU memory and not; they take what `plan` has for them."""
    seen: list[tuple[int, bool]] = []
    kills, planned = [2, 3], {}

    def kill(session: Any) -> None:
        optimizer = session.optimizer
        assert all(param.grad is None for param in session.lora.values())
        slots = sum(x.nbytes for x in optimizer.staging)
        if offload not in planned:
            planned[offload] = optimizer_bytes(JobFacts(session.job))
        assert optimizer.state_bytes() + slots == planned[offload]
        seen.append((session.step, slots > 0))
        if kills and session.step == kills[0]:  # which is not saved yet
            kills.pop(0)
            raise Killed

    for offload in ("cpu", "none", "cpu"):
        train = WHOLE | {"fused_backward": True}
        job = full_job("offloaded", place, coat={"optimizer": {"offload": offload}}, train=train, save=EACH_STEP)
        with pytest.raises(Killed) if kills else nullcontext():
            final = COATTrainer(job, observer=kill).train()
    assert_same_end(final.parent, separate.parent)
    assert_all_bitwise(tensors_in(final / full.PART), tensors_in(separate / full.PART))
    runs = ((0, 1, 2), True), ((1, 2, 3), False), ((2, 3), True)
    assert seen == [(step, offloaded) for steps, offloaded in runs for step in steps]


def test_the_saved_model_loads_and_everything_was_trained(place, separate):
    saved = tensors_in(separate / full.PART)
    start = FluxTransformer2DModel.from_pretrained(place["model"], subfolder="transformer")
    assert len(list((separate / full.PART).glob("*.safetensors"))) > 1
    loaded = FluxTransformer2DModel.from_pretrained(separate, subfolder=full.PART, torch_dtype=torch.bfloat16)
    assert_all_bitwise(dict(loaded.named_parameters()), saved)
    linears = [name for name, param in start.named_parameters() if param.ndim > 1]
    same = [name for name in linears if torch.equal(dict(start.named_parameters())[name].bfloat16(), saved[name])]
    assert same == []
    assert not any(path.name == "lora.safetensors" for path in separate.parent.rglob("*"))  # nothing is kept twice


def test_saves_are_rotated_gone_back_to_and_belong_to_their_run(place, separate):
    run = separate.parent
    assert {path.name for path in run.glob("separate*")} == {"separate", "separate_000000001", "separate_000000002"}
    lora = engine_job("separate", **place, coat={}, train=WHOLE)
    with pytest.raises(ResumeError, match=r"network\.linear null -> 4"):
        COATTrainer(lora).train()
    final = tensors_in(separate / full.PART)
    go_back(run, 2)
    assert not separate.exists()
    job = full_job("separate", place, coat={}, train=WHOLE, save=EACH_STEP)
    assert_all_bitwise(tensors_in(COATTrainer(job).train() / full.PART), final)
    (separate / full.PART / "config.json").unlink()  # a published folder that lost a file is put back
    assert COATTrainer(job).train() == separate
    assert (separate / full.PART / "config.json").is_file()


def test_include_and_exclude_choose_what_is_trained_and_room_is_asked_for_the_whole_model(place, monkeypatch):
    asked = []
    monkeypatch.setattr(trainer, "require_room", lambda folder, space=None: asked.append(space) or [])
    coat = {"include": ["*.attn.*", "x_embedder"], "exclude": ["single_transformer_blocks.*", "*.bias"]}
    job = full_job("some", place, coat=coat, train={"steps": 2, "ema_config": {"use_ema": True, "ema_decay": 0.5}})
    final = COATTrainer(job).train()
    whole = sum(x.nbytes for x in tensors_in(final / full.PART).values())  # weights in codes count as well
    assert [space.lora for space in asked if space is not None] == [whole]
    start = FluxTransformer2DModel.from_pretrained(place["model"], subfolder="transformer", torch_dtype=torch.bfloat16)
    start = dict(start.named_parameters())
    saved = tensors_in(final / full.PART)
    assert {x.dtype for x in saved.values()} == {torch.float16}
    changed = {name for name, param in start.items() if not torch.equal(param.half(), saved[name])}
    wanted = {name for name in start if re.fullmatch(r"(x_embedder|transformer_blocks\..*\.attn\..*)\.weight", name)}
    assert changed <= wanted
    assert {name for name in wanted if "norm" not in name} <= changed
    state = newest_set(final.parent)
    raw, average = load_file(state / "lora.safetensors"), load_file(state / "ema.safetensors")
    assert raw.keys() == average.keys() == wanted
    assert {x.dtype for x in raw.values()} == {torch.bfloat16}
    assert_bitwise(saved["x_embedder.weight"], average["x_embedder.weight"].half())


def test_a_pattern_that_chooses_nothing_is_refused_before_anything_is_loaded(place, tmp_path, monkeypatch, capsys):
    job = full_job("typo", place, coat={"include": ["*.atn.*"]}, train=WHOLE)
    monkeypatch.setattr(session, "load_encoders", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=r"coat\.include: '\*\.atn\.\*' matches no parameter"):
        COATTrainer(job).train()
    path = tmp_path / "typo.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    assert main(["check", str(path), "--no-data"]) == 2
    assert f"error: {path}: config.process[0].coat.include: '*.atn.*' matches no" in capsys.readouterr().err
