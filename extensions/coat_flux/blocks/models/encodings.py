"""Weights as other programs store them: ComfyUI's FP8, INT8 and NVFP4 in safetensors, and GGUF; each decoded alone.

    FP8     codes · scale, the scale of all or of each row, 1 if absent
    INT8    codes · scale, times H along K where its entry says `convrot`: groups of a power of 4, in which H is the
            Kronecker power of a 4 x 4 matrix, and that of `coat_core.int8` with its columns in reverse order
    NVFP4   code · block scale · scale: two codes a byte, the first in the high half; an E4M3 scale for each 16 along K,
            in tiles of 128 rows and 4 blocks, whose rows 0, 32, 64 and 96 stand side by side
    GGUF    blocks of ggml's types, which the gguf package decodes

What a weight is, is its dtype; `<linear>.comfy_quant` (JSON) or `_quantization_metadata` in the header must agree.

Shapes: W [N, K].
Sources: ComfyUI comfy/quant_ops.py and QUANTIZATION.md; comfy-kitchen tensor/int8_utils.py, float_utils.py; cuBLAS, "1D
block scaling factors layout".
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coat_core.config import FP8LinearConfig
from coat_core.formats import E4M3
from coat_core.int8 import LARGEST_ROTATION, rotate
from coat_core.linear.function import StoredWeight
from coat_core.nvfp4 import BLOCK, MAGNITUDES

from ...base.errors import UserError

GGUF = ".gguf"
SCALES = (".scale_weight", ".weight_scale")
TENSOR_SCALE, MARK, METADATA = ".weight_scale_2", ".comfy_quant", "_quantization_metadata"
NOT_WEIGHTS = ("scaled_fp8", ".scale_input", ".input_scale", MARK, TENSOR_SCALE, *SCALES)
E4M3_CODES, INT8, NVFP4 = "float8_e4m3fn", "int8_tensorwise", "nvfp4"
FP8 = {E4M3_CODES: torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
# safetensors' dtype of codes → their format; U8 holds FP8, too, where the file says so
FORMATS = {"F8_E4M3": E4M3_CODES, "F8_E5M2": "float8_e5m2", "I8": INT8, "U8": NVFP4}
NAMES = {E4M3_CODES: "FP8 e4m3", "float8_e5m2": "FP8 e5m2", INT8: "INT8", NVFP4: "NVFP4"}
AS_THEY_ARE = ("BF16", "F16", "F32", "F64")  # ggml's types that are not quantized
TILE_ROWS, TILE_BLOCKS = 128, 4  # of NVFP4's block scales


class CheckpointError(UserError, ValueError):
    """A checkpoint file that cannot be used: `<rule>; <remedy>`, without the file."""


class Encoding(NamedTuple):
    """How a weight is stored: its format (of `FORMATS`, or ggml's type), the keys of its scales, a rotation's size."""

    format: str
    scale: str | None = None
    tensor_scale: str | None = None
    rotated: int = 1


# --- the header ---


class Header(NamedTuple):
    """What a file holds: by key the shape that it stands for, its dtype or ggml's type, and what is said of it."""

    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    marks: dict[str, Any]  # of linears, in safetensors
    is_gguf: bool = False

    def encodings(self) -> dict[str, Encoding]:
        """Encodings by key, of encoded tensors only; CheckpointError for an encoding that is not read."""
        if self.is_gguf:
            return {key: Encoding(kind) for key, kind in self.dtypes.items() if kind not in AS_THEY_ARE}
        weights = [key for key in self.shapes if key.endswith(".weight")]
        marked = [key for key in weights if self.dtypes[key] in FORMATS or key.removesuffix(".weight") in self.marks]
        return {key: self._encoding(key) for key in marked}

    def _encoding(self, key: str) -> Encoding:
        stem, shape, dtype = key.removesuffix(".weight"), self.shapes[key], self.dtypes[key]
        mark = self.marks.get(stem, {})
        again = "convert or download it again"
        kind = mark.get("format", FORMATS.get(dtype, dtype))
        if kind not in FORMATS.values():
            raise CheckpointError(f"stores {key} as {kind}, which is not read here; give the model in bf16 or FP8")
        if FORMATS.get(dtype) != kind and not (dtype == "U8" and kind in FP8):
            raise CheckpointError(f"says that {key} is {kind}, and holds {dtype}; {again}")
        scale = next((stem + end for end in SCALES if stem + end in self.shapes), None)
        tensor_scale = stem + TENSOR_SCALE if stem + TENSOR_SCALE in self.shapes else None
        if (scale is None and kind in (INT8, NVFP4)) or (tensor_scale is None and kind == NVFP4):
            raise CheckpointError(f"has no scale of {key}, which is {kind}; {again}")
        counts = [1, shape[0]]
        if kind == NVFP4:
            counts = [TILE_ROWS * ceil(shape[0] / TILE_ROWS) * TILE_BLOCKS * ceil(shape[1] / BLOCK / TILE_BLOCKS)]
        if scale is not None and prod(self.shapes[scale]) not in counts:
            text = f"has {prod(self.shapes[scale])} scales of {key}, which is {kind} of shape {shape}"
            raise CheckpointError(f"{text}; {again}")
        rotated = int(mark.get("convrot_groupsize", LARGEST_ROTATION)) if mark.get("convrot") else 1
        return Encoding(kind, scale, tensor_scale, rotated)


def read_header(path: Path) -> Header:
    """The header of a safetensors or GGUF file; CheckpointError if it is invalid or incomplete."""
    try:
        with path.open("rb") as start:
            first = start.read(9)
        if first[:8] == b"version ":
            raise CheckpointError("is a Git LFS pointer, not the weights; run git lfs pull in its folder")
        is_gguf = path.suffix.lower() == GGUF
        content = GGUF if first[:4] == b"GGUF" else ".safetensors"
        if is_gguf != (content == GGUF) and (content == GGUF or first[8:] == b"{"):
            raise CheckpointError(f"is a {content} file by its content; rename it to end in {content}")
        if is_gguf:
            tensors = gguf_tensors(path)
            shapes = {name: [int(size) for size in reversed(each.shape)] for name, each in tensors.items()}
            dtypes = {name: each.tensor_type.name for name, each in tensors.items()}
            return Header(shapes, dtypes, {}, is_gguf=True)
        with safe_open(path, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
            shapes = {key: each.get_shape() for key, each in slices.items()}
            dtypes = {key: each.get_dtype() for key, each in slices.items()}
            marks = json.loads((file.metadata() or {}).get(METADATA, "{}")).get("layers", {})
            for key in shapes:
                if key.endswith(MARK):
                    marks[key.removesuffix(MARK)] = json.loads(bytes(file.get_tensor(key).tolist()))
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror}); check its permissions") from error
    except SafetensorError as error:
        raise CheckpointError(f"is not safetensors ({error}), so it is not whole; download it again") from error
    except (AttributeError, ValueError) as error:
        raise CheckpointError(f"has a damaged note on its quantization ({error}); download it again") from error
    for key in shapes:  # two codes a byte
        weight = key.removesuffix(TENSOR_SCALE) + ".weight"
        if key.endswith(TENSOR_SCALE) and len(shapes.get(weight, ())) == 2:
            shapes[weight] = [shapes[weight][0], 2 * shapes[weight][1]]
    return Header(shapes, dtypes, marks)


def gguf_tensors(path: Path) -> dict[str, Any]:
    """A GGUF file's tensors by name, mapped; CheckpointError if it is damaged, or the gguf package is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError('is a GGUF file, which needs a package; pip install "coat-flux[gguf]"') from error
    try:
        # copy-on-write: torch warns of arrays that it must not write to
        return {each.name: each for each in gguf.GGUFReader(path, "c").tensors}
    except (ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"is not a whole GGUF file ({error}); download it again") from error


# --- the values ---


def decode(codes: Tensor, encoding: Encoding, scale: Tensor | None, tensor_scale: Tensor | None) -> Tensor:
    """Return W in fp32 from a tensor of the file and its scales; block scales as `rows_of_tiles` gives them."""
    if encoding.format == NVFP4:
        assert scale is not None
        assert tensor_scale is not None
        numbers = torch.tensor([*MAGNITUDES, *(-size for size in MAGNITUDES)])
        values = numbers[torch.stack((codes >> 4, codes & 15), dim=-1).flatten(-2).to(torch.int32)]
        return (values.unflatten(-1, (-1, BLOCK)) * (scale.float() * tensor_scale.float()).unsqueeze(-1)).flatten(-2)
    if codes.dtype == torch.uint8:
        codes = codes.view(FP8[encoding.format])
    values = codes.to(torch.float32)
    if scale is not None:
        values *= scale.float().reshape(-1, *[1] * (values.ndim - 1))
    if encoding.rotated == 1:
        return values
    return rotate(values, encoding.rotated).unflatten(-1, (-1, encoding.rotated)).flip(-1).flatten(-2)


def rows_of_tiles(scales: Tensor, blocks: int) -> Tensor:
    """NVFP4's block scales [rows, blocks] from their tiles, rows of padding included."""
    of_columns = ceil(blocks / TILE_BLOCKS)
    tiles = scales.reshape(-1, of_columns, TILE_ROWS // 4, 4, TILE_BLOCKS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1, of_columns * TILE_BLOCKS)[:, :blocks]


def keeps_codes(config: FP8LinearConfig, row_scales: bool) -> bool:
    """Whether a linear stores a file's E4M3 codes and their scales unchanged."""
    return config.weight_format == E4M3.name and (config.weight_has_row_scales or not row_scales)


def as_stored(codes: Tensor, scale: Tensor | None) -> StoredWeight:
    """E4M3 codes of W and their scale [], [1], [N] or [N, 1] as our linears store them."""
    scale = torch.ones(()) if scale is None else scale.float()
    scale = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())
    return StoredWeight(codes.view(torch.float8_e4m3fn), scale)


def decode_gguf(stored: Any, part_of: Callable[[Any], Any]) -> Tensor:
    """Rows, taken by `part_of`, of a tensor of `gguf_tensors`, in fp32; it may share the file's map."""
    from gguf.quants import dequantize

    if stored.data.ndim == 1:
        return part_of(torch.from_numpy(dequantize(stored.data, stored.tensor_type)))
    rows = part_of(torch.from_numpy(stored.data))  # a row is whole blocks
    return torch.from_numpy(dequantize(rows.numpy(), stored.tensor_type))
