"""The two tokenizers of the tiny FLUX: byte-level BPE for CLIP and Unigram for T5, both built from the word list below.

CLIP's vocabulary starts from all 256 bytes, so any text has tokens. T5's has the words and single characters; what
is in neither becomes `<unk>`, as with the real T5. Files are written in the layouts that transformers 4 (vocab.json,
merges.txt) and transformers 5 (tokenizer.json) read.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = """
a an the of on in with and for to at by from is it no this that one two three new old very front back side view full
close up t shirt tshirt tee polo blouse top tank sweater jumper hoodie sweatshirt cardigan jacket coat blazer parka
vest dress gown skirt trousers pants jeans shorts leggings suit shoe shoes sneaker sneakers boot boots sandal heel cap
hat beanie scarf glove gloves sock socks belt bag handbag backpack tie garment clothes clothing outfit wear apparel
fashion red green blue yellow orange purple pink brown black white grey gray beige navy teal olive mustard burgundy
cream khaki mint coral lilac turquoise gold silver dark light bright pale plain striped stripes dotted dots polka
checked checkered plaid tartan floral printed print pattern patterned logo graphic solid quilted ribbed knitted
pleated cotton wool denim leather silk linen velvet canvas suede fleece fabric cloth texture soft smooth sleeve
sleeves sleeveless short long collar button buttons zip zipper pocket pockets hood drawstring waist hem cuff neck v
crew round laces sole belt fold folds slim wide loose photo photograph picture image product studio shot background
simple clean catalogue flat lay isolated hanging hanger shadow model man woman person people child wearing standing
walking street indoor outdoor table wall floor trigger style high quality
"""

DISTINCT_WORDS = list(dict.fromkeys(WORDS.split()))

CLIP_BOS, CLIP_EOS = "<|startoftext|>", "<|endoftext|>"
CLIP_MAX_LENGTH = 77
END_OF_WORD = "</w>"
_CLIP_SPLIT = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"

T5_PAD, T5_EOS, T5_UNK = "<pad>", "</s>", "<unk>"
T5_PAD_ID, T5_EOS_ID, T5_UNK_ID = 0, 1, 2
_T5_SPACE = "▁"
# printable ASCII, Latin-1 and Latin Extended-A letters, Greek, Cyrillic, typographic quotes and dashes
_T5_CHARACTER_RANGES = ((0x21, 0x7E), (0xA1, 0x17F), (0x391, 0x3C9), (0x410, 0x44F), (0x2013, 0x201E))


def learn_merges(words: list[str]) -> list[tuple[str, str]]:
    """Learns BPE merges until every word is one token: the most frequent pair first, ties by spelling."""
    spelled = [[*word[:-1], word[-1] + END_OF_WORD] for word in words]
    merges: list[tuple[str, str]] = []
    while True:
        counts = Counter(pair for symbols in spelled for pair in pairwise(symbols))
        if not counts:
            return merges
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        for symbols in spelled:
            for index in reversed(range(len(symbols) - 1)):
                if tuple(symbols[index : index + 2]) == best:
                    symbols[index : index + 2] = ["".join(best)]


def clip_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns CLIP's token → id table (bytes, bytes that end a word, merges, the two special tokens) and its merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = learn_merges(DISTINCT_WORDS)
    tokens = [*alphabet, *(byte + END_OF_WORD for byte in alphabet), *("".join(pair) for pair in merges)]
    tokens = list(dict.fromkeys([*tokens, CLIP_BOS, CLIP_EOS]))
    return {token: index for index, token in enumerate(tokens)}, merges


def t5_vocabulary() -> list[tuple[str, float]]:
    """Returns T5's (piece, log-probability) list: special tokens, word-initial space, words, characters."""
    words = [form for word in DISTINCT_WORDS for form in (word, word.capitalize())]
    characters = [chr(code) for low, high in _T5_CHARACTER_RANGES for code in range(low, high + 1)]
    scored = [(T5_PAD, 0.0), (T5_EOS, 0.0), (T5_UNK, 0.0), (_T5_SPACE, -4.0)]
    scored += [(_T5_SPACE + word, -6.0 - 0.001 * rank) for rank, word in enumerate(words)]
    scored += [(character, -9.0 - 0.001 * rank) for rank, character in enumerate(characters)]
    return list(dict(scored).items())


def write_json(path: Path, content: object) -> None:
    """Writes `content` as UTF-8 JSON with a final newline, the same bytes on every system."""
    path.write_bytes((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))


def write_clip_tokenizer(folder: Path) -> None:
    """Writes the CLIP tokenizer's files into `folder` (made here)."""
    folder.mkdir(parents=True)
    vocab, merges = clip_vocabulary()
    bpe = models.BPE(vocab=vocab, merges=merges, end_of_word_suffix=END_OF_WORD, unk_token=CLIP_EOS)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CLIP_SPLIT), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(
        (CLIP_EOS, vocab[CLIP_EOS]), (CLIP_BOS, vocab[CLIP_BOS]), trim_offsets=False, add_prefix_space=False
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (CLIP_BOS, CLIP_EOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": CLIP_BOS, "eos_token": CLIP_EOS, "unk_token": CLIP_EOS, "pad_token": CLIP_EOS}
    write_json(folder / "vocab.json", vocab)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    (folder / "merges.txt").write_bytes("\n".join(lines).encode("utf-8"))
    write_json(folder / "special_tokens_map.json", special)
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": CLIP_MAX_LENGTH, "do_lower_case": True}
    write_json(folder / "tokenizer_config.json", {**config, **special, "clean_up_tokenization_spaces": False})


def write_t5_tokenizer(folder: Path, max_length: int) -> None:
    """Writes the T5 tokenizer's files into `folder` (made here); `max_length` is the longest prompt, in tokens."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.Unigram(t5_vocabulary(), unk_id=T5_UNK_ID, byte_fallback=False))
    metaspace = {"replacement": _T5_SPACE, "prepend_scheme": "always", "split": True}
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**metaspace)]
    )
    tokenizer.decoder = decoders.Metaspace(**metaspace)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {T5_EOS}", pair=f"$A {T5_EOS} $B {T5_EOS}", special_tokens=[(T5_EOS, T5_EOS_ID)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (T5_PAD, T5_EOS, T5_UNK)])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": T5_EOS, "unk_token": T5_UNK, "pad_token": T5_PAD}
    write_json(folder / "special_tokens_map.json", special)
    config = {"tokenizer_class": "T5TokenizerFast", "model_max_length": max_length, "extra_ids": 0}
    write_json(folder / "tokenizer_config.json", {**config, **special, "clean_up_tokenization_spaces": False})
