"""The order of the data as a function of (seed, epoch, place).

ai-toolkit shuffles with global generators, also in loader processes, which run ahead of the training. Here

    batches    are grouped by generators seeded while data sets load
    order      of an epoch depends on (seed, epoch)
    photo      its random draws depend on (seed, epoch, place)
    draws      of a micro-batch depend on its number, if a step has several

so (epoch, batches taken) is the position of a run. N processes see the data of one with accumulation N.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import signal
import sys
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ...base.interrupts import SIGNALS
from ...base.rng import kept_draws, mixed_seed

LOADING, ORDER, ITEM, DRAWS = range(4)  # the first number after the run's seed: what is drawn with it


def draw_from(*numbers: int) -> None:
    """Seed the CPU's generators by (numbers)."""
    seed = mixed_seed(*numbers)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Draw from (numbers) on the CPU inside the block."""
    with kept_draws():
        draw_from(*numbers)
        yield


class _SeededItems(Dataset):
    """A data set indexed by ((epoch, place), index); ai-toolkit looks for its data sets in `datasets`."""

    def __init__(self, inner: Any, seed: int):
        self.inner = inner
        self.datasets = inner.datasets
        self.seed = seed

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, key: tuple[tuple[int, int], int]) -> Any:
        (epoch, place), index = key
        with seeded(self.seed, ITEM, epoch, place):
            return self.inner[index]


class _EpochOrder(Sampler):
    def __init__(self, length: int, batch_size: int, seed: int, stride: int):
        self.length = length
        self.batch_size = batch_size
        self.seed = seed
        self.stride = stride
        self.epoch = self.batch = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[tuple[int, int], int]]:
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, ORDER, self.epoch))
        order = torch.randperm(self.length, generator=generator).tolist()
        size = self.batch_size
        for start in range(self.batch * size, self.length, self.stride * size):
            for place in range(start, min(start + size, self.length)):
                yield (self.epoch, place), order[place]


class ResumableLoader(DataLoader):
    """Counts passes and batches taken since (below 0: another process is ahead)."""

    epoch = 0
    taken = 0
    rank = 0
    _under_way: weakref.ref[Generator[Any, None, None]] | None = None  # in a circle loader processes would stay

    def __iter__(self) -> Iterator[Any]:
        batches = self._epoch()
        self._under_way = weakref.ref(batches)
        return batches

    def _epoch(self) -> Generator[Any, None, None]:
        order = self.sampler
        order.epoch = self.epoch
        order.batch = self.taken + self.rank
        for batch in super().__iter__():
            self.taken += order.stride
            yield batch
        batches = -(-order.length // order.batch_size)
        passes = (self.taken + self.rank) // batches  # several, if there are fewer batches than processes
        self.epoch = self.epoch + passes
        self.taken = self.taken - passes * batches

    def close(self) -> None:
        """End the loader processes now; the collector waits 5 s for each."""
        batches = None if self._under_way is None else self._under_way()
        if batches is not None:
            batches.close()
        self._iterator = None


def make_resumable(loader: DataLoader, seed: int, rank: int = 0, processes: int = 1) -> ResumableLoader:
    """A loader over the same data in our order."""
    if loader.num_workers and multiprocessing.get_start_method() != "fork":
        # loader processes that start from scratch get a copy of sys.path, and must find coat_flux
        parent = str(Path(__file__).resolve().parents[3])
        if parent not in sys.path:
            sys.path.append(parent)
    resumable = ResumableLoader(
        _SeededItems(loader.dataset, seed),
        batch_size=loader.batch_size,
        sampler=_EpochOrder(len(loader.dataset), loader.batch_size or 1, seed, processes),
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory=loader.pin_memory,
        worker_init_fn=_ignore_interrupts,
        generator=torch.Generator().manual_seed(seed),
    )
    resumable.rank = rank
    return resumable


def _ignore_interrupts(worker: int) -> None:
    """Keep loaders alive until the save: a terminal's signals reach them too."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def fingerprint(loader: DataLoader) -> str:
    """A hash of the photos in each batch."""
    digest = hashlib.sha256()
    for dataset in loader.dataset.datasets:
        names = [Path(item.path).name for item in dataset.file_list]
        batches = getattr(dataset, "batch_indices", None)  # without buckets there are none
        digest.update(repr([len(dataset), names, batches]).encode())
    return digest.hexdigest()
