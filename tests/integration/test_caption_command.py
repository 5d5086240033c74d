"""`coat-flux caption` with tiny random models of the real classes (BLIP, Florence-2, Qwen2.5-VL), and no network."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from coat_flux.cli.entry import main
from coat_flux.data.captions import inject_trigger, read_caption
from coat_flux.data.drafts import MOST_TOKENS, Captioner, load_pretrained
from tests.reliability.photos import jpeg, noise, write

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
    """A BLIP of 13 words."""
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
def blip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_blip(tmp_path_factory.mktemp("models") / "blip")


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A JPEG, a cut-out in a folder of its own, and an upright photo stored on its side."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos"
    write(folder / "plain.jpg", jpeg(seed=1))
    cut = noise((96, 64), seed=2)
    cut.putalpha(Image.linear_gradient("L").resize(cut.size))
    (folder / "more").mkdir()
    cut.save(folder / "more" / "cut.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    dark = noise((96, 64), seed=3).point(lambda level: level // 8)
    dark.save(folder / "sideways.jpg", exif=exif)
    return folder


def run(*arguments: object) -> int:
    return main(["caption", *map(str, arguments)])


def texts(folder: Path, extension: str = "txt") -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in folder.rglob(f"*.{extension}")}


def test_a_line_beside_each_photo_is_the_trigger_and_what_blip_says(photos, blip, capsys):
    assert run("photos", "--model", blip) == 0
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


def test_nothing_is_written_over_and_what_is_there_counts_as_done(photos, blip, capsys):
    write(photos / "plain.txt", b"")
    (photos / "more" / "cut.txt").symlink_to("nowhere")
    before = (photos / "plain.txt").stat(), (photos / "more" / "cut.txt").lstat()
    assert run("photos", "--model", blip) == 0
    assert ((photos / "plain.txt").stat(), (photos / "more" / "cut.txt").lstat()) == before
    assert not (photos / "more" / "nowhere").exists()
    assert f"1 captions by {blip}, 2 kept" in capsys.readouterr().out
    drafts = (photos / "sideways.txt").stat()
    assert run("photos", "--model", "no/model") == 0  # which nothing needs any more
    assert (photos / "sideways.txt").stat() == drafts
    assert run("photos", "--model", blip, "--ext", ".caption") == 0  # others
    assert sorted(texts(photos, "caption")) == ["cut", "plain", "sideways"]


def test_florence_is_given_its_task(photos, tmp_path):
    folder = make_florence(tmp_path / "florence")
    assert Captioner(str(folder)).prompt == "<DETAILED_CAPTION>"
    assert run("photos", "--model", folder) == 0
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
    assert run("photos", "--model", folder, "--about", "background, pose") == 0
    drafts = texts(photos)
    assert len(drafts) == 3
    for draft in drafts.values():
        assert draft.startswith(b"[trigger], ")
        assert draft.count(b"\n") == 1
        assert b"Describe" not in draft  # nor the rest of the question
        assert b"assistant" not in draft


def test_half_precision_weights_run_in_fp32_on_a_cpu(blip, tmp_path):
    half = shutil.copytree(blip, tmp_path / "half")
    transformers.BlipForConditionalGeneration.from_pretrained(blip).half().save_pretrained(half)
    assert json.loads((half / "config.json").read_text())["dtype"] == "float16"
    _, model = load_pretrained(str(half), "AutoModelForImageTextToText", "describes images", "cpu")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_a_model_that_says_nothing_writes_nothing(photos, blip, monkeypatch, capsys):
    monkeypatch.setattr(Captioner, "describe", lambda *_: "")
    assert run("photos", "--model", blip) == 2
    assert texts(photos) == {}
    assert capsys.readouterr().err.count("the model says nothing") == 3


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "nobody/nothing"), "cannot be loaded ("),
        (("--model", "no such/name"), "is neither a folder nor a model of the Hub"),
        (("--model", "photos"), "cannot be loaded ("),
        (("--model", "other"), "is of another kind (segformer)"),
        (("--about", "pose, sky"), ""),
        (("--ext", "jpg"), "is none of a caption"),
        (("--ext", "a/b"), "is none of a caption"),
        pytest.param(("--device", "cuda"), "torch finds no CUDA GPU here", marks=NO_GPU),
    ],
)
def test_what_cannot_work_is_one_error(photos, blip, arguments, says, capsys):
    transformers.SegformerConfig().save_pretrained(photos.parent / "other")
    assert run("photos", *([] if "--model" in arguments else ["--model", blip]), *arguments) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith(f"error: {' '.join(arguments).replace(', ', ',')}: {says}")
    assert texts(photos) == {}


def test_odd_files_and_folders(photos, blip, capsys):
    pytest.importorskip("pillow_heif")
    write(photos / "broken.png", b"no image")
    noise((64, 64), seed=8).save(photos / "phone.heic")
    assert run("photos", "--model", blip) == 2
    out, err = capsys.readouterr()
    assert "broken.png: cannot be read as an image" in err
    assert f"4 captions by {blip}, 0 kept, 1 failed" in out
    assert sorted(texts(photos)) == ["cut", "phone", "plain", "sideways"]
    for folder in ("nowhere", "empty", photos / "plain.jpg"):
        (photos.parent / "empty").mkdir(exist_ok=True)
        assert run(folder, "--model", blip) == 2
        assert str(folder) in capsys.readouterr().err
