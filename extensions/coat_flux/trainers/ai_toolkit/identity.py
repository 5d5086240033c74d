"""Which run this is, so that a resume that would be another one is refused."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["identity_of"]

NETWORK = ("type", "linear", "conv", "transformer_only", "network_kwargs")
BATCH = ("batch_size", "gradient_accumulation")
HOW_NOT_WHAT = ("num_workers", "prefetch_factor", "dataset_path")  # of a data set: how it is read; caches besides


def identity_of(process: Any) -> dict[str, Any]:
    """Return the identity of a run inside ai-toolkit.

    Args:
        process: built, nothing loaded.
    """
    from ...saves.identity import run_identity

    network, train = process.network_config, dict(process.get_conf("train", {}))
    return run_identity(
        model=process.model_config.name_or_path,
        datasets=list(_datasets(process.get_conf("datasets", None) or [], getattr(process, "_held_out", None))),
        network={key: getattr(network, key) for key in NETWORK},
        seed=_seed(process),
        world_size=process.accelerator.num_processes,
        batch={key: getattr(process.train_config, key) for key in BATCH},
        coat=dataclasses.asdict(process.coat),
        train={key: value for key, value in train.items() if key not in BATCH},
    )


def _seed(process: Any) -> int | None:
    """The config's seed, or that of run.py; None where each start draws its own."""
    if process.training_seed is not None:
        return process.training_seed
    text = os.environ.get("SEED", "")
    return int(text) if text.lstrip("-").isdigit() else None


def _datasets(entries: list[Mapping[str, Any]], held_out: Any) -> Iterator[dict[str, Any]]:
    """The data sets as written; one that reads a list of files has no folder to look into."""
    for entry in entries:
        place = entry.get("dataset_path") or entry["folder_path"]
        if os.path.isdir(place):
            kept = {k: v for k, v in entry.items() if k not in HOW_NOT_WHAT and not k.startswith("cache_")}
            names = [] if held_out is None else held_out.names.get(place, [])
            yield {**kept, "folder_path": place, "held_out": names}
