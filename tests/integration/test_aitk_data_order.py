"""The order of the data inside ai-toolkit: the same wherever it is resumed, however many processes load it."""

import multiprocessing
import random
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from coat_flux.trainers.ai_toolkit import data_order
from coat_flux.trainers.ai_toolkit.data_order import ResumableLoader, make_resumable, seeded

LENGTH = 7
SEED = 5
Item = tuple[int, float]


class Draws(Dataset):
    """Items that say their index, and what three global generators drew for them."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Item:
        return index, random.random() + float(np.random.rand()) + float(torch.rand(()))  # noqa: NPY002


def _loader(
    workers: int, batch_size: int | None, seed: int = SEED, rank: int = 0, processes: int = 1
) -> ResumableLoader:
    kept = {"prefetch_factor": 2, "persistent_workers": True} if workers else {}
    host = DataLoader(
        ConcatDataset([Draws()]),
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        collate_fn=list if batch_size else tuple,
        **kept,
    )
    return make_resumable(host, seed, rank, processes)


def _take(loader: ResumableLoader, count: int) -> list:
    """Batches as ai-toolkit's loop takes them: a new iterator at the end of an epoch."""
    taken: list = []
    while len(taken) < count:
        taken += islice(iter(loader), count - len(taken))
    return taken


@pytest.mark.parametrize(
    ("processes", "batch_size", "workers"), [(1, None, 0), (1, 2, 2), (2, None, 0), (3, 2, 0), (LENGTH + 2, 2, 0)]
)
def test_processes_share_the_batches_of_one_and_any_number_goes_on_anywhere(processes, batch_size, workers):
    """Also where an epoch has fewer batches than there are processes."""
    per_epoch = -(-LENGTH // (batch_size or 1))
    for steps in (1, per_epoch - 1, per_epoch, per_epoch + 2):
        whole = _take(_loader(0, batch_size), (steps + 2) * processes + 2 * per_epoch)
        ranks = [_loader(workers, batch_size, SEED, rank, processes) for rank in range(processes)]
        for rank, loader in enumerate(ranks):
            assert _take(loader, steps) == whole[rank : steps * processes : processes]
        assert len({loader.epoch * per_epoch + loader.taken for loader in ranks}) == 1
        for others in {1, processes, 3}:
            for rank in range(others):
                again = _loader(workers if others == 1 else 0, batch_size, SEED, rank, others)
                again.epoch, again.taken = ranks[0].epoch, ranks[0].taken
                rest = whole[steps * processes + rank :: others]
                assert _take(again, len(rest)) == rest


def test_every_item_once_in_each_epoch_and_in_another_order():
    items = _take(_loader(0, None), 2 * LENGTH)
    epochs = [index for index, _ in items[:LENGTH]], [index for index, _ in items[LENGTH:]]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(LENGTH))
    assert epochs[0] != epochs[1]
    assert len({draw for _, draw in items}) == 2 * LENGTH
    assert [index for index, _ in _take(_loader(0, None, SEED + 1), LENGTH)] != epochs[0]


def test_global_generators_do_not_notice():
    def draws() -> Item:
        return random.random(), float(np.random.rand()) + float(torch.rand(()))  # noqa: NPY002

    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(3)
    expected = draws()
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(3)
    with seeded(1, 2):
        inside = draws()
    _take(_loader(0, None), LENGTH + 2)
    assert draws() == expected
    with seeded(1, 2):
        assert draws() == inside


def test_closed_loader_has_no_processes_left():
    before = set(multiprocessing.active_children())
    loader = _loader(2, None)
    batches = iter(loader)
    assert len([next(batches), next(batches)]) == 2
    assert len(set(multiprocessing.active_children()) - before) == 2
    loader.close()
    assert set(multiprocessing.active_children()) <= before


def test_worker_processes_that_start_anew_find_the_package(monkeypatch):
    parent = str(Path(data_order.__file__).resolve().parents[3])
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != parent])
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "spawn")
    _loader(2, None)
    assert sys.path[-1] == parent
