"""A stack of residual layers trained twice, standard and with COAT: memory, time per step, largest batch, loss.

    python scripts/benchmark_coat.py --hidden_size 1024 --num_layers 8 --batch_size 4 --num_steps 50
        --use_fp8_activation --output benchmark_results.json

Both train every weight (fp32, bf16 autocast) of x + W gelu(norm(x)) layers on the same batches of a fixed random task.
Standard: nn.Linear, saved tensors as they are, torch's AdamW. COAT: FP8AdamW; with --use_fp8_activation also FP8 GEMMs
and FP8 saved tensors. Runs on a CPU (FP8 is emulated there: its times say nothing about a GPU's) and on a GPU.

The two take turns, a few steps each per round, so that both meet the same other load on the machine. Every ratio is
COAT over standard: below 1 means that COAT needs less. A round's time is the median of its steps, the time of a side is
the median of its rounds, and the ratio of the times is shown with the lowest and the highest of any round.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coat_core import FP8AdamW, replace_linear_with_fp8
from coat_core.activation import PackedSavedTensors

LARGEST_TRIED = 1 << 20  # samples
COMPARED_STEPS = 10  # at the end, for the loss
STATE_STEPS = 2  # after which the optimizer has its states
SIDES = {"standard": False, "coat": True}  # name -> COAT or not
CPU_BUDGET_GB = 8.0


class ResidualLayer(nn.Module):
    """x + W gelu(norm(x)), [..., d] to [..., d]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return x + self.linear(nn.functional.gelu(self.norm(x)))


class Trainee:
    """A model with its optimizer and its way to keep saved tensors.

    Args:
        options: of the command line.
        coat: COAT, or standard.
    """

    def __init__(self, options: argparse.Namespace, *, coat: bool) -> None:
        self.device, self.options = torch.device(options.device), options
        torch.manual_seed(options.seed)
        self.model = nn.Sequential(*(ResidualLayer(options.hidden_size) for _ in range(options.num_layers)))
        self.model.to(self.device)
        self.packs = coat and options.use_fp8_activation
        if self.packs:
            replace_linear_with_fp8(self.model, trainable=True)
        optimizer = FP8AdamW if coat else torch.optim.AdamW
        self.optimizer: Any = optimizer(self.model.parameters(), lr=options.lr)
        draw = torch.Generator().manual_seed(options.seed)
        self.task = (
            torch.randn(options.hidden_size, options.hidden_size, generator=draw) / options.hidden_size**0.5
        ).to(self.device)

    def batch(self, index: int, size: int) -> Tensor:
        """The inputs of one step, [size, sequence, d] N(0, 1): the same for both trainees."""
        draw = torch.Generator().manual_seed(self.options.seed + 1 + index)
        return torch.randn(size, self.options.seq_len, self.options.hidden_size, generator=draw).to(self.device)

    def loss(self, x: Tensor) -> Tensor:
        """Mean squared distance from tanh(x T), T fixed."""
        packing = PackedSavedTensors() if self.packs else contextlib.nullcontext()
        with torch.autocast(self.device.type, torch.bfloat16), packing:
            y = self.model(x)
        return nn.functional.mse_loss(y.float(), torch.tanh(x @ self.task))

    def step(self, x: Tensor) -> Tensor:
        """One training step; returns the loss, detached."""
        loss = self.loss(x)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def saved_bytes(trainee: Trainee, size: int) -> int:
    """What a forward pass of `size` samples keeps for backward, without its input."""
    x = trainee.batch(0, size)
    gc.collect()
    if trainee.device.type == "cuda":
        before = torch.cuda.memory_allocated(trainee.device)
        loss = trainee.loss(x)
        return torch.cuda.memory_allocated(trainee.device) - before - loss.numel() * loss.element_size()
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = trainee.loss(x)
        gc.collect()
    events = profiler.profiler.kineto_results.events()
    alive = sum(event.nbytes() for event in events if event.name() == "[memory]")
    return alive - loss.numel() * loss.element_size()


def tensor_bytes(tensors: Any) -> int:
    """Bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def log(message: str) -> None:
    """One line of progress; the table on stdout stays alone."""
    print(message, file=sys.stderr, flush=True)


def timed_step(trainee: Trainee, index: int) -> tuple[float, float]:
    """Do one step; return its loss and its milliseconds."""
    x, on_gpu = trainee.batch(index, trainee.options.batch_size), trainee.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(trainee.device)
    started = time.perf_counter()
    loss = trainee.step(x)
    if on_gpu:
        torch.cuda.synchronize(trainee.device)
    return loss.item(), 1e3 * (time.perf_counter() - started)


def race(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Train both, a share of the steps in each round, and return the loss and time of every step and round by side."""
    trainees = {name: Trainee(options, coat=coat) for name, coat in SIDES.items()}
    found: dict[str, dict[str, Any]] = {name: {"losses": [], "step_ms": [], "round_ms": []} for name in SIDES}
    started = time.monotonic()
    for number in range(options.rounds):
        steps = range(*(options.num_steps * i // options.rounds for i in (number, number + 1)))
        for name in list(SIDES)[:: -1 if number % 2 else 1]:
            losses, times = zip(*(timed_step(trainees[name], index) for index in steps), strict=True)
            found[name]["losses"] += losses
            found[name]["step_ms"] += times
            found[name]["round_ms"].append(statistics.median(times))
        left = (time.monotonic() - started) * (options.rounds - number - 1) / (number + 1)
        ms = ", ".join(f"{name} {side['round_ms'][-1]:.1f}" for name, side in found.items())
        log(f"round {number + 1}/{options.rounds}, {len(steps)} steps each: ms per step {ms}; {left:.0f} s left")
    for side in found.values():
        side["ms_per_step"] = statistics.median(side["round_ms"])
        side["final_loss"] = statistics.fmean(side["losses"][-COMPARED_STEPS:])
    return found


def largest_batch(fits: Callable[[int], bool]) -> int:
    """The most samples that fit, by doubling and bisection; 0 where not even one does."""
    low, high = 0, 1
    while high <= LARGEST_TRIED and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fits_on_gpu(trainee: Trainee, size: int) -> bool:
    """Whether a step with `size` samples ends."""
    try:
        trainee.step(trainee.batch(0, size))
    except torch.OutOfMemoryError:
        trainee.optimizer.zero_grad()
        return False
    finally:
        torch.cuda.empty_cache()
    return True


def measure_memory(options: argparse.Namespace, *, coat: bool) -> dict[str, Any]:
    """Return what one of the two takes, alone on the device, and the largest batch."""
    trainee = Trainee(options, coat=coat)
    on_gpu = trainee.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(trainee.device)
    for index in range(STATE_STEPS):
        trainee.step(trainee.batch(index, options.batch_size))
    peak = torch.cuda.max_memory_allocated(trainee.device) if on_gpu else 0
    one, two = saved_bytes(trainee, options.batch_size), saved_bytes(trainee, 2 * options.batch_size)
    per_sample = (two - one) / options.batch_size
    weights = tensor_bytes([*trainee.model.parameters(), *trainee.model.buffers()])
    fixed = {
        "weights": weights,
        "gradients": tensor_bytes(trainee.model.parameters()),
        "optimizer_states": _state_bytes(trainee.optimizer),
        "weight_copies_saved": round(one - per_sample * options.batch_size),
    }
    saved = round(per_sample * options.batch_size)
    total = sum(fixed.values()) + saved
    if on_gpu:
        batch = largest_batch(lambda size: fits_on_gpu(trainee, size))
    else:
        batch = largest_batch(lambda size: sum(fixed.values()) + size * per_sample <= options.memory_gb * 1e9)
    memory = {**fixed, "saved_activations": saved, "peak": peak if on_gpu else total}
    return {"memory_bytes": memory, "largest_batch": batch}


def _state_bytes(optimizer: Any) -> int:
    return tensor_bytes(
        value
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step" and isinstance(value, Tensor)
    )


def compare(standard: dict[str, Any], coat: dict[str, Any]) -> dict[str, float]:
    """COAT over standard; `speedup` alone is standard's time over COAT's."""
    memory = {key: coat["memory_bytes"][key] / max(value, 1) for key, value in standard["memory_bytes"].items()}
    rounds = [ours / theirs for ours, theirs in zip(coat["round_ms"], standard["round_ms"], strict=True)]
    return {
        **{f"{key}_ratio": ratio for key, ratio in memory.items()},
        "ms_per_step_ratio": coat["ms_per_step"] / standard["ms_per_step"],
        "ms_per_step_ratio_min": min(rounds),
        "ms_per_step_ratio_max": max(rounds),
        "speedup": standard["ms_per_step"] / coat["ms_per_step"],
        "largest_batch_ratio": coat["largest_batch"] / max(standard["largest_batch"], 1),
        "final_loss_difference": coat["final_loss"] - standard["final_loss"],
        "final_loss_relative_difference": coat["final_loss"] / standard["final_loss"] - 1,
    }


def print_table(results: dict[str, Any]) -> None:
    """Print both columns and what COAT changes."""
    standard, coat, against = results["standard"], results["coat"], results["comparison"]
    print(f"{results['machine']['device']}, torch {torch.__version__}; peak: {results['machine']['peak']}\n")
    print(f"{'':<26}{'standard':>12}{'COAT':>12}{'COAT/standard':>16}")

    def row(label: str, theirs: float, ours: float, digits: int = 2) -> None:
        print(f"{label:<26}{theirs:>12.{digits}f}{ours:>12.{digits}f}{ours / max(theirs, 1e-9):>16.3f}")

    for key, value in standard["memory_bytes"].items():
        row(f"{key.replace('_', ' ')}, MB", value / 1e6, coat["memory_bytes"][key] / 1e6)
    for label, of in (("fastest round", min), ("median", statistics.median), ("slowest round", max)):
        row(f"ms per step, {label}", of(standard["round_ms"]), of(coat["round_ms"]))
    row("largest batch", standard["largest_batch"], coat["largest_batch"], 0)
    relative = against["final_loss_relative_difference"]
    label = f"loss, last {COMPARED_STEPS} steps"
    print(f"{label:<26}{standard['final_loss']:>12.5f}{coat['final_loss']:>12.5f}{relative:>+15.2%}")
    print(
        f"\nA step of COAT takes {against['ms_per_step_ratio']:.3f} times as long as a standard step "
        f"({against['ms_per_step_ratio_min']:.3f} to {against['ms_per_step_ratio_max']:.3f} "
        f"in {len(coat['round_ms'])} rounds)."
    )


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden_size", type=int, default=1024, help="d, a multiple of 16")
    parser.add_argument("--num_layers", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--seq_len", type=int, default=64, help="tokens of a sample (default: 64)")
    parser.add_argument("--num_steps", type=int, default=50, help="training steps of each (default: 50)")
    parser.add_argument("--rounds", type=int, default=5, help="they take turns in so many rounds (default: 5)")
    parser.add_argument("--use_fp8_activation", action="store_true", help="FP8 GEMMs and saved tensors too")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory_gb", type=float, help="for the largest batch (default: the GPU's; on a CPU 8)")
    parser.add_argument("--output", type=Path, default=Path("benchmark_results.json"), metavar="FILE")
    options = parser.parse_args()
    for name in ("hidden_size", "num_layers", "batch_size", "seq_len", "num_steps", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be at least 1")
    options.rounds = min(options.rounds, options.num_steps)
    return options


def main() -> None:
    """Measure both, print the table, write the file."""
    options = parse_arguments()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's lines about itself
    on_gpu = torch.device(options.device).type == "cuda"
    if on_gpu and options.memory_gb is not None:
        total = torch.cuda.get_device_properties(options.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(options.memory_gb * 1e9 / total, 1.0), options.device)
    options.memory_gb = options.memory_gb or CPU_BUDGET_GB
    results: dict[str, Any] = {
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
        "machine": {
            "device": torch.cuda.get_device_name(options.device) if on_gpu else platform.machine(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "peak": "allocated on the device" if on_gpu else "the sum of the parts above it",
        },
    }
    for name, coat in SIDES.items():
        log(f"memory of {name}")
        results[name] = measure_memory(options, coat=coat)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    for name, figures in race(options).items():
        results[name] |= figures
    results["comparison"] = compare(results["standard"], results["coat"])
    print_table(results)
    options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"\nwrote {options.output}")


if __name__ == "__main__":
    main()
