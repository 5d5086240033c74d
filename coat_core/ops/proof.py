"""Proves kernels on the card that runs them: each is compared with its reference before it is trusted.

    with recorded_calls() as calls:      # references run, and each kind of call is recorded
        ...                              # a block, forward and backward
    verdicts = prove(calls, device)      # in another process, which a broken CUDA context takes along

A recorded call has the shapes, strides, alignment and options of the run, and `SAMPLED_ROWS` rows of each tensor, which
are repeated. Every buffer, of arguments and of results, is filled with NaN and lies between zones of NaN: a read
beyond, a write beyond and an element that nobody writes all show.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from coat_core.casts import Cast, arguments_of, declarations
from coat_core.formats import FP8_DTYPES, format_of
from coat_core.ops import dispatch, launch
from coat_core.ops.adamw import Moment, read_moments
from coat_core.quantize import quantize

SAMPLED_ROWS = 17  # no divisor of a tile's rows, so that tiles differ
NAN = 0xFF  # each byte of a NaN, in every floating format
ZONE = 16384  # bytes before and behind a buffer
START_S, HANG_S, BUDGET_S = 60.0, 40.0, 60.0  # until the process answers; for one call; for all calls
POLL_S = 0.02

# largest error relative to the largest value of its row, by the least precise dtype that a call has values in: a few
# roundings, of intermediate results, too
ROW_RTOL = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8, torch.float32: 1e-3}
NEAR_ZERO = 1e-3  # of the largest value of all: rows are compared as if they had at least this
SMALLEST = 1e-20  # and this
MOMENT_RTOL = 0.15  # AdamW's powers may turn a code of e4m3
CODES_OFF = {torch.int8: 2}  # where the values before the cast were rounded themselves; else 1
ADAMW = "coat::fp8_adamw_step"
STEP_ELEMENTS = 1 << 24  # of parameters: full fine-tuning has 12 billion

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """A tensor of a call: its layout and first rows."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int  # bytes of its address beyond a multiple of 16
    rows: Tensor  # on the CPU: at most `SAMPLED_ROWS` of the dimension before the last, 1 where it is expanded

    @classmethod
    def of(cls, x: Any) -> Any:
        """The sample of a tensor; anything else as it is."""
        if not isinstance(x, Tensor):
            return x
        rows = x.detach()
        if x.ndim > 1:
            rows = rows.narrow(-2, 0, min(x.shape[-2], SAMPLED_ROWS))
        for dim, stride in enumerate(x.stride()):
            if stride == 0 and rows.shape[dim] > 1:
                rows = rows.narrow(dim, 0, 1)
        alignment = 0 if x.is_meta else x.data_ptr() % 16
        return cls(tuple(x.shape), x.stride(), alignment, rows.cpu().contiguous().clone())


@dataclass(frozen=True)
class Call:
    """A call of an operator, with a `Sample` in place of each tensor."""

    operator: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The recorded form of this call; of an AdamW step, its first parameters."""
        if operator == ADAMW:
            args = _first_parameters(*args)
        return cls(operator, *tree_map(Sample.of, (args, kwargs)))

    def signature(self) -> str:
        """What decides which code runs: all of it but the values of tensors, and floats such as the learning rate."""
        parts: list[Any] = [self.operator]
        for x in tree_leaves((self.args, self.kwargs)):
            if isinstance(x, Sample):
                parts.append((x.shape, x.strides, x.alignment, x.rows.dtype))
            elif not isinstance(x, float):
                parts.append(x)
        return str(parts)


def _first_parameters(params: list[Tensor], grads: list[Tensor], *others: Any) -> tuple[Any, ...]:
    """The arguments of `fp8_adamw_step` for as many parameters as have `STEP_ELEMENTS`, but at least one."""
    exp_avg, numbers, exp_avg_sq, sq_numbers, first_blocks, hyper, *tables, expansion, maximize = others
    count, elements = 1, params[0].numel()
    while count < len(params) and elements + params[count].numel() <= STEP_ELEMENTS:
        elements += params[count].numel()
        count += 1
    blocks = first_blocks[count] if count < len(params) else len(exp_avg)
    moments = exp_avg[:blocks], numbers[:, :blocks], exp_avg_sq[:blocks], sq_numbers[:, :blocks]
    rows = [None if table is None else table[:count] for table in tables]
    return params[:count], grads[:count], *moments, first_blocks[:count], hyper, *rows, expansion, maximize


@contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """Run references in the `with` block, in all threads; the list then has one call of each signature."""
    found: dict[str, Call] = {}
    calls: list[Call] = []

    def record(operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = Call.of(operator, args, kwargs)
        found.setdefault(call.signature(), call)

    with dispatch.references(record):
        yield calls
    calls += found.values()


# --- one call ---


class Buffers:
    """Tensors full of NaN, between zones of NaN."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: list[tuple[Tensor, Tensor]] = []  # the bytes of zones and tensor, and the tensor

    def make(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, alignment: int = 0) -> Tensor:
        """A tensor of this layout."""
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        length = 0 if 0 in shape else (last + 1) * dtype.itemsize
        whole = torch.full((ZONE + alignment + length + ZONE,), NAN, dtype=torch.uint8, device=self._device)
        x = whole[ZONE + alignment :][:length].view(dtype).as_strided(tuple(shape), tuple(strides))
        self._made.append((whole, x))
        return x

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A kernel's result, as `launch.empty` allocates it."""
        return self.make(shape, torch.empty(shape, device="meta").stride(), dtype)

    def restore(self, sample: Any) -> Any:
        """The tensor of a sample; anything else as it is."""
        if not isinstance(sample, Sample):
            return sample
        x = self.make(sample.shape, sample.strides, sample.rows.dtype, sample.alignment)
        rows, target = sample.rows.to(self._device), x
        if x.dtype.itemsize == 1:  # FP8 as bytes, which torch can index
            rows, target = rows.view(torch.uint8), x.view(torch.uint8)
        for dim, stride in enumerate(sample.strides):
            if stride == 0 and x.shape[dim] > 1:
                target = target.narrow(dim, 0, 1)
        if x.numel() and x.ndim > 1:
            rows = rows.index_select(-2, torch.arange(target.shape[-2], device=self._device) % rows.shape[-2])
        target.copy_(rows)
        return x

    def damaged(self) -> bool:
        """Whether a byte outside of the tensors has changed."""
        for whole, x in self._made:
            changed = whole != NAN
            inside = x.data_ptr() - whole.data_ptr() if x.numel() else ZONE
            written = changed[inside:][: len(whole) - inside - ZONE]
            if x.numel():
                written.view(torch.uint8).view(x.dtype).as_strided(x.shape, x.stride()).zero_()
            if bool(changed.any()):
                return True
        return False


def fault(call: Call, device: torch.device) -> str:
    """Launch a call's kernel and run its reference: what is wrong with the kernel, or empty."""
    operator = dispatch.launchers[call.operator]
    buffers, others = Buffers(device), Buffers(device)
    args, kwargs = tree_map(buffers.restore, (call.args, call.kwargs))
    own_args, own_kwargs = tree_map(others.restore, (call.args, call.kwargs))
    expected = operator._init_fn(*own_args, **own_kwargs)
    with launch.allocated_by(buffers.empty):
        results = dispatch.launcher_of(call.operator)(*args, **kwargs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if buffers.damaged():
        return "writes outside of its buffers"
    named = arguments_of(operator)
    if call.operator == ADAMW:
        return _step_fault(
            named(*args, **kwargs), named(*own_args, **own_kwargs), tree_map(others.restore, call.args[0])
        )
    for pair in zip(_tensors((args, kwargs)), _tensors((own_args, own_kwargs)), strict=True):
        found, before = (x.detach().contiguous().view(-1).view(torch.uint8) for x in pair)
        if not torch.equal(found, before):
            return "changes an argument"
    declared = declarations[call.operator](results, *args, **kwargs) if call.operator in declarations else ()
    recast: dict[int, Tensor] = {}  # id of codes or scale → what the operator's own values give
    for cast in declared if type(declared) is tuple else (declared,):
        if isinstance(cast, Cast) and cast.values.is_floating_point() and cast.codes.dtype in FP8_DTYPES:
            values = cast.values if cast.factors is None else cast.values.to(torch.float32) * cast.factors
            codes, scale, _ = quantize(values, format_of(cast.codes.dtype).name, cast.granularity)
            recast |= {id(cast.codes): codes, id(cast.scale): scale}
    rtol = max(ROW_RTOL.get(x.dtype, 0.0) for x in _tensors((args, kwargs, results)))
    for x, own in zip(_tensors(results), _tensors(expected), strict=True):
        why = _difference(x, recast.get(id(x), own), rtol)
        if why:
            return why
    return ""


def _difference(x: Tensor, expected: Tensor, rtol: float, slack: Tensor | float = 0.0) -> str:
    """How x differs from the reference's result by more than rounding, or empty."""
    if (x.dtype, x.shape) != (expected.dtype, expected.shape):
        return f"returns {x.dtype} {list(x.shape)}, its reference {expected.dtype} {list(expected.shape)}"
    if not x.numel():
        return ""
    values, own = x.to(torch.float32), expected.to(torch.float32)
    if not torch.equal(values.isfinite(), own.isfinite()):
        return "leaves NaN, inf or elements that nobody wrote"
    if x.dtype.itemsize == 1:
        steps = int((_ordered(x) - _ordered(expected)).abs().max())
        return f"codes are off by {steps}" if steps > CODES_OFF.get(x.dtype, 1) else ""
    size = own.abs()
    largest = size.amax(-1, keepdim=True).clamp_min(NEAR_ZERO * float(size.max()))
    error = ((values - own).abs() - slack) / largest.clamp_min(SMALLEST)
    worst = float(error.nan_to_num().max())
    return f"values are off by {worst:.2g} of the largest in their row" if worst > rtol else ""


def _ordered(codes: Tensor) -> Tensor:
    """Codes as integers, neighbours one apart."""
    bits = codes.contiguous().view(torch.uint8).to(torch.int16)
    if codes.dtype in FP8_DTYPES:
        return torch.where(bits < 0x80, bits, 0x80 - bits)
    return codes.to(torch.int16)


def _step_fault(a: Any, own: Any, before: list[Tensor]) -> str:
    """What is wrong with an AdamW step, by how far parameters moved and by the moments, dequantized."""
    for x, expected, start in zip(a.params, own.params, before, strict=True):
        move, own_move = (each.to(torch.float32) - start.to(torch.float32) for each in (x, expected))
        why = _difference(
            move, own_move, ROW_RTOL[torch.float32], torch.finfo(x.dtype).eps * expected.abs().to(torch.float32)
        )
        if why:
            return f"parameters: {why}"
    moments = []
    for each in (a, own):
        stored = Moment(each.exp_avg, each.exp_avg_numbers), Moment(each.exp_avg_sq, each.exp_avg_sq_numbers)
        moments.append(read_moments(*stored, slice(None)))
    for name, x, expected in zip(("exp_avg", "exp_avg_sq"), *moments, strict=True):
        why = _difference(x, expected, MOMENT_RTOL)
        if why:
            return f"{name}: {why}"
    return ""


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


# --- all calls, in another process ---


def prove(
    calls: Sequence[Call], device: torch.device, hang_s: float = HANG_S, budget_s: float = BUDGET_S
) -> dict[str, str]:
    """Compare kernels with their references in another process: operator → what is wrong with its kernel, or empty.

    An operator is missing if time or memory ran out before all its calls were compared. A call that ends the process,
    or does not return in `hang_s` seconds, counts against its operator; another process does the rest. `budget_s`
    seconds are for all calls.
    """
    verdicts: dict[str, str] = {}
    deadline = time.monotonic() + budget_s
    rest = list(calls)
    untested: set[str] = set()
    while rest and time.monotonic() < deadline:
        try:
            with closing(_answers(rest.copy(), device, hang_s)) as answers:
                for why in answers:
                    operator = rest.pop(0).operator
                    if why is None:
                        untested.add(operator)
                    else:
                        verdicts[operator] = verdicts.get(operator) or why
                    if time.monotonic() > deadline:
                        break
        except RuntimeError as error:
            logger.warning("kernels are not proved: %s", error)
            break
    untested |= {call.operator for call in rest}
    return {operator: why for operator, why in verdicts.items() if why or operator not in untested}


def _answers(calls: list[Call], device: torch.device, hang_s: float) -> Generator[str | None, None, None]:
    """Yield another process's verdicts on these calls, as long as it lives; RuntimeError if it does not start."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    count, seconds = -1, START_S  # of answers; the first says that it has started
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "errors", "w+b") as errors:
        answers = Path(folder) / "answers"
        answers.touch()
        torch.save(calls, Path(folder) / "calls")
        command = [sys.executable, "-c", "from coat_core.ops.proof import main; main()", folder, str(device)]
        process = subprocess.Popen(command, stderr=errors, stdout=errors, env={**os.environ, "PYTHONPATH": path})
        since = time.monotonic()
        try:
            while count < len(calls):
                ended = process.poll() is not None
                lines = answers.read_text(encoding="utf-8").split("\n")[:-1]
                if len(lines) > count + 1:
                    why, broken = json.loads(lines[count + 1])
                    if count >= 0:
                        yield why
                    if broken:
                        return
                    count, seconds, since = count + 1, hang_s, time.monotonic()
                elif ended or time.monotonic() - since > seconds:
                    why = f"no end after {seconds:g} s"
                    if ended:
                        errors.seek(0)
                        said = [line.strip() for line in errors.read().decode(errors="replace").split("\n")]
                        last = next(filter(None, reversed(said)), f"exit code {process.returncode}")
                        why = f"its process ended: {last}"
                    if count < 0:
                        raise RuntimeError(why)
                    yield why
                    return
                else:
                    time.sleep(POLL_S)
        finally:
            process.kill()
            process.wait()


def main() -> None:
    """The other process: FOLDER DEVICE."""
    folder, device = Path(sys.argv[1]), torch.device(sys.argv[2])
    dispatch.load_operators()
    with open(folder / "answers", "a", encoding="utf-8") as answers:

        def answer(why: str | None, broken: bool = False) -> None:
            answers.write(json.dumps([why, broken]) + "\n")
            answers.flush()

        torch.zeros(1, device=device)
        answer("")
        for call in torch.load(folder / "calls", weights_only=False):
            try:
                answer(fault(call, device))
            except torch.OutOfMemoryError:
                answer(None)
            except Exception as error:  # of a launch or a compiler
                answer(dispatch.first_line(error), _is_broken(device))


def _is_broken(device: torch.device) -> bool:
    """Whether the error stays with the CUDA context: every later call would raise it, too."""
    try:
        torch.zeros(1, device=device).item()
    except Exception:
        return True
    return False
