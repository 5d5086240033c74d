"""The whole model that a job without `network:` trains, inside the stand-in: what is chosen, converted and saved."""

import time
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel

from coat_core.linear.module import FP8TrainableLinear
from coat_core.optim import FP8AdamW
from coat_flux.blocks.apply import apply_coat
from coat_flux.config.coat import COATConfig
from coat_flux.saves.errors import ResumeError
from coat_flux.saves.repair import step_of
from coat_flux.trainers.full import check_model
from tests.helpers.aitk_standin.host import Host, standin_host  # noqa: F401
from tests.helpers.asserts import assert_bitwise

INCLUDE, EXCLUDE = ["transformer_blocks.*", "x_embedder"], ["*.bias"]


def _load(folder: Path) -> Any:
    return FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer", torch_dtype=torch.bfloat16)


def _converted(host: Host, folder: Path) -> tuple[Any, Any]:
    """What `FullModel` reads of a process whose model is loaded, and the `FullModel`."""
    host.start()
    config = SimpleNamespace(name_or_path=str(folder), quantize=False, qtype="half", arch="flux")
    coat = COATConfig.from_dict({"include": INCLUDE, "exclude": EXCLUDE, "activation": {"flow": "generic"}})
    process = SimpleNamespace(sd=SimpleNamespace(unet=_load(folder)), model_config=config, coat=coat)
    full = host.load("coat_flux.trainers.ai_toolkit.full").FullModel(process)
    host.load("coat_flux.trainers.ai_toolkit.quantizer").convert_model(process, [], full.linears)
    apply_coat(process.sd.unet, process.coat, device="cpu", trained=full.linears)
    return process, full


def test_the_chosen_parameters_are_trained_and_the_save_is_whole(host, place, tmp_path):
    process, full = _converted(host, place["model"])
    process.sd.unet.requires_grad_(True)  # as ai-toolkit has it by then
    (group,) = full.param_groups(1e-5)
    assert group["lr"] == 1e-5
    trained = [name for name, parameter in process.sd.unet.named_parameters() if parameter.requires_grad]
    assert list(full.trained) == trained
    assert all(name.startswith(("transformer_blocks", "x_embedder")) and name.endswith("weight") for name in trained)
    assert isinstance(process.sd.unet.transformer_blocks[0].attn.to_q, FP8TrainableLinear)
    frozen = process.sd.unet.single_transformer_blocks[0].attn.to_q
    assert frozen.weight_codes.dtype == torch.uint8
    with torch.no_grad():
        for parameter in full.trained.values():
            parameter.add_(1.0)
    saved = tmp_path / "run" / "run_000000002"
    process.sd.save(str(saved), OrderedDict(training_info=OrderedDict(step=3, epoch=0), name="run"), torch.float16)
    assert step_of(saved) == 3
    assert "trained tensors read back" in check_model(saved, full.trained)
    before, after = (dict(_load(each).named_parameters()) for each in (place["model"], saved))
    for name, parameter in after.items():
        assert parameter.dtype == torch.bfloat16
        assert_bitwise(parameter.detach(), (before[name] + 1.0 if name in full.trained else before[name]).detach())
    with torch.no_grad():
        next(iter(full.trained.values())).fill_(torch.nan)
    process.sd.save(str(tmp_path / "bad" / "bad"), OrderedDict(), torch.float16)
    with pytest.raises(ResumeError, match="not as it was trained, or not finite"):
        check_model(tmp_path / "bad" / "bad", full.trained)


def test_a_folder_is_published_as_the_newest_and_another_programs_is_not_passed_over(host, tmp_path):
    host.start()
    saves = host.load("coat_flux.trainers.ai_toolkit.resume").Saves(tmp_path, "run", 2)

    def write(folder: Path, step: int) -> None:
        (folder / f"run_{step:09d}" / "transformer").mkdir(parents=True)
        (folder / f"run_{step:09d}" / "transformer" / "model.safetensors").write_text("weights")
        (folder / f"run_{step:09d}" / "aitk_meta.yaml").write_text(f"training_info: {{step: {step}, epoch: 0}}\n")
        torch.save({}, folder / "optimizer.pt")

    for step in (2, 4):
        path = saves.commit(step, lambda folder, step=step: write(folder, step))
        assert path == tmp_path / f"run_{step:09d}"
    time.sleep(0.01)
    (tmp_path / "run_000000002" / "touched").write_text("")  # by now the last changed
    assert saves.newest() == tmp_path / "coat" / "state-000000004"
    assert max(tmp_path.glob("run*"), key=lambda path: path.stat().st_ctime_ns) == tmp_path / "run_000000004"
    write(tmp_path, 6)
    assert saves.newest() is None


def test_the_update_is_in_backward_and_a_loss_that_is_not_finite_changes_nothing(host, place):
    process, full = _converted(host, place["model"])
    (group,) = full.param_groups(1e-2)
    process.optimizer = SimpleNamespace(optimizer=FP8AdamW(group["params"], lr=1e-2))  # as accelerate wraps it
    process.train_config = SimpleNamespace(max_grad_norm=1e9)
    process.get_conf = lambda key, default=None: {"fused_backward": True}
    phases = SimpleNamespace(held=SimpleNamespace(add=lambda *_: None))
    watch: Any = SimpleNamespace(phases=phases, begin_update=lambda: None)
    full.begin(process, watch)
    assert len(process.optimizer.optimizer.state_dict()["state"]) == len(full.trained)
    weight = full.trained["x_embedder.weight"]
    for loss, changes in ((torch.nan, False), (1.0, True)):
        before = weight.detach().clone()
        with full.fused.updating(1.0 - torch.tensor(loss).isfinite().float()):
            weight.float().sum().backward()
        assert weight.grad is None
        assert torch.equal(weight, before) is not changes
        assert float(full.fused.norm) == pytest.approx(weight.numel() ** 0.5)
