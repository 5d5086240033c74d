"""The embedded tiny FLUX: made locally and whole, loads as FLUX.1-dev does, predicts and trains sensibly."""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from peft import LoraConfig
from safetensors import safe_open
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

from coat_flux.mini_flux import vocabulary
from coat_flux.mini_flux.folder import MARKER_NAME, make_tiny_flux
from tests.tolerances import (
    TINY_FLUX_CHANGE_FLOOR,
    TINY_FLUX_LORA_GAIN,
    TINY_FLUX_PREDICTION_STD,
    TINY_VAE_COLOUR,
    TINY_VAE_LATENT_STD,
)

PROMPT = "a red striped t-shirt on a plain white background, product photo"
LATENT_SIDE = 8  # packed tokens per side: an image of 128 × 128 pixels


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(self, address):
        raise AssertionError(f"network access to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def one_thread():
    """On matrices this small, threads wait for each other longer than they work (20 times slower on a busy machine)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_flux(tmp_path_factory.mktemp("models") / "tiny-flux")


@pytest.fixture(scope="module")
def pipe(folder) -> FluxPipeline:
    pipe = FluxPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(torch.float32)


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# --- the folder --------------------------------------------------------------------------------------------------


def test_same_seed_gives_the_same_bytes_and_another_seed_other_weights(folder, tmp_path):
    first, again, other = (
        digests(folder),
        digests(make_tiny_flux(tmp_path / "a")),
        digests(make_tiny_flux(tmp_path / "b", 1)),
    )
    assert first == again
    weights = [name for name in first if name.endswith(".safetensors")]
    assert len(weights) == 4
    assert {name for name in weights if first[name] == other[name]} == {"vae/diffusion_pytorch_model.safetensors"}


def test_a_finished_folder_is_not_written_again(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert make_tiny_flux(str(folder)) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def _older_version(folder):
    marker = folder / MARKER_NAME
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "version": 0}))


def _missing_file(folder):
    (folder / "vae" / "config.json").unlink()


def _truncated_file(folder):
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def _broken_marker(folder):
    (folder / MARKER_NAME).write_text('{"version":')


@pytest.mark.parametrize("damage", [_older_version, _missing_file, _truncated_file, _broken_marker])
def test_a_damaged_or_older_folder_is_made_again(folder, tmp_path, damage):
    copy = make_tiny_flux(tmp_path / "tiny")
    damage(copy)
    assert digests(copy) != digests(folder)
    make_tiny_flux(copy)
    assert digests(copy) == digests(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_an_interrupted_run_leaves_nothing_behind(tmp_path, monkeypatch, folder):
    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(vocabulary, "write_t5_tokenizer", killed)
        with pytest.raises(KeyboardInterrupt):
            make_tiny_flux(tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []
    assert digests(make_tiny_flux(tmp_path / "tiny")) == digests(folder)


def test_a_folder_of_the_users_is_refused_and_kept(tmp_path):
    (tmp_path / "model_index.json").write_text("mine")
    with pytest.raises(FileExistsError, match=r"out_dir=.*: must be new, empty or .*choose another folder"):
        make_tiny_flux(tmp_path)
    assert (tmp_path / "model_index.json").read_text() == "mine"


# --- the parts ---------------------------------------------------------------------------------------------------


def test_pipeline_has_the_real_classes_and_flux_dev_settings(pipe):
    assert type(pipe.transformer) is FluxTransformer2DModel
    assert type(pipe.vae) is AutoencoderKL
    assert type(pipe.text_encoder) is CLIPTextModel
    assert type(pipe.text_encoder_2) is T5EncoderModel
    assert isinstance(pipe.tokenizer, CLIPTokenizer)
    assert isinstance(pipe.tokenizer_2, T5TokenizerFast)
    config = pipe.transformer.config
    assert (config.guidance_embeds, config.in_channels, config.num_layers, config.num_single_layers) == (True, 64, 2, 2)
    assert sum(config.axes_dims_rope) == config.attention_head_dim == 32
    assert config.joint_attention_dim == pipe.text_encoder_2.config.d_model
    assert config.pooled_projection_dim == pipe.text_encoder.config.hidden_size
    vae = pipe.vae.config
    assert (vae.latent_channels, vae.scaling_factor, vae.shift_factor) == (16, 0.3611, 0.1159)
    assert pipe.vae_scale_factor == 8
    scheduler = pipe.scheduler.config
    assert (scheduler.shift, scheduler.use_dynamic_shifting) == (3.0, True)
    assert (scheduler.base_shift, scheduler.max_shift) == (0.5, 1.15)
    assert (scheduler.base_image_seq_len, scheduler.max_image_seq_len) == (256, 4096)


def test_every_linear_of_the_blocks_can_run_in_fp8(pipe):
    shapes = {
        name: tuple(module.weight.shape)
        for name, module in pipe.transformer.named_modules()
        if isinstance(module, torch.nn.Linear) and "transformer_blocks." in name
    }
    assert len(shapes) == 40
    assert {name: shape for name, shape in shapes.items() if shape[0] % 16 or shape[1] % 16} == {}


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "text_encoder_2"])
def test_weights_are_bf16_on_disk_and_load_completely(folder, pipe, part):
    (path,) = (folder / part).glob("*.safetensors")
    module = getattr(pipe, part)
    with safe_open(path, "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    loaded = {name.removeprefix("text_model."): tensor for name, tensor in module.state_dict().items()}
    for name, tensor in stored.items():
        assert torch.equal(loaded[name.removeprefix("text_model.")], tensor.float()), name
    if part == "text_encoder":  # transformers before 5.6 finds CLIP's tensors only with this prefix
        assert all(name.startswith("text_model.") for name in stored)


def test_components_load_the_way_ai_toolkit_loads_them(folder):
    dtype = torch.bfloat16
    tokenizer = CLIPTokenizer.from_pretrained(folder, subfolder="tokenizer", torch_dtype=dtype)
    tokenizer_2 = T5TokenizerFast.from_pretrained(folder, subfolder="tokenizer_2", torch_dtype=dtype)
    encoder = CLIPTextModel.from_pretrained(folder, subfolder="text_encoder", torch_dtype=dtype)
    encoder_2 = T5EncoderModel.from_pretrained(folder, subfolder="text_encoder_2", torch_dtype=dtype)
    transformer = FluxTransformer2DModel.from_pretrained(str(folder / "transformer"), subfolder=None, torch_dtype=dtype)
    assert {next(model.parameters()).dtype for model in (encoder, encoder_2, transformer)} == {dtype}
    assert len(tokenizer) == encoder.config.vocab_size
    assert len(tokenizer_2) == encoder_2.config.vocab_size
    ids = tokenizer([PROMPT], padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
    ids_2 = tokenizer_2([PROMPT], padding="max_length", max_length=512, truncation=True, return_tensors="pt").input_ids
    with torch.no_grad():
        assert encoder(ids).pooler_output.shape == (1, 64)
        assert encoder_2(ids_2)[0].shape == (1, 512, 64)


# --- tokenizers --------------------------------------------------------------------------------------------------


def test_clip_tokenizer_spells_any_text_in_bytes(pipe):
    tokenizer = pipe.tokenizer
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1052, 1053, 1053)
    assert tokenizer.model_max_length == 77
    words = tokenizer.convert_ids_to_tokens(tokenizer("Red striped HOODIE").input_ids)
    assert words == ["<|startoftext|>", "red</w>", "striped</w>", "hoodie</w>", "<|endoftext|>"]
    for text in ("ünïcode", "连衣裙", "👗", "zxqj"):
        ids = tokenizer(text).input_ids
        assert tokenizer.eos_token_id not in ids[1:-1]  # the unknown token
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    full = tokenizer(PROMPT * 20, padding="max_length", max_length=77, truncation=True).input_ids
    assert (len(full), full[0], full[-1]) == (77, 1052, 1053)


def test_t5_tokenizer_ends_pads_and_marks_unknown_characters(pipe):
    tokenizer = pipe.tokenizer_2
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.model_max_length == 512
    ids = tokenizer("a Navy dress").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁a", "▁Navy", "▁dress", "</s>"]
    assert tokenizer("a", padding="max_length", max_length=4).input_ids == [ids[0], 1, 0, 0]
    assert tokenizer("", padding="max_length", max_length=2).input_ids == [1, 0]
    assert tokenizer.decode(tokenizer("café Größe №42!").input_ids, skip_special_tokens=True) == "café Größe 42!"
    assert tokenizer("№").input_ids.count(2) == 1


# --- the transformer -----------------------------------------------------------------------------------------------


@torch.no_grad()
def encode_prompts(
    pipe, prompts: list[str], pooled_prompts: list[str] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """T5 states (B, 64, width) of `prompts`, and pooled CLIP states (B, width) of `pooled_prompts` or the same."""
    embeds, _, _ = pipe.encode_prompt(prompts, None, max_sequence_length=64)
    _, pooled, _ = pipe.encode_prompt(pooled_prompts or prompts, None, max_sequence_length=64)
    return embeds, pooled


def predict(pipe, x, encoded, timestep=0.5, guidance=3.5):
    """The transformer's prediction for packed latents `x` (B, tokens, 64)."""
    embeds, pooled = encoded
    return pipe.transformer(
        hidden_states=x,
        encoder_hidden_states=embeds,
        pooled_projections=pooled,
        timestep=torch.as_tensor(timestep).expand(len(x)),
        guidance=torch.full((len(x),), guidance),
        img_ids=pipe._prepare_latent_image_ids(1, LATENT_SIDE, LATENT_SIDE, "cpu", torch.float32),
        txt_ids=torch.zeros(embeds.shape[1], 3),
        return_dict=False,
    )[0]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", [0, 1])
def test_prediction_depends_on_every_input(pipe, tmp_path, seed):
    pipe = pipe if seed == 0 else FluxPipeline.from_pretrained(make_tiny_flux(tmp_path / "b", seed)).to(torch.float32)
    x, other_x = torch.randn(2, 1, LATENT_SIDE**2, 64, generator=torch.Generator().manual_seed(0))
    other, same = "a navy dress, product photo", encode_prompts(pipe, [PROMPT])
    with torch.no_grad():
        base = predict(pipe, x, same)
        changed = {
            "image": predict(pipe, other_x, same),
            "prompt": predict(pipe, x, encode_prompts(pipe, [other], [PROMPT])),
            "pooled prompt": predict(pipe, x, encode_prompts(pipe, [PROMPT], [other])),
            "timestep": predict(pipe, x, same, timestep=0.9),
            "guidance": predict(pipe, x, same, guidance=1.0),
        }
    low, high = TINY_FLUX_PREDICTION_STD
    assert low < base.std().item() < high
    moved = {name: ((value - base).norm() / base.norm()).item() for name, value in changed.items()}
    assert {name: size for name, size in moved.items() if size < TINY_FLUX_CHANGE_FLOOR} == {}


def smooth_latents(count: int) -> torch.Tensor:
    """Packed latents (count, tokens, 64) of unit variance, blurred as encoded pictures are."""
    coarse = torch.randn(count, 16, 4, 4, generator=torch.Generator().manual_seed(1))
    fine = torch.nn.functional.interpolate(coarse, size=(2 * LATENT_SIDE,) * 2, mode="bilinear")
    return FluxPipeline._pack_latents(fine / fine.std(), count, 16, 2 * LATENT_SIDE, 2 * LATENT_SIDE)


def flow_matching_loss(pipe, clean: torch.Tensor, encoded, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(clean.shape, generator=generator)
    t = torch.sigmoid(torch.randn(len(clean), generator=generator))
    noisy = torch.lerp(clean, noise, t[:, None, None])
    return (predict(pipe, noisy, encoded, timestep=t, guidance=1.0) - (noise - clean)).square().mean()


@pytest.mark.usefixtures("one_thread")
def test_lora_on_the_blocks_learns(folder):
    pipe = FluxPipeline.from_pretrained(folder).to(torch.float32)
    pipe.transformer.requires_grad_(False)
    torch.manual_seed(0)  # PEFT draws lora_A from the global generator
    names = r"(to_[qkv]|to_out\.0|to_add_out|add_[qkv]_proj|net\.0\.proj|net\.2|linear|proj_mlp|proj_out)"
    targets = r".*transformer_blocks\..*" + names
    pipe.transformer.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=targets))
    adapters = [parameter for parameter in pipe.transformer.parameters() if parameter.requires_grad]
    assert len(adapters) == 2 * 40
    clean = smooth_latents(4)
    encoded = encode_prompts(pipe, ["a red shirt", "a navy dress", "a green hoodie", "black sneakers"])

    def fixed_noise_loss() -> float:
        with torch.no_grad():
            losses = [
                flow_matching_loss(pipe, clean, encoded, torch.Generator().manual_seed(100 + i)) for i in range(4)
            ]
        return torch.stack(losses).mean().item()

    before, generator = fixed_noise_loss(), torch.Generator().manual_seed(7)
    optimizer = torch.optim.AdamW(adapters, lr=1e-3)
    for _ in range(50):
        optimizer.zero_grad()
        flow_matching_loss(pipe, clean, encoded, generator).backward()
        optimizer.step()
    assert fixed_noise_loss() < TINY_FLUX_LORA_GAIN * before


# --- the VAE -------------------------------------------------------------------------------------------------------


def encode(vae, pixels: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return (vae.encode(pixels).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor


def decode(vae, latents: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vae_keeps_colours(folder, dtype):
    vae = AutoencoderKL.from_pretrained(folder, subfolder="vae").to(dtype)
    colours = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0], [0.75, -0.25, 0.125]])
    pixels = colours[:, :, None, None].expand(3, 3, 128, 128)
    decoded = decode(vae, encode(vae, pixels.to(dtype))).float()[:, :, 16:-16, 16:-16]
    assert (decoded - pixels[:, :, 16:-16, 16:-16]).abs().max() < TINY_VAE_COLOUR


def test_vae_shows_the_picture_at_low_resolution(pipe):
    generator = torch.Generator().manual_seed(3)
    scene = torch.nn.functional.interpolate(torch.rand(2, 3, 6, 6, generator=generator) * 2 - 1, 192, mode="bicubic")
    latents = encode(pipe.vae, scene)
    decoded = decode(pipe.vae, latents)
    assert latents.shape == (2, 16, 24, 24)
    low, high = TINY_VAE_LATENT_STD
    assert low < latents.std().item() < high
    inner = (slice(None), slice(None), slice(16, -16), slice(16, -16))
    error = (decoded - scene)[inner].square().mean()
    assert error < 0.02 * scene[inner].var()
    assert error < 0.02 * (decoded[0] - scene[1])[None][inner].square().mean()


def test_vae_latents_are_almost_deterministic_but_sampled(pipe):
    latents = pipe.vae.encode(torch.zeros(1, 3, 64, 64)).latent_dist
    assert torch.allclose(latents.std, torch.full_like(latents.std, 0.0183), rtol=0.01)


def test_decoding_noise_does_not_saturate(pipe):
    noise = torch.randn(1, 16, 24, 24, generator=torch.Generator().manual_seed(0))
    decoded = decode(pipe.vae, noise)
    assert decoded.std() > 0.1
    assert (decoded.abs() > 1).float().mean() < 0.01


# --- the whole pipeline -----------------------------------------------------------------------


def test_pipeline_samples_and_follows_the_prompt(pipe):
    def sample(prompt: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return pipe(prompt, height=64, width=96, num_inference_steps=3, generator=generator, output_type="pt").images

    image = sample(PROMPT)
    assert image.shape == (1, 3, 64, 96)
    assert torch.equal(image, sample(PROMPT))
    assert (image - sample("a navy dress")).abs().mean() > TINY_FLUX_CHANGE_FLOOR / 10
    assert ((image > 0) & (image < 1)).float().mean() > 0.9
