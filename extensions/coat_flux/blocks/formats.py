"""The 8 bits of a run on its device: formats and scalings whose products run there and are right.

    neighbours            where the product asked for is refused or wrong: FP8 with the other scaling, INT8 with
                          `fallback: int8`, else bf16; with `fallback: error` none of them
    weight.format: auto   e4m3, or INT8, the more precise: the one whose two products of a linear, with casts and
                          rotation, take less time at the run's sizes, timed before the load

Times are kept by card and versions; a resumed run keeps its format.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from coat_core.config import FP8LinearConfig
from coat_core.formats import E4M3, FORMATS, INT8
from coat_core.granularity import Granularity
from coat_core.linear.function import dgrad, fp8_gemm_obstacle, fprop, quantize_weight
from coat_core.ops.dispatch import first_line
from coat_core.ops.launch import n_blocks
from coat_core.ops.quantize import quantize
from coat_core.ops.scaled_mm import ALIGNMENT, try_products_of

from ..base.rng import kept_draws
from ..config.coat import AUTO, COATConfig
from .measure import DEVICE, Picked, candidates, from_first_process, keep_results, kept_results, key_on, timed
from .models import HUB_MODELS
from .models.checkpoint import cached_folder

logger = logging.getLogger(__name__)

Sizes = tuple[int, int, int]  # M tokens, K in, N out of a linear
TEXT_TOKENS, MLP_RATIO = 512, 4
PIXELS_PER_TOKEN = 256  # the VAE takes 8 × 8 pixels to a latent, FLUX packs 2 × 2 of them
MOST_TOKENS = 4608  # of FLUX.1 at 1024 px; more take memory and change little
FLUX_SIZES = (MOST_TOKENS, 3072, MLP_RATIO * 3072)
BUDGET_S, REPEATS = 3.0, 15


def largest_side(entry: Mapping[str, Any]) -> int:
    """The largest resolution of a process entry's photos, in pixels."""
    sides: list[int] = []
    for dataset in entry.get("datasets") or []:
        given = dataset.get("resolution", 512)
        sides += given if isinstance(given, list | tuple) else [given]
    return max(sides, default=512)


def linear_sizes(entry: Mapping[str, Any]) -> Sizes:
    """M, K, N of an MLP's first linear in a process entry's largest micro-batch; K is FLUX.1's if not known here."""
    model = str(entry["model"]["name_or_path"])
    config: Mapping[str, Any] = HUB_MODELS.get(model, {}).get("transformer", {})
    file = (cached_folder(model) or Path(model)) / "transformer" / "config.json"
    if file.is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
    width = FLUX_SIZES[1]
    if {"num_attention_heads", "attention_head_dim"} <= config.keys():
        width = ALIGNMENT * n_blocks(config["num_attention_heads"] * config["attention_head_dim"], ALIGNMENT)
    tokens = TEXT_TOKENS + largest_side(entry) ** 2 // PIXELS_PER_TOKEN
    batch = (entry.get("train") or {}).get("batch_size", 1)
    return min(batch * tokens, MOST_TOKENS), width, MLP_RATIO * width


def config_for(
    device: torch.device,
    config: COATConfig,
    sizes: Sizes | None = None,
    saved: Mapping[str, Any] | None = None,
) -> COATConfig:
    """The config in force on this device; where it is not the one asked for, the log says why. Idempotent.

    `sizes` are those of the products that are tried and timed, also of those that `GemmPick` may take, while there is
    memory; `saved` is how a resumed run ran, as `saves.state.execution_of`. The first of several processes decides.
    """
    stores = config.enabled and config.weight.use_fp8 and config.activation.use_fp8
    if not stores or device.type == "meta":
        return config
    if sizes is None:
        return _in_force(device, config, FLUX_SIZES, {})
    if device.type == "cuda":
        try_products_of(*sizes)
    in_force: COATConfig = from_first_process(lambda: _in_force(device, config, sizes, saved or {}))
    return in_force


def _in_force(device: torch.device, config: COATConfig, sizes: Sizes, saved: Mapping[str, Any]) -> COATConfig:
    if config.weight.format == AUTO:
        config = _automatic(device, config, sizes, saved)
    choices = [config, *_other_scalings(config)]
    if config.fallback == INT8.name and config.weight.format in FORMATS:
        choices.append(config.with_weights_in(INT8.name))
    found, refused = _first_multiplied(device, choices)
    if found is None:  # then it is bf16, and `apply_coat` says so
        return config
    for gemm in candidates(found)[:-1]:
        fp8_gemm_obstacle(device, replace(found.linear_config(), input_granularity=gemm))  # which keeps its answer
    if refused:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        scaling = found.activation.linear_granularity
        logger.warning("coat.fallback: %s, so products are in %s %s", reasons, found.weight.format, scaling)
    return found


def _automatic(device: torch.device, config: COATConfig, sizes: Sizes, saved: Mapping[str, Any]) -> COATConfig:
    """The config in e4m3 or INT8, with the reason as `chosen`."""
    in_e4m3 = config.with_weights_in(E4M3.name)
    usable: dict[str, COATConfig] = {}
    refused: dict[str, str] = {}
    for choices in ([in_e4m3, *_other_scalings(in_e4m3)], [config.with_weights_in(INT8.name)]):
        found, reasons = _first_multiplied(device, choices)
        refused |= reasons
        if found is not None:
            usable[found.weight.format] = found
    times: Mapping[str, float] = {}
    name = next(iter(usable), E4M3.name)
    if device.type != DEVICE:
        why = f"nothing is timed on a {device.type}"
    elif not usable:
        why = "no product in 8 bits runs here"
    elif len(usable) == 1:
        why = "the only one whose products run here"
    elif saved.get("weight_format") in usable:
        name, times, why = saved["weight_format"], saved.get("weight_ms", {}), "that of the resumed run"
    elif config.speed.measure == "never":
        why = "speed.measure: never"
    else:
        try:
            times, why = _times(device, usable, sizes)
            name = min(times, key=lambda each: times[each])
        except Exception as error:  # whatever a kernel raises that does not compile
            why = f"timing failed ({first_line(error)})"
    picked = Picked(name, why, times, refused)
    logger.info(picked.describe(f"weight.format: auto is {name}", digits=2))
    return replace(usable.get(name, in_e4m3), chosen=picked)


def _other_scalings(config: COATConfig) -> list[COATConfig]:
    """The config with one scale a tensor in all products, and with one a row of their inputs.

    None in INT8, or with `fallback: error`.
    """
    if config.weight.format == INT8.name or config.fallback == "error":
        return []
    whole = replace(config.activation, linear_granularity="per_tensor", wgrad_format="bf16")
    rows = replace(config.activation, linear_granularity="per_row")
    weight = replace(config.weight, granularity="per_tensor")
    return [replace(config, weight=weight, activation=whole), replace(config, activation=rows)]


def _first_multiplied(device: torch.device, choices: Iterable[COATConfig]) -> tuple[COATConfig | None, dict[str, str]]:
    """The first of these whose products run and are right, or None; by format and scaling, why not those before it."""
    refused: dict[str, str] = {}
    for config in choices:
        reason = fp8_gemm_obstacle(device, config.linear_config())
        if reason is None:
            return config, refused
        refused.setdefault(f"{config.weight.format} {config.activation.linear_granularity}", reason)
    return None, refused


# --- the faster of two ---


def _times(device: torch.device, configs: Mapping[str, COATConfig], sizes: Sizes) -> tuple[dict[str, float], str]:
    """Milliseconds of each config's linear, and where they are from."""
    shape = " x ".join(map(str, sizes))
    linears = {name: asdict(config.linear_config()) for name, config in configs.items()}
    key = key_on(device, {"sizes": sizes, "linears": linears})
    times = kept_results().get(key, {})
    if times.keys() == configs.keys():
        return times, f"the faster at {shape}, timed earlier on this GPU"
    started = time.monotonic()
    calls = {name: _linear(device, config.linear_config(), sizes) for name, config in configs.items()}
    for call in calls.values():  # compiles kernels
        call()
    samples = [[timed(call, device) for call in calls.values()]]
    while len(samples) < REPEATS and time.monotonic() - started < BUDGET_S:
        samples.append([timed(call, device) for call in calls.values()])
    times = dict(zip(calls, map(statistics.median, zip(*samples, strict=True)), strict=True))
    keep_results(key, times)
    return times, f"the faster at {shape}, timed in {time.monotonic() - started:.1f} s"


def _linear(device: torch.device, linear: FP8LinearConfig, sizes: Sizes) -> Callable[[], None]:
    """The two products of a frozen linear of random numbers, with the casts of a step."""
    tokens, k, n = sizes
    with kept_draws():
        x, full = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (tokens, n))
    weight = quantize_weight(full, linear)

    def once() -> None:
        quantized = quantize(x, linear.input_format, Granularity(linear.input_granularity))
        y = fprop(x, quantized, weight, None, x.dtype)
        dgrad(y, weight, linear, in_fp8=True)

    return once
