"""The state of all parameters in one buffer of each kind; the tensors of `Optimizer.state` are views into them.

A step collects no list of state tensors: the operator reads the buffers. Files do not change.

    codes of a moment    [n_blocks, B]        parameter 0 from block 0 on, the next one in the block after its last
    numbers of a moment  fp32 [S, n_blocks]   scale, exponent, center
    steps                fp32 [n_params]
    draws                int32 [n_params, 2]  for stochastic rounding: stream, first element; in no file

Codes and numbers are on the parameters' device, or in CPU memory (`offload`), passing through the device in chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from coat_core.ops.adamw import chunks
from coat_core.ops.launch import n_blocks
from coat_core.optim.offload import Staging
from coat_core.optim.state import State, Storage, empty_moment, moment_views
from coat_core.rounding import PARAMETERS, streams


class DeviceState:
    """The packed state of the parameters on one device; methods take `indices` into `params`."""

    def __init__(self, params: list[Tensor], moments: dict[str, Storage], steps_on_device: bool, offload: bool) -> None:
        device = params[0].device
        block_size = next(iter(moments.values())).block_size
        self.params = params
        *self.first_blocks, blocks = accumulate((n_blocks(param.numel(), block_size) for param in params), initial=0)
        held_on = torch.device("cpu") if offload else device
        self.moments = {name: empty_moment(blocks, storage, held_on) for name, storage in moments.items()}
        self.staging = Staging(self.moments, moments, device) if offload else None
        self.steps = torch.zeros(len(params), dtype=torch.float32, device=device if steps_on_device else "cpu")
        self.draws: dict[str, Tensor] = {}  # by the operator's argument: "draws", "param_draws"

    def rows(self, table: Tensor, indices: list[int]) -> Tensor:
        """These parameters' rows of a table of all, without a sync."""
        first, count = indices[0], len(indices)
        if indices == list(range(first, first + count)):
            return table[first:][:count]
        return torch.stack([table[index] for index in indices])

    def step_numbers(self, indices: list[int], step: float | None) -> Tensor:
        """Step numbers, fp32 [n] on the parameters' device: `step` for all, or if None the counters'."""
        if step is None:
            return self.rows(self.steps, indices)
        return torch.full((len(indices),), step, device=self.params[0].device)

    def draws_at(self, indices: list[int], step: float | None) -> dict[str, Tensor]:
        """Tables of stream, step and first element, int32 [n, 3], by the operator's argument."""
        tables = {}
        for name, table in self.draws.items():
            stream, first = self.rows(table, indices).unbind(-1)
            steps = self.step_numbers(indices, step).to(torch.int32)
            tables[name] = torch.stack((stream, steps, first), dim=-1)
        return tables

    def calls(self, indices: list[int], tables: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
        """Yield the arguments of each call of the operator, several for offloaded moments; call before the next.

        `tables`, by argument, have a row for each of `indices`; those of draws are int32.
        """
        params = [self.params[index] for index in indices]
        grads: list[Any] = [param.grad for param in params]
        first_blocks = [self.first_blocks[index] for index in indices]
        if self.staging is None:
            yield {"params": params, "grads": grads, "first_blocks": first_blocks, **self.moments, **tables}
            return

        flat_params = [param.detach().reshape(-1) for param in params]
        flat_grads = [grad.detach().reshape(-1) for grad in grads]
        sizes = tuple(map(Tensor.numel, params))
        block_size = self.moments["exp_avg"].codes.shape[1]
        for chunk in chunks(sizes, tuple(first_blocks), block_size, self.staging.elements):
            if chunk.rows.start == chunk.rows.stop:
                continue
            first, start, _ = chunk.pieces[0]
            part: dict[str, Any] = {
                "params": chunk.cut(flat_params),
                "grads": chunk.cut(flat_grads),
                "first_blocks": [0, *accumulate(chunk.blocks[:-1])],
            }
            for name, table in tables.items():
                part[name] = _chunk_rows(table, first, len(chunk.pieces), start)
            with self.staging.blocks(chunk.rows) as moments:
                yield {**part, **moments}
        for param, flat in zip(params, flat_params, strict=True):
            if not param.is_contiguous():  # then `flat` is a copy
                param.copy_(flat.view(param.shape))


def _chunk_rows(table: Tensor, first: int, count: int, start: int) -> Tensor:
    """`count` rows from `first` on; draws of the first parameter begin at its element `start`."""
    is_shifted = start > 0 and not table.is_floating_point()
    if len(table) == count and not is_shifted:
        return table
    rows = table[first:][:count].clone()  # kernels want it at a multiple of 16 bytes
    if is_shifted:
        rows[0, 2] += start
    return rows


class PackedState:
    """The packed state of all parameters, by device; entries of `state` become views, missing ones of `new` zeros."""

    def __init__(
        self,
        state: MutableMapping[Tensor, State],
        new: Iterable[Tensor],
        moments: dict[str, Storage],
        steps_on_device: bool,
        offload: bool = False,
    ) -> None:
        self._steps_on_device = steps_on_device
        self.seed: int | None = None  # of `draw_from`
        added = {id(param) for param in new if not state.setdefault(param, {})}
        by_device: dict[torch.device, list[Tensor]] = {}
        for param, entry in state.items():
            if isinstance(param, Tensor) and (entry or id(param) in added):  # other entries are a hook's
                by_device.setdefault(param.device, []).append(param)

        self.devices: list[DeviceState] = []
        self._places: dict[int, tuple[DeviceState, int]] = {}  # of each parameter, by its id
        for params in by_device.values():
            packed = DeviceState(params, moments, steps_on_device, offload)
            self.devices.append(packed)
            for index, param in enumerate(params):
                self._places[id(param)] = (packed, index)
                views = {"step": packed.steps[index]}
                for name, storage in moments.items():
                    views |= moment_views(name, packed.moments[name], storage, packed.first_blocks[index], param.shape)
                entry = state[param]
                for key, values in entry.items():
                    views[key].copy_(values)
                entry.clear()
                entry.update(views)
        self.stagings = [packed.staging for packed in self.devices if packed.staging is not None]
        self._key = _key_of(state)

    def draw_from(self, seed: int, places: dict[int, tuple[int, int]], moments: bool, parameters: bool) -> None:
        """Draw from `seed` from now on, for exp_avg_sq, for parameters in bf16 and fp16, or for both; without a sync.

        `places`, by id: each parameter's number and, for a shard, the number of its first element in the whole.
        """
        self.seed = seed
        seeds = {"draws": seed} if moments else {}
        if parameters:
            seeds["param_draws"] = seed ^ PARAMETERS
        for packed in self.devices:
            packed.draws.clear()
            own = [places.get(id(param), (0, 0)) for param in packed.params]  # one in no group has no step
            for name, key in seeds.items():
                numbers = streams(key, len(places), packed.params[0].device)
                rows = [torch.stack((numbers[i], torch.full_like(numbers[i], first))) for i, first in own]
                packed.draws[name] = torch.stack(rows)

    def holds(self, state: MutableMapping[Tensor, State], params: list[Tensor]) -> bool:
        """Whether all parameters, `params` among them, still have their packed state."""
        return self._places.keys() >= set(map(id, params)) and _key_of(state) == self._key

    def count_step(self, params: list[Tensor], found_inf: Tensor | None = None) -> None:
        """Add 1 to the step counters of these parameters; 0 where `found_inf`, on the counters' device, is 1."""
        if found_inf is not None and not self._steps_on_device:
            raise ValueError("found_inf: needs step counters on the device; pass capturable=True")
        one = 1.0 if found_inf is None else 1.0 - found_inf
        if len(params) == len(self._places):
            for packed in self.devices:
                packed.steps += one
            return
        steps = []
        for param in params:
            packed, index = self._places[id(param)]
            steps.append(packed.steps[index])
        if len(steps) == 1:  # in backward, where a foreach operator of one tensor reads the number
            steps[0] += one
        else:
            torch._foreach_add_(steps, one)

    def batches(self, params: list[Tensor]) -> Iterator[tuple[DeviceState, list[int], float | None]]:
        """Yield state, indices and step of parameters of one device, of the same dtypes and, if on the CPU, step."""
        counts: dict[DeviceState, list[float]] = {}
        alike: dict[tuple[DeviceState, torch.dtype, torch.dtype, float | None], list[int]] = {}
        for param in params:
            packed, index = self._places[id(param)]
            assert param.grad is not None
            step = None
            if not self._steps_on_device:
                if packed not in counts:  # all at once: a read for each would take longer than the rest
                    counts[packed] = packed.steps.tolist()
                step = counts[packed][index]
            alike.setdefault((packed, param.dtype, param.grad.dtype, step), []).append(index)
        for (packed, _, _, step), indices in alike.items():
            yield packed, indices, step


def _key_of(state: MutableMapping[Tensor, State]) -> list[Any]:
    """A list that differs once a parameter or its state was moved, or the state was replaced."""
    key: list[Any] = []
    for param, entry in state.items():
        if isinstance(param, Tensor) and entry:
            key += (param.device, id(entry), *map(Tensor.data_ptr, entry.values()))
    return key
