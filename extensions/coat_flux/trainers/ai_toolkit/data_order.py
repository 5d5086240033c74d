"""The order of the data as a function of (seed, epoch, place), so that a run can resume anywhere.

ai-toolkit shuffles with the global random generators: with `random` when it groups photos into batches, with torch's
when an epoch begins, and in its loader processes when it drops or shuffles a caption. None of these can be restored
later, and loader processes run ahead of the training. Here

    batches      `random`, numpy and torch are seeded while the data sets are loaded, and restored afterwards
    order        the permutation of an epoch comes from (seed, epoch)
    photo        what is drawn while a photo is loaded comes from (seed, epoch, place in the order)
    draws        noise and timesteps of a micro-batch come from its number, where a step has several: in one process
                 with accumulation as in several processes

so (epoch, batches taken) determines where a run is, whatever `num_workers` is. Of N processes each takes every N-th
batch of the one order, across epoch borders: together they see what one process sees with accumulation N.
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

__all__ = ["ResumableLoader", "draw_from", "fingerprint", "make_resumable", "seeded"]

LOADING = 0  # the first number after the run's seed: what is drawn with it
ORDER = 1
ITEM = 2
DRAWS = 3


def _seed_of(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


def draw_from(seed: int, number: int) -> None:
    """Let the draws of a micro-batch come from its number, on all devices.

    Args:
        seed: the run's.
        number: of the micro-batch since the run began, all processes together.
    """
    mixed = _seed_of(seed, DRAWS, number)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)  # noqa: NPY002
    torch.manual_seed(mixed)


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Draw from (numbers) inside the block, on the CPU's generators; they go on as before after it.

    Args:
        numbers: the run's seed and what is drawn, none negative.
    """
    seed = _seed_of(*numbers)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])


class _SeededItems(Dataset):
    """A data set whose items are asked for by ((epoch, place), index)."""

    def __init__(self, inner: Dataset, seed: int):
        self.inner = inner
        self.seed = seed

    @property
    def datasets(self) -> list[Dataset]:
        """The data sets inside, where ai-toolkit looks for them."""
        return self.inner.datasets

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, key: tuple[tuple[int, int], int]) -> Any:
        (epoch, place), index = key
        with seeded(self.seed, ITEM, epoch, place):
            return self.inner[index]


class _EpochOrder(Sampler):
    """The keys of an epoch from a batch on, of every `stride`-th batch.

    Args:
        length: items of the data set.
        batch_size: items that the loader takes together.
        seed: of the order.
        stride: how many processes share the batches.
    """

    def __init__(self, length: int, batch_size: int, seed: int, stride: int):
        self.length, self.batch_size, self.seed, self.stride = length, batch_size, seed, stride
        self.epoch = self.batch = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[tuple[int, int], int]]:
        generator = torch.Generator().manual_seed(_seed_of(self.seed, ORDER, self.epoch))
        order, size = torch.randperm(self.length, generator=generator).tolist(), self.batch_size
        starts = range(self.batch * size, self.length, self.stride * size)
        places = [place for start in starts for place in range(start, min(start + size, self.length))]
        return iter([((self.epoch, place), order[place]) for place in places])


class ResumableLoader(DataLoader):
    """A DataLoader that knows how many batches the loop took, and resumes from there.

    Attributes:
        epoch: passes over the data done.
        taken: batches that all processes together have taken since that epoch began, this one's next being `rank`
            after them; of several processes one may be an epoch ahead of another, and its number be below 0.
        rank: of this process.
    """

    epoch = 0
    taken = 0
    rank = 0
    _under_way: weakref.ref[Generator[Any, None, None]] | None = None

    def __iter__(self) -> Iterator[Any]:
        batches = self._epoch()
        self._under_way = weakref.ref(batches)
        return batches

    def _epoch(self) -> Generator[Any, None, None]:
        order = self.sampler
        order.epoch, order.batch = self.epoch, self.taken + self.rank
        for batch in super().__iter__():
            self.taken += order.stride
            yield batch
        batches = -(-order.length // order.batch_size)
        passes = (self.taken + self.rank) // batches  # more than one where there are fewer batches than processes
        self.epoch, self.taken = self.epoch + passes, self.taken - passes * batches

    def close(self) -> None:
        """End the loader processes now; the garbage collector would wait 5 s for each of them."""
        batches = None if self._under_way is None else self._under_way()
        if batches is not None:
            batches.close()
        self._iterator = None


def make_resumable(loader: DataLoader, seed: int, rank: int = 0, processes: int = 1) -> ResumableLoader:
    """Return a loader over the same data with an order of ours.

    Args:
        loader: ai-toolkit's, not yet iterated.
        seed: the run's seed for this loader.
        rank: of this process.
        processes: that share the batches.
    """
    if loader.num_workers and multiprocessing.get_start_method() != "fork":
        _let_workers_import()
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
    """Such signals reach every process of a terminal: loader processes must live until the step is done and saved."""
    from ...saves.interrupts import SIGNALS

    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _let_workers_import() -> None:
    """Let loader processes that start from scratch (Windows, macOS) find `coat_flux`; they get a copy of sys.path."""
    parent = str(Path(__file__).resolve().parents[3])
    if parent not in sys.path:
        sys.path.append(parent)


def fingerprint(loader: DataLoader) -> str:
    """Return a hash of which photos are in which batches; it changes with the order a folder lists its files in."""
    digest = hashlib.sha256()
    for dataset in getattr(loader.dataset, "datasets", [loader.dataset]):
        names = [Path(item.path).name for item in getattr(dataset, "file_list", [])]
        groups = getattr(dataset, "batch_indices", None) or range(len(names))
        digest.update(repr([len(dataset), names, [list(g) if isinstance(g, list) else g for g in groups]]).encode())
    return digest.hexdigest()
