"""Attention kernel and GEMM of a run: tried, timed, the fastest taken; forced, kept, remembered; clocks are made up."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from coat_core import FP8Linear
from coat_core.ops import attention
from coat_flux.blocks import measure
from coat_flux.blocks.measure import AttentionPick, GemmPick, Picked
from coat_flux.config.coat import COATConfig
from coat_flux.saves.state import execution_of, keep_execution
from tests.helpers.flux import coat_flux_model, predict

OWN = "flash_cpu"  # what torch chooses here
NAMES = ("quick", "slow", "wrong", "refused")
TORCHS_FORWARD = attention.attention_forward
MS = {OWN: 2.0, "quick": 1.0, "slow": 4.0, "wrong": 0.1}


class Kernels:
    """Kernels that are torch's in turn under made-up names, with a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ms, self.timed, self.tried = dict(MS), [], []
        for module in (measure, attention):
            monkeypatch.setattr(module, "use_kernel", self.use)
        monkeypatch.setattr(attention, "attention_forward", self.forward)
        monkeypatch.setattr(measure, "GPU_KERNELS", NAMES)
        monkeypatch.setattr(measure, "DEVICE", "cpu")
        monkeypatch.setattr(measure, "timed", self.clock)
        self.in_use: str | None = None

    def use(self, kernel: str | None, like: Tensor | None = None) -> None:
        if kernel == "refused":
            raise RuntimeError("CUDA error:\n not on this card")
        self.in_use = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        self.tried.append(self.in_use)
        out, context = TORCHS_FORWARD(q, k, v)
        return (-out if self.in_use == "wrong" else out), context

    def clock(self, once: Callable[[], Any], device: torch.device) -> float:
        once()
        self.timed.append(self.in_use)
        return self.ms[self.in_use or ""]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    attention.use_kernel(None)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(monkeypatch)


def like(tokens: int = 40) -> Tensor:
    return torch.empty(1, tokens, 2, 16, dtype=torch.bfloat16).transpose(1, 2)


def pick(kept: str | None = None, tokens: int = 40, **speed: str) -> tuple[AttentionPick, Picked]:
    chooses = AttentionPick(COATConfig.from_dict({"speed": {**speed}}))
    chooses.resumed = kept
    return chooses, chooses.choose(like(tokens))


def test_the_fastest_that_is_right_is_taken(kernels, caplog):
    with caplog.at_level(logging.INFO):
        chooses, picked = pick()
    assert (picked.name, kernels.in_use, chooses.kernel) == ("quick", "quick", "quick")
    assert picked.milliseconds == {OWN: 2.0, "quick": 1.0, "slow": 4.0}
    assert picked.refused["refused"] == "RuntimeError: CUDA error: not on this card"
    assert picked.refused["wrong"].startswith("differs from plain matrix products by")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("attention: quick 1.00 ms (fastest at 40 tokens; flash_cpu 2.00 ms; slow 4.00 ms; wrong: ")


@pytest.mark.parametrize(("ms", "taken"), [(1.96, OWN), (1.90, "quick"), (2.5, OWN)])
def test_torchs_choice_stays_where_another_is_hardly_faster(kernels, ms, taken):
    kernels.ms["quick"] = ms
    assert pick()[1].name == taken
    assert kernels.in_use == taken


def test_each_shape_is_measured_once_for_all_runs_while_its_kernel_runs(kernels):
    first = pick()[1]
    kernels.timed.clear()
    second = pick()[1]
    assert (second.name, second.milliseconds, kernels.timed) == (first.name, first.milliseconds, [])
    file = measure.cache_file()
    (key,) = json.loads(file.read_text())
    file.write_text(json.dumps({key: {"refused": 0.5, "quick": 1.0}}))
    assert pick()[1].name == "quick"
    assert json.loads(file.read_text())[key] == {OWN: 2.0, "quick": 1.0, "slow": 4.0}
    kernels.ms = dict.fromkeys(MS, 1.0)
    assert pick(tokens=48)[1].name == OWN


def test_a_run_that_no_kernel_suits_goes_on_with_torchs_choice(kernels):
    kernels.forward = lambda *_: 1 / 0  # type: ignore[method-assign]
    attention.attention_forward = kernels.forward
    picked = pick()[1]
    assert (picked.name, picked.why) == (OWN, "torch's choice: no kernel passed the trial")
    assert set(picked.refused) == {OWN, *NAMES}
    assert (kernels.in_use, measure.cache_file().exists()) == (None, False)


def test_a_kernel_named_by_the_config_is_taken_and_must_run(kernels):
    chooses = AttentionPick(COATConfig())
    chooses._forced, chooses.resumed = "slow", "quick"
    picked = chooses.choose(like())
    assert (picked.name, picked.why) == ("slow", "as configured: speed.attention")
    assert (kernels.in_use, kernels.tried, kernels.timed) == ("slow", ["slow"], [])
    for kernel in ("refused", "wrong"):
        chooses._forced = kernel
        with pytest.raises(RuntimeError, match=rf"^coat\.speed\.attention='{kernel}': .*; set it to auto"):
            chooses.choose(like())


@pytest.mark.parametrize(("measures", "now"), [("auto", "quick"), ("never", OWN)])
def test_a_resumed_run_keeps_its_kernel_or_says_why_it_cannot(kernels, caplog, measures, now):
    chooses, picked = pick(kept="slow", measure=measures)
    assert (picked.name, picked.why) == ("slow", "that of the resumed run")
    assert (kernels.in_use, chooses.kernel, kernels.timed, caplog.records) == ("slow", "slow", [], [])
    chooses, picked = pick(kept="refused", measure=measures)
    assert (picked.name, chooses.kernel, bool(kernels.timed)) == (now, now, measures == "auto")
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"refused -> {now} (RuntimeError: CUDA error: not on this card)" in line


def test_the_first_of_several_processes_chooses_for_all(kernels, monkeypatch):
    sent = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda box, src: sent.append(box[0]))
    assert pick()[1].name == "quick"
    kernels.tried.clear()
    kernels.ms = {}
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda box, src: box.__setitem__(0, sent[0]))
    chooses, picked = pick()
    assert (picked, kernels.tried, kernels.in_use, chooses.kernel) == (sent[0], [], "quick", "quick")


def test_on_a_cpu_torch_chooses_and_a_kernel_for_gpus_is_refused(caplog):
    with caplog.at_level(logging.INFO):
        chooses, picked = pick(kept="cudnn", measure="always")
    assert (picked.name, picked.why, chooses.kernel) == (OWN, "torch's choice", None)
    assert [record.getMessage() for record in caplog.records] == ["attention: flash_cpu (torch's choice)"]
    assert attention._in_use is None
    with pytest.raises(RuntimeError, match=r"speed\.attention='cudnn': needs a GPU, this is a cpu; set it to auto"):
        pick(attention="cudnn")


def test_blocks_run_the_kernel_that_was_chosen_and_a_save_names_it(kernels):
    models = [coat_flux_model({"memory": {"checkpointing": "none"}})[0] for _ in range(2)]
    assert "attention" not in execution_of(models[0])
    predict(models[0])
    saved = execution_of(models[0])
    assert saved["attention"] == "quick" == kernels.in_use
    kernels.timed.clear()
    keep_execution(models[1], {**saved, "attention": "slow"})
    predict(models[1])
    assert (execution_of(models[1])["attention"], kernels.in_use, kernels.timed) == ("slow", "slow", [])


# --- a GEMM ---
HIDDEN = 32
GEMM_MS = {"per_tensor": 3.0, "per_row": 2.0, "bf16": 5.0}


class Double(nn.Module):
    """A block with one FP8 linear and one that the config leaves in bf16."""

    def __init__(self, config: COATConfig) -> None:
        super().__init__()
        plain = COATConfig.from_dict({"activation": {"use_fp8": False}}).linear_config()
        self.linear = FP8Linear.from_linear(nn.Linear(HIDDEN, HIDDEN), config.linear_config())
        self.excluded = FP8Linear.from_linear(nn.Linear(HIDDEN, HIDDEN), plain)
        self.lora = nn.Parameter(torch.ones(1))

    def forward(self, hidden: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return text * self.lora, self.excluded(self.linear(hidden))


class Single(Double):
    pass


def config_of(**coat: Any) -> COATConfig:
    return COATConfig.from_dict({"speed": {"measure": "always"}, **coat})


class Bench:
    """Blocks whose time is a table's: the clock is replaced, the passes run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: COATConfig, pass_s: float = 0.1) -> None:
        self.blocks = {"a.0": Double(config), "b.0": Single(config), "b.1": Single(config)}
        self.runs: list[tuple[type, str]] = []
        self.seen: list[int] = []  # image tokens of each
        self.now = 0.0
        self.args = (torch.randn(1, 6, HIDDEN), torch.randn(1, 4, HIDDEN))
        self.pick = GemmPick(self.blocks, config, self.form_of)
        self._pass_s = pass_s
        monkeypatch.setattr(measure, "timed", self.timed)
        monkeypatch.setattr(measure.time, "monotonic", lambda: self.now)

    def gemm(self) -> str:
        own = self.blocks["a.0"].linear.config
        return own.input_granularity if own.use_fp8_gemm else "bf16"

    def form_of(self, block: nn.Module) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.runs.append((type(block), self.gemm()))
            self.seen.append(args[0].shape[1])
            self.now += self._pass_s
            return block(*args)

        return run

    def timed(self, once: Callable[[], None], device: torch.device) -> float:
        once()
        return GEMM_MS[self.runs[-1][1]]


def test_a_resumed_gemm_is_taken_without_measuring_unless_the_config_forbids_it(monkeypatch, caplog):
    bench, coarse = (Bench(monkeypatch, config_of()) for _ in range(2))
    bench.pick.keep("bf16")
    assert (bench.pick.choose(bench.args).name, bench.gemm(), bench.runs) == ("bf16", "bf16", [])
    assert not caplog.records
    coarse.pick.keep("per_tensor")
    assert "per_tensor" in caplog.text
    assert coarse.pick.choose(coarse.args).name == "per_row"


def test_the_fastest_is_taken_and_logged_and_nothing_of_the_run_is_touched(monkeypatch):
    bench = Bench(monkeypatch, config_of(activation={"linear_granularity": "per_tensor"}))
    before, state = [x.clone() for x in bench.args], torch.get_rng_state()
    picked = bench.pick.choose(bench.args)
    assert picked.name == bench.gemm() == "per_row"
    assert picked.milliseconds == {"per_tensor": 9.0, "per_row": 6.0, "bf16": 15.0}
    assert picked.describe("", 1).startswith(" 6.0 ms (fastest, measured in")
    assert "per_tensor 9.0 ms" in picked.describe("", 1)
    assert all(torch.equal(x, copy) and not x.requires_grad for x, copy in zip(bench.args, before, strict=True))
    assert all(p.grad is None for block in bench.blocks.values() for p in block.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    for gemm in ("bf16", "per_row", "per_tensor"):  # excluded linears stay in bf16, and FP8 comes back
        bench.pick.set(gemm)
        assert bench.gemm() == gemm
        assert all(not block.excluded.config.use_fp8_gemm for block in bench.blocks.values())


def test_blocks_that_take_other_arguments_than_the_first_are_left_out(monkeypatch):
    bench = Bench(monkeypatch, config_of())
    bench.blocks["c.0"] = FP8Linear.from_linear(nn.Linear(HIDDEN, HIDDEN), config_of().linear_config())  # of one x
    bench.pick = GemmPick(bench.blocks, config_of(), bench.form_of)
    assert bench.pick.choose(bench.args).milliseconds
    assert {kind for kind, _ in bench.runs} == {Double, Single}


def test_a_gemm_that_is_refused_or_fails_is_left_out_with_its_reason(monkeypatch):
    bench = Bench(monkeypatch, config_of(activation={"linear_granularity": "per_tensor"}))
    refusal = "Rowwise scaling is not currently supported on your device"

    def obstacle(device: torch.device, linear: Any) -> str | None:
        return refusal if linear.input_granularity == "per_row" else None

    def fails(once: Callable[[], None], device: torch.device) -> float:
        if bench.gemm() == "bf16":
            raise RuntimeError("CUDA error: invalid argument\nmore")
        return 7.0

    monkeypatch.setattr(measure, "fp8_gemm_obstacle", obstacle)
    monkeypatch.setattr(measure, "timed", fails)
    picked = bench.pick.choose(bench.args)
    assert (picked.name, bench.gemm(), list(picked.milliseconds)) == ("per_tensor", "per_tensor", ["per_tensor"])
    assert picked.refused == {"per_row": refusal, "bf16": "RuntimeError: CUDA error: invalid argument"}
    monkeypatch.undo()
    bench = Bench(monkeypatch, config_of())  # where all fail it is the one that was asked for
    monkeypatch.setattr(measure, "timed", Mock(side_effect=RuntimeError("no")))
    assert (bench.pick.choose(bench.args).name, bench.gemm()) == ("per_row", "per_row")


def test_out_of_memory_is_no_verdict_on_the_first_gemm(monkeypatch):
    """After the largest size, one timing for every first batch, its own is tried; only then the step's remedies."""
    bench = Bench(monkeypatch, config_of())
    bench.pick.image_tokens = 64
    tokens = []

    def full(once: Callable[[], None], device: torch.device) -> float:
        once()
        tokens.append(bench.seen[-1])
        if bench.seen[-1] == 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 1.0

    monkeypatch.setattr(measure, "timed", full)
    assert bench.pick.choose(bench.args).name == "per_row"
    assert tokens[:2] == [64, 6]
    assert "measured earlier" in bench.pick.choose(bench.args).why, "kept for these shapes"
    monkeypatch.setattr(measure, "timed", bench.timed)
    bench.seen.clear()
    bench.pick.choose(bench.args)
    assert set(bench.seen) == {64}, "as times of the largest the others' would stay"
    bench.seen.clear()
    bench.pick.choose((torch.randn(1, 8, HIDDEN), bench.args[1]))
    assert not bench.seen


def test_arguments_grow_with_their_tables_and_those_with_a_mask_do_not():
    image, text, table = torch.randn(1, 6, 10), torch.randn(1, 4, 10), (torch.randn(10, 6), torch.randn(10, 6))
    grown = measure.enlarged((image, text, torch.randn(1, 10), table, None), 8)
    assert [x.shape[-2] for x in (*grown[:3], *grown[3])] == [8, 4, 1, 12, 12]
    assert torch.equal(grown[0][:, :6], image)
    assert grown[1] is text
    masked = (image, text, torch.ones(1, 10, dtype=torch.bool))
    assert measure.enlarged(masked, 8) is masked
    assert measure.enlarged((image, text), 5)[0] is image


@pytest.mark.parametrize("content", ["", '{"x": 3}'])
def test_a_broken_cache_costs_a_measurement(monkeypatch, content):
    measure.cache_file().parent.mkdir(parents=True)
    measure.cache_file().write_text(content)
    bench = Bench(monkeypatch, config_of(), pass_s=4.0)  # one candidate uses the time up
    picked = bench.pick.choose(bench.args)
    assert (list(picked.milliseconds), picked.name) == (["per_row"], "per_row")
    assert len(json.loads(measure.cache_file().read_text())) == 1


@pytest.mark.parametrize(
    ("coat", "why"),
    [
        ({"speed": {"measure": "never"}}, "speed.measure: never"),
        ({"speed": {"measure": "auto"}}, "nothing is measured on a cpu"),
        ({"activation": {"use_fp8": False}, "speed": {"measure": "always"}}, "the only one"),
    ],
)
def test_as_written_where_nothing_is_measured(monkeypatch, coat, why):
    bench = Bench(monkeypatch, COATConfig.from_dict(coat))
    picked = bench.pick.choose(bench.args)
    assert (bench.runs, picked.milliseconds) == ([], {})
    assert why in picked.describe("", 1)


def test_a_cached_answer_of_another_config_is_not_taken(monkeypatch):
    keys = set()
    for coat in ({}, {"activation": {"linear_granularity": "per_tensor"}}, {"weight": {"granularity": "per_row"}}):
        bench = Bench(monkeypatch, config_of(**coat))
        keys.add(measure.key_of(bench.args, bench.blocks.values(), config_of(**coat)))
    assert len(keys) == 3
