"""Blocks in the layout of the original FLUX.1, as ai-toolkit's Chroma has them, where those cannot be imported."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention


@dataclass
class ModulationOut:
    """Each [B, 1, D]."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


class Scale(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale.shape, self.scale, 1e-6)


class QKNorm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.query_norm, self.key_norm = Scale(d), Scale(d)


class SelfAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.norm = QKNorm(hidden // heads)


def attended(qkvs: list[Tensor], norms: list[QKNorm], heads: int, pe: Tensor, mask: Tensor) -> Tensor:
    """Attention over streams of [q|k|v], pairs turned by the matrices of `pe`."""
    parts: list[list[Tensor]] = [[], [], []]
    for qkv, norm in zip(qkvs, norms, strict=True):
        q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        for found, part in zip(parts, (norm.query_norm(q), norm.key_norm(k), v), strict=True):
            found.append(part)
    q, k, v = (torch.cat(part, dim=2) for part in parts)

    def turned(x: Tensor) -> Tensor:
        pairs = x.float().unflatten(-1, (-1, 1, 2))
        return (pe[..., 0] * pairs[..., 0] + pe[..., 1] * pairs[..., 1]).flatten(-2).to(x.dtype)

    return scaled_dot_product_attention(turned(q), turned(k), v, mask).transpose(1, 2).flatten(2)


def modulated(norm: nn.Module, x: Tensor, by: ModulationOut) -> Tensor:
    return (1 + by.scale) * norm(x) + by.shift


class DoubleStreamBlock(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.hidden_size, self.num_heads = hidden_size, num_heads
        for stream in ("img", "txt"):
            for number in (1, 2):
                setattr(self, f"{stream}_norm{number}", nn.LayerNorm(hidden_size, 1e-6, elementwise_affine=False))
            setattr(self, f"{stream}_attn", SelfAttention(hidden_size, num_heads))
            up, down = nn.Linear(hidden_size, 4 * hidden_size), nn.Linear(4 * hidden_size, hidden_size)
            setattr(self, f"{stream}_mlp", nn.Sequential(up, nn.GELU(approximate="tanh"), down))

    def forward(self, img: Tensor, txt: Tensor, pe: Tensor, distill_vec: Any, mask: Tensor) -> tuple[Tensor, Tensor]:
        of_image, of_text = distill_vec
        qkvs = [
            self.txt_attn.qkv(modulated(self.txt_norm1, txt, of_text[0])),
            self.img_attn.qkv(modulated(self.img_norm1, img, of_image[0])),
        ]
        out = attended(qkvs, [self.txt_attn.norm, self.img_attn.norm], self.num_heads, pe, mask)
        of_txt, of_img = out.split([txt.shape[1], img.shape[1]], dim=1)
        txt = txt + of_text[0].gate * self.txt_attn.proj(of_txt)
        img = img + of_image[0].gate * self.img_attn.proj(of_img)
        txt = txt + of_text[1].gate * self.txt_mlp(modulated(self.txt_norm2, txt, of_text[1]))
        img = img + of_image[1].gate * self.img_mlp(modulated(self.img_norm2, img, of_image[1]))
        return img, txt


class SingleStreamBlock(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.hidden_size, self.num_heads, self.mlp_hidden_dim = hidden_size, num_heads, 4 * hidden_size
        self.linear1, self.linear2 = nn.Linear(hidden_size, 7 * hidden_size), nn.Linear(5 * hidden_size, hidden_size)
        self.norm = QKNorm(hidden_size // num_heads)
        self.pre_norm = nn.LayerNorm(hidden_size, 1e-6, elementwise_affine=False)
        self.mlp_act = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor, pe: Tensor, distill_vec: ModulationOut, mask: Tensor) -> Tensor:
        both = self.linear1(modulated(self.pre_norm, x, distill_vec))
        qkv, mlp = both.split([3 * self.hidden_size, self.mlp_hidden_dim], dim=-1)
        out = attended([qkv], [self.norm], self.num_heads, pe, mask)
        return x + distill_vec.gate * self.linear2(torch.cat([out, self.mlp_act(mlp)], dim=-1))
