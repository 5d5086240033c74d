"""`coat-flux mask` with a tiny SegFormer of the real classes, random or with a fixed answer, and no network."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from transformers import AutoImageProcessor, SegformerConfig, SegformerForSemanticSegmentation

from coat_flux.cli.entry import main
from coat_flux.data.drafts import LONGEST, ModelError, Parser
from tests.helpers.engine_job import engine_job
from tests.reliability.photos import jpeg, noise, write

LABELS = ("Background", "Hair", "Upper-clothes", "Left-leg", "Dress")
TINY = {"depths": [1] * 4, "hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 8}


def make_model(folder: Path, answer: str | None = None, labels: tuple[str, ...] = LABELS) -> Path:
    """A SegFormer with its processor; with `answer` it sees that label everywhere."""
    torch.manual_seed(3)
    model = SegformerForSemanticSegmentation(SegformerConfig(**TINY, id2label=dict(enumerate(labels))))
    classifier = model.decode_head.classifier
    classifier.weight.data *= 50  # of a random model one label wins everywhere else
    if answer is not None:
        classifier.weight.data.zero_()
        classifier.bias.data = torch.tensor([float(label == answer) for label in labels])
    model.save_pretrained(folder)
    processor = {"image_processor_type": "SegformerImageProcessor", "size": {"height": 64, "width": 64}}
    write(folder / "preprocessor_config.json", json.dumps(processor))
    return folder


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture(scope="module")
def sees_dresses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "dresses", "Dress")


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A JPEG, a cut-out, and an upright photo stored on its side."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos"
    folder.mkdir()
    write(folder / "plain.jpg", jpeg(seed=1))
    cut = noise((96, 64), seed=2)
    opacity = Image.new("L", (96, 64), 0)
    opacity.paste(255, (10, 10, 50, 60))
    opacity.paste(99, (50, 10, 60, 60))
    cut.putalpha(opacity)
    cut.save(folder / "cut.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    noise((96, 64), seed=3).save(folder / "sideways.jpg", exif=exif)
    return folder


def run(*arguments: object) -> int:
    return main(["mask", *map(str, arguments)])


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert (image.mode, image.format) == ("L", "PNG")
        return np.asarray(image)


def state(path: Path) -> tuple[int, int, int]:
    """What a file that is written again would change; reading it changes its time of access."""
    status = path.lstat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def test_masks_come_from_alpha_or_the_model_and_a_job_reads_them(photos, sees_dresses, capsys):
    assert run(photos, "--model", sees_dresses) == 0
    masks = photos.parent / "photos_masks"
    assert sorted(path.name for path in masks.iterdir()) == ["cut.png", "plain.png", "sideways.png"]
    alpha = pixels(masks / "cut.png")
    assert (alpha[30, 20], alpha[30, 55], alpha[5, 20]) == (255, 99, 0)
    assert pixels(masks / "plain.png").min() == 255
    assert pixels(masks / "sideways.png").shape == (96, 64)
    out = capsys.readouterr().out
    assert f"{masks}: 1 masks from transparency, 2 by {sees_dresses}, 0 kept" in out
    assert f"mask_path: {masks}" in out
    sheet = Path("output") / "data" / "photos_masks.png"
    with Image.open(sheet) as image:
        tinted = np.asarray(image.convert("RGB")).astype(int)
    assert ((tinted[..., 0] - tinted[..., 1:].max(axis=-1)) > 30).any()  # red around the cut-out
    job = engine_job("x", model=photos, images=photos, out=photos.parent / "out", dataset={"mask_path": str(masks)})
    capsys.readouterr()
    assert main(["data", str(write(photos.parent / "job.yaml", yaml.safe_dump(job)))]) == 0
    assert "mask" not in capsys.readouterr().err


def test_nothing_is_written_over_and_what_is_there_counts_as_done(photos, sees_dresses, capsys):
    masks = photos.parent / "own"
    write(masks / "plain.webp", b"mine")
    (masks / "cut.png").symlink_to("nowhere")
    before = {path.name: state(path) for path in masks.iterdir()}
    assert run(photos, "--out", masks, "--model", sees_dresses) == 0
    assert (masks / "plain.webp").read_bytes() == b"mine"
    assert {path.name: state(path) for path in masks.iterdir() if path.name in before} == before
    assert sorted(path.name for path in masks.iterdir()) == ["cut.png", "plain.webp", "sideways.png"]
    capsys.readouterr()
    kept = state(masks / "sideways.png")
    assert run(photos, "--out", masks, "--model", "no/model") == 0  # which nothing needs any more
    assert state(masks / "sideways.png") == kept
    assert "0 by no/model, 3 kept" in capsys.readouterr().out


def test_a_random_model_answers_as_transformers_computes_it(random_model):
    photo = noise((LONGEST + 200, 150), seed=5)
    parser = Parser(str(random_model), ["Hair", "Left-leg"])
    mask = np.asarray(parser.mask(photo))
    assert mask.shape == (150, LONGEST + 200)
    processor = AutoImageProcessor.from_pretrained(random_model)
    model = SegformerForSemanticSegmentation.from_pretrained(random_model).eval()
    with torch.no_grad():
        logits = model(**processor(images=photo, return_tensors="pt")).logits
    size = round(150 * LONGEST / (LONGEST + 200)), LONGEST
    classes = torch.nn.functional.interpolate(logits, size=size, mode="bilinear", align_corners=False).argmax(1)[0]
    white = ((classes == 1) | (classes == 3)).numpy()
    assert 0.02 < white.mean() < 0.98
    expected = Image.fromarray(white.astype(np.uint8) * 255).resize(photo.size, Image.Resampling.BILINEAR)
    assert np.array_equal(mask, np.asarray(expected))


def test_labels_of_garments_are_the_default(random_model, tmp_path):
    assert Parser(str(random_model)).labels == ("Upper-clothes", "Dress")
    # of mattmdjaga/segformer_b2_clothes
    atr = "Background Hat Hair Sunglasses Upper-clothes Skirt Pants Dress Belt Left-shoe Right-shoe Face Left-leg"
    atr += " Right-leg Left-arm Right-arm Bag Scarf"
    others = ("Background", "Hair", "Sunglasses", "Face", "Left-leg", "Right-leg", "Left-arm", "Right-arm")
    parser = Parser(str(make_model(tmp_path / "atr", labels=tuple(atr.split()))))
    assert parser.labels == tuple(label for label in atr.split() if label not in others)


def test_a_photo_without_a_garment_gets_no_mask(photos, tmp_path, capsys):
    sees_hair = make_model(tmp_path / "hair", "Hair")
    assert run(photos, "--model", sees_hair) == 0
    assert [path.name for path in (tmp_path / "photos_masks").iterdir()] == ["cut.png"]
    out = capsys.readouterr().out
    assert out.count("no garment was found") == 2
    assert run(photos, "--model", sees_hair, "--labels", "Hair, Dress") == 0
    assert len(list((tmp_path / "photos_masks").iterdir())) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "nobody/nothing"), "cannot be loaded ("),
        (("--model", "photos"), "cannot be loaded ("),
        (("--labels", "Drss"), "is not a label of "),
        (("--out", "photos/masks"), "is inside "),
        (("--sheet", "a.what"), "cannot be written"),
    ],
)
def test_what_cannot_work_is_one_error(photos, sees_dresses, arguments, says, capsys):
    assert run(photos, *([] if "--model" in arguments else ["--model", sees_dresses]), *arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith(f"error: {' '.join(arguments)}: {says}")


def test_odd_files_and_folders(photos, sees_dresses, capsys):
    write(photos / "broken.png", b"no image")
    write(photos / "more" / "plain.jpg", jpeg(seed=9))  # masks go by names
    assert run(photos, "--model", sees_dresses) == 2
    err = capsys.readouterr().err
    assert "broken.png: cannot be read as an image" in err
    assert "rename one of them" in err
    assert len(list((photos.parent / "photos_masks").iterdir())) == 3
    for folder in ("nowhere", "empty", photos / "cut.png"):
        (photos.parent / "empty").mkdir(exist_ok=True)
        assert run(folder) == 2
    assert run(photos, "--out", photos / "cut.png") == 2


def test_a_model_without_a_garments_label_says_which_it_has(tmp_path):
    rooms = make_model(tmp_path / "rooms", labels=("wall", "floor"))
    with pytest.raises(ModelError, match=r"no label is a garment's; write --labels with some of .*wall"):
        Parser(str(rooms))
