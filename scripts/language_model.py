"""The setting of COAT's paper: all weights of a language model trained, in bf16 and with COAT, `coat_core` alone.

    python scripts/language_model.py [--size small | full] [--steps N] [--batch N] [--seeds N] [--arms A ...] [--out D]

A decoder-only transformer learns to predict the next byte of the Python standard library's own sources, of which every
tenth file is held out. All arms start from the same weights and read the same batches in the same order, seed by seed,
so that the difference of their losses on the held-out files is paired; its interval is Student's at 95 % over the
seeds. Weights are fp32, products bf16 (autocast) or FP8. Finished runs are kept in D and not repeated. Prints Markdown.
Needs torch only.

Source: arXiv 2410.19313, section 6 (OLMo-1B and OLMo-7B pretrained with bf16 and with COAT).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from coat_core import FP8AdamW, FP8LinearConfig, FP8QuantizationConfig, replace_linear_with_fp8
from coat_core.activation import PackedSavedTensors

BYTES = 256  # the vocabulary
STUDENT_95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # by degrees of freedom
PAPER = (("OLMo-1B, 300 B tokens", 2.551, 2.568), ("OLMo-7B, 250 B tokens", 2.366, 2.379))  # training loss: bf16, COAT


@dataclass(frozen=True)
class Size:
    """A model [layers, width], what it reads, and how long it learns."""

    layers: int
    width: int
    context: int
    batch: int
    steps: int
    lr: float
    text_mb: float


SIZES = {
    "tiny": Size(1, 32, 32, 4, 25, 1e-2, 0.1),  # the test
    "small": Size(4, 128, 128, 8, 200, 2e-3, 4),
    "full": Size(6, 384, 256, 16, 2000, 1e-3, 16),  # 10.8 M parameters
}


class Block(nn.Module):
    """Causal attention and an MLP, each added to the stream x [batch, tokens, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(width // 64, 1)
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x after attention and MLP."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """Bytes [batch, tokens] to the logits of the next ones [batch, tokens, 256]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(BYTES, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width, bias=False), nn.Linear(size.width, BYTES, bias=False)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                depth = math.sqrt(2 * size.layers) if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(param, std=0.02 / depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        position = self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks((self.embed(tokens) + position).to(torch.bfloat16))))


# -- arms: what is compared ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One way to train: `linear` multiplies the blocks in FP8 and saves what backward needs in FP8 (None: bf16)."""

    name: str
    optimizer: Callable[..., torch.optim.Optimizer]
    linear: FP8LinearConfig | None = None

    def precision(self, device: str) -> contextlib.ExitStack:
        """Return what a forward pass runs in."""
        stack = contextlib.ExitStack()
        stack.enter_context(torch.autocast(device, torch.bfloat16))
        if self.linear is not None:
            stack.enter_context(PackedSavedTensors())
        return stack

    def prepare(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Convert the blocks where this arm does; embeddings, norms and the head stay as they are."""
        if self.linear is not None:
            replace_linear_with_fp8(model, self.linear, lambda _, name: name.startswith("blocks."), trainable=True)
        return self.optimizer(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, lr=lr)


FP8 = FP8LinearConfig(cache_weight=True)
INTEGER = FP8QuantizationConfig(m1_format="int8_ratio", m2_format="uint8_log")
ARMS = {
    "bf16": Arm("bf16, AdamW", torch.optim.AdamW),
    "coat": Arm("COAT, moments e4m3 expanded", FP8AdamW, FP8),
    "integer": Arm("COAT, moments int8_ratio and uint8_log", functools.partial(FP8AdamW, fp8_config=INTEGER), FP8),
    "wgrad": Arm("COAT, wgrad in e4m3 too", FP8AdamW, replace(FP8, wgrad_format="e4m3")),
}


# -- text ------------------------------------------------------------------------------------------------------------


@functools.cache
def standard_library(megabytes: float) -> tuple[Tensor, Tensor]:
    """Bytes to train on and held-out ones, int64: sources in an order by name that mixes packages; whole files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    names = [name for name in names if not {"site-packages", "test", "tests"} & set(name.parts)]
    files = [root / name for name in sorted(names, key=lambda name: (name.name, name.as_posix()))]
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(files):
        parts[number % 10 == 9].append(path.read_bytes())
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8).long() for part in parts)
    return train[: int(megabytes * 1e6)], held_out


def batch(text: Tensor, size: Size, generator: torch.Generator) -> Tensor:
    """Draw [batch, context + 1] bytes."""
    starts = torch.randint(len(text) - size.context, (size.batch, 1), generator=generator)
    return text[starts + torch.arange(size.context + 1)]


def loss_of(model: nn.Module, bytes_: Tensor, arm: Arm) -> Tensor:
    """Mean cross entropy of the next byte, in nats."""
    bytes_ = bytes_.to(next(model.parameters()).device)
    with arm.precision(bytes_.device.type):
        logits = model(bytes_[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), bytes_[:, 1:].flatten())


# -- bytes -----------------------------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """Counts the bytes of all tensors made inside it that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.made[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def bytes(self) -> int:
        """Return their sum."""
        return sum(size for storage, size in self.made.items() if not storage.expired())


def saved_per_token(model: nn.Module, text: Tensor, size: Size, arm: Arm) -> float:
    """Bytes kept for backward per token: of two batches less of one, so that copies of weights do not count."""
    totals = []
    for count in (1, 2):
        rows = batch(text, size, torch.Generator().manual_seed(0)).repeat(count, 1)
        with Alive() as alive:
            loss = loss_of(model, rows, arm)
        totals.append(alive.bytes())
        del loss
    return (totals[1] - totals[0]) / (size.batch * size.context)


def state_per_parameter(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of an optimizer's state per parameter."""
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()) / sum(param.numel() for param in optimizer.state)


# -- runs ------------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """Of one run: loss on the held-out files in nats per byte, bytes, and seconds."""

    loss: float
    losses: list[float]
    state_bytes: float
    saved_bytes: float
    step_s: float


def train(arm: Arm, size: Size, seed: int, device: str) -> Result:
    """Train one model and measure it."""
    text, held_out = standard_library(size.text_mb)
    torch.manual_seed(seed)
    model = LanguageModel(size).to(device)
    optimizer = arm.prepare(model, size.lr)
    order, losses, began = torch.Generator().manual_seed(seed), [], time.perf_counter()
    for step in range(size.steps):
        warm, gone = (step + 1) / (size.steps // 10 + 1), step / size.steps
        for group in optimizer.param_groups:
            group["lr"] = size.lr * min(warm, 0.55 + 0.45 * math.cos(math.pi * gone))
        loss = loss_of(model, batch(text, size, order), arm)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    step_s = (time.perf_counter() - began) / size.steps
    fixed = torch.Generator().manual_seed(0)
    with torch.no_grad():
        final = fmean(loss_of(model, batch(held_out, size, fixed), arm).item() for _ in range(64))
    saved = saved_per_token(model, text, size, arm)
    return Result(final, losses, state_per_parameter(optimizer), saved, step_s)


def table(results: dict[str, list[Result]]) -> str:
    """Return the comparison as Markdown; gaps to bf16 are paired by seed."""
    lines = [
        "| | held-out loss | gap to bf16 | optimizer B/parameter | saved B/token | ms/step |",
        "|---|---|---|---|---|---|",
    ]
    for arm, runs in results.items():
        gap = "·"
        if arm != "bf16" and "bf16" in results:
            gaps = [run.loss - base.loss for run, base in zip(runs, results["bf16"], strict=True)]
            gap = f"{fmean(gaps):+.4f}"
            if len(gaps) > 1:
                gap += f" ± {STUDENT_95[len(gaps) - 1] * stdev(gaps) / math.sqrt(len(gaps)):.4f}"
        loss = fmean(run.loss for run in runs)
        state = fmean(run.state_bytes for run in runs)
        saved = fmean(run.saved_bytes for run in runs)
        step_ms = 1000 * fmean(run.step_s for run in runs)
        lines.append(f"| {ARMS[arm].name} | {loss:.4f} | {gap} | {state:.2f} | {saved:,.0f} | {step_ms:.0f} |")
    lines += [f"| paper, {name} | {bf16} bf16, {ours} COAT | {ours - bf16:+.3f} | | | |" for name, bf16, ours in PAPER]
    if len(results.get("bf16", [])) > 1:
        lines += ["", f"bf16 itself over the seeds: standard deviation {stdev(r.loss for r in results['bf16']):.4f}."]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, seed by seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 11), metavar="1..10")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=("bf16", "coat", "integer"))
    parser.add_argument("--steps", type=int, help="other than the size's own")
    parser.add_argument("--batch", type=int, help="other than the size's own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("output/language_model"))
    options = parser.parse_args(arguments)
    size = SIZES[options.size]
    size = replace(size, steps=options.steps or size.steps, batch=options.batch or size.batch)
    results: dict[str, list[Result]] = {}
    for seed in range(options.seeds):
        for arm in options.arms:
            file = options.out / f"{options.size}-{size.steps}x{size.batch}-{arm}-{seed}.json"
            if not file.exists():
                result = train(ARMS[arm], size, seed, options.device)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(asdict(result)))
                print(f"seed {seed}, {ARMS[arm].name}: {result.loss:.4f}, {result.step_s:.2f} s/step", flush=True)
            results.setdefault(arm, []).append(Result(**json.loads(file.read_text())))
    params = sum(param.numel() for param in LanguageModel(size).parameters())
    tokens = size.steps * size.batch * size.context
    print(f"\n{params / 1e6:.2f} M parameters, {tokens / 1e6:.2f} M bytes read, {options.seeds} seeds\n")
    print(table(results))


if __name__ == "__main__":
    main()
