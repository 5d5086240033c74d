"""The fastest GEMM scaling that is at least as precise as configured, measured on the run's first batch.

    per_tensor, per_row    FP8
    bf16                   the FP8 weight dequantized at each use

One block of each kind runs forward and backward with each candidate on detached copies of the first batch,
weighted by the number of such blocks; the run's gradients and random state are untouched. Results are cached in a
small JSON file per user, and the first process's answer counts for all.
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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..base.files import write_file
from .fused.block import written_gradients
from .fused.reading import argument_names
from .gemms import BlockGemms
from .lora import trained_parameters

if TYPE_CHECKING:
    from ..config.coat import COATConfig

logger = logging.getLogger(__name__)

GEMMS = ("per_tensor", "per_row", "bf16")  # from coarse to exact
BUDGET_S = 20.0
WARM_UP, REPEATS = 2, 5


class PickedGemm(NamedTuple):
    """The GEMM of the blocks' linears, and why; milliseconds of all blocks by candidate, if measured."""

    gemm: str  # of `GEMMS`, or the config's own scaling
    milliseconds: Mapping[str, float]
    why: str  # in words

    def describe(self) -> str:
        """One line for the log."""
        own = f" {self.milliseconds[self.gemm]:.1f} ms" if self.gemm in self.milliseconds else ""
        others = [f"{gemm} {ms:.1f} ms" for gemm, ms in self.milliseconds.items() if gemm != self.gemm]
        return f"execution: {self.gemm} GEMM{own} ({'; '.join([self.why, *others])})"


def candidates(config: COATConfig) -> tuple[str, ...]:
    """Return the GEMMs that are at least as precise as the config asks, the one it asks for first."""
    asked = config.activation.linear_granularity if config.activation.use_fp8 else "bf16"
    return GEMMS[GEMMS.index(asked) :] if asked in GEMMS else (asked,)


class GemmPick:
    """Chooses at the first forward pass; `form_of` returns what runs a block in a training step."""

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        config: COATConfig,
        form_of: Callable[[nn.Module], Callable[..., Any]],
    ) -> None:
        self._blocks, self._config, self._form_of = list(blocks.values()), config, form_of
        self._gemms = BlockGemms(self._blocks, config)
        self._candidates = candidates(config)
        self._resumed: str | None = None

    def keep(self, gemm: str) -> None:
        """Reuse the GEMM of the resumed run, for equal rounding; one that the config forbids is logged and ignored."""
        if gemm in self._candidates:
            self._resumed = gemm
        else:
            logger.warning("resume: the config no longer allows the saved GEMM, %s; choosing again", gemm)

    def leave_out(self, linears: Collection[nn.Module]) -> None:
        """Exclude these linears from the pick."""
        self._gemms.leave_out(linears)

    def choose(self, args: tuple[Any, ...]) -> PickedGemm:
        """Pick a GEMM by the first block's coming `args`, and set the blocks' linears to it."""
        if self._resumed is not None:
            picked = PickedGemm(self._resumed, {}, "that of the resumed run")
        else:
            reason = self._reason_not_to_measure(args)
            picked = PickedGemm(self._candidates[0], {}, reason) if reason else self._measured(args)
        self._gemms.set(picked.gemm)
        logger.info(picked.describe())
        return picked

    def _reason_not_to_measure(self, args: tuple[Any, ...]) -> str | None:
        measure = self._config.speed.measure
        if measure == "never":
            return "as configured: speed.measure: never"
        if measure == "auto" and args[0].device.type != "cuda":
            return f"as configured: nothing is measured on a {args[0].device.type}"
        if len(self._candidates) == 1:
            return "the only one that is as precise as configured"
        return None

    def _measured(self, args: tuple[Any, ...]) -> PickedGemm:
        key = key_of(args, self._blocks, self._config)
        times = from_first_process(lambda: read_times(key))
        why = "measured earlier on this GPU, these shapes"
        if not set(times) & set(self._candidates):
            started = time.monotonic()
            times = from_first_process(lambda: self._time_all(args))
            why = f"fastest, measured in {time.monotonic() - started:.1f} s"
            write_times(key, times)
        times = {gemm: ms for gemm, ms in times.items() if gemm in self._candidates}
        return PickedGemm(min(times, key=lambda gemm: times[gemm]), times, why)

    def _time_all(self, args: tuple[Any, ...]) -> dict[str, float]:
        started = time.monotonic()
        times: dict[str, float] = {}
        for gemm in self._candidates:
            if times and time.monotonic() - started > BUDGET_S:
                logger.info("speed.measure: no time left for %s", gemm)
                continue
            self._gemms.set(gemm)
            times[gemm] = self._milliseconds(args, started)
        return times

    def _milliseconds(self, args: tuple[Any, ...], started: float) -> float:
        known = argument_names(type(self._blocks[0]))  # blocks with other arguments cannot take `args`
        counts = Counter(kind for kind in map(type, self._blocks) if argument_names(kind) == known)
        first = {type(block): block for block in reversed(self._blocks)}
        return sum(count * self._block_ms(first[kind], args, started) for kind, count in counts.items())

    def _block_ms(self, block: nn.Module, args: tuple[Any, ...], started: float) -> float:
        given = tuple(_leaf(x) if isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3 else x for x in args)
        wanted = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
        wanted += trained_parameters(block)
        run = self._form_of(block)

        def once() -> None:
            with torch.enable_grad(), written_gradients(False):
                outputs = tree_leaves(run(*given))
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
