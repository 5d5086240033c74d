"""Whole steps as CUDA graphs, one for each shape of batch: a replay costs the CPU a few copies, not 3,700 launches.

A capture spans the forward pass to the moving average. Before a replay, batch, noise, timesteps and learning rates are
copied into its inputs; loss and gradient norm are read after it.

    1st step of a shape    runs eagerly: kernels are compiled, blocks decided on
    2nd                    runs eagerly; then the step is captured, replayed from the same state, and both are compared
    after that             a replay

If they differ, or a capture fails, all further steps run eagerly. Graphs share one memory pool, freed before anything
else that may need the memory (`make_room`, `drop`); the next step of a shape is then captured again.

Source: torch.cuda.graph; https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...blocks.runner import BlockRunner
from ...watch.oom import release_memory

if TYPE_CHECKING:
    from .session import Session

MOST_GRAPHS = 8  # captured shapes: the driver keeps every node of each
ROOM = 1.05  # memory of an eager step relative to the pool's
# Relative tolerances of the loss and of an update's norm: attention's backward sums in any order.
LARGEST_LOSS_DIFFERENCE, LARGEST_DIFFERENCE = 0.01, 0.1

Drawn = Sequence[Mapping[str, Tensor]]  # of each micro-batch, by `Objective.draw`
State = Mapping[str, Sequence[Tensor]]


def capture(call: Callable[[], Any], pool: Any = None) -> tuple[Any, Any]:
    """Capture `call` without running it; returns the graph, and `call`'s result, which has values after a replay."""
    graph = torch.cuda.CUDAGraph()
    # other threads load the next batch meanwhile
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        made = call()
    return graph, made


class StepGraphs:
    """Captures and replays the steps of a session; once `failed`, all run eagerly (an error with `fallback: error`).

    `step` maps draws and learning rates fp64 [param groups] to fp32 [2], loss and gradient norm; it must not read from
    the device, draw random numbers or depend on its number.
    """

    def __init__(self, session: Session, step: Callable[[Drawn, Tensor], Tensor]) -> None:
        self._session = session
        self._step = step
        self._runner: Any = BlockRunner.of(session.transformer)  # whose `generation` changes when a capture would
        self._graphs: dict[Any, _Graph] = {}
        self._captured_in: Any = None
        self._ran: set[Any] = set()
        self._trusted: set[Any] = set()
        self.failed = self._full = False

    def run(self, drawn: Drawn, eager: Callable[[], Tensor]) -> Tensor | None:
        """Replay a step; returns loss and gradient norm, fp32 [2], or None if it must be run eagerly.

        `eager` does the same step and returns the same numbers. RuntimeError with `fallback: error` on failure.
        """
        shape = tuple(tuple((name, x.shape, x.dtype) for name, x in each.items()) for each in drawn)
        rates = [float(group["lr"]) for group in self._session.optimizer.param_groups]
        if self._captured_in != self._runner.generation:
            self.drop()
        if shape in self._graphs:
            return self._graphs[shape].replay(drawn, rates)
        if shape not in self._ran:
            self._ran.add(shape)
            return None
        if len(self._graphs) == MOST_GRAPHS:
            if not self._full:
                text = f"CUDA graphs: {MOST_GRAPHS} shapes of batches are captured, further ones run eagerly"
                self._session.log.info(text)
            self._full = True
            return None
        if shape in self._trusted:
            return self._captured(shape, drawn, rates)
        return self._compared(shape, drawn, rates, eager)

    def _state(self) -> State:
        """The tensors that a step changes."""
        session = self._session
        parameters = list(session.lora.values())
        entries = [session.optimizer.state[parameter] for parameter in parameters]
        return {
            "parameters": parameters,
            "average": [] if session.ema is None else list(session.ema.shadow.values()),
            "counters": [entry["step"] for entry in entries],
            "others": [x for entry in entries for name, x in entry.items() if name != "step"],
        }

    def make_room(self) -> None:
        """Free the pool if an eager step would not fit beside it."""
        pool = sum(graph.bytes for graph in self._graphs.values())  # which the allocator does not count as allocated
        if not pool:
            return
        unused = max(torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - pool, 0)
        if torch.cuda.mem_get_info()[0] + unused < ROOM * pool:
            self.drop()

    def drop(self) -> bool:
        """Free all graphs; returns whether there were any."""
        had = bool(self._graphs)
        self._graphs.clear()
        if had:
            release_memory()
        return had

    def _captured(self, shape: Any, drawn: Drawn, rates: Sequence[float]) -> Tensor | None:
        generation = self._runner.generation
        try:
            graph = _Graph(self._step, drawn, len(rates), next(iter(self._graphs.values()), None))
        except Exception as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            self._fail(f"a step cannot be captured: {reason}", error)
            return None
        if self._runner.generation != generation:  # it ran differently from the steps before it
            return None
        self._graphs[shape] = graph
        self._captured_in = generation
        return graph.replay(drawn, rates)

    def _compared(self, shape: Any, drawn: Drawn, rates: Sequence[float], eager: Callable[[], Tensor]) -> Tensor:
        """Do the step eagerly, then by a replay from the same state, and compare."""
        before = _copied(self._state())
        numbers = eager()
        expected = _copied(self._state())
        try:
            self._restore(before)
            replayed = self._captured(shape, drawn, rates)
            if replayed is not None:
                difference = _difference(before, expected, _copied(self._state()), numbers, replayed)
                if not difference:
                    if not self._trusted:
                        text = "CUDA graphs: from here on steps are replayed; the first agrees with an eager step"
                        self._session.log.info(text)
                    self._trusted.add(shape)
                    return replayed
                self._fail(f"a replayed step differs from the same step run eagerly: {difference}")
        except BaseException:
            self._restore(expected)
            raise
        self._restore(expected)
        return numbers

    @torch.no_grad()
    def _restore(self, state: State) -> None:
        for kind, tensors in self._state().items():
            for tensor, value in zip(tensors, state[kind], strict=True):
                tensor.copy_(value)

    def _fail(self, reason: str, error: Exception | None = None) -> None:
        self.failed = True
        self.drop()
        if self._session.job.coat.fallback == "error":
            raise RuntimeError(f"fallback='error': CUDA graphs: {reason}; set coat.speed.cuda_graphs: never") from error
        self._session.log.info(f"CUDA graphs: {reason}; steps run eagerly")


class _Graph:
    """A captured step, its inputs and result; `bytes` is the growth of the pool shared with `other`."""

    def __init__(
        self, step: Callable[[Drawn, Tensor], Tensor], drawn: Drawn, groups: int, other: _Graph | None
    ) -> None:
        device = drawn[0]["latents"].device
        self._inputs = [{name: torch.empty_like(x) for name, x in each.items()} for each in drawn]
        self._rates = torch.full((groups,), math.nan, dtype=torch.float64, device=device)
        release_memory()
        before = torch.cuda.memory_reserved() if device.type == "cuda" else 0
        pool = None if other is None else other._graph.pool()
        self._graph, self._numbers = capture(lambda: step(self._inputs, self._rates), pool)
        self.bytes = torch.cuda.memory_reserved() - before if device.type == "cuda" else 0

    @torch.no_grad()
    def replay(self, drawn: Drawn, rates: Sequence[float]) -> Tensor:
        for inputs, batch in zip(self._inputs, drawn, strict=True):
            for name, x in inputs.items():
                x.copy_(batch[name])
        for own_rate, rate in zip(self._rates, rates, strict=True):
            own_rate.fill_(rate)
        self._graph.replay()
        return self._numbers.clone()


def _copied(state: State) -> State:
    return {kind: [x.detach().to("cpu", copy=True) for x in tensors] for kind, tensors in state.items()}


def _difference(before: State, eager: State, replayed: State, numbers: Tensor, replayed_numbers: Tensor) -> str:
    expected, got = numbers.tolist(), replayed_numbers.tolist()
    finite = list(map(math.isfinite, (*expected, *got)))
    if not all(finite):
        return "" if finite[:2] == finite[2:] else f"loss and gradient norm {got}, eagerly {expected}"
    if not math.isclose(got[0], expected[0], rel_tol=LARGEST_LOSS_DIFFERENCE):
        return f"loss {got[0]:.6g}, eagerly {expected[0]:.6g}"
    if not all(map(torch.equal, replayed["counters"], eager["counters"])):
        return "the optimizer counted another number of steps"
    for kind in ("parameters", "average"):
        distances = []
        for state in (replayed, before):
            pairs = zip(state[kind], eager[kind], strict=True)
            distances.append(math.hypot(*(float((x.float() - y.float()).norm()) for x, y in pairs)))
        error, update = distances
        if error > LARGEST_DIFFERENCE * update:
            return f"update of the {kind} by {error / update if update else math.inf:.1%}"
    return ""
