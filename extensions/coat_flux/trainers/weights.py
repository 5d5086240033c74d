"""The transformer's weights on disk: located without being read, then read one at a time.

A file is mapped, and the map closed after every `MAPPED_BYTES` read, since pages read count as the process's memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from coat_core.linear.function import StoredWeight
from coat_core.nvfp4 import BLOCK

from ..blocks.models import FLUX
from ..blocks.models.checkpoint import CheckpointError, flux_config, transformer_keys
from ..blocks.models.encodings import (
    E4M3_CODES,
    GGUF,
    NOT_WEIGHTS,
    Encoding,
    as_stored,
    decode,
    decode_gguf,
    gguf_tensors,
    read_header,
    rows_of_tiles,
)
from ..export.lora_files import place_of

MAPPED_BYTES = 64 * 2**20
WEIGHTS = "diffusion_pytorch_model.safetensors"  # diffusers' names in a part's folder
INDEX = f"{WEIGHTS}.index.json"


class Place(NamedTuple):
    """Location of a tensor: its key in a safetensors file, and its own shape."""

    file: Path
    key: str
    shape: tuple[int, ...]
    rows: tuple[slice, ...] | None = None  # rows of the stored tensor, in order; None: all
    encoding: Encoding | None = None  # None: stored as it is

    def part_of(self, stored: Tensor) -> Tensor:
        """These rows of the stored tensor."""
        if self.rows is None:
            return stored
        return stored[self.rows[0]] if len(self.rows) == 1 else torch.cat([stored[part] for part in self.rows])


class Weights:
    """Tensors by the model's own names, each read on demand."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self.places = dict(places)
        self._mapped: tuple[Path, Any, int] | None = None  # file, its map, bytes read through it

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU, to be copied, since it may share the file's map; CheckpointError if unreadable."""
        place = self.places[name]
        with _explained(place):
            tensor = self._read(place, place.key)
            if place.encoding is None or place.file.suffix.lower() == GGUF:
                return tensor
            return decode(tensor, place.encoding, *self._scales(place, place.encoding))

    def codes(self, name: str) -> StoredWeight | None:
        """A linear's weight as E4M3 codes and a scale, where the file has them; CheckpointError if unreadable."""
        place = self.places[name]
        if place.encoding is None or place.encoding.format != E4M3_CODES:
            return None
        with _explained(place):
            return as_stored(self._read(place, place.key), self._scales(place, place.encoding)[0])

    def close(self) -> None:
        """Close the map."""
        self._mapped = None

    def _scales(self, place: Place, encoding: Encoding) -> tuple[Tensor | None, Tensor | None]:
        if encoding.scale is None:
            return None, None
        scale = self._read(place._replace(rows=None), encoding.scale)
        if encoding.tensor_scale is None:
            return (scale if scale.numel() == 1 else place.part_of(scale)), None
        blocks = rows_of_tiles(scale, place.shape[1] // BLOCK)
        return place.part_of(blocks), self._read(place._replace(rows=None), encoding.tensor_scale)

    def _read(self, place: Place, key: str) -> Tensor:
        path = place.file
        is_gguf = path.suffix.lower() == GGUF
        if self._mapped is None or self._mapped[0] != path or self._mapped[2] > MAPPED_BYTES:
            self._mapped = None
            self._mapped = (path, gguf_tensors(path) if is_gguf else safe_open(path, framework="pt"), 0)
        _, file, read = self._mapped
        tensor: Tensor = decode_gguf(file[key], place.part_of) if is_gguf else place.part_of(file.get_tensor(key))
        # a GGUF header of FLUX.1 takes 0.1 s to read, and its values are 4 to 16 times as many bytes as in the file
        self._mapped = (path, file, read + tensor.nbytes // (16 if is_gguf else 1))
        return tensor


@contextmanager
def _explained(place: Place) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"cannot be read at {place.key} ({error}); download it again") from error


def local_folder(name_or_path: str, part: str) -> Path:
    """The folder of one part of a diffusers model, downloaded from the hub if need be (OSError, ValueError)."""
    if Path(name_or_path).is_dir():
        return Path(name_or_path, part)
    from huggingface_hub import snapshot_download

    wanted = ["model_index.json", f"{part}/config.json", f"{part}/{INDEX}"]
    folder = Path(snapshot_download(name_or_path, allow_patterns=wanted), part)
    wanted += [f"{part}/{name}" for name in _file_names(folder)]  # which the index lists
    return Path(snapshot_download(name_or_path, allow_patterns=wanted), part)


def _file_names(folder: Path) -> list[str]:
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return sorted(set(index["weight_map"].values()))
    except FileNotFoundError:
        return [WEIGHTS]
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"has a damaged {INDEX}; download it again") from error


def folder_weights(folder: Path) -> Weights:
    """The weights in one part's folder of a diffusers model; CheckpointError if a file is missing or incomplete."""
    places: dict[str, Place] = {}
    for name in _file_names(folder):
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"has no {folder.name}/{name}; download it again")
        try:
            shapes = read_header(path).shapes
        except CheckpointError as error:
            raise CheckpointError(f"{folder.name}/{name} {error}") from error
        places |= {key: Place(path, key, tuple(shape)) for key, shape in shapes.items()}
    return Weights(places)


def original_weights(path: Path) -> tuple[Weights, dict[str, Any]]:
    """Weights of a safetensors or GGUF file in Black Forest Labs' layout, under diffusers' names, and a config.

    The names for LoRA export split fused q, k, v and MLP at any width. CheckpointError if not FLUX.1, or damaged.
    """
    header = read_header(path)
    shapes = header.shapes
    config = flux_config(shapes)
    encodings = header.encodings()
    keys = transformer_keys(shapes)
    hidden = config["num_attention_heads"] * config["attention_head_dim"]
    places: dict[str, Place] = {}
    for name, key in keys.items():
        if name.endswith(NOT_WEIGHTS):
            continue
        shape = shapes[key]
        for member, rows in _parts(name, torch.arange(shape[0] if shape else 0), hidden).items():
            breaks = (rows.diff() != 1).nonzero().flatten() + 1
            runs = [part for part in rows.tensor_split(breaks) if len(part)]
            slices = tuple(slice(int(part[0]), int(part[-1]) + 1) for part in runs)
            places[member] = Place(path, key, (len(rows), *shape[1:]), slices, encodings.get(key))
    return Weights(places), config


def _parts(name: str, rows: Tensor, hidden: int) -> dict[str, Tensor]:
    """Rows of each diffusers linear fused in a tensor of the original; CheckpointError if FLUX.1 has no such tensor."""
    if name.endswith(".scale"):
        blocks, number, rest = name.split(".", 2)
        ours = next(block_list for block_list in FLUX.lists if block_list.original == blocks)
        return {f"{ours.pattern}.{number}.{ours.norms[rest]}": rows}
    stem, _, kind = name.rpartition(".")
    try:
        linear, _ = place_of(stem, "comfyui", FLUX)
    except KeyError as error:
        raise CheckpointError(f"has a tensor {name}, which FLUX.1 does not have; give another checkpoint") from error
    if linear.swapped:
        rows = torch.cat(rows.chunk(2)[::-1])
    heights = [height * hidden for height in linear.heights] if len(linear.members) > 1 else [len(rows)]
    if sum(heights) != len(rows):
        raise CheckpointError(f"has {len(rows)} rows in {name}, not {sum(heights)}; download it again")
    return {f"{member}.{kind}": part for member, part in zip(linear.members, rows.split(heights), strict=True)}


def check_weights(model: nn.Module, weights: Weights, what: str) -> None:
    """CheckpointError unless names and shapes are those of a model called `what`."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, shape in expected.items():
        if name not in weights.places:
            raise CheckpointError(f"lacks {name}; download it again, or give another checkpoint")
        stored = weights.places[name].shape
        if stored != shape:
            raise CheckpointError(f"has {name} of shape {list(stored)}, not {list(shape)}; download it again")
    unexpected = weights.places.keys() - expected.keys()
    if unexpected:
        raise CheckpointError(f"has {min(unexpected)}, which {what} does not have; give another checkpoint")


@torch.no_grad()
def fill(
    model: nn.Module,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    on_filled: Callable[[str, nn.Module, StoredWeight | None], None] | None = None,
) -> None:
    """Fill a model on the meta device with weights, module by module; floating ones in `dtype`.

    `on_filled` gets each module with all its own weights, and the codes of one that the file has as E4M3, before the
    next is read. CheckpointError if unreadable.
    """
    for name, module in list(model.named_modules()):
        tensors: dict[str, Tensor] = {}
        codes: StoredWeight | None = None
        mapped: set[int] = set()
        for leaf in (*module._parameters, *module._buffers):
            full = f"{name}.{leaf}".lstrip(".")
            if full in weights.places:
                stored = weights.codes(full)
                tensor = weights.read(full) if stored is None else stored.dequantize()
                codes = stored if leaf == "weight" else codes
                mapped.add(tensor.data_ptr())
                tensors[leaf] = tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
                del tensor
        if tensors:
            module.load_state_dict(tensors, strict=False, assign=True)
            tensors.clear()
            if on_filled is not None:
                on_filled(name, module, codes)
            # copy only what stays mapped: weights that became codes need none
            module._apply(lambda x, mapped=mapped: x.clone() if x.data_ptr() in mapped else x, recurse=False)
    weights.close()
