"""FLUX.2's prompts as embeddings, in the shapes that FLUX.1's have, so that all else is one code for both."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .cache import input_device, model_identity

__all__ = ["Flux2Text"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Flux2Text:
    """FLUX.2's frozen text side: one language model, of which some layers' states are the embeddings.

    Attributes:
        pipeline: diffusers' pipeline of the model, with text encoder and tokenizer only.
        max_length: tokens per prompt, with what the chat template adds; longer captions are cut.
    """

    pipeline: Any
    max_length: int = 512

    @property
    def models(self) -> list[nn.Module]:
        """The text encoder."""
        return [self.pipeline.text_encoder]

    @property
    def identity(self) -> str:
        """Changes whenever the embeddings of a prompt would."""
        name = type(self.pipeline).__name__
        return f"{name}-{self.max_length}-{model_identity(self.pipeline.text_encoder)}"

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Embeddings [B, T, D] in bf16, as the pipeline makes them of each prompt; and [B, 0]: nothing is pooled."""
        device = input_device(self.pipeline.text_encoder)
        tokenizer, embeds = getattr(self.pipeline.tokenizer, "tokenizer", self.pipeline.tokenizer), []
        for prompt in prompts:
            length = len(tokenizer(prompt).input_ids)
            if length >= self.max_length:
                logger.warning(
                    "caption of %d tokens: its end is cut (limit %d): %.60s...", length, self.max_length, prompt
                )
            made, _ = self.pipeline.encode_prompt(prompt=[prompt], device=device, max_sequence_length=self.max_length)
            embeds.append(made)
        together = torch.cat(embeds).to(torch.bfloat16)
        return together, together.new_zeros(len(together), 0)
