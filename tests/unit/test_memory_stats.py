"""Memory lines."""

from __future__ import annotations

import re

import pytest
import torch

from coat_flux.watch.phases import STEP_MOMENTS, peak_bytes, used_bytes
from coat_flux.watch.step_watch import CPU_NOTE
from tests import tolerances
from tests.helpers.step_watch import step_watch


def test_lines_come_at_log_every_with_the_note_once() -> None:
    watch, log = step_watch("memory: {log_every: 2}")
    for step in (1, 2, 3, 4):
        for moment in STEP_MOMENTS:
            watch.mark(moment, step)
    lines = log.details
    assert lines[0] == CPU_NOTE
    shape = r"\[(\w+)\] Step (\d): Allocated: (\d+\.\d\d)GB, Reserved: (\d+\.\d\d)GB"
    found = [re.fullmatch(shape, line).groups() for line in lines[1:]]
    assert [(phase, step) for phase, step, *_ in found] == [(phase, step) for step in "24" for phase in STEP_MOMENTS]
    assert all(0 < float(allocated) <= float(reserved) for *_, allocated, reserved in found)


def test_disabled_log_is_silent() -> None:
    for text in ("memory: {log_every: 1, log_memory_stats: false}", "{enabled: false, memory: {log_every: 1}}"):
        watch, log = step_watch(text)
        watch.mark("after_forward", 1)
        assert log.details == []


def test_cpu_numbers_are_the_process_and_its_peak() -> None:
    before = used_bytes(torch.device("cpu"))[0]
    block = torch.ones(64 * 2**20 // 4)
    during, peak = used_bytes(torch.device("cpu"))
    assert during - before > 48 * 2**20
    assert peak >= during
    del block
    assert peak_bytes(torch.device("cpu")) >= during - tolerances.RESIDENT_SLACK_BYTES


@pytest.mark.gpu
def test_gpu_numbers_are_the_allocators() -> None:
    device = torch.device("cuda")
    block = torch.ones(2**20, device=device)
    assert used_bytes(device) == (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    assert peak_bytes(device) >= block.nbytes
