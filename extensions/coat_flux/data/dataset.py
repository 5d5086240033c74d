"""From dataset settings to samples, and from samples to an endless, resumable, shardable order of batches."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .buckets import BUCKET_STEP, Bucket, Sample
from .files import DatasetError
from .preflight import inspect_datasets

__all__ = ["Batch", "BucketBatchSampler", "Sample", "scan"]

logger = logging.getLogger(__name__)


def scan(
    dataset_configs: Sequence[Any],
    trigger_word: str | None = None,
    *,
    background: str = "white",
    transparency: str = "background",
    step: int = BUCKET_STEP,
    reads_t5: bool = True,
) -> list[Sample]:
    """All samples of all datasets in a fixed order; arguments as `inspect_datasets`. Raises DatasetError."""
    report = inspect_datasets(
        dataset_configs, trigger_word, background=background, transparency=transparency, step=step, reads_t5=reads_t5
    )
    if report.errors:
        raise DatasetError(report.error_text())
    for warning in report.warnings:
        logger.warning("%s", warning)
    return report.samples


@dataclass(frozen=True)
class Batch:
    """Indices of samples that share a bucket size, and the number of the draw since the start of training."""

    indices: tuple[int, ...]
    draw: int


class BucketBatchSampler:
    """Endless order of batches of equal image size, one shuffle per epoch.

    The order of epoch e depends on (samples, batch_size, seed, e) only. Rank r of `world_size` takes batches r, r +
    world_size, ... of that sequence, across epoch borders, so that N processes see together what one process sees with
    N accumulation steps. The last batch of a bucket is filled up with the bucket's first samples: no image is left out
    and every batch has the same weight. Raises ValueError without samples, or for a batch size or rank out of range.
    """

    def __init__(
        self, samples: Sequence[Sample], batch_size: int, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        if not samples:
            raise ValueError("samples=[]: there is nothing to train on; scan a dataset folder with images")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be at least 1; use 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}: must be from 0 to world_size - 1 = {world_size - 1}; check the launcher")
        self.batch_size, self.seed, self.rank, self.world_size = batch_size, seed, rank, world_size
        self._buckets: dict[Bucket, list[int]] = {}
        for index, sample in enumerate(samples):
            self._buckets.setdefault(sample.bucket, []).append(index)
        self.batches_per_epoch = sum(-(-len(members) // batch_size) for members in self._buckets.values())
        self._sample_count = len(samples)
        self._position = 0  # in the sequence over all epochs, all ranks together
        self._order: tuple[int, list[tuple[int, ...]]] = (-1, [])

    def epoch_batches(self, epoch: int) -> list[tuple[int, ...]]:
        """All batches of an epoch, all ranks together, in order."""
        rng = random.Random(f"{self.seed}/{epoch}")
        batches = []
        for members in self._buckets.values():
            shuffled = rng.sample(members, len(members))
            for start in range(0, len(shuffled), self.batch_size):
                stop = start + self.batch_size
                batches.append(tuple(shuffled[i % len(shuffled)] for i in range(start, stop)))
        rng.shuffle(batches)
        return batches

    def __iter__(self) -> Iterator[Batch]:
        while True:
            draw = self._position + self.rank
            self._position += self.world_size
            yield Batch(self._at(draw), draw)

    def _at(self, draw: int) -> tuple[int, ...]:
        epoch, position = divmod(draw, self.batches_per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, self.epoch_batches(epoch))
        return self._order[1][position]

    def state_dict(self) -> dict[str, int]:
        """The position of the next batch; equal on all ranks after equally many batches."""
        epoch, position = divmod(self._position, self.batches_per_epoch)
        return {
            "epoch": epoch,
            "position": position,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "samples": self._sample_count,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state`; logs if changed data or settings change the order."""
        mine = self.state_dict()
        changed = [
            f"{key} {state[key]} -> {mine[key]}" for key in ("seed", "batch_size", "samples") if state[key] != mine[key]
        ]
        if changed:
            logger.warning(
                "resume: %s; training continues in epoch %d with a new order", ", ".join(changed), state["epoch"]
            )
        position = min(state["position"], self.batches_per_epoch)
        self._position = state["epoch"] * self.batches_per_epoch + position
