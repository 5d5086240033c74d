"""Full fine-tuning in a real ai-toolkit checkout, on a CPU; see test_aitk_real.py."""

import json
import math
import signal
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel

from coat_flux.config.job_file import load_job_yaml
from coat_flux.saves.errors import ResumeError
from coat_flux.trainers.standalone.saving import find_resume_point
from tests.helpers.aitk_standin.ends import assert_same_end
from tests.helpers.aitk_standin.host import REPOSITORY
from tests.helpers.aitk_standin.real import Checkout, make_real_entry, real_checkout  # noqa: F401
from tests.helpers.asserts import assert_all_bitwise
from tests.helpers.engine_job import tensors_in

pytestmark = [pytest.mark.aitk, pytest.mark.timeout(3600)]

STEPS = 6
WHOLE = "whole"


def _entry(**train: Any) -> dict[str, Any]:
    """All that has a state: schedule, accumulation, dropped captions in two loader processes, a photo held out."""
    lora_keys = ("network", "save.dtype", "model.qtype", "coat.activation.flow", "coat.optimizer.stochastic_rounding")
    changes = {
        **dict.fromkeys(lora_keys, ...),
        "model.quantize": False,
        "save.save_every": 2,
        "sample.prompts": ["a plain [trigger]"],
        "sample.sample_every": 4,
        "sample.sample_steps": 1,
        "datasets.0.caption_dropout_rate": 0.5,
        "datasets.0.num_workers": 2,
        "validation": {"hold_out": 1, "every": 100},
        "logging": {"verbose": True},  # memory lines are printed, too
        "coat.memory.log_every": 2,
    }
    train = {"steps": STEPS, "gradient_accumulation": 2, "lr": 2e-4, "max_grad_norm": 1e9, **train}
    return make_real_entry(changes, **train)


@pytest.fixture(scope="module", autouse=True)
def _whole(checkout: Checkout) -> None:
    checkout.run(WHOLE, _entry())


def _saved(checkout: Checkout, name: str) -> dict[str, torch.Tensor]:
    return tensors_in(checkout.folder(name) / name / "transformer")


def _original(checkout: Checkout) -> dict[str, torch.Tensor]:
    tensors = tensors_in(checkout.root / "models" / "coat_mini_flux" / "transformer")
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def _assert_same_end(checkout: Checkout, name: str) -> None:
    assert_all_bitwise(_saved(checkout, name), _saved(checkout, WHOLE))
    assert_same_end(checkout.folder(WHOLE), checkout.folder(name), records=False)


def _records(checkout: Checkout, name: str) -> dict[str, Any]:
    return json.loads((max((checkout.folder(name) / "coat").glob("state-*")) / "aitk" / "state.json").read_text())


def test_every_weight_is_trained_and_the_save_is_ai_toolkits_and_loads_with_diffusers(checkout):
    saved, start = _saved(checkout, WHOLE), _original(checkout)
    assert saved.keys() == start.keys()
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert [name for name in start if start[name].ndim > 1 and torch.equal(start[name], saved[name])] == []
    folder = checkout.folder(WHOLE)
    names = ["whole", "whole_000000002", "whole_000000004"]
    assert sorted(path.name for path in folder.glob("whole*")) == names
    assert sorted(path.name for path in (folder / WHOLE).iterdir()) == ["aitk_meta.yaml", "transformer"]
    loaded = FluxTransformer2DModel.from_pretrained(folder / WHOLE, subfolder="transformer", torch_dtype=torch.bfloat16)
    assert_all_bitwise(dict(loaded.named_parameters()), saved)
    losses, held_out = checkout.column(WHOLE, "loss"), _records(checkout, WHOLE)["held_out_loss"]
    assert len(losses) == STEPS
    assert all(map(math.isfinite, losses))
    assert held_out[-1][1] < held_out[0][1]
    states = checkout.optimizer(WHOLE)["state"]
    assert len(states) == len(start)
    codes = [state[key] for state in states.values() for key in ("exp_avg_codes", "exp_avg_sq_codes")]
    assert {x.dtype for x in codes} == {torch.float8_e4m3fn}
    state = max((folder / "coat").glob("state-*"))
    assert not (state / "aitk" / "lora.safetensors").exists()  # nothing is kept twice


def test_killed_run_ends_as_the_one_that_was_not(checkout):
    code, _ = checkout.start("killed", _entry(), at="[after_backward] Step 4", send=signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert "[coat] resume: continues after step 3," in checkout.run("killed", _entry())
    _assert_same_end(checkout, "killed")
    assert _records(checkout, "killed") == _records(checkout, WHOLE)


def test_updates_in_backward_are_the_separate_step_to_the_bit(checkout):
    code, out = checkout.start("fused", _entry(fused_backward=True), at="[after_backward] Step 4", send=signal.SIGINT)
    assert code == 130, out[-4000:]
    assert "[coat] stopped after 4 steps, saved in" in out
    entry = _entry(fused_backward=True)
    entry["coat"]["optimizer"]["offload"] = "cpu"  # from here on the moments are in CPU memory
    assert "expanded), in CPU memory" in checkout.run("fused", entry)
    _assert_same_end(checkout, "fused")
    assert checkout.column("fused", "loss") == checkout.column(WHOLE, "loss")


def test_the_shipped_config_runs_with_captions_encoded_once(checkout):
    entry = load_job_yaml(REPOSITORY / "configs" / "flux_full_80gb.yaml")["config"]["process"][0]
    small = {"width": 64, "height": 64, "sample_steps": 1, "sample_every": 2}
    entry |= {"device": "cpu", "sample": entry["sample"] | small, "training_seed": 42}
    entry["model"]["name_or_path"] = "models/coat_mini_flux"
    entry["datasets"][0]["resolution"] = [64]
    entry["train"].update(steps=3, lr=2e-4)
    entry["save"]["save_every"] = 1
    out = checkout.run("shipped", entry)
    assert "UNLOADING TEXT ENCODER" in out
    saved, start = _saved(checkout, "shipped"), _original(checkout)
    assert [name for name in start if start[name].ndim > 1 and torch.equal(start[name], saved[name])] == []
    assert all(map(math.isfinite, checkout.column("shipped", "grad_norm")))
    assert sorted(path.name for path in checkout.folder("shipped").glob("shipped*")) == ["shipped", "shipped_000000002"]


def test_ai_toolkit_itself_goes_on_from_the_save(checkout):
    plain = _entry()
    del plain["coat"], plain["validation"]
    checkout.run("handed_on", _entry(steps=2))
    out = checkout.run("handed_on", {**plain, "type": "sd_trainer", "train": {**plain["train"], "steps": 3}})
    assert "IMPORTANT RESUMING FROM" in out
    assert "Found step 2 in metadata, starting from there" in out
    before, after = _original(checkout), _saved(checkout, "handed_on")
    assert before.keys() == after.keys()
    code, out = checkout.start("handed_on", _entry(steps=4))
    assert code == 1
    assert "handed_on: is not a save of this trainer" in out


def test_what_cannot_be_gone_on_with_is_refused_before_the_model_is_loaded(checkout):
    lora = make_real_entry()
    code, out = checkout.start(WHOLE, lora)
    assert code == 1
    assert "network.linear null -> 16" in out
    with pytest.raises(ResumeError, match="is ai-toolkit's, and full fine-tuning resumes in the trainer that saved"):
        find_resume_point(checkout.folder(WHOLE), WHOLE)
    code, out = checkout.start("several", _entry(), processes=2)
    assert code != 0
    assert "several processes train a network (a LoRA) and nothing else; start one" in out
    assert "Loading transformer" not in out
