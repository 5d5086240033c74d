"""Cache entries: exact round trip, keys, damage, atomic writing."""

from __future__ import annotations

import pytest
import torch

from coat_flux.base.files import file_sha256
from coat_flux.data.buckets import Bucket
from coat_flux.data.cache import TensorCache, latent_key, text_key
from coat_flux.data.files import DatasetError
from tests.helpers.asserts import assert_bitwise


def entry():
    return {"latents": torch.randn(4, 3, 5), "pooled": torch.randn(7).bfloat16()}


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_stored_comes_back_bit_for_bit(tmp_path, in_memory, on_disk):
    cache = TensorCache(tmp_path / "latents" if on_disk else None, in_memory)
    tensors = entry()
    cache.store("key", tensors, "a.png")
    found = cache.load("key")
    assert cache.enabled == (in_memory or on_disk)
    if not cache.enabled:
        assert found is None
        return
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert_bitwise(found[name], tensor)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == (["key.safetensors"] if on_disk else [])


def test_a_second_run_finds_the_file(tmp_path):
    TensorCache(tmp_path, False).store("key", tensors := entry(), "a.png")
    assert_bitwise(TensorCache(tmp_path, False).load("key")["latents"], tensors["latents"])
    assert TensorCache(tmp_path, False).load("other") is None


def truncate(content):
    return content[: len(content) // 2]


def flip_a_bit(content):
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, lambda content: b"", lambda content: b"x" * len(content)])
def test_a_damaged_file_is_reported_and_can_be_made_again(tmp_path, caplog, damage):
    cache = TensorCache(tmp_path, False)
    cache.store("key", tensors := entry(), "a.png")
    cache.path("key").write_bytes(damage(cache.path("key").read_bytes()))
    assert cache.load("key") is None
    assert "key.safetensors: damaged cache file" in caplog.text
    cache.store("key", tensors, "a.png")
    assert_bitwise(cache.load("key")["latents"], tensors["latents"])


def test_names_that_are_no_text_do_not_hinder(tmp_path):
    TensorCache(tmp_path, False).store("key", tensors := entry(), "bad\udcff.png")
    assert_bitwise(TensorCache(tmp_path, False).load("key")["latents"], tensors["latents"])


def test_a_failed_write_leaves_nothing_and_names_the_remedy(tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.replace", no_space)
    with pytest.raises(DatasetError, match=r"cannot be written \(No space left on device\); make the folder writable"):
        TensorCache(tmp_path, False).store("key", entry(), "a.png")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_without_a_folder_has_no_paths():
    with pytest.raises(ValueError, match=r"folder=None: this cache is not on disk"):
        TensorCache(None, True).path("key")


def test_keys_change_with_everything_that_changes_the_entry():
    base = ("digest", Bucket(64, 32), False, "vae", (255, 255, 255), False)
    changes = ("other", Bucket(32, 64), True, "b", (0, 0, 0), True)
    others = [(*base[:i], change, *base[i + 1 :]) for i, change in enumerate(changes)]
    keys = {latent_key(*arguments) for arguments in [base, *others]}
    assert len(keys) == 7
    assert latent_key(*base) == latent_key(*base)
    assert len({text_key("a", "x"), text_key("b", "x"), text_key("a", "y")}) == 3


def test_file_sha256_follows_the_bytes_only(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    (tmp_path / "b").write_bytes(b"x" * 3_000_000)
    (tmp_path / "c").write_bytes(b"x" * 2_999_999 + b"y")
    assert file_sha256(tmp_path / "a") == file_sha256(tmp_path / "b") != file_sha256(tmp_path / "c")
