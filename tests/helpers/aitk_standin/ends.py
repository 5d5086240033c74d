"""Whether two runs inside ai-toolkit, or its stand-in, ended alike."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.helpers.asserts import assert_all_bitwise, assert_bitwise

NOT_SEEDED = {"numpy", "numpy_gauss"}  # by no ai-toolkit, and drawn by none


def newest_state(run: Path) -> Path:
    """The newest set of a run; at most one before it is kept."""
    states = sorted((run / "coat").glob("state-*"))
    assert len(states) in (1, 2)
    return states[-1]


def assert_same_end(one: Path, other: Path, *, records: bool = True) -> None:
    """Raw LoRA, average, random numbers, moments and, with `records`, `state.json` of two runs are the same."""
    left, right = newest_state(one), newest_state(other)
    assert left.name == right.name
    files = {path.name for path in (left / "aitk").glob("*.safetensors")}
    assert files == {path.name for path in (right / "aitk").glob("*.safetensors")}
    assert "rng.safetensors" in files
    for file in files:
        expected, got = (load_file(folder / "aitk" / file) for folder in (left, right))
        assert expected.keys() == got.keys()
        for name in expected.keys() - NOT_SEEDED:
            assert_bitwise(got[name], expected[name])
    before, after = (torch.load(run / "optimizer.pt", weights_only=True)["state"] for run in (one, other))
    assert before.keys() == after.keys()
    for index, state in before.items():
        assert_all_bitwise(after[index], state)
    if records:
        expected, got = (json.loads((folder / "aitk" / "state.json").read_text()) for folder in (left, right))
        for key in expected:
            assert got[key] == expected[key], key
