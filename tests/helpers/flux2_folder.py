"""A tiny FLUX.2 klein with random weights, as a folder that diffusers' own pipeline loads."""

from pathlib import Path
from typing import Any

import torch

TOKENS = 32
TEXT_WIDTH = 32  # of each of the three layers' states that are the embeddings
TRANSFORMER: dict[str, Any] = {
    "in_channels": 32, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 32, "num_attention_heads": 2,
    "joint_attention_dim": 3 * TEXT_WIDTH, "axes_dims_rope": (8, 8, 8, 8), "guidance_embeds": False,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_flux2(folder: Path, **transformer: Any) -> Path:
    import diffusers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_bytes_tokenizer(), pad_token="<|pad|>", model_max_length=TOKENS, chat_template=TEMPLATE
    )
    sizes = {"hidden_size": TEXT_WIDTH, "intermediate_size": TEXT_WIDTH, "head_dim": 16, "num_hidden_layers": 27}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    vae = diffusers.AutoencoderKLFlux2(
        block_out_channels=(8, 8, 8, 8), latent_channels=8, layers_per_block=1, norm_num_groups=4
    )
    vae.bn.running_mean.normal_(0.0, 0.1)
    vae.bn.running_var.uniform_(0.5, 2.0)
    pipeline = diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae.bfloat16(),
        text_encoder=Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads)).bfloat16(),
        tokenizer=tokenizer,
        transformer=diffusers.Flux2Transformer2DModel(**{**TRANSFORMER, **transformer}).bfloat16(),
        is_distilled=True,
    )
    pipeline.save_pretrained(folder)
    return folder


def _bytes_tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(name) for name in ("<|pad|>", "<|im_start|>", "<|im_end|>")])
    return tokenizer
