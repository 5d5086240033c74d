"""The data path with real diffusers and transformers classes: encoding, caching, dropping the models, resuming."""

from __future__ import annotations

import os
import random
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from coat_flux.data.cache import TextEncoders, encode_latents, encode_prompts, model_identity
from coat_flux.data.captions import shuffle_tokens
from coat_flux.data.dataset import Batch, BucketBatchSampler, scan
from coat_flux.data.files import DatasetError
from coat_flux.data.images import read_photo, to_tensor
from coat_flux.data.loader import cache_all
from tests import tolerances
from tests.helpers.asserts import assert_bitwise
from tests.helpers.tiny_flux import make_tiny_flux

CACHED = {"cache_latents_to_disk": True, "cache_text_embeddings": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_flux(tmp_path_factory.mktemp("models") / "tiny-flux")


@pytest.fixture(scope="module")
def vae(model):
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_pretrained(model, subfolder="vae").eval()


@pytest.fixture(scope="module")
def encoders(model):
    from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

    return TextEncoders(
        CLIPTextModel.from_pretrained(model, subfolder="text_encoder", dtype=torch.bfloat16).eval(),
        T5EncoderModel.from_pretrained(model, subfolder="text_encoder_2", dtype=torch.bfloat16).eval(),
        AutoTokenizer.from_pretrained(model, subfolder="tokenizer"),
        AutoTokenizer.from_pretrained(model, subfolder="tokenizer_2"),
        max_length=32,
    )


@pytest.fixture
def folder(tmp_path):
    """Five photos of two shapes with captions."""
    noise = np.random.default_rng(0)
    for i, size in enumerate([(64, 64), (64, 64), (96, 64), (96, 64), (64, 64)]):
        pixels = noise.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"photo{i}.png")
        (tmp_path / f"photo{i}.txt").write_text(f"a [trigger] dress, number {i}, red", encoding="utf-8")
    return tmp_path


def config(folder, **changes):
    settings = {
        "folder_path": str(folder),
        "caption_ext": ".txt",
        "default_caption": None,
        "caption_dropout_rate": 0.0,
        "shuffle_tokens": False,
        "cache_latents": False,
        "cache_latents_to_disk": False,
        "cache_text_embeddings": False,
        "resolution": [96],
        "num_repeats": 1,
        "flip_x": False,
        "buckets": True,
    }
    return SimpleNamespace(**settings | changes)


def make(folder, vae, encoders, cache_folder=None, seed=0, **changes):
    configs = [config(folder, **changes)]
    samples = scan(configs, "ohwx")
    return cache_all(
        samples, vae, encoders, progress=False, dataset_configs=configs, seed=seed, cache_folder=cache_folder
    )


def first_batches(dataset, count=6, batch_size=2):
    return list(islice(map(dataset.batch, BucketBatchSampler(dataset.samples, batch_size)), count))


def assert_same_batches(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert_bitwise(a[name], b[name])


def cache_files(folder, kind="*"):
    return sorted((folder / "_coat_cache").glob(f"{kind}/*"))


def refuse(monkeypatch):
    """From here on, nothing may be encoded."""

    def encoded(*_, **__):
        raise AssertionError("encoded again")

    monkeypatch.setattr("coat_flux.data.loader.encode_latents", encoded)
    monkeypatch.setattr(TextEncoders, "encode", encoded)


def test_latents_are_shifted_scaled_and_decode_to_the_photo(vae):
    image = Image.new("RGB", (128, 96), (200, 60, 90))
    pixels = to_tensor(image)[None]
    latents = encode_latents(vae, pixels)
    assert latents.shape == (1, 16, 12, 16)
    assert latents.dtype == torch.float32
    expected = (vae.encode(pixels).latent_dist.mean - vae.config.shift_factor) * vae.config.scaling_factor
    assert_bitwise(latents, expected.detach())
    with torch.no_grad():
        decoded = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample
    away_from_the_border = (decoded - pixels)[..., 32:-32, 32:-32]
    assert away_from_the_border.abs().max() < tolerances.TINY_VAE_COLOUR


@pytest.mark.parametrize("prompt", ["a red dress", "", "dress, " * 60])
def test_prompts_are_encoded_as_the_diffusers_pipeline_does(model, encoders, prompt):
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(
        model,
        transformer=None,
        vae=None,
        text_encoder=encoders.clip,
        text_encoder_2=encoders.t5,
    )
    with torch.no_grad():  # as the pipeline does when it draws
        theirs = pipeline.encode_prompt(prompt, None, max_sequence_length=32)
    models, tokenizers = (encoders.clip, encoders.t5), (encoders.clip_tokenizer, encoders.t5_tokenizer)
    embeds, pooled = encode_prompts(models, tokenizers, [prompt, "another"], 32)
    assert embeds.dtype == pooled.dtype == torch.bfloat16
    assert_bitwise(embeds[:1], theirs[0])
    assert_bitwise(pooled[:1], theirs[1])
    assert not torch.equal(pooled[0], pooled[1])


def test_a_caption_that_is_cut_is_reported(encoders, caplog):
    encoders.encode(["dress, " * 60])
    assert "(limit 32): dress, dress," in caplog.text


def test_batch_shapes_and_contents(folder, vae, encoders):
    dataset = make(folder, vae, encoders)
    for batch in first_batches(dataset):
        assert sorted(batch) == ["indices", "latents", "pooled", "prompt_embeds"]
        for row, index in enumerate(batch["indices"].tolist()):
            sample = dataset.samples[index]
            assert sample.caption == f"a ohwx dress, number {sample.image_path.stem[-1]}, red"
            pixels = to_tensor(read_photo(sample.image_path).image)[None]
            assert_bitwise(batch["latents"][row], encode_latents(vae, pixels)[0])
            assert_bitwise(batch["pooled"][row], encoders.encode([sample.caption])[1][0])
        assert batch["prompt_embeds"].shape == (2, 32, encoders.t5.config.d_model)


@pytest.mark.parametrize(
    "caching",
    [CACHED, {"cache_latents": True}, {"cache_latents": True, **CACHED}, {"cache_latents_to_disk": True}],
)
def test_cached_batches_are_those_encoded_on_the_fly(folder, vae, encoders, caching):
    common = {"caption_dropout_rate": 0.4, "flip_x": True}
    live = first_batches(make(folder, vae, encoders, **common), 10)
    assert_same_batches(live, first_batches(make(folder, vae, encoders, **common, **caching), 10))
    assert_same_batches(live, first_batches(make(folder, vae, encoders, **common, **caching), 10))
    assert len(cache_files(folder, "latents")) == (10 if "cache_latents_to_disk" in caching else 0)
    assert len(cache_files(folder, "text")) == (6 if "cache_text_embeddings" in caching else 0)


def test_batches_are_on_the_device_and_models_return_home(folder, vae, encoders, device):
    configs = [config(folder, **CACHED)]
    dataset = cache_all(scan(configs), vae, encoders, device, progress=False, dataset_configs=configs)
    batch = dataset.batch(Batch((0,), 0))
    assert {name: tensor.device.type for name, tensor in batch.items()} == {
        "latents": device.type,
        "prompt_embeds": device.type,
        "pooled": device.type,
        "indices": "cpu",
    }
    assert batch["latents"].isfinite().all()
    assert {next(module.parameters()).device.type for module in (vae, encoders.clip, encoders.t5)} == {"cpu"}


def test_flip_mirrors_the_photo(folder, vae, encoders):
    dataset = make(folder, vae, encoders, flip_x=True)
    plain, flipped = dataset.samples[0], dataset.samples[5]
    mirrored = to_tensor(read_photo(plain.image_path).image).flip(-1)[None]
    assert_bitwise(dataset.latents(flipped), encode_latents(vae, mirrored)[0])


def test_models_are_let_go_exactly_when_everything_is_cached(folder, vae, encoders):
    for caching, vae_needed, encoders_needed in [
        ({}, True, True),
        ({"cache_latents": True}, False, True),
        ({"cache_text_embeddings": True}, True, False),
        (CACHED, False, False),
    ]:
        dataset = make(folder, vae, encoders, **caching)
        assert (dataset.needs_vae, dataset.needs_encoders) == (vae_needed, encoders_needed)
        assert (dataset.vae is vae, dataset.encoders is encoders) == (vae_needed, encoders_needed)


def test_a_second_run_encodes_nothing_also_with_renamed_and_touched_files(folder, vae, encoders, monkeypatch):
    before = first_batches(make(folder, vae, encoders, **CACHED, caption_dropout_rate=0.5))
    for path in [*folder.glob("*.png"), *folder.glob("*.txt")]:
        path.write_bytes(path.read_bytes())
        path.rename(path.with_name(f"renamed-{path.name}"))
    refuse(monkeypatch)
    assert_same_batches(before, first_batches(make(folder, vae, encoders, **CACHED, caption_dropout_rate=0.5)))


def test_a_replaced_photo_of_same_name_size_and_date_is_encoded_again(folder, vae, encoders):
    first = folder / "photo0.png"
    old = make(folder, vae, encoders, **CACHED)
    stat = first.stat()
    content = bytearray(first.read_bytes())
    Image.new("RGB", (64, 64), "red").save(first)
    replaced = first.read_bytes()
    first.write_bytes(replaced + b"\0" * (len(content) - len(replaced)))
    os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (first.stat().st_size, first.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    new = make(folder, vae, encoders, **CACHED)
    assert not torch.equal(new.latents(new.samples[0]), old.latents(old.samples[0]))
    assert_bitwise(new.latents(new.samples[1]), old.latents(old.samples[1]))


def test_an_edited_caption_another_vae_or_token_length_is_encoded_again(folder, vae, encoders, model):
    from diffusers import AutoencoderKL

    make(folder, vae, encoders, **CACHED)
    (folder / "photo0.txt").write_text("a blue coat")
    make(folder, vae, encoders, **CACHED)
    assert (len(cache_files(folder, "latents")), len(cache_files(folder, "text"))) == (5, 6)
    half = AutoencoderKL.from_pretrained(model, subfolder="vae").bfloat16()
    assert model_identity(half) != model_identity(vae) == model_identity(vae)
    shorter = TextEncoders(encoders.clip, encoders.t5, encoders.clip_tokenizer, encoders.t5_tokenizer, 16)
    make(folder, half, shorter, **CACHED)
    assert (len(cache_files(folder, "latents")), len(cache_files(folder, "text"))) == (10, 11)


def test_a_damaged_cache_is_made_again(folder, vae, encoders, caplog):
    before = first_batches(make(folder, vae, encoders, **CACHED))
    damaged = [cache_files(folder, "latents")[2], cache_files(folder, "text")[1]]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-8])
    after = make(folder, vae, encoders, **CACHED)
    assert [path.name for path in damaged] == [
        record.args[0].name for record in caplog.records if "damaged cache file" in record.msg
    ]
    caplog.clear()
    assert_same_batches(before, first_batches(after))
    assert caplog.records == []


@pytest.mark.parametrize(
    ("kind", "what"), [("latents", "photo0.png"), ("text", "caption 'a ohwx dress, number 0, red'")]
)
def test_a_cache_removed_during_the_run_is_an_error_with_a_remedy(folder, vae, encoders, kind, what):
    dataset = make(folder, vae, encoders, **CACHED)
    for path in cache_files(folder, kind):
        path.unlink()
    with pytest.raises(DatasetError, match=rf"{what}: its cached .* were removed or damaged .*; start the run again"):
        dataset.batch(Batch((0,), 0))


def test_cache_folder_can_be_elsewhere(folder, vae, encoders, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("cache")
    make(folder, vae, encoders, elsewhere, **CACHED)
    assert not (folder / "_coat_cache").exists()
    assert len(list(elsewhere.glob("*/*.safetensors"))) == 10


def test_dropout_uses_the_trigger_word_prompt_at_the_set_rate_and_repeats(folder, vae, encoders):
    dataset = make(folder, vae, encoders, **CACHED, caption_dropout_rate=0.3)
    dropped = dataset.text(0, "ohwx")[1]

    def drops(from_draw, dataset=dataset):
        batches = (dataset.batch(Batch((0, 1), draw)) for draw in range(from_draw, 200))
        return [torch.equal(row, dropped) for batch in batches for row in batch["pooled"]]

    seen = drops(0)
    assert abs(np.mean(seen) - 0.3) < tolerances.DROPOUT_SIGMAS * (0.3 * 0.7 / 400) ** 0.5
    assert drops(120) == seen[240:]
    assert drops(0, make(folder, vae, encoders, **CACHED, caption_dropout_rate=0.3, seed=1)) != seen
    assert seen[::2] != seen[1::2]  # rows of one batch are dropped independently


def test_shuffled_captions_differ_between_draws(folder, vae, encoders):
    dataset = make(folder, vae, encoders, shuffle_tokens=True)
    caption = dataset.samples[0].caption
    variants = {shuffle_tokens(caption, random.Random(seed)) for seed in range(60)}
    pooled = {tuple(encoders.encode([variant])[1][0].tolist()) for variant in variants}
    seen = {tuple(dataset.batch(Batch((0,), draw))["pooled"][0].tolist()) for draw in range(20)}
    assert len(seen) >= 2
    assert seen <= pooled


def test_an_unusable_vae_is_an_error(folder, encoders, model):
    from diffusers import AutoencoderKL

    broken = AutoencoderKL.from_pretrained(model, subfolder="vae")
    with torch.no_grad():
        next(broken.encoder.parameters()).fill_(float("nan"))
    with pytest.raises(DatasetError, match=r"photo0\.png: the VAE returns NaN or inf"):
        make(folder, broken, encoders, cache_latents=True)
