"""The fastest execution mode that is at least as precise as configured, measured on the run's first batch.

    GEMM       per_tensor, per_row (FP8) or bf16 (the FP8 weight dequantized at each use)
    compile    none (eager) or blocks (torch.compile); where steps become CUDA graphs, those alone, measured eager

A GEMM's scaling may become finer than asked for, never coarser. Each candidate runs one block of each kind forward and
backward on detached copies of the first batch; no gradient, random state or saved tensor of the run is touched. Seconds
are weighted by how many blocks of a kind there are. The answer is kept from run to run in one small JSON file
per user (one that cannot be read or written costs a measurement, nothing else), and under several processes the first
one's answer counts for all.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..base.files import write_file
from .execution import NOT_CAPTURED, ExecutionMode, Picked, candidates
from .fused.gradients import written_gradients
from .fused.reading import argument_names
from .gemms import BlockGemms
from .lora import trained_parameters

if TYPE_CHECKING:
    from ..config.coat import COATConfig

logger = logging.getLogger(__name__)

BUDGET_S = 20.0
COMPILE_BEFORE_S = 10.0  # compilation cannot be stopped: it is begun only while this much of the budget is not used up
WARM_UP, REPEATS = 2, 5


class Unavailable(Exception):
    """An execution mode does not run on this machine; the message says why."""


RunBlock = Callable[[str, nn.Module, tuple[Any, ...]], tuple[Tensor, ...]]


class SpeedPick:
    """Chooses at the first forward pass.

    Attributes:
        graph_obstacle: why whole steps cannot be CUDA graphs; empty where they can.

    Args:
        blocks: full name → block; kinds are classes.
        config: the `coat:` block.
        run: (compile, block, arguments) → outputs, the block as a training step would run it; raises Unavailable.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], config: COATConfig, run: RunBlock) -> None:
        self._blocks, self._config, self._run = list(blocks.values()), config, run
        self._gemms = BlockGemms(self._blocks, config)
        self._kept: ExecutionMode | None = None
        self.graph_obstacle = NOT_CAPTURED

    def keep_execution(self, mode: ExecutionMode) -> None:
        """Take the execution mode of the run being resumed instead of measuring: another one rounds otherwise.

        Args:
            mode: of that run; one that the config no longer allows is logged and not taken.
        """
        if mode in (*candidates(self._config), *candidates(self._config, "")):
            self._kept = mode
        else:
            logger.warning("resume: the config no longer allows the saved execution mode, %s; choosing again", mode)

    def leave_out(self, linears: Collection[nn.Module]) -> None:
        """Let what is picked not be set on these linears."""
        self._gemms.leave_out(linears)

    def choose(self, args: tuple[Any, ...]) -> Picked:
        """Pick, and set the blocks' linears to the GEMM that was picked.

        Args:
            args: what the first block is about to be called with.
        """
        found = candidates(self._config, self.graph_obstacle)
        if self._kept is not None:
            kept, same = self._kept, ("none", "cudagraphs")  # they compute the same
            kept = kept._replace(compile=found[0].compile) if {kept.compile, found[0].compile} <= {*same} else kept
            picked = Picked(kept, {}, "that of the resumed run")
        else:
            reason = self._reason_not_to_measure(args, found)
            picked = Picked(found[0], {}, reason) if reason else self._measured(args, found)
        self._gemms.set(picked.execution.gemm)
        logger.info(picked.describe())
        return picked

    def _reason_not_to_measure(self, args: tuple[Any, ...], found: list[ExecutionMode]) -> str | None:
        measure = self._config.speed.measure
        if measure == "never":
            return "as configured: speed.measure: never"
        if measure == "auto" and args[0].device.type != "cuda":
            return f"as configured: nothing is measured on a {args[0].device.type}"
        if len(found) == 1:
            return "the only one that is as precise as configured"
        return None

    def _measured(self, args: tuple[Any, ...], found: list[ExecutionMode]) -> Picked:
        key = key_of(args, self._blocks, self._config)
        kept = from_first_process(lambda: read_cache(key))
        known = {ExecutionMode(*mode): ms for mode, ms in kept.items()} if kept else {}
        why = "measured earlier on this GPU, these shapes"
        if not set(known) & set(found):
            started = time.monotonic()
            timed = from_first_process(lambda: self._time_all(args, found))
            known = {ExecutionMode(*mode): ms for mode, ms in timed.items()}
            why = f"fastest, measured in {time.monotonic() - started:.1f} s"
            write_cache(key, known)
        ours = {mode: ms for mode, ms in known.items() if mode in found}
        return Picked(min(ours, key=lambda mode: ours[mode]), ours, why)

    def _time_all(self, args: tuple[Any, ...], found: list[ExecutionMode]) -> dict[ExecutionMode, float]:
        """Eager ones first; of the compiled ones only the fastest GEMM's, while there is time."""
        started = time.monotonic()
        times: dict[ExecutionMode, float] = {}
        for mode in (mode for mode in found if mode.compile == found[0].compile):
            if times and time.monotonic() - started > BUDGET_S:
                logger.info("speed.measure: no time left for %s", mode)
                continue
            times[mode] = self._milliseconds(mode, args, started)
        best = min(times, key=lambda mode: times[mode])
        for mode in found:
            if mode.gemm == best.gemm and mode not in times and time.monotonic() - started < COMPILE_BEFORE_S:
                try:
                    times[mode] = self._milliseconds(mode, args, started)
                except Unavailable as error:
                    logger.info("speed.measure: %s: %s", mode, error)
        return times

    def _milliseconds(self, mode: ExecutionMode, args: tuple[Any, ...], started: float) -> float:
        self._gemms.set(mode.gemm)
        known = argument_names(type(self._blocks[0]))  # blocks with other arguments cannot take `args`
        counts = Counter(kind for kind in map(type, self._blocks) if argument_names(kind) == known)
        first = {type(block): block for block in reversed(self._blocks)}
        return sum(count * self._block_ms(mode, first[kind], args, started) for kind, count in counts.items())

    def _block_ms(self, mode: ExecutionMode, block: nn.Module, args: tuple[Any, ...], started: float) -> float:
        given = tuple(_leaf(x) if isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3 else x for x in args)
        wanted = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
        wanted += trained_parameters(block)

        def once() -> None:
            with torch.enable_grad(), written_gradients(False):
                outputs = tree_leaves(self._run(mode.compile, block, given))
                torch.autograd.grad(outputs, wanted, [torch.ones_like(x) for x in outputs], allow_unused=True)

        for _ in range(WARM_UP):
            once()
        times = [timed(once, args[0].device)]
        while len(times) < REPEATS and time.monotonic() - started < BUDGET_S:
            times.append(timed(once, args[0].device))
        return statistics.median(times)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def timed(once: Callable[[], None], device: torch.device) -> float:
    """Return the milliseconds of one call, by the device's clock."""
    if device.type != "cuda":
        started = time.perf_counter()
        once()
        return (time.perf_counter() - started) * 1e3
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    once()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def from_first_process(make: Callable[[], Any]) -> Any:
    """Return what `make` returns in the first of several processes, in all of them; all must come here."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return make()
    box = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def cache_file() -> pathlib.Path:
    """Return the file: in XDG_CACHE_HOME, or ~/.cache."""
    folder = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(folder) / "coat_flux" / "speed.json"


def key_of(args: tuple[Any, ...], blocks: Iterable[nn.Module], config: COATConfig) -> str:
    """Return a key of all that speed depends on: device, versions, shapes, blocks, adapters, config."""
    device = args[0].device
    blocks = list(blocks)
    facts = {
        "triton": version_of("triton", "triton-windows"),
        "autocast": torch.is_autocast_enabled(device.type),
        "inputs": [(list(x.shape), str(x.dtype)) for x in args if isinstance(x, Tensor)],
        "blocks": dict(Counter(type(block).__name__ for block in blocks)),
        "trained": sum(p.numel() for block in blocks for p in trained_parameters(block)),
        "activation": asdict(config.activation),
        "weight": asdict(config.weight),
        "compile": config.speed.compile,
    }
    return key_on(device, facts)


def key_on(device: torch.device, facts: Mapping[str, Any]) -> str:
    """Return a key of plain facts, of the device and of the versions of torch and coat_flux."""
    from .. import __version__

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    facts = {**facts, "coat_flux": __version__, "torch": torch.__version__, "device": name}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def version_of(*packages: str) -> str | None:
    """Return the version of the first of these packages that is installed; None without any."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def read_cache(key: str) -> dict[tuple[str, str], float]:
    """Return (GEMM, compile) → milliseconds, empty where nothing is known."""
    return {(gemm, mode): ms for name, ms in read_times(key).items() for gemm, _, mode in [name.partition("/")]}


def write_cache(key: str, milliseconds: Mapping[Any, float]) -> None:
    """Keep (GEMM, compile) → milliseconds."""
    write_times(key, {f"{gemm}/{mode}": ms for (gemm, mode), ms in milliseconds.items()})


def read_times(key: str) -> dict[str, float]:
    """Return name → milliseconds, empty where nothing is known."""
    return _all().get(key, {})


def write_times(key: str, milliseconds: Mapping[str, float]) -> None:
    """Keep name → milliseconds."""
    file, content = cache_file(), {**_all(), key: dict(milliseconds)}
    try:
        write_file(file, json.dumps(content, indent=1))
    except OSError as error:
        logger.info("%s: not written, the next run measures again (%s)", file, error)


def _all() -> dict[str, dict[str, float]]:
    try:
        content = json.loads(cache_file().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.info("%s: not readable, the run measures again (%s)", cache_file(), error)
        return {}
    well_formed = isinstance(content, dict) and all(isinstance(entry, dict) for entry in content.values())
    return content if well_formed else {}
