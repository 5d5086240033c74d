"""The tiny VAE: an `AutoencoderKL` whose weights are set by hand so that it keeps a picture's colours and shapes.

Every convolution is written down, none is random. All residual branches are zero, so each block passes its input on and
what is left is linear:

* encoder: two 2×2 averages (a pixel now stands for 4×4 image pixels: R, G, B and the left-right difference of the
  luminance), then the four positions of each 2×2 block go to channels of their own: 4 features × 4 positions = the 16
  latent channels of an 8×8 patch;
* decoder: three 2× upsamplings. `_UPSAMPLE_TAPS` are the 3-tap filters that, after a nearest-neighbour upsampling, give
  the 4-pixel averages back smoothed by (1, 2, 1)/4, and `_BILINEAR_TAPS` those that make bilinear interpolation.

The group norm and SiLU before each output convolution would bend this. Two tricks keep them linear: each value a
travels as the pair (a, -a), because silu(a) - silu(-a) = a exactly, and next to the pairs stand constants
±`_CONSTANT`, so large that they alone decide the standard deviation the norm divides by.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from scripts.mini_flux.models import VAE_CONFIG as MINI_VAE_CONFIG

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

SCALING_FACTOR, SHIFT_FACTOR = 0.3611, 0.1159  # FLUX.1-dev's
LATENT_CHANNELS = 16
VAE_CONFIG = {
    **MINI_VAE_CONFIG,
    "block_out_channels": (8, 16, 16, 64),
    "norm_num_groups": 1,
    "sample_size": 1024,
    "mid_block_add_attention": True,
}
_CONSTANT = 256.0
_PIXEL_STD = 0.5  # of photographs scaled to [-1, 1]; makes scaled latents of std near 1
_GAIN = 1.0 / (SCALING_FACTOR * _PIXEL_STD)
_LOG_VARIANCE = -8.0  # latents are sampled with std exp(-4) around the mean
_LUMINANCE = (0.299, 0.587, 0.114)
_BILINEAR_TAPS = (0.25, 0.5, 0.25)
_UPSAMPLE_TAPS = ((0.0, 0.25, 0.25), (0.25, 0.25, 0.0))  # for the left/top and the right/bottom half of a block


def build_vae() -> AutoencoderKL:
    """Returns the tiny VAE in fp32: 16 latent channels, 8× downsampling, FLUX's scaling and shift factors.

    Numerics: `decode(encode(x).mode())` of a constant colour gives that colour within 0.01, 16 pixels and more from the
    border (convolutions pad with zeros, which is mid-grey).
    """
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(**VAE_CONFIG)
    with torch.no_grad():
        _reset(vae)
        _set_encoder(vae.encoder)
        _set_decoder(vae.decoder)
    return vae.eval()


def _reset(vae: nn.Module) -> None:
    """Zeroes every weight, except that norms keep weight 1 and 1×1 shortcuts pass their channels on."""
    for name, module in vae.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
        if name.endswith("conv_shortcut"):
            nn.init.dirac_(module.weight)


def _set_encoder(encoder: nn.Module) -> None:
    halve = _outer((0.5, 0.5, 0.0), (0.5, 0.5, 0.0))  # the downsampler pads right and bottom only
    contrast = _outer((0.5, 0.5, 0.0), (0.5, -0.5, 0.0))
    nn.init.dirac_(encoder.conv_in.weight)
    first, second, third = (encoder.down_blocks[i].downsamplers[0].conv.weight for i in range(3))
    for colour in range(3):
        first[colour, colour] = halve
        second[colour, colour] = halve
        second[3, colour] = contrast * _LUMINANCE[colour]
    for feature in range(4):
        for position in range(4):
            row, column = divmod(position, 2)
            third[4 * position + feature, feature, row, column] = _GAIN
    _pair_up(encoder.down_blocks[3].resnets[0].conv_shortcut, LATENT_CHANNELS)
    _read_pairs(encoder.conv_out, LATENT_CHANNELS)
    encoder.conv_out.bias[LATENT_CHANNELS:] = _LOG_VARIANCE


def _set_decoder(decoder: nn.Module) -> None:
    nn.init.dirac_(decoder.conv_in.weight)
    first, second, third = (decoder.up_blocks[i].upsamplers[0].conv.weight for i in range(3))
    for colour in range(3):
        for position in range(4):
            row, column = divmod(position, 2)
            first[colour, 4 * position + colour] = _outer(_UPSAMPLE_TAPS[row], _UPSAMPLE_TAPS[column]) / _GAIN
        second[colour, colour] = _outer(_BILINEAR_TAPS, _BILINEAR_TAPS)
        third[colour, colour] = _outer(_BILINEAR_TAPS, _BILINEAR_TAPS)
    _pair_up(decoder.up_blocks[3].resnets[0].conv_shortcut, 3)
    _read_pairs(decoder.conv_out, 3)


def _outer(rows: tuple[float, ...], columns: tuple[float, ...]) -> torch.Tensor:
    return torch.outer(torch.tensor(rows), torch.tensor(columns))


def _pair_up(shortcut: nn.Conv2d, count: int) -> None:
    """Makes a 1×1 convolution write `count` values as pairs (a, -a) and ±`_CONSTANT` after them."""
    shortcut.weight.zero_()
    for index in range(count):
        shortcut.weight[2 * index, index] = 1.0
        shortcut.weight[2 * index + 1, index] = -1.0
    shortcut.bias[2 * count] = _CONSTANT
    shortcut.bias[2 * count + 1] = -_CONSTANT


def _read_pairs(conv: nn.Conv2d, count: int) -> None:
    """Makes the output convolution take the pairs apart again and undo what the norm divided by."""
    norm_divisor = _CONSTANT * math.sqrt(2 / conv.in_channels)
    for index in range(count):
        conv.weight[index, 2 * index, 1, 1] = norm_divisor
        conv.weight[index, 2 * index + 1, 1, 1] = -norm_divisor
