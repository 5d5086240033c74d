"""What was measured, kept from run to run: one small JSON file per user.

A file that cannot be read or written costs a measurement, nothing else.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .plain_lora import trained_parameters

if TYPE_CHECKING:
    from ..config.coat import COATConfig

logger = logging.getLogger(__name__)


def cache_file() -> pathlib.Path:
    """Return the file: in XDG_CACHE_HOME, or ~/.cache."""
    folder = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(folder) / "coat_flux" / "speed.json"


def key_of(args: tuple[Any, ...], blocks: Iterable[nn.Module], config: COATConfig) -> str:
    """Return a key of all that speed depends on: device, versions, shapes, blocks, adapters, config."""
    from .. import __version__

    device = args[0].device
    blocks = list(blocks)
    facts = {
        "coat_flux": __version__,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "autocast": torch.is_autocast_enabled(device.type),
        "inputs": [(list(x.shape), str(x.dtype)) for x in args if isinstance(x, Tensor)],
        "blocks": dict(Counter(type(block).__name__ for block in blocks)),
        "trained": sum(p.numel() for block in blocks for p in trained_parameters(block)),
        "activation": asdict(config.activation),
        "weight": asdict(config.weight),
        "compile": config.speed.compile,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _triton_version() -> str | None:
    """Version of triton under either of its names; None without it."""
    for package in ("triton", "triton-windows"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def read(key: str) -> dict[tuple[str, str], float]:
    """Return (GEMM, compile) → milliseconds, empty where nothing is known."""
    entry = _all().get(key, {})
    return {(gemm, mode): ms for name, ms in entry.items() for gemm, _, mode in [name.partition("/")]}


def write(key: str, milliseconds: Mapping[Any, float]) -> None:
    """Keep (GEMM, compile) → milliseconds."""
    file = cache_file()
    content = {**_all(), key: {f"{gemm}/{mode}": ms for (gemm, mode), ms in milliseconds.items()}}
    staged = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        staged.write_text(json.dumps(content, indent=1), encoding="utf-8")
        staged.replace(file)
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
