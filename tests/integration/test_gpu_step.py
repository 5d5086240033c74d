"""A training step on a GPU: by the kernels, without waiting for the device; eager and as CUDA graphs."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from coat_core import FP8AdamW
from coat_core.ops.dispatch import triton_obstacle
from coat_flux.blocks.runner import BlockRunner
from coat_flux.trainers.standalone.network import lora_parameters
from coat_flux.trainers.standalone.trainer import COATTrainer
from tests.helpers.asserts import assert_sqnr
from tests.helpers.engine_job import engine_job, write_images
from tests.helpers.flux import coat_flux_model, flux_inputs
from tests.helpers.tiny_flux import make_tiny_flux
from tests.tolerances import GPU_STEP_FLOOR_DB

pytestmark = pytest.mark.gpu

KEPT = {"memory": {"checkpointing": "none"}, "speed": {"measure": "never", "cuda_graphs": "never"}}


class Training:
    """The tiny FLUX with its LoRA on a device."""

    def __init__(self, device: str, coat: dict[str, Any]) -> None:
        model, _, _ = coat_flux_model({**KEPT, **coat}, device=device)
        self.model: nn.Module = model.to(device)
        self.inputs = {k: v.to(device) for k, v in flux_inputs().items()}
        self.parameters = lora_parameters(self.model)
        self.optimizer = FP8AdamW(self.parameters.values(), lr=1e-3)

    def step(self, update: bool = True) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(**self.inputs)[0].float().square().mean()
        loss.backward()
        if update:
            self.optimizer.step()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        self.step(update=False)
        return {name: parameter.grad.float().cpu() for name, parameter in self.parameters.items()}


def test_replayed_steps_train_as_eager_ones(tmp_path):
    """A run of the stand-alone trainer with its steps as CUDA graphs, which are compared with eager ones on the way."""
    places = {"model": make_tiny_flux(tmp_path / "model"), "images": write_images(tmp_path / "images")}
    found = {}
    for name, graphs, stream in (("none", "never", 0), ("cudagraphs", "auto", 0), ("streamed", "auto", "all")):
        memory = {"checkpointing": "none", "stream_blocks": stream}
        coat = {"memory": memory, "speed": {"measure": "never", "cuda_graphs": graphs}, "fallback": "error"}
        train = {"steps": 16, "ema_config": {"use_ema": True}, "lr_scheduler": "linear"}
        job = engine_job(name, out=tmp_path, coat=coat, train=train, **places)
        job["config"]["process"][0]["device"] = "cuda"
        found[name] = load_file(COATTrainer(job).train())
    for run in ("cudagraphs", "streamed"):
        log = (tmp_path / run / "coat" / "log.txt").read_text()
        assert "CUDA graphs: from here on steps are replayed" in log
        for name, tensor in found["none"].items():
            assert_sqnr(tensor.float(), found[run][name].float(), GPU_STEP_FLOOR_DB)


@pytest.mark.triton
def test_the_kernels_run_here():
    assert triton_obstacle(torch.device("cuda", torch.cuda.current_device())) is None


INT8 = {"format": "int8", "grad_format": "int8"}


@pytest.mark.parametrize(
    "coat",
    [
        {"activation": {"linear_granularity": "per_tensor"}},
        {"activation": {"linear_granularity": "per_row"}},
        {"weight": {"format": "nvfp4"}},
        {"weight": {"format": "int8"}, "activation": INT8},
        {"memory": {"checkpointing": "none", "stream_blocks": "all"}},
    ],
    ids=["per_tensor", "per_row", "nvfp4", "int8", "streamed"],
)
def test_gradients_are_the_cpus(coat):
    expected, found = Training("cpu", coat).gradients(), Training("cuda", coat).gradients()
    for name, gradient in expected.items():
        assert_sqnr(gradient, found[name], GPU_STEP_FLOOR_DB)


@pytest.mark.parametrize("scaling", ["per_tensor", "per_row"])
def test_a_step_does_not_wait_for_the_gpu(scaling):
    training = Training("cuda", {"activation": {"linear_granularity": scaling}})
    for _ in range(2):  # the first pass compares with diffusers, and makes the optimizer's state
        training.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_start_up_measurement(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    training = Training("cuda", {"speed": {"measure": "auto"}})
    training.step()
    picked = BlockRunner.of(training.model).picked
    assert picked is not None
    assert set(picked.milliseconds) == {"per_tensor", "per_row", "bf16"}
    assert picked.milliseconds[picked.name] == min(picked.milliseconds.values()) > 0
