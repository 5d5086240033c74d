"""Steps that the device decides alone, and steps as CUDA graphs, recorded on a CPU: the same run, bit by bit."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from coat_core import FP8Linear
from coat_core.optim import FP8AdamW
from coat_flux.blocks.runner import BlockRunner
from coat_flux.config.coat import COATConfig
from coat_flux.config.job import JobConfig
from coat_flux.config.job_sections import EMASection, SaveSection
from coat_flux.plan import cards
from coat_flux.trainers import optimizer as optim
from coat_flux.trainers.standalone import session as sessions
from coat_flux.trainers.standalone import step_graph
from coat_flux.trainers.standalone import trainer as steps
from coat_flux.trainers.standalone.network import LoraEMA
from coat_flux.trainers.standalone.trainer import COATTrainer, settle, train_step
from coat_flux.trainers.standalone.workers import Workers
from coat_flux.watch.guard import DeadRunError
from coat_flux.watch.run_tables import StepStats
from tests.helpers.asserts import assert_all_bitwise, assert_bitwise
from tests.helpers.engine_job import FEW_LINEARS, ON_DISK, engine_job, rows
from tests.helpers.recorded_graph import RecordedGraph, recording
from tests.helpers.step_watch import set_limits, step_watch

COAT = {"memory": {"log_memory_stats": False}}
TRAIN = {"steps": 8, "lr_scheduler": "linear", "ema_config": {"use_ema": True, "ema_decay": 0.9}}
BLOCKS = {"coat": COAT, "train": TRAIN, "network": FEW_LINEARS, "dataset": ON_DISK}


def state_of(session: Any) -> dict[str, Tensor]:
    """Copies of adapters, their averages and moments."""
    state = dict(session.lora) | {f"average {k}": v for k, v in session.ema.shadow.items()}
    for name, parameter in session.lora.items():
        state |= {f"{key} of {name}": x for key, x in session.optimizer.state[parameter].items()}
    return {name: x.detach().clone() for name, x in state.items()}


def changed_by_a_step(session: Any) -> list[Tensor]:
    return [x for kind in session.graphs._state().values() for x in kind]


class Run:
    """A run on the CPU whose optimizer can skip steps on the device, as on a GPU."""

    def __init__(self, name: str, place: dict[str, Path], out: Path, **job: Any):
        self.graphs: list[RecordedGraph] = []
        self.sessions: list[Any] = []
        self.job = engine_job(name, **{**place, "out": out}, **{**BLOCKS, **job})
        self.folder = out / name

    def train(self, *, captures: bool, observer: Any = lambda session: None) -> dict[str, Tensor]:
        build = optim.build_optimizer
        with pytest.MonkeyPatch.context() as patch:
            set_limits(patch, health_every=6, dead_lora_steps=2)  # steps 4, 7 and 8 are replayed
            patch.setattr(optim, "build_optimizer", lambda *args, **kw: build(*args, **{**kw, "capturable": True}))
            if captures:
                patch.setattr(sessions, "_capture_obstacle", lambda job, workers: "")
            patch.setattr(step_graph, "capture", recording(lambda: changed_by_a_step(self.sessions[0]), self.graphs))

            def observe(session: Any) -> None:
                self.sessions[:] = [session]
                observer(session)

            COATTrainer(self.job, observer=observe).train()
        return state_of(self.sessions[0])

    def log(self) -> str:
        return (self.folder / "coat" / "log.txt").read_text()

    def numbers(self) -> list[list[str]]:
        return [list(row.values())[:5] for row in rows(self.folder)]


@pytest.fixture(scope="module")
def eager_run(place: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], Any]:
    run = Run("eager", place, tmp_path_factory.mktemp("eager"))
    state = run.train(captures=False)
    assert not run.graphs
    return state, run.numbers()


@pytest.fixture
def run(place: dict[str, Path], tmp_path: Path) -> Callable[..., Run]:
    return lambda name, **job: Run(name, place, tmp_path, **job)


def test_with_micro_batches_pictures_and_a_step_that_is_not_finite(run):
    """The 7th step is skipped, on the device; pictures need the memory of the graphs."""

    def poison(session: Any) -> None:
        draw = session.objective.draw

        def poisoned(batch: Any, number: int) -> Any:
            drawn = draw(batch, number)
            return {**drawn, "noise": drawn["noise"] * math.nan} if number == 13 else drawn

        if session.step == 0:
            session.objective.draw = poisoned

    train = {**TRAIN, "gradient_accumulation": 2, "timestep_type": "weighted"}
    train |= {"disable_sampling": False, "skip_first_sample": True}
    job = {"train": train, "sample": {"sample_every": 5, "sample_steps": 1}}
    eager, replayed = run("eager", **job), run("replayed", **job)
    expected, state = eager.train(captures=False, observer=poison), replayed.train(captures=True, observer=poison)
    assert_all_bitwise(state, expected)
    assert replayed.numbers() == eager.numbers()
    assert "step 7: loss=nan" in replayed.log()
    assert len(replayed.graphs) == 2
    assert replayed.log().count("agrees with an eager step") == 1


def test_what_changes_in_the_blocks_is_captured_again(run):
    def exclude(session: Any) -> None:
        if session.step == 4:
            linears = [module for module in session.transformer.modules() if isinstance(module, FP8Linear)]
            BlockRunner.of(session.transformer).multiply_in_bf16(linears[-6:])

    eager, replayed = run("eager"), run("replayed")
    expected, state = eager.train(captures=False, observer=exclude), replayed.train(captures=True, observer=exclude)
    assert_all_bitwise(state, expected)
    assert len(replayed.graphs) == 2


def test_a_replayed_and_resumed_run_is_the_same_run(run, eager_run):
    """Through a schedule of the learning rate, noise, EMA, and health steps between replays."""
    replayed = run("replayed", save={"save_every": 4})

    def stop(session: Any) -> None:
        if session.step == 5 and not stopped:
            stopped.append(True)
            raise KeyboardInterrupt

    stopped: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        replayed.train(captures=True, observer=stop)
    assert_all_bitwise(replayed.train(captures=True, observer=stop), eager_run[0])
    assert replayed.numbers() == eager_run[1]
    assert [graph.replays for graph in replayed.graphs] == [1, 1]
    assert replayed.log().count("agrees with an eager step") == 2


def test_memory_that_graphs_hold_is_the_first_to_be_given_back(run, eager_run, monkeypatch):
    """A health step, run eagerly next to graphs, runs out of memory once: it is tried again as it was."""
    monkeypatch.setattr(cards, "EDITS", ())  # for speed no remedies are sought
    failed = []

    def run_out(session: Any) -> None:
        loss = session.objective.loss

        def scarce(drawn: Any) -> Tensor:
            if session.step == 4 and not failed:
                failed.append(len(session.graphs._graphs))
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return loss(drawn)

        if session.step == 0:
            session.objective.loss = scarce

    replayed = run("replayed")
    state = replayed.train(captures=True, observer=run_out)
    assert failed == [1]
    assert "Step 5 is tried again: CUDA graphs: their memory was given back" in replayed.log()
    assert len(replayed.graphs) == 2
    assert_all_bitwise(state, eager_run[0])


# -- around two matrices -----------------------------------------------------------------------------------------------
NAMES = ("transformer.a.lora_A.weight", "transformer.a.lora_B.weight")


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, health_every=50, dead_lora_steps=40, nonfinite_steps=3)


class SmallRun:
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
        self.watch, self.lines = step_watch(COATConfig.from_dict(COAT), lora=self.lora)
        self.rows: list[StepStats] = []
        self.read_at: list[int] = []  # steps done when each row came
        optimizer = FP8AdamW(self.lora.values(), lr=1e-3, capturable=True)
        train = SimpleNamespace(gradient_accumulation=2, max_grad_norm=1.0, steps=1000)
        self.session: Any = SimpleNamespace(
            job=SimpleNamespace(train=train, save=SaveSection(), seed=3, coat=SimpleNamespace(fallback="auto")),
            transformer=nn.Identity(), workers=Workers("cpu"), watch=self.watch, lora=self.lora,
            dataset=SimpleNamespace(batch=lambda batch: {}), objective=self, optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
            ema=LoraEMA(self.lora, EMASection(ema_decay=0.9)), live=SimpleNamespace(poll=frozenset),
            log=SimpleNamespace(step=self._record, info=self.lines.info), epoch=0, step=0, outstanding=None,
            skips_on_device=late, captures=captures, fused=None, graphs=None,
        )  # fmt: skip

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


@pytest.mark.parametrize("spoil", [{}, {9: math.nan}, {8: math.inf, 10: math.nan, 15: math.inf}], ids=str)
def test_a_late_run_is_the_same_run(spoil):
    late, prompt = SmallRun(True, spoil), SmallRun(False, spoil)
    for run in (late, prompt):
        run.train(9)
    assert late.session.outstanding[0].step == 9
    assert late.read_at == [1, 2, 4, 5, 6, 7, 8, 9]  # the first two at once, the others when the next is under way
    settle(late.session)
    assert late.session.outstanding is None
    assert_all_bitwise(state_of(late.session), state_of(prompt.session))
    exact, expected = ([repr(replace(row, seconds=0.0)) for row in run.rows] for run in (late, prompt))
    assert exact == expected
    assert late.lines.said == prompt.lines.said
    assert late.watch.state_dict() == prompt.watch.state_dict()
    assert len(late.lines.said) == len(spoil)


@pytest.mark.parametrize(("norm", "clipped"), [(4.0, 1.0), (0.25, 0.25)])
def test_gradients_are_scaled_to_max_grad_norm_and_shorter_ones_stay(norm, clipped):
    run = SmallRun(False, {})
    torchs = [nn.Parameter(torch.zeros(4, 4)) for _ in run.lora]
    for param in (*run.lora.values(), *torchs):
        param.grad = torch.full((4, 4), norm / math.sqrt(32))
    torch.nn.utils.clip_grad_norm_(torchs, run.session.job.train.max_grad_norm)
    assert steps._clipped(run.session, torch.tensor(2.0)).tolist() == pytest.approx([2.0, norm])
    grads = torch.cat([param.grad.flatten() for param in run.lora.values() if param.grad is not None])
    assert grads.norm().item() == pytest.approx(clipped, rel=1e-4)
    assert_bitwise(grads, torch.cat([param.grad.flatten() for param in torchs]))


def test_what_is_outstanding_is_judged_before_a_save_and_a_dead_run_ends_under_the_right_number():
    run = SmallRun(True, {10: math.nan, 12: math.nan, 14: math.nan})
    run.train(7)
    assert run.watch.guard.doubt is None  # only step 6 is known
    settle(run.session)
    assert run.watch.guard.doubt == "the last 2 steps were not finite"
    with pytest.raises(DeadRunError, match=r"step 8: loss=nan.* for 3 steps in a row") as error:
        run.train(5)
    assert (error.value.since, run.session.step) == (4, 9)  # bad from step 6, compared last at 4
    assert run.watch.guard.doubt is not None


def test_parameters_are_checked_under_the_step_that_broke_them(monkeypatch):
    found = []
    for late in (True, False):
        run = SmallRun(late, {})
        with suppress(DeadRunError):
            run.train(38)
        monkeypatch.setattr(run.watch.guard, "_check", lambda step, needs_effect: found.append((step, needs_effect)))
        run.train(4)
    assert found == [(40, True)] * 2


def small(patch: pytest.MonkeyPatch, **options: Any) -> tuple[SmallRun, list[RecordedGraph]]:
    """A run and the graphs that it records; its fourth step is compared, the fifth replayed."""
    graphs: list[RecordedGraph] = []
    made = SmallRun(True, {}, captures=True, **options)
    patch.setattr(step_graph, "BlockRunner", SimpleNamespace(of=lambda model: SimpleNamespace(generation=0)))
    patch.setattr(step_graph, "capture", recording(lambda: changed_by_a_step(made.session), graphs))
    return made, graphs


def test_each_shape_has_a_graph_of_its_own_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(step_graph, "MOST_GRAPHS", 2)
    replayed, graphs = small(monkeypatch, tokens=(8, 4, 2))
    eager = SmallRun(True, {}, tokens=(8, 4, 2))
    for run in (replayed, eager):
        run.train(14)
    assert_all_bitwise(state_of(replayed.session), state_of(eager.session))
    assert [graph.pool_of for graph in graphs] == [None, "pool"]
    assert all(graph.replays > 1 for graph in graphs)
    assert sum("2 shapes of batches are captured, further ones run eagerly" in x for x in replayed.lines.said) == 1


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("loss", "a replayed step differs from the same step run eagerly: loss"),
        ("update", "a replayed step differs from the same step run eagerly: update of the parameters by"),
        ("capture", "a step cannot be captured: no graph today"),
    ],
)
def test_what_cannot_be_replayed_runs_eagerly(broken, reason, monkeypatch):
    """The run is the one without graphs, bit by bit, and a line says why; `fallback: error` raises."""
    replay = RecordedGraph.replay

    def changed(graph: RecordedGraph) -> None:
        replay(graph)
        if broken == "loss":
            next(iter(replayed.session.graphs._graphs.values()))._numbers.mul_(1.1)
        if broken == "update":
            with torch.no_grad():
                next(iter(replayed.lora.values())).add_(1e-2)

    if broken == "capture":
        monkeypatch.setattr(RecordedGraph, "__enter__", Mock(side_effect=RuntimeError("no graph today")))
    monkeypatch.setattr(RecordedGraph, "replay", changed)
    replayed, _ = small(monkeypatch)
    eager = SmallRun(True, {})
    for run in (replayed, eager):
        run.train(6)
    assert_all_bitwise(state_of(replayed.session), state_of(eager.session))
    assert any(f"CUDA graphs: {reason}" in line for line in replayed.lines.said)
    replayed, _ = small(monkeypatch)
    replayed.session.job.coat.fallback = "error"
    with pytest.raises(RuntimeError, match=r"fallback='error': CUDA graphs: .*coat\.speed\.cuda_graphs: never"):
        replayed.train(6)


def test_graphs_make_room_where_an_eager_step_would_find_none(monkeypatch):
    graphs = step_graph.StepGraphs(SimpleNamespace(transformer=torch.nn.Identity()), lambda *_: torch.zeros(2))
    figures = {"memory_reserved": lambda: 60, "memory_allocated": lambda: 20, "mem_get_info": lambda: (30, 80)}
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, value)
    graphs._graphs["a"] = SimpleNamespace(bytes=40)
    graphs.make_room()
    assert not graphs._graphs  # 30 are free, none unused: less than 42
    graphs._graphs["a"] = SimpleNamespace(bytes=20)
    graphs.make_room()
    assert graphs._graphs  # 30 free, 20 unused


@pytest.mark.parametrize(
    ("job", "device", "size", "obstacle"),
    [
        ({}, "cpu", 1, "cpu"),
        ({}, "cuda", 2, "processes"),
        ({"network": {"dropout": 0.1}}, "cuda", 1, "network.dropout"),
        ({"train": {**TRAIN, "optimizer": "adamw"}}, "cuda", 1, "adamw"),
    ],
)
def test_why_steps_are_not_captured(job, device, size, obstacle, place, tmp_path):
    raw = engine_job("run", **{**place, "out": tmp_path}, **{"coat": COAT, "train": TRAIN, **job})
    workers: Any = SimpleNamespace(device=torch.device(device), size=size)
    assert obstacle in sessions._capture_obstacle(JobConfig.from_dict(raw), workers)
