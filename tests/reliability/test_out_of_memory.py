"""Out of memory in the midst of a step: it is explained, the step is tried again with more recomputation, and fits.

Where recomputation is exact the retried step's weights are those of a step that never failed, bit for bit; with FP8
they are those of a run that recomputes every block.
"""

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from coat_core import FP8AdamW, FP8Linear
from coat_core.linear import function
from coat_core.linear.function import load_weight
from coat_flux.base.text import size_text
from coat_flux.blocks.gemms import transposed_bytes
from coat_flux.blocks.held import HeldTensors
from coat_flux.blocks.runner import BlockRunner
from coat_flux.config.findings import ConfigError
from coat_flux.config.job import JobConfig
from coat_flux.plan import cards
from coat_flux.trainers.standalone.network import lora_parameters
from coat_flux.trainers.standalone.trainer import COATTrainer
from coat_flux.watch.oom import OutOfMemory, explain_oom, recompute_more
from coat_flux.watch.phases import PhaseTracker
from tests.helpers.asserts import assert_all_bitwise
from tests.helpers.engine_job import engine_job
from tests.helpers.flux import coat_flux_model, loss_of, predict
from tests.unit.test_plan import job_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MESSAGE = "CUDA out of memory. Tried to allocate 2.25 GiB.\nGPU 0 has a total capacity of ..."
EXACT = {"activation": {"use_fp8": False}, "memory": {"enable_efficient_checkpoint": False}}


class RunsOut(TorchDispatchMode):
    """The operator numbered `after`, counted from the moment `where` of a step on, finds no memory."""

    def __init__(self, phases: PhaseTracker, where: str, after: int) -> None:
        super().__init__()
        self.phases, self.where, self.left = phases, where, after

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.left -= self.phases.moment == self.where
        if self.left == 0:
            raise torch.OutOfMemoryError(MESSAGE)
        return func(*args, **(kwargs or {}))


class Training:
    """Tiny FLUX with a LoRA and its optimizer, followed by a memory report."""

    def __init__(self, coat: dict[str, Any]) -> None:
        self.model, self.report, _ = coat_flux_model(coat)
        self.lora = lora_parameters(self.model)
        self.optimizer = FP8AdamW(self.lora.values(), lr=1e-3)
        self.phases = PhaseTracker(CPU, None, counts=False)
        for part in ("transformer", "lora", "gradients"):
            self.phases.held.add(part, self.model)
        self.phases.held.add("optimizer", self.optimizer)
        self.phases.enter("step")

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.phases.mark("before_forward")
        loss = loss_of(predict(self.model))
        self.phases.mark("after_forward")
        loss.backward()
        self.phases.mark("after_backward")
        self.optimizer.step()
        self.phases.mark("after_optimizer_step")

    def weights(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.lora.items()}

    def kept_bytes(self) -> int:
        """What a forward pass leaves for backward."""
        for _ in range(2):  # blocks are read, then their adapters copied, which stays
            predict(self.model)
        with HeldTensors() as held:
            loss = loss_of(predict(self.model))
        assert loss.requires_grad
        return held.now

    def blocks(self) -> list[nn.Module]:
        return [*self.model.transformer_blocks, *self.model.single_transformer_blocks]


def big_job(**coat: Any) -> JobConfig:
    """FLUX.1-dev, batches of two, nothing cached: the plan's figures for it are in gigabytes."""
    return job_of(
        coat=coat,
        train={"batch_size": 2, "gradient_checkpointing": True},
        dataset={"cache_latents_to_disk": False, "cache_text_embeddings": False},
    )


# --- a step that fails, and is tried again ---
@pytest.fixture(scope="module")
def recomputing() -> Training:
    """One step with every block recomputed."""
    training = Training({"memory": {"checkpointing": "all"}})
    training.step()
    return training


@pytest.mark.parametrize(("moment", "after"), [("forward pass", 3), ("backward pass", 300)])
def test_the_step_is_explained_and_the_retry_recomputes_every_block(recomputing, moment, after):
    training = Training({})
    before = training.weights()
    with pytest.raises(torch.OutOfMemoryError) as error, RunsOut(training.phases, moment, after):
        training.step()
    assert_all_bitwise(training.weights(), before)
    said = explain_oom(error.value, training.phases, lambda: 1 / 0).splitlines()
    assert said[0] == f"Out of memory in the phase step ({moment}): {MESSAGE.splitlines()[0]}"
    held = next(line for line in said if line.startswith("held now: "))
    assert f"lora {size_text(sum(4 * p.numel() for p in training.lora.values()))}" in held
    assert "transformer " in held
    kept = training.kept_bytes()
    assert "checkpointing auto: from here on all 4 blocks recompute, before 0" in recompute_more(training.model)
    assert recompute_more(training.model) is None
    training.step()
    assert_all_bitwise(training.weights(), recomputing.weights())
    less = training.kept_bytes()
    assert less < 0.5 * kept
    assert less == recomputing.kept_bytes()


def test_transposed_weights_go_first_and_change_nothing(monkeypatch):
    released: list[str] = []
    monkeypatch.setattr("coat_flux.watch.oom.release_memory", lambda: released.append("to the device"))
    training, expected = Training({}), Training({})
    runner = BlockRunner.of(training.model)
    training.step()
    copied = transposed_bytes(training.blocks())
    runner.expect(device="cuda", free_bytes=1e12, transposed_bytes=copied)  # as on a GPU with room: dgrad reads them
    linears = [m for block in training.blocks() for m in block.modules() if isinstance(m, FP8Linear)]
    assert sum(load_weight(m, m.config).transposed is not None for m in linears) == 34
    assert recompute_more(training.model).startswith("transposed weights: ")
    assert not any(load_weight(m, m.config).transposed is not None for m in linears)
    assert runner.plan.recomputed == []
    training.step()
    expected.step()
    expected.step()
    assert_all_bitwise(training.weights(), expected.weights())
    assert "all 4 blocks recompute" in recompute_more(training.model)
    assert len(released) == 2


def test_what_config_or_trainer_fix_and_a_model_without_blocks_stay_unchanged():
    for coat, allows in (({"memory": {"checkpointing": "none"}}, True), ({}, False)):
        model, _, _ = coat_flux_model(coat, allow_recompute=allows)
        assert recompute_more(model) is None
        assert not BlockRunner.of(model).plan.recomputed
    assert recompute_more(nn.Linear(2, 2)) is None


def test_a_later_larger_picture_does_not_take_the_choice_back():
    training = Training({})
    training.step()
    recompute_more(training.model)
    predict(training.model, side=9)
    assert BlockRunner.of(training.model).plan.recomputed == [0, 1, 2, 3]
    assert training.report.metadata()["coat.got.checkpointing"] == "4 of 4 blocks recompute from FP8 inputs"
    assert training.report.metadata()["coat.why.checkpointing"] == "memory ran out with 0"


# --- the explanation ---
@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A GPU of 24 GB: 15 of them in tensors, 18 reserved, 20.5 taken by all processes."""
    at = {"allocated": 15e9, "reserved": 18e9, "free": 3.5e9, "total": 24e9}
    for name in ("allocated", "reserved"):
        for figure in (f"memory_{name}", f"max_memory_{name}"):
            monkeypatch.setattr(torch.cuda, figure, lambda device, name=name: int(at[name]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(at["free"]), int(at["total"])))
    monkeypatch.setattr("coat_flux.watch.phases.reset_peak", lambda device: None)
    return at


def explained(job: Any, phase: str = "step", error: BaseException | None = None) -> list[str]:
    phases = PhaseTracker(CUDA, None)
    phases.enter(phase)
    return explain_oom(error or torch.OutOfMemoryError(MESSAGE), phases, job).splitlines()


def freed(job: JobConfig, phase: str = "step") -> dict[str, int]:
    """Change → megabytes, in the order of the lines."""
    lines = [line.strip() for line in explained(lambda: job, phase) if line.startswith("  ")]
    sizes = {}
    for line in lines:
        text, _, rest = line.partition("  ")
        assert "  costs " in rest
        sizes[text] = round(float(rest.split("frees ")[1].split(" MB")[0].replace(",", "")))
    return sizes


def test_remedies_have_their_megabytes_and_come_cheapest_first(card, monkeypatch):
    memory = {"checkpointing": "none", "transposed_weights": "always"}
    sizes = freed(big_job(memory=memory, activation={"attention": "bf16"}))
    assert sizes.pop("coat.memory.transposed_weights: never") == round(912 * 3072**2 / 1e6)  # weights that see tokens
    assert list(sizes) == [
        "train.cache_text_embeddings: true",
        "datasets: cache_latents_to_disk: true",
        "coat.activation.attention: fp8",
        "coat.memory.stream_blocks: auto, transposed_weights: auto",
        "coat.memory.checkpointing: auto",
        "coat.memory.checkpointing: all",
        "train.batch_size: 1, gradient_accumulation: 2",
        "network.linear: 8",
        "datasets: resolution at most 768",
    ]
    assert sizes["train.cache_text_embeddings: true"] == round(2 * (4_762_310_656 + 123_060_480) / 1e6)
    assert sizes["datasets: cache_latents_to_disk: true"] == round(2 * 83_819_683 / 1e6)
    assert sizes["coat.memory.checkpointing: all"] > sizes["coat.activation.attention: fp8"] > 1000
    assert sizes["network.linear: 8"] > 85_917_696 * 4 / 2e6  # half of the adapters, their gradients and moments
    named = ("coat.memory.checkpointing", "_smaller_samples", "train.disable_sampling")
    monkeypatch.setattr(cards, "EDITS", [edit for edit in cards.EDITS if edit.__name__ in named])
    samples = freed(big_job(), phase="sample")
    assert samples["train.disable_sampling: true"] > samples["sample.width and height: at most 768"] > 100
    assert "coat.memory.checkpointing: all" not in samples


def test_gaps_and_other_processes_are_named_with_what_to_do(card, monkeypatch):
    monkeypatch.setattr(cards, "EDITS", ())
    text = "\n".join(explained(lambda: big_job()))
    assert "held now: activations and workspace 15.0 GB" in text  # nothing else is known of this run
    assert "allocated 15.0 GB, reserved 18.0 GB, free 3.5 GB of 24.0 GB" in text
    assert "fragmentation: 3.0 GB" in text
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in text
    assert "other processes hold 1.9 GB" in text
    assert "coat.memory.budget_gb below the 22.1 GB" in text
    card.update(allocated=17.9e9, free=5.5e9)
    text = "\n".join(explained(lambda: big_job()))
    assert "fragmentation" not in text
    assert "other processes" not in text


def test_the_phase_is_the_one_that_the_error_left(card):
    phases = PhaseTracker(CUDA, None)
    phases.enter("step")
    first = explain_oom(torch.OutOfMemoryError(MESSAGE), phases, lambda: 1 / 0)  # at no moment of a step yet
    assert first.startswith("Out of memory in the phase step: ")
    with contextlib.suppress(torch.OutOfMemoryError), phases.during("sample"):
        raise torch.OutOfMemoryError(MESSAGE)
    assert phases.under_way == "sample"
    said = explain_oom(torch.OutOfMemoryError(MESSAGE), phases, lambda: 1 / 0)
    assert said.startswith("Out of memory in the phase sample: ")
    phases.mark("before_forward")
    assert phases.under_way == "step"


def test_cpu_memory_is_told_apart_from_the_cards(card):
    error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 2 bytes.")
    lines = explained(lambda: big_job(), phase="load", error=error)
    assert lines[1].startswith("plan: 12.")  # T5 in bf16, and Python
    assert lines[1].endswith("of CPU memory")
    assert lines[2].startswith("CPU memory: this process has ")
    assert not any("network.linear" in line for line in lines)


def test_an_explanation_that_fails_says_so_and_goes_on(card, monkeypatch):
    def no_job() -> JobConfig:
        raise ConfigError("job.yaml: network.type=lokr")

    lines = explained(no_job)
    assert lines[1] == "(plan: not known, ConfigError: job.yaml: network.type=lokr)"
    assert any(line.startswith("held now: ") for line in lines)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: 1 / 0)
    lines = explained(no_job)
    assert "(held: not known, ZeroDivisionError: division by zero)" in lines


# --- the stand-alone trainer ---
def run_lora(name: str, place: dict[str, Path], checkpointing: str) -> dict[str, Tensor]:
    coat = {**EXACT, "memory": {**EXACT["memory"], "checkpointing": checkpointing, "log_memory_stats": False}}
    train = {"steps": 2, "gradient_checkpointing": True}
    return load_file(COATTrainer(engine_job(name, **place, coat=coat, train=train, save={"dtype": "fp32"})).train())


def failing_dgrad(at: int) -> Callable[..., Tensor]:
    """The backward product of linears; call number `at` finds no memory. Sizes are counted on the meta device."""
    calls, original = itertools.count(1), function.dgrad

    def dgrad(grad: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if grad.device.type != "meta" and next(calls) == at:
            raise torch.OutOfMemoryError(MESSAGE)
        return original(grad, *args, **kwargs)

    return dgrad


def test_a_run_goes_on_with_the_same_weights(place, monkeypatch, capsys):
    expected = run_lora("fits", place, "auto")
    monkeypatch.setattr("coat_core.linear.function.dgrad", failing_dgrad(60))
    monkeypatch.setattr("coat_flux.watch.step_watch.explain_oom", lambda error, *_: f"explained: {error}")
    weights = run_lora("failed", place, "auto")
    said = "".join(capsys.readouterr())
    assert f"explained: {MESSAGE.splitlines()[0]}" in said
    assert "Step 2 is tried again: checkpointing auto: from here on all 4 blocks recompute" in said
    assert_all_bitwise(weights, expected)


def test_a_run_that_may_not_recompute_more_ends_with_the_explanation(place, monkeypatch):
    monkeypatch.setattr("coat_core.linear.function.dgrad", failing_dgrad(60))
    monkeypatch.setattr(cards, "EDITS", ())
    with pytest.raises(OutOfMemory, match=r"in the phase step \(backward pass\): CUDA out of memory") as error:
        run_lora("ended", place, "none")
    assert "plan for this phase: " in str(error.value)
