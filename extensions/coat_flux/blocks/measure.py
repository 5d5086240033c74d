"""What is chosen by measurement on the run's first batch: the scaling of the GEMMs, and the attention kernel.

    GEMMs        per_tensor or per_row in FP8, or bf16 (the FP8 weight dequantized at each use): the fastest that is at
                 least as precise as configured
    attention    the fastest kernel that agrees with plain matrix products (`AttentionTrial`) at the batch's shape;
                 without a GPU torch chooses

GEMMs are timed in one block of each class, forward and backward on detached copies of the first batch, and weighted by
the number of such blocks; the run's gradients and random state are untouched. Times are cached in a small JSON file per
user, so that equal jobs choose the same; the first process's answer counts for all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pathlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from coat_core.activation import FP8InputLinear
from coat_core.config import FP8LinearConfig
from coat_core.linear.function import fp8_gemm_obstacle, input_storage
from coat_core.ops.attention import GPU_KERNELS, TAKES_MASK, AttentionTrial, chosen_kernel, use_kernel
from coat_core.ops.dispatch import first_line

from ..base.environment import TRITON, version_of
from ..base.files import write_file
from ..config.coat import COATConfig
from .fused.parts import written_gradients
from .gemms import stored_linears
from .hook import argument_names
from .lora import trained_parameters
from .models import first_measured

logger = logging.getLogger(__name__)

MEASURED = "the fastest of those that were measured"  # for the start table, which has no numbers of one run
TORCHS_CHOICE = "torch's choice"  # begins such a reason


@dataclass(frozen=True)
class Picked:
    """A GEMM of the blocks' linears, or a kernel of their attention."""

    name: str  # of `GEMMS` or the config's own scaling; or as `coat_core.ops.attention` names the kernel
    why: str = TORCHS_CHOICE
    milliseconds: Mapping[str, float] = field(default_factory=dict)  # of all blocks by GEMM, or of one by kernel
    refused: Mapping[str, str] = field(default_factory=dict)  # kernel → why it cannot be used here

    def describe(self, title: str, digits: int) -> str:
        """One line for the log: its time; in brackets the reason, the times of the others, and those refused."""
        own, others = "", [self.why]
        for name, ms in self.milliseconds.items():
            if name == self.name:
                own = f" {ms:.{digits}f} ms"
            else:
                others.append(f"{name} {ms:.{digits}f} ms")
        others += [f"{name}: {reason}" for name, reason in self.refused.items()]
        return f"{title}{own} ({'; '.join(others)})"


# --- the scaling of the GEMMs ---

GEMMS = ("per_tensor", "per_row", "bf16")  # from coarse to exact
BUDGET_S = 20.0  # seconds for all candidates
WARM_UP, REPEATS = 2, 5  # calls of a block, untimed and timed


def candidates(config: COATConfig) -> tuple[str, ...]:
    """The GEMMs that are at least as precise as the config asks, the one it asks for first."""
    asked = config.activation.linear_granularity if config.activation.use_fp8 else "bf16"
    return GEMMS[GEMMS.index(asked) :] if asked in GEMMS else (asked,)


class GemmPick:
    """Chooses for the linears with FP8 GEMMs, at the first pass; `form_of` returns what runs a block in a step."""

    def __init__(
        self, blocks: Mapping[str, nn.Module], config: COATConfig, form_of: Callable[[nn.Module], Callable[..., Any]]
    ) -> None:
        self._blocks = list(blocks.values())
        self._config = config
        self._form_of = form_of
        self._candidates = candidates(config)
        self._resumed: str | None = None
        # linears with FP8 GEMMs at the first `set`, and the name of the attribute with their config
        self._linears: list[tuple[Any, str]] | None = None
        self.image_tokens = 0  # of the run's largest images, which are timed

    def keep(self, gemm: str) -> None:
        """Reuse the GEMM of the resumed run, for equal rounding, unless the config forbids it now."""
        if gemm in self._candidates:
            self._resumed = gemm
        else:
            logger.warning("resume: the config no longer allows the saved GEMM, %s; choosing again", gemm)

    def set(self, gemm: str) -> None:
        """Switch to one of `GEMMS`, or the config's own scaling; adapters save their inputs to match."""
        asked = self._config.linear_config()
        scaling = asked.input_granularity if gemm == "bf16" else gemm
        if self._linears is None:
            self._linears = []
            for block in self._blocks:
                linears = stored_linears(block)
                self._linears += [(module, name) for module, name in linears if getattr(module, name).use_fp8_gemm]
        for module, name in self._linears:
            config: FP8LinearConfig = getattr(module, name)
            setattr(module, name, replace(config, use_fp8_gemm=gemm != "bf16", input_granularity=scaling))
        for block in self._blocks:
            for module in block.modules():
                if isinstance(module, FP8InputLinear) and module.source:
                    module.storage = input_storage(replace(asked, input_granularity=scaling))

    def choose(self, args: tuple[Any, ...]) -> Picked:
        """Pick a GEMM by the next `args` of the first block that is measured, and set the blocks' linears to it."""
        measure, device = self._config.speed.measure, args[0].device.type
        if self._resumed is not None:
            picked = Picked(self._resumed, "that of the resumed run")
        elif measure == "never":
            picked = Picked(self._candidates[0], "as configured: speed.measure: never")
        elif measure == "auto" and device != "cuda":
            picked = Picked(self._candidates[0], f"as configured: nothing is measured on a {device}")
        elif len(self._candidates) == 1:
            picked = Picked(self._candidates[0], "the only one that is as precise as configured")
        else:
            picked = from_first_process(lambda: self._fastest(args))
        self.set(picked.name)
        logger.info(picked.describe(f"execution: {picked.name} GEMM", digits=1))
        return picked

    def _fastest(self, args: tuple[Any, ...]) -> Picked:
        refused: dict[str, str] = {}
        for gemm in self._candidates[:-1]:  # bf16 always runs
            linear = replace(self._config.linear_config(), input_granularity=gemm)
            reason = fp8_gemm_obstacle(args[0].device, linear)
            if reason is not None:
                refused[gemm] = reason
        usable = [gemm for gemm in self._candidates if gemm not in refused]
        failed: dict[str, str] = {}
        for batch in (enlarged(args, self.image_tokens), args):  # the first is too large, or a model's grows otherwise
            started = time.monotonic()
            key = key_of(batch, self._blocks, self._config)
            times = {gemm: ms for gemm, ms in kept_results().get(key, {}).items() if gemm in usable}
            why = "measured earlier on this GPU, these shapes"
            if not times:
                try:
                    times, failed = self._time_all(usable, batch)
                except torch.OutOfMemoryError:
                    if batch is args:
                        raise
                    continue
                why = f"fastest, measured in {time.monotonic() - started:.1f} s"
                if times:
                    keep_results(key, times)
            if times:
                return Picked(min(times, key=lambda gemm: times[gemm]), why, times, {**refused, **failed})
        return Picked(usable[0], "as configured: no GEMM could be timed", refused={**refused, **failed})

    def _time_all(self, gemms: Sequence[str], args: tuple[Any, ...]) -> tuple[dict[str, float], dict[str, str]]:
        """By GEMM, the milliseconds of all blocks; and of those that failed the reasons."""
        started = time.monotonic()
        called = self._blocks[first_measured(self._blocks)]
        known = argument_names(type(called))  # blocks with other arguments cannot take `args`
        counts = Counter(cls for cls in map(type, self._blocks) if argument_names(cls) == known)
        first = {type(block): block for block in reversed(self._blocks)}  # of each class
        times: dict[str, float] = {}
        refused: dict[str, str] = {}
        for gemm in gemms:
            if times and time.monotonic() - started > BUDGET_S:
                logger.info("speed.measure: no time left for %s", gemm)
                continue
            self.set(gemm)
            try:
                times[gemm] = sum(count * self._block_ms(first[cls], args, started) for cls, count in counts.items())
            except Exception as error:  # of a compiler, too
                if isinstance(error, torch.OutOfMemoryError) and not times:
                    raise  # the batch is too large, whichever the GEMM
                refused[gemm] = first_line(error)
        return times, refused

    def _block_ms(self, block: nn.Module, args: tuple[Any, ...], started: float) -> float:
        inputs, trained = as_leaves(block, args)
        run = self._form_of(block)

        def once() -> None:
            with torch.enable_grad(), written_gradients(False):
                outputs = tree_leaves(run(*inputs))
                torch.autograd.grad(outputs, trained, [torch.ones_like(x) for x in outputs], allow_unused=True)

        for _ in range(WARM_UP):
            once()
        times = [timed(once, args[0].device)]
        while len(times) < REPEATS and time.monotonic() - started < BUDGET_S:
            times.append(timed(once, args[0].device))
        return statistics.median(times)


def as_leaves(block: nn.Module, args: Any) -> tuple[Any, list[Tensor]]:
    """A block's arguments, with copies of its streams [B, S, D] that require gradients; and all tensors that do."""
    trained: list[Tensor] = list(trained_parameters(block))

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3:
            x = x.detach().clone().requires_grad_()
        if isinstance(x, Tensor) and x.requires_grad:
            trained.append(x)
        return x

    return tree_map(leaf, args), trained


def enlarged(args: tuple[Any, ...], image_tokens: int) -> tuple[Any, ...]:
    """Arguments with the image stream [B, S, D] repeated to so many tokens, as are tables; unchanged with a mask."""
    streams = [x for x in args if isinstance(x, Tensor) and x.ndim == 3]
    tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
    has_mask = not all(x.is_floating_point() or x.is_complex() for x in tensors)
    if len(streams) != 2 or has_mask:
        return args
    image, text = streams
    tokens, text_tokens = image.shape[1], text.shape[1]
    if tokens >= image_tokens:
        return args
    sizes = {tokens: image_tokens, text_tokens + tokens: text_tokens + image_tokens}

    def longer(x: Any) -> Any:
        if not isinstance(x, Tensor) or x is text:
            return x
        for dim, size in enumerate(x.shape[:-1]):
            if size in sizes:
                return x.index_select(dim, torch.arange(sizes[size], device=x.device) % size)
        return x

    return tuple(tree_map(longer, args))


# --- the attention kernel ---

DEVICE = "cuda"  # where there is something to choose
ATTENTION_REPEATS = 7
TIE = 1.03  # torch's choice is taken where another is not faster by more than this
PACKAGES = ("flash-attn", "flash-attn-3", "flash-attn-4")


class AttentionPick:
    """Chooses the attention kernel once, at the first training pass."""

    def __init__(self, config: COATConfig) -> None:
        self._forced = None if config.speed.attention == "auto" else config.speed.attention
        self._measures = config.speed.measure != "never"
        self.resumed: str | None = None  # the resumed run's, taken if it can be used, for equal rounding
        self.kernel: str | None = None  # the one in use, on a GPU

    def choose(self, like: Tensor, mask: Tensor | None = None) -> Picked:
        """Pick a kernel for q [B, H, S, d] and a mask; RuntimeError if the configured one cannot be used."""
        use_kernel(None)
        own = chosen_kernel(like, like, like, mask)
        on_gpu = like.device.type == DEVICE
        if self._forced is not None:
            if mask is not None and self._forced not in TAKES_MASK:
                reason: str | None = "takes no mask, which this model hands to attention"
            elif on_gpu:
                reason = AttentionTrial(like).obstacle(self._forced)
            else:
                reason = f"needs a GPU, this is a {like.device.type}"
            if reason is not None:
                name = f"coat.speed.attention={self._forced!r}"
                raise RuntimeError(f"{name}: {reason}; set it to auto, or to a kernel that runs here")
            picked = Picked(self._forced, "as configured: speed.attention")
        elif mask is not None:
            picked = Picked(own, f"{TORCHS_CHOICE} of those that take this model's mask")
        elif on_gpu:
            picked = self._automatic(like, own)
        else:
            picked = Picked(own)
        if on_gpu and (mask is None or self._forced is not None):
            self.kernel = picked.name
            if self.resumed not in (None, picked.name):
                text = "resume: attention kernel %s -> %s (%s); results differ from here on by rounding"
                logger.warning(text, self.resumed, picked.name, picked.refused.get(self.resumed, picked.why))
        use_kernel(None if picked.why.startswith(TORCHS_CHOICE) else picked.name, like)
        logger.info(picked.describe(f"attention: {picked.name}", digits=2))
        return picked

    def _automatic(self, like: Tensor, own: str) -> Picked:
        """The resumed run's kernel, else the fastest, else `own`."""
        refused = {}
        if self.resumed is not None:
            reason = AttentionTrial(like).obstacle(self.resumed)
            if reason is None:
                return Picked(self.resumed, "that of the resumed run")
            refused = {self.resumed: reason}
        if not self._measures:
            return Picked(own, refused=refused)
        return from_first_process(lambda: _measured_kernel(like, own, refused))


def _measured_kernel(like: Tensor, own: str, refused: Mapping[str, str]) -> Picked:
    facts = {
        "attention": [list(like.shape), str(like.dtype)],
        "cudnn": torch.backends.cudnn.version(),
        "packages": [version_of(package) for package in PACKAGES],
    }
    key = key_on(like.device, facts)
    trial = AttentionTrial(like)
    refused = dict(refused)
    times = kept_results().get(key, {})
    if times and trial.obstacle(_fastest_kernel(times, own)) is None:
        why = "measured earlier on this GPU, this shape"
        return Picked(_fastest_kernel(times, own), why, times, refused)
    times = {}
    for kernel in dict.fromkeys((own, *GPU_KERNELS)):
        reason = trial.obstacle(kernel)
        if reason is None:
            times[kernel] = statistics.median(timed(trial.run, like.device) for _ in range(ATTENTION_REPEATS))
        else:
            refused[kernel] = reason
    if not times:
        return Picked(own, f"{TORCHS_CHOICE}: no kernel passed the trial", refused=refused)
    keep_results(key, times)
    return Picked(_fastest_kernel(times, own), f"fastest at {like.shape[2]} tokens", times, refused)


def _fastest_kernel(times: Mapping[str, float], own: str) -> str:
    best = min(times, key=lambda kernel: times[kernel])
    return own if own in times and times[own] <= TIE * times[best] else best


# --- measuring ---


def timed(once: Callable[[], None], device: torch.device) -> float:
    """The milliseconds of one call, by the device's clock."""
    if device.type != "cuda":
        started = time.perf_counter()
        once()
        return (time.perf_counter() - started) * 1e3
    start = torch.cuda.Event(enable_timing=True)
    stop = torch.cuda.Event(enable_timing=True)
    start.record()
    once()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def from_first_process(make: Callable[[], Any]) -> Any:
    """The result of `make` in the first of several processes; all must call this."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return make()
    box = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


# --- times of earlier runs ---


def cache_file() -> pathlib.Path:
    """In XDG_CACHE_HOME, or ~/.cache."""
    folder = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(folder) / "coat_flux" / "speed.json"


def key_of(args: tuple[Any, ...], blocks: Sequence[nn.Module], config: COATConfig) -> str:
    """A key of all that a GEMM's speed depends on: device, versions, shapes, blocks, adapters, config."""
    device = args[0].device
    facts = {
        "autocast": torch.is_autocast_enabled(device.type),
        "inputs": [(list(x.shape), str(x.dtype)) for x in args if isinstance(x, Tensor)],
        "blocks": dict(Counter(type(block).__name__ for block in blocks)),
        "trained": sum(p.numel() for block in blocks for p in trained_parameters(block)),
        "activation": asdict(config.activation),
        "weight": asdict(config.weight),
    }
    return key_on(device, facts)


def key_on(device: torch.device, facts: Mapping[str, Any]) -> str:
    """A key of plain facts, of the device and of the versions of triton, torch and coat_flux."""
    from .. import __version__

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = {"coat_flux": __version__, "torch": torch.__version__, "triton": version_of(*TRITON)}
    facts = {**facts, **versions, "device": name}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def keep_results(key: str, results: Mapping[str, Any]) -> None:
    """Add name → milliseconds, or operator → verdict, to the file for later starts."""
    file, content = cache_file(), {**kept_results(), key: dict(results)}
    try:
        write_file(file, json.dumps(content, indent=1))
    except OSError as error:
        logger.info("%s: not written, the next run measures again (%s)", file, error)


def kept_results() -> dict[str, dict[str, Any]]:
    """The results so far, by key."""
    try:
        content = json.loads(cache_file().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.info("%s: not readable, the run measures again (%s)", cache_file(), error)
        return {}
    well_formed = isinstance(content, dict) and all(isinstance(entry, dict) for entry in content.values())
    return content if well_formed else {}
