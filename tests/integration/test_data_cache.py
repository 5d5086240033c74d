"""The data path with real diffusers and transformers classes: encoding, caching, dropping the models, resuming."""

import os
import random
from itertools import islice

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, FluxPipeline
from PIL import Image
from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

from coat_flux.config.job_sections import DatasetSection
from coat_flux.data.cache import (
    PROMPT_BYTES,
    TensorCache,
    TextEncoders,
    by_layer,
    encode_latents,
    input_device,
    model_identity,
    on_device,
)
from coat_flux.data.captions import shuffle_tokens
from coat_flux.data.files import DatasetError
from coat_flux.data.images import read_photo, to_tensor
from coat_flux.data.loader import Batch, BucketBatchSampler, LatentDataset, picture_of
from coat_flux.data.preflight import DataReport
from tests import tolerances
from tests.helpers.asserts import assert_all_bitwise, assert_bitwise
from tests.reliability.photos import noise

CACHED = {"cache_latents_to_disk": True, "cache_text_embeddings": True}


@pytest.fixture(scope="module")
def vae(place):
    return AutoencoderKL.from_pretrained(place["model"], subfolder="vae").eval()


@pytest.fixture(scope="module")
def encoders(place):
    model = place["model"]
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
    for i, size in enumerate([(64, 64), (64, 64), (96, 64), (96, 64), (64, 64)]):
        noise(size, i).save(tmp_path / f"photo{i}.png")
        (tmp_path / f"photo{i}.txt").write_text(f"a [trigger] dress, number {i}, red", encoding="utf-8")
    return tmp_path


def make(folder, vae, encoders, device="cpu", seed=0, **changes):
    configs = [DatasetSection(folder_path=str(folder), resolution=(96,), **changes)]
    dataset = LatentDataset(DataReport(configs, "ohwx").usable(), configs, vae, encoders, device, seed=seed)
    dataset.fill(progress=False)
    return dataset


def first_batches(dataset, count=6):
    return list(islice(map(dataset.batch, BucketBatchSampler(dataset.samples, 2)), count))


def assert_same_batches(one, other):
    for a, b in zip(one, other, strict=True):
        assert_all_bitwise(a, b)


def cache_files(folder, kind="*"):
    return sorted((folder / "_coat_cache").glob(f"{kind}/*"))


# -- encoding ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prompt", ["", "dress, " * 60])
def test_prompts_are_encoded_as_the_diffusers_pipeline_does(place, encoders, prompt, caplog):
    parts = {"transformer": None, "vae": None, "text_encoder": encoders.clip, "text_encoder_2": encoders.t5}
    pipeline = FluxPipeline.from_pretrained(place["model"], **parts)
    with torch.no_grad():  # as the pipeline does when it draws
        theirs = pipeline.encode_prompt(prompt, None, max_sequence_length=32)
    embeds, pooled = encoders.encode([prompt, "another"])
    assert embeds.dtype == pooled.dtype == torch.bfloat16
    assert_bitwise(embeds[:1], theirs[0])
    assert_bitwise(pooled[:1], theirs[1])
    assert not torch.equal(pooled[0], pooled[1])
    assert ("(limit 32): dress, dress," in caplog.text) == (len(prompt) > 32)


def test_text_encoders_that_do_not_fit_come_one_layer_at_a_time_with_the_same_bits(encoders):
    clip_and_t5 = [246_000_000, 9_524_000_000]  # in bf16
    for room, expected in ((None, [False, False]), (12e9, [False, False]), (9.9e9, [False, True]), (0, [True, True])):
        assert by_layer(clip_and_t5, room) == expected
        assert by_layer(clip_and_t5[::-1], room) == expected[::-1]
    model, tokens = encoders.t5, torch.arange(8)[None]
    with torch.no_grad():
        expected = model(tokens).last_hidden_state
        with on_device([model], torch.device("cpu"), PROMPT_BYTES):
            assert {p.device.type for p in model.parameters()} == {"meta"}
            assert torch.equal(model(tokens.to(input_device(model))).last_hidden_state, expected)
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert torch.equal(model(tokens).last_hidden_state, expected)


# -- batches -----------------------------------------------------------------------------------------------------------
def test_batch_shapes_and_contents(folder, vae, encoders):
    dataset = make(folder, vae, encoders, flip_x=True)
    for order in islice(BucketBatchSampler(dataset.samples, 2), 6):
        batch = dataset.batch(order)
        assert sorted(batch) == ["latents", "pooled", "prompt_embeds"]
        for row, index in enumerate(order.indices):
            sample = dataset.samples[index]
            assert sample.caption == f"a ohwx dress, number {sample.image_path.stem[-1]}, red"
            pixels = to_tensor(read_photo(sample.image_path)[0])[None]
            pixels = pixels.flip(-1) if sample.flip else pixels
            assert_bitwise(batch["latents"][row], encode_latents(vae, pixels)[0])
            assert_bitwise(batch["pooled"][row], encoders.encode([sample.caption])[1][0])
        assert batch["prompt_embeds"].shape == (2, 32, encoders.t5.config.d_model)


@pytest.mark.parametrize("caching", [CACHED, {"cache_latents": True}])
def test_cached_batches_are_those_encoded_on_the_fly(folder, vae, encoders, caching):
    common = {"caption_dropout_rate": 0.4, "flip_x": True}
    live = first_batches(make(folder, vae, encoders, **common), 10)
    assert_same_batches(live, first_batches(make(folder, vae, encoders, **common, **caching), 10))
    assert_same_batches(live, first_batches(make(folder, vae, encoders, **common, **caching), 10))
    assert len(cache_files(folder, "latents")) == (10 if "cache_latents_to_disk" in caching else 0)
    assert len(cache_files(folder, "text")) == (6 if "cache_text_embeddings" in caching else 0)


def test_batches_are_on_the_device_and_models_return_home(folder, vae, encoders, device):
    batch = make(folder, vae, encoders, device, **CACHED).batch(Batch((0,), 0))
    assert {tensor.device.type for tensor in batch.values()} == {device.type}
    assert batch["latents"].isfinite().all()
    assert {next(module.parameters()).device.type for module in (vae, encoders.clip, encoders.t5)} == {"cpu"}


def test_models_are_let_go_exactly_when_everything_is_cached(folder, vae, encoders):
    latents, texts = {"cache_latents": True}, {"cache_text_embeddings": True}
    cases = ({}, True, True), (latents, False, True), (texts, True, False), (CACHED, False, False)
    for caching, vae_needed, encoders_needed in cases:
        dataset = make(folder, vae, encoders, **caching)
        assert (dataset.needs_vae, dataset.needs_encoders) == (vae_needed, encoders_needed)
        assert (dataset.vae is vae, dataset.encoders is encoders) == (vae_needed, encoders_needed)


def test_dropout_uses_the_trigger_word_prompt_at_the_set_rate_and_repeats(folder, vae, encoders):
    dataset = make(folder, vae, encoders, **CACHED, caption_dropout_rate=0.3)
    dropped = dataset.encoded(dataset.samples[0], "ohwx")["pooled"]

    def drops(from_draw, dataset=dataset):
        batches = (dataset.batch(Batch((0, 1), draw)) for draw in range(from_draw, 200))
        return [torch.equal(row, dropped) for batch in batches for row in batch["pooled"]]

    seen = drops(0)
    assert abs(np.mean(seen) - 0.3) < tolerances.DROPOUT_SIGMAS * (0.3 * 0.7 / 400) ** 0.5
    assert drops(120) == seen[240:]
    assert drops(0, make(folder, vae, encoders, seed=1, **CACHED, caption_dropout_rate=0.3)) != seen
    assert seen[::2] != seen[1::2]  # rows of one batch are dropped independently


def test_shuffled_captions_differ_between_draws(folder, vae, encoders):
    dataset = make(folder, vae, encoders, shuffle_tokens=True)
    variants = {shuffle_tokens(dataset.samples[0].caption, random.Random(seed)) for seed in range(60)}
    pooled = {tuple(encoders.encode([variant])[1][0].tolist()) for variant in variants}
    seen = {tuple(dataset.batch(Batch((0,), draw))["pooled"][0].tolist()) for draw in range(20)}
    assert len(seen) >= 2
    assert seen <= pooled


# -- the caches --------------------------------------------------------------------------------------------------------
def test_a_second_run_encodes_nothing_also_with_renamed_and_touched_files(folder, vae, encoders, monkeypatch):
    before = first_batches(make(folder, vae, encoders, **CACHED, caption_dropout_rate=0.5))
    for path in [*folder.glob("*.png"), *folder.glob("*.txt")]:
        path.write_bytes(path.read_bytes())
        path.rename(path.with_name(f"renamed-{path.name}"))
    monkeypatch.setattr("coat_flux.data.loader.encode_latents", lambda *_: pytest.fail("encoded again"))
    monkeypatch.setattr(TextEncoders, "encode", lambda *_: pytest.fail("encoded again"))
    assert_same_batches(before, first_batches(make(folder, vae, encoders, **CACHED, caption_dropout_rate=0.5)))


def test_a_replaced_photo_of_same_name_size_and_date_is_encoded_again(folder, vae, encoders):
    first = folder / "photo0.png"
    old = make(folder, vae, encoders, **CACHED)
    stat = first.stat()
    Image.new("RGB", (64, 64), "red").save(first)
    first.write_bytes(first.read_bytes().ljust(stat.st_size, b"\0"))
    os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    new = make(folder, vae, encoders, **CACHED)
    before, after = (dataset.batch(Batch((0, 1), 0))["latents"] for dataset in (old, new))
    assert not torch.equal(after[0], before[0])
    assert_bitwise(after[1], before[1])


def test_an_edited_caption_another_vae_or_token_length_is_encoded_again(folder, vae, encoders, place):
    make(folder, vae, encoders, **CACHED)
    (folder / "photo0.txt").write_text("a blue coat")
    make(folder, vae, encoders, **CACHED)
    assert (len(cache_files(folder, "latents")), len(cache_files(folder, "text"))) == (5, 6)
    half = AutoencoderKL.from_pretrained(place["model"], subfolder="vae").bfloat16()
    assert model_identity(half) != model_identity(vae) == model_identity(vae)
    scaled = AutoencoderKL.from_pretrained(place["model"], subfolder="vae", scaling_factor=0.5)
    assert model_identity(scaled) != model_identity(vae)
    shorter = TextEncoders(encoders.clip, encoders.t5, encoders.clip_tokenizer, encoders.t5_tokenizer, 16)
    make(folder, half, shorter, **CACHED)
    assert (len(cache_files(folder, "latents")), len(cache_files(folder, "text"))) == (10, 11)


def test_a_damaged_file_is_reported_and_not_loaded_and_a_failed_write_names_the_remedy(tmp_path, caplog):
    cache, path = TensorCache(tmp_path, False), tmp_path / "key.safetensors"
    entry = {"latents": torch.randn(4, 3, 5), "pooled": torch.randn(7).bfloat16()}
    cache.store("key", entry, "bad\udcff.png")
    assert_all_bitwise(cache.load("key"), entry)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        path.write_bytes(damaged)
        caplog.clear()
        assert cache.load("key") is None
        assert "key.safetensors: damaged cache file" in caplog.text
    with pytest.raises(DatasetError, match=r"cannot be written.*cache_latents_to_disk: false"):
        TensorCache(path, False).store("key", entry, "a.png")


@pytest.mark.parametrize(("kind", "what"), [("latents", "photo0.png"), ("text", "caption 'a ohwx dress, number 0")])
def test_a_cache_removed_during_the_run_is_an_error_with_a_remedy(folder, vae, encoders, kind, what):
    dataset = make(folder, vae, encoders, **CACHED)
    for path in cache_files(folder, kind):
        path.unlink()
    with pytest.raises(DatasetError, match=rf"{what}.*start the run again"):
        dataset.batch(Batch((0,), 0))


def test_an_unusable_vae_is_an_error(folder, encoders, place):
    broken = AutoencoderKL.from_pretrained(place["model"], subfolder="vae")
    with torch.no_grad():
        next(broken.encoder.parameters()).fill_(float("nan"))
    with pytest.raises(DatasetError, match=r"photo0\.png: the VAE returns NaN or inf"):
        make(folder, broken, encoders, cache_latents=True)


# -- masks -------------------------------------------------------------------------------------------------------------
def test_masks_of_a_batch_have_mean_1_a_missing_one_is_black_unless_all_are(folder, vae, encoders, tmp_path_factory):
    masks = tmp_path_factory.mktemp("masks")
    left = Image.new("L", (64, 64), 0)
    left.paste(255, (0, 0, 32, 64))
    left.save(masks / "photo0.png")
    dataset = make(folder, vae, encoders, mask_path=str(masks), mask_min_value=0.2, cache_latents=True)
    names = [sample.image_path.name for sample in dataset.samples]
    masked, missing, other = (names.index(f"photo{i}.png") for i in (0, 1, 4))
    mask = dataset.batch(Batch((masked, missing), 0))["mask"]  # m = 1 and 0.2, and 0: mean 0.3
    assert mask.shape == (2, 1, 8, 8)
    columns = mask[:, 0, 0]
    assert torch.allclose(columns[0], torch.tensor([1 / 0.3] * 4 + [0.2 / 0.3] * 4))
    assert not mask[1].any()
    assert dataset.batch(Batch((missing, other), 0))["mask"].eq(1).all()
    assert dataset.encoded(dataset.samples[missing], "")["mask"].eq(0).all()
    assert "mask" not in make(folder, vae, encoders, cache_latents=True).batch(Batch((0, 1), 0))
    picture, shown = picture_of(dataset.samples[masked], dataset.ground(dataset.samples[masked]))
    assert picture.shape == (64, 64, 3)
    assert shown[:, :32].all()
    assert not shown[:, 32:].any()


def test_with_alpha_mask_the_colours_under_transparent_parts_stay(folder, vae, encoders):
    alpha = Image.new("L", (64, 64), 0)
    alpha.paste(255, (0, 32, 64, 64))
    with Image.open(folder / "photo0.png") as image:
        opaque = image.convert("RGB")
    cut = opaque.copy()
    cut.putalpha(alpha)
    plain = make(folder, vae, encoders, cache_latents=True).encoded
    cut.save(folder / "photo0.png")
    dataset = make(folder, vae, encoders, alpha_mask=True, cache_latents=True)
    index = [sample.image_path.name for sample in dataset.samples].index("photo0.png")
    row = dataset.encoded(dataset.samples[index], "")
    assert row["mask"][0, :, 0].tolist() == [0] * 4 + [1] * 4
    assert_bitwise(row["latents"], plain(dataset.samples[index], "")["latents"])


def test_latents_are_shifted_and_scaled(vae):
    pixels = to_tensor(Image.new("RGB", (128, 96), (200, 60, 90)))[None]
    expected = (vae.encode(pixels).latent_dist.mean - vae.config.shift_factor) * vae.config.scaling_factor
    assert_bitwise(encode_latents(vae, pixels), expected.detach())
