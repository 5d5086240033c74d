"""Loss masks and regularization photos, with numbers worked out by hand; what `check` says of odd masks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from coat_flux.config.job_sections import DatasetSection, TrainSection
from coat_flux.data.buckets import Bucket
from coat_flux.data.masks import Mask, find_mask, normalized
from coat_flux.data.preflight import DataReport
from coat_flux.trainers.standalone.flow_matching import Objective, sample_losses
from tests.reliability.photos import noise

SQUARE, LATENTS = Bucket(64, 64), (8, 8)


def paint(path: Path, size: tuple[int, int] = (64, 64), white: tuple[int, int, int, int] | None = None) -> Path:
    """A black mask with one white box."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("L", size, 0)
    if white is not None:
        image.paste(255, white)
    image.save(path)
    return path


def columns(mask: Mask, bucket: Bucket = SQUARE, **options: Any) -> list[float]:
    """The weight of each column of latents, the same in all rows."""
    weights = mask.weights(mask.levels(bucket, (bucket.height // 8, bucket.width // 8), **options))
    assert weights.shape[0] == 1
    assert torch.equal(weights[0], weights[0, :1].expand_as(weights[0]))
    return weights[0, 0].tolist()


def test_white_weighs_1_black_the_least_and_both_are_mirrored_inverted_and_cut_with_the_photo(tmp_path):
    file = paint(tmp_path / "a.png", white=(0, 0, 16, 64))
    mask = Mask(file, (64, 64), (64, 64))
    assert columns(mask) == [1] * 2 + [0] * 6
    assert columns(mask, flip=True) == [0] * 6 + [1] * 2
    assert columns(Mask(file, (64, 64), (64, 64), inverted=True, least=0.25)) == [0.25] * 2 + [1] * 6
    wide = paint(tmp_path / "wide.png", (128, 64), white=(0, 0, 48, 64))  # the crop is 32 to 96
    assert columns(Mask(wide, (128, 64), (128, 64))) == [1] * 2 + [0] * 6
    small = paint(tmp_path / "small.png", (32, 16), white=(0, 0, 16, 16))  # scaled to its photo
    scaled = columns(Mask(small, (32, 16), (128, 64)))
    assert (scaled[:3], scaled[5:]) == ([1] * 3, [0] * 3)


def test_grey_is_linear_and_a_latent_has_its_upper_left_pixel(tmp_path):
    image = np.zeros((64, 64), np.uint8)
    image[::8, ::8] = 51  # 0.2
    Image.fromarray(image).save(tmp_path / "a.png")
    assert columns(Mask(tmp_path / "a.png", (64, 64), (64, 64), least=0.5)) == pytest.approx([0.6] * 8)


def test_blur_is_at_most_half_a_percent_of_the_shorter_side(tmp_path):
    file = paint(tmp_path / "a.png", (1000, 800), white=(0, 0, 500, 800))
    mask = Mask(file, (1000, 800), (1000, 800))
    assert [mask.radius(chance) for chance in (0, 0.24, 0.25, 0.6, 0.9999)] == [0, 0, 1, 2, 3]
    with Image.open(file) as image:
        blurred = np.asarray(image.filter(ImageFilter.GaussianBlur(3)).resize((1000, 800)).crop((4, 0, 996, 800)))
    assert blurred[0, 496] not in (0, 255)
    exact = mask.levels(Bucket(992, 800), (800, 992), radius=3)
    assert np.array_equal(exact[0].numpy(), blurred)
    assert not torch.equal(exact, mask.levels(Bucket(992, 800), (800, 992)))


def test_masks_have_the_photos_name_and_the_hosts_order_of_extensions(tmp_path):
    photo = tmp_path / "photos" / "deep" / "a.b.jpg"
    config = DatasetSection(folder_path=str(tmp_path / "photos"), mask_path=str(tmp_path / "masks"), mask_min_value=0.1)
    assert find_mask(photo, (64, 64), config) is None
    for name in ("a.b.webp", "a.b.png", "a.b.jpg", "a.png"):
        paint(tmp_path / "masks" / name, (30, 20))
    found = find_mask(photo, (60, 40), config)
    assert found == Mask(tmp_path / "masks" / "a.b.jpg", (30, 20), (60, 40), least=0.1)  # all black: no box


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_the_mask_and_an_opaque_photo_counts_whole(tmp_path, mode):
    photo = Image.new(mode, (64, 64), "red" if mode == "RGBA" else 9)
    photo.putalpha(Image.open(paint(tmp_path / "alpha.png", white=(0, 0, 32, 64))))
    photo.save(tmp_path / "a.png")
    Image.new("RGB", (64, 64)).save(tmp_path / "opaque.jpg")
    config = DatasetSection(folder_path=str(tmp_path), alpha_mask=True)
    for name, expected in (("a.png", [1] * 4 + [0] * 4), ("opaque.jpg", [1] * 8)):
        assert columns(find_mask(tmp_path / name, (64, 64), config)) == expected


def test_the_loss_is_that_inside_the_mask_whose_mean_over_the_batch_is_1():
    """Two photos with errors of 1 and 9: one masked by half with least 0, one by a quarter."""
    prediction = torch.stack([torch.full((4, 8, 8), 1.0), torch.full((4, 8, 8), 3.0)])
    zero, weights = torch.zeros_like(prediction), torch.zeros(2, 1, 8, 8)
    weights[0, :, :, :4] = weights[1, :, :, :2] = 1
    mask = normalized(weights)  # of mean 3/8: 8/3 inside
    losses = sample_losses(prediction, zero, zero, None, mask)
    assert losses.tolist() == pytest.approx([8 / 3 / 2 * 1, 8 / 3 / 4 * 9])
    halved = sample_losses(prediction, zero, zero, torch.tensor([1.0, 0.5]), mask)
    assert halved.tolist() == pytest.approx([4 / 3, 3])
    assert torch.equal(normalized(torch.zeros(2, 1, 8, 8)), torch.ones(2, 1, 8, 8))


def test_the_weight_of_regularization_multiplies_that_of_the_timestep():
    batch = {"latents": torch.zeros(2, 16, 8, 8), "weights": torch.tensor([1.0, 0.25])}
    for train in (TrainSection(), TrainSection(timestep_type="weighted")):
        objective = Objective(None, train, None, 3, torch.float32)  # type: ignore[arg-type]
        drawn, plain = objective.draw(batch, 5), objective.draw({"latents": batch["latents"]}, 5)
        assert torch.equal(drawn["weights"], plain.get("weights", torch.ones(2)) * batch["weights"])


def report(folder: Path, trigger: str | None = None, **settings: Any) -> DataReport:
    return DataReport([DatasetSection(folder_path=str(folder), resolution=(64,), **settings)], trigger)


def test_captions_of_regularization_get_no_trigger_word(tmp_path):
    for seed, text in enumerate(("a [trigger] coat", "a coat")):
        noise((64, 64), seed=seed).save(tmp_path / f"{seed}.png")
        (tmp_path / f"{seed}.txt").write_text(text)
    samples = report(tmp_path, "ohwx", is_reg=True).usable()
    assert [(sample.caption, sample.dropped_caption) for sample in samples] == [("a ohwx coat", ""), ("a coat", "")]


@pytest.mark.parametrize(
    ("change", "settings", "error", "warning"),
    [
        ({}, {}, "", ""),
        ({"a.png": ((64, 128), (9, 9, 50, 99))}, {}, "masks/a.png: is 64x128, its photo a.png 128x64; ", ""),
        ({"a.png": ((64, 32), (20, 9, 40, 29))}, {}, "", "1 masks have another size"),
        ({"a.png": ((128, 64), None)}, {}, "masks/a.png: its crop is black", ""),
        ({"a.png": ((128, 64), (0, 0, 32, 64))}, {"buckets": False}, "masks/a.png: its crop is black", ""),
        ({"a.png": ((128, 64), (0, 0, 33, 64))}, {"buckets": False}, "", ""),
        ({"a.png": ((128, 64), None)}, {"mask_min_value": 0.1}, "", "1 crops have black masks (first: that of a.png)"),
        ({"a.png": ((128, 64), (0, 0, 128, 64))}, {"invert_mask": True}, "masks/a.png: its crop is black", ""),
        ({"a.png": None}, {}, "", "1 of 2 photos have no mask in "),
        ({"a.png": None, "b.png": None}, {}, "has no mask of a photo in ", ""),
        ({"a.png": b"no image"}, {}, "masks/a.png: cannot be read as an image", ""),
        ({}, {"masks": "among the photos"}, "is inside", ""),
    ],
)  # fmt: skip
def test_masks_that_cannot_be_meant(tmp_path, change, settings, error, warning):
    photos, masks = tmp_path / "photos", tmp_path / "masks"
    photos.mkdir()
    for seed, name in enumerate("ab"):
        noise((128, 64), seed=seed).save(photos / f"{name}.png")
        (photos / f"{name}.txt").write_text(f"a coat, {name}")
        paint(masks / f"{name}.png", (128, 64), white=(50, 10, 80, 50))
    for name, what in change.items():
        if what is None:
            (masks / name).unlink()
        elif isinstance(what, bytes):
            (masks / name).write_bytes(what)
        else:
            paint(masks / name, *what)
    if "masks" in settings:
        masks = masks.rename(photos / settings.pop("masks"))
    found = report(photos, mask_path=str(masks), **settings)
    assert [error in line for line in found.errors] == ([True] if error else []), found.errors
    about = [line for line in found.warnings if "mask" in line.replace(str(photos), "")]
    if not error:
        assert [warning in line for line in about] == ([True] if warning else []), about
