"""How much code a training step goes through, counted by a profiler: what someone must read to follow one.

A two-block FluxTransformer2DModel with rank-4 LoRA, warm: `apply_coat`, autocast, backward and `FP8AdamW.step`.
"""

import os
import sys
from collections import OrderedDict
from types import CodeType, FrameType
from typing import Any

import torch

from coat_core import FP8AdamW
from coat_flux.trainers.standalone.network import lora_parameters
from tests.architecture.sources import ROOT
from tests.helpers.flux import coat_flux_model, flux_inputs, loss_of

ROOMS = tuple(f"{ROOT / folder}{os.sep}" for folder in ("coat_core", "extensions/coat_flux"))
MOST_FILES, MOST_FUNCTIONS, MOST_LINES = 26, 160, 2_000  # one file less where no other test has run before


def entered(step: Any) -> set[CodeType]:
    """The functions of ours that `step` enters; those that a decorator or comprehension makes count by their own."""
    codes: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOMS):
            codes.add(frame.f_code)

    sys.setprofile(profile)
    torch.autograd.set_multithreading_enabled(False)  # backward in this thread, which is the one that is profiled
    try:
        step()
    finally:
        torch.autograd.set_multithreading_enabled(True)
        sys.setprofile(None)
    return codes


def lines_of(code: CodeType) -> set[tuple[str, int]]:
    """File and number of each line of a function, its docstring and signature among them."""
    numbers = [line for *_, line in code.co_lines() if line is not None]
    return {(code.co_filename, line) for line in range(code.co_firstlineno, max(numbers) + 1)}


def test_the_way_of_a_step(monkeypatch):
    # what other tests of this process have registered for every optimizer is not on this step's way
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_post_hooks", OrderedDict())
    model, _, _ = coat_flux_model({"memory": {"checkpointing": "none"}, "speed": {"measure": "never"}})
    optimizer = FP8AdamW(list(lora_parameters(model).values()), lr=1e-3)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(**flux_inputs(), return_dict=False)[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    codes = entered(step)
    files = sorted({code.co_filename for code in codes})
    lines = set().union(*map(lines_of, codes))
    for file in files:
        inside = sorted((code.co_firstlineno, code.co_qualname) for code in codes if code.co_filename == file)
        print(f"{len(inside):4} {file}: {', '.join(name for _, name in inside)}")
    print(f"{len(files)} files, {len(codes)} functions, {len(lines)} lines")
    assert len(files) <= MOST_FILES
    assert len(codes) <= MOST_FUNCTIONS
    assert len(lines) <= MOST_LINES
