"""`coat-flux mask`, `coat-flux caption`: tiny models of the real classes (SegFormer, BLIP, Florence-2, Qwen2.5-VL)."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import yaml
from PIL import Image
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoImageProcessor, SegformerConfig, SegformerForSemanticSegmentation

from coat_flux.cli.entry import main
from coat_flux.data.captions import inject_trigger, read_caption
from coat_flux.data.drafts import LONGEST, MOST_TOKENS, Captioner, ModelError, Parser, load_pretrained
from tests.helpers.engine_job import engine_job
from tests.reliability.photos import jpeg, noise, write

LABELS = ("Background", "Hair", "Upper-clothes", "Left-leg", "Dress")
TINY = {"depths": [1] * 4, "hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 8}


def make_parser(folder: Path, answer: str | None = None, labels: tuple[str, ...] = LABELS) -> Path:
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


WORDS = ["a", "woman", "man", "in", "the", "park", "dress", "stands", "wears", "light", "by", "night"]
BLIP_VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DEC]", *WORDS]
QWEN_TOKENS = [f"<|{name}|>" for name in ("endoftext", "im_start", "im_end", "vision_start", "vision_end")]
QWEN_TOKENS += ["<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save(folder: Path, config: transformers.PreTrainedConfig, tokenizer: object, processor: dict) -> Path:
    torch.manual_seed(4)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        parameter.data *= 4  # or one token wins for every photo
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write(folder / "preprocessor_config.json", json.dumps(processor))
    return folder


def make_blip(folder: Path) -> Path:
    """A BLIP of 12 words."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(BLIP_VOCABULARY)}, "[UNK]"))
    words.normalizer = normalizers.BertNormalizer()
    special = {"pad_token": "[PAD]", "sep_token": "[SEP]", "cls_token": "[CLS]", "bos_token": "[DEC]"}
    special |= {"unk_token": "[UNK]", "mask_token": "[MASK]"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": 5, "sep_token_id": 3, "pad_token_id": 0, "eos_token_id": 3}
    text = {"vocab_size": len(BLIP_VOCABULARY), "encoder_hidden_size": 16, "max_position_embeddings": 128}
    vision = {"image_size": 32, "patch_size": 16, "initializer_range": 0.1}
    config = transformers.BlipConfig(text_config=small | ids | text, vision_config=small | vision, projection_dim=16)
    size = {"height": 32, "width": 32}
    processor = {"image_processor_type": "BlipImageProcessor", "processor_class": "BlipProcessor", "size": size}
    return save(folder, config, tokenizer, processor)


def byte_tokenizer(special: list[str], **options: object) -> transformers.PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    names = ["input_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, **options)


def make_florence(folder: Path) -> Path:
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    image_token = {"image_token": "<image>"}
    tokenizer = byte_tokenizer([*names.values(), "<image>"], **names, extra_special_tokens=image_token)
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    ids |= {"decoder_start_token_id": ids["eos_token_id"]}
    small = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 16)
    small |= dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    small |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": 256, "forced_eos_token_id": None}
    vision = {"depths": [1] * 4, "embed_dim": [8] * 4, "num_heads": [1] * 4, "num_groups": [1] * 4}
    vision |= {"window_size": 4, "projection_dim": 16}
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    config = transformers.Florence2Config(
        text_config=small | text | ids, vision_config=vision, image_token_id=image_id, **ids
    )
    processor = {"image_processor_type": "CLIPImageProcessor", "processor_class": "Florence2Processor"}
    size = {"height": 64, "width": 64}
    return save(folder, config, tokenizer, processor | {"size": size, "do_center_crop": False, "image_seq_length": 5})


def make_qwen(folder: Path) -> Path:
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = byte_tokenizer(QWEN_TOKENS, **names, chat_template=TEMPLATE)
    number = tokenizer.convert_tokens_to_ids
    small = {"hidden_size": 16, "intermediate_size": 16}
    rope = {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2]}
    text = {"vocab_size": len(tokenizer), "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    ids = {"eos_token_id": number("<|im_end|>"), "bos_token_id": None, "pad_token_id": number("<|endoftext|>")}
    vision = {"depth": 1, "num_heads": 2, "out_hidden_size": 16, "fullatt_block_indexes": [0], "window_size": 56}
    config = transformers.Qwen2_5_VLConfig(
        text_config=small | text | ids | {"rope_scaling": rope},
        vision_config=small | vision,
        image_token_id=number("<|image_pad|>"),
        video_token_id=number("<|video_pad|>"),
    )
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    return save(folder, config, tokenizer, processor | {"min_pixels": 3136, "max_pixels": 12_845_056})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of models: a parser that sees dresses everywhere, one that is random, and a BLIP."""
    root = tmp_path_factory.mktemp("models")
    parsers = {"dresses": make_parser(root / "dresses", "Dress"), "random": make_parser(root / "random")}
    return parsers | {"blip": make_blip(root / "blip")}


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A JPEG, a cut-out in a folder of its own, and a dark upright photo stored on its side."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos"
    write(folder / "plain.jpg", jpeg(seed=1))
    cut = noise((96, 64), seed=2)
    opacity = Image.new("L", (96, 64), 0)
    opacity.paste(255, (10, 10, 50, 60))
    opacity.paste(99, (50, 10, 60, 60))
    cut.putalpha(opacity)
    (folder / "more").mkdir()
    cut.save(folder / "more" / "cut.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    noise((96, 64), seed=3).point(lambda level: level // 8).save(folder / "sideways.jpg", exif=exif)
    return folder


def run(command: str, *arguments: object) -> int:
    return main([command, *map(str, arguments)])


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert (image.mode, image.format) == ("L", "PNG")
        return np.asarray(image)


def texts(folder: Path, extension: str = "txt") -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in folder.rglob(f"*.{extension}")}


# -- masks -------------------------------------------------------------------------------------------------------------
def test_masks_come_from_alpha_or_the_model_and_a_job_reads_them(photos, folders, capsys):
    model = folders["dresses"]
    assert run("mask", photos, "--model", model) == 0
    masks = photos.parent / "photos_masks"
    assert sorted(path.name for path in masks.iterdir()) == ["cut.png", "plain.png", "sideways.png"]
    alpha = pixels(masks / "cut.png")
    assert (alpha[30, 20], alpha[30, 55], alpha[5, 20]) == (255, 99, 0)
    assert pixels(masks / "plain.png").min() == 255
    assert pixels(masks / "sideways.png").shape == (96, 64)
    out = capsys.readouterr().out
    assert f"{masks}: 1 masks from transparency, 2 by {model}, 0 kept" in out
    assert f"mask_path: {masks}" in out
    with Image.open(Path("output") / "data" / "photos_masks.png") as sheet:
        tinted = np.asarray(sheet.convert("RGB")).astype(int)
    assert ((tinted[..., 0] - tinted[..., 1:].max(axis=-1)) > 30).any()  # red around the cut-out
    job = engine_job("x", model=photos, images=photos, out=photos.parent / "out", dataset={"mask_path": str(masks)})
    capsys.readouterr()
    assert run("data", write(photos.parent / "job.yaml", yaml.safe_dump(job))) == 0
    assert "mask" not in capsys.readouterr().err


def test_a_random_model_answers_as_transformers_computes_it(folders):
    photo = noise((LONGEST + 200, 150), seed=5)
    mask = np.asarray(Parser(str(folders["random"]), ["Hair", "Left-leg"]).mask(photo))
    assert mask.shape == (150, LONGEST + 200)
    processor = AutoImageProcessor.from_pretrained(folders["random"])
    model = SegformerForSemanticSegmentation.from_pretrained(folders["random"]).eval()
    with torch.no_grad():
        logits = model(**processor(images=photo, return_tensors="pt")).logits
    size = round(150 * LONGEST / (LONGEST + 200)), LONGEST
    classes = torch.nn.functional.interpolate(logits, size=size, mode="bilinear", align_corners=False).argmax(1)[0]
    white = ((classes == 1) | (classes == 3)).numpy()
    assert 0.02 < white.mean() < 0.98
    expected = Image.fromarray(white.astype(np.uint8) * 255).resize(photo.size, Image.Resampling.BILINEAR)
    assert np.array_equal(mask, np.asarray(expected))


def test_labels_of_garments_are_the_default(tmp_path):
    # of mattmdjaga/segformer_b2_clothes
    atr = "Background Hat Hair Sunglasses Upper-clothes Skirt Pants Dress Belt Left-shoe Right-shoe Face Left-leg"
    atr += " Right-leg Left-arm Right-arm Bag Scarf"
    others = ("Background", "Hair", "Sunglasses", "Face", "Left-leg", "Right-leg", "Left-arm", "Right-arm")
    parser = Parser(str(make_parser(tmp_path / "atr", labels=tuple(atr.split()))))
    assert parser.labels == tuple(label for label in atr.split() if label not in others)
    rooms = make_parser(tmp_path / "rooms", labels=("wall", "floor"))
    with pytest.raises(ModelError, match=r"no label is a garment's; write --labels with some of .*wall"):
        Parser(str(rooms))


def test_a_photo_without_a_garment_gets_no_mask(photos, tmp_path, capsys):
    sees_hair = make_parser(tmp_path / "hair", "Hair")
    assert run("mask", photos, "--model", sees_hair) == 0
    assert [path.name for path in (tmp_path / "photos_masks").iterdir()] == ["cut.png"]
    assert capsys.readouterr().out.count("no garment was found") == 2
    assert run("mask", photos, "--model", sees_hair, "--labels", "Hair, Dress") == 0
    assert len(list((tmp_path / "photos_masks").iterdir())) == 3


# -- captions ----------------------------------------------------------------------------------------------------------
def test_a_line_beside_each_photo_is_the_trigger_and_what_blip_says(photos, folders, capsys):
    blip = folders["blip"]
    assert run("caption", "photos", "--model", blip) == 0
    drafts = texts(photos)
    assert sorted(drafts) == ["cut", "plain", "sideways"]
    images = transformers.AutoImageProcessor.from_pretrained(blip)
    model = transformers.BlipForConditionalGeneration.from_pretrained(blip).eval()
    upright = Image.open(photos / "sideways.jpg").transpose(Image.Transpose.ROTATE_270)
    for name, photo in (("plain", Image.open(photos / "plain.jpg")), ("sideways", upright)):
        inputs = images(images=photo.convert("RGB"), return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=MOST_TOKENS)[0].tolist()
        words = [BLIP_VOCABULARY[token] for token in tokens if BLIP_VOCABULARY[token] in WORDS]
        assert len(words) > 1
        assert drafts[name] == f"[trigger], {' '.join(words)}\n".encode()
    assert drafts["plain"] != drafts["sideways"]
    caption = drafts["plain"].decode().strip()
    assert inject_trigger(read_caption(photos / "plain.jpg"), "ohwx") == caption.replace("[trigger]", "ohwx")
    out = capsys.readouterr().out
    assert f"{Path('photos', 'plain.jpg')}: {caption}\n" in out
    assert f"photos: 3 captions by {blip}, 0 kept, 0 failed" in out
    assert run("caption", "photos", "--model", blip, "--ext", ".caption") == 0
    assert texts(photos, "caption") == drafts
    assert run("caption", "photos", "--model", blip, "--ext", ".caption") == 0
    assert texts(photos, "caption") == drafts


def test_florence_is_given_its_task(photos, tmp_path):
    folder = make_florence(tmp_path / "florence")
    assert Captioner(str(folder)).prompt == "<DETAILED_CAPTION>"
    assert run("caption", "photos", "--model", folder) == 0
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.Florence2ForConditionalGeneration.from_pretrained(folder).eval()
    photo = Image.open(photos / "plain.jpg")
    inputs = processor(images=photo, text="<DETAILED_CAPTION>", return_tensors="pt")
    text = processor.decode(model.generate(**inputs, max_new_tokens=MOST_TOKENS)[0], skip_special_tokens=True)
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    assert texts(photos)["plain"].decode() == f"[trigger], {' '.join(line.split())}\n"


def test_a_chat_is_asked_for_what_is_not_the_garment_and_its_answer_is_written(photos, tmp_path):
    folder = make_qwen(tmp_path / "qwen")
    captioner = Captioner(str(folder))
    assert "30 words: background, pose, light. Do not mention clothes" in captioner.prompt
    assert captioner.prompt.startswith("<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe")
    assert captioner.prompt.endswith("<|im_start|>assistant\n")  # the model's turn
    assert "30 words: room. Do not" in Captioner(str(folder), ["room"]).prompt
    assert run("caption", "photos", "--model", folder, "--about", "background, pose") == 0
    drafts = texts(photos)
    assert len(drafts) == 3
    for draft in drafts.values():
        assert draft.startswith(b"[trigger], ")
        assert draft.count(b"\n") == 1
        assert b"Describe" not in draft  # nor the rest of the question
        assert b"assistant" not in draft


def test_half_precision_weights_run_in_fp32_on_a_cpu(folders, tmp_path):
    half = shutil.copytree(folders["blip"], tmp_path / "half")
    transformers.BlipForConditionalGeneration.from_pretrained(half).half().save_pretrained(half)
    assert json.loads((half / "config.json").read_text())["dtype"] == "float16"
    _, model = load_pretrained(str(half), "AutoModelForImageTextToText", "describes images", "cpu")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_a_model_that_says_nothing_writes_nothing(photos, folders, monkeypatch, capsys):
    monkeypatch.setattr(Captioner, "describe", lambda *_: "")
    assert run("caption", "photos", "--model", folders["blip"]) == 2
    assert texts(photos) == {}
    assert capsys.readouterr().err.count("the model says nothing") == 3


# -- both --------------------------------------------------------------------------------------------------------------
def state(path: Path) -> tuple[int, int, int]:
    """What a file that is written again would change; reading it changes its time of access."""
    status = path.lstat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@pytest.mark.parametrize(("command", "model", "ending"), [("mask", "dresses", "png"), ("caption", "blip", "txt")])
def test_nothing_is_written_over_and_what_is_there_counts_as_done(photos, folders, command, model, ending, capsys):
    out = photos.parent / "own" if command == "mask" else photos
    options = ("--out", out) if command == "mask" else ()
    link = (out if command == "mask" else photos / "more") / f"cut.{ending}"
    mine = write(out / ("plain.webp" if command == "mask" else "plain.txt"), b"")
    link.symlink_to("nowhere")
    before = state(mine), state(link)
    assert run(command, photos, *options, "--model", folders[model]) == 0
    drafted = out / f"sideways.{ending}"
    kept = state(drafted)
    assert (state(mine), state(link)) == before
    assert not (link.parent / "nowhere").exists()
    capsys.readouterr()
    assert run(command, photos, *options, "--model", "no/model") == 0  # which nothing needs any more
    assert state(drafted) == kept
    assert "by no/model, 3 kept" in capsys.readouterr().out


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        ("caption", ("--model", "nobody/nothing"), "cannot be loaded ("),
        ("caption", ("--model", "no such/name"), "is neither a folder nor a model of the Hub"),
        ("mask", ("--model", "photos"), "cannot be loaded ("),
        ("caption", ("--model", "parser"), "is of another kind (segformer)"),
        ("caption", ("--about", "pose, sky"), ""),
        ("caption", ("--ext", "a/b"), "is none of a caption"),
        ("mask", ("--labels", "Drss"), "is not a label of "),
        ("mask", ("--out", "photos/masks"), "is inside "),
        ("mask", ("--sheet", "a.what"), "cannot be written"),
        pytest.param("caption", ("--device", "cuda"), "torch finds no CUDA GPU here", marks=NO_GPU),
    ],
)
def test_what_cannot_work_is_one_error(photos, folders, command, arguments, says, capsys):
    Path("parser").symlink_to(folders["dresses"])
    model = folders["blip" if command == "caption" else "dresses"]
    assert run(command, "photos", *([] if "--model" in arguments else ["--model", model]), *arguments) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith(f"error: {' '.join(arguments).replace(', ', ',')}: {says}")
    assert texts(photos) == {}


def test_odd_files_and_folders(photos, folders, capsys):
    write(photos / "broken.png", b"no image")
    write(photos / "more" / "plain.jpg", jpeg(seed=9))  # masks go by names
    for command, model in (("mask", "dresses"), ("caption", "blip")):
        assert run(command, photos, "--model", folders[model]) == 2
        out, err = capsys.readouterr()
        assert "broken.png: cannot be read as an image" in err
        assert ("rename one of them" in err) == (command == "mask")
        assert ("4 captions by" in out and "1 failed" in out) == (command == "caption")
        for folder in ("nowhere", "empty", photos / "plain.jpg"):
            (photos.parent / "empty").mkdir(exist_ok=True)
            assert run(command, folder, "--model", folders[model]) == 2
            assert str(folder) in capsys.readouterr().err
    assert len(list((photos.parent / "photos_masks").iterdir())) == 3
    assert run("mask", photos, "--out", photos / "plain.jpg") == 2
