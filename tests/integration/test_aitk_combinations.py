"""What users combine with COAT, each run in the real ai-toolkit with a tiny FLUX.

The table of docs/ai-toolkit.md has the same rows.
"""

from __future__ import annotations

from typing import Any

import pytest

from coat_flux.trainers.ai_toolkit.install import install
from tests.helpers.aitk_standin.real import Checkout, as_kontext, make_real_entry
from tests.helpers.tiny_flux import make_tiny_flux

pytestmark = [pytest.mark.aitk, pytest.mark.timeout(3600)]

PHOTOS, KONTEXT = "datasets_example/clothing", "models/flux_kontext"
# name → (changes of the job, flow of its blocks, words that the job prints)
RUNS: dict[str, tuple[dict[str, Any], str, str]] = {
    "LoKr": (
        {"network": {"type": "lokr", "linear": 4, "lokr_full_rank": False, "lokr_factor": 8}},
        "generic",
        "a LokrModule",
    ),
    "full-rank LoKr": ({"network": {"type": "lokr", "lokr_factor": 8}}, "generic", "a LokrModule"),
    "DoRA": ({"network": {"type": "dora", "linear": 4}}, "generic", "dora"),
    "EMA": ({"train.ema_config": {"use_ema": True, "ema_decay": 0.9}}, "fused", ""),
    "masks": ({"datasets.0.mask_path": PHOTOS}, "fused", ""),
    "regularization images": ({"datasets.1": {"folder_path": PHOTOS, "is_reg": True, "resolution": [64]}}, "fused", ""),
    "several data sets": ({"datasets.1": {"folder_path": PHOTOS, "resolution": [96]}}, "fused", ""),
    "control images": (
        {"model.arch": "flux_kontext", "model.name_or_path": KONTEXT, "datasets.0.control_path": PHOTOS},
        "fused",
        "",
    ),
    "text-encoder caching": (
        {"train.cache_text_embeddings": True, "datasets.0.caption_dropout_rate": 0.0},
        "fused",
        "",
    ),
    "low_vram": ({"model.low_vram": True}, "fused", ""),
    "layer_offloading": ({"model.layer_offloading": True}, "fused", ""),
    "train_text_encoder": ({"train.train_text_encoder": True}, "fused", ""),
    "differential output preservation": (
        {"train.diff_output_preservation": True, "train.diff_output_preservation_class": "dungarees"},
        "fused",
        "",
    ),
}


def entry_of(changes: dict[str, Any]) -> dict[str, Any]:
    entry = make_real_entry(steps=2, batch_size=1, disable_sampling=True)
    entry["model"] = {"name_or_path": "models/flux", "arch": "flux", "quantize": True, "qtype": "coat_fp8"}
    entry["model"]["quantize_te"] = False
    entry["save"]["save_every"] = 2
    entry["coat"]["memory"] = {"checkpointing": "none"}
    entry["datasets"][0].update(resolution=[64], cache_latents_to_disk=False)
    for dotted, value in changes.items():
        place: Any = entry
        *parents, leaf = dotted.split(".")
        for parent in parents:
            place = place[int(parent)] if isinstance(place, list) else place[parent]
        if isinstance(place, list):
            place.append({"caption_ext": "txt", **value})
        else:
            place[leaf] = value
    return entry


def job_name(combination: str) -> str:
    return combination.lower().replace(" ", "_")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout with the tiny FLUX, in which every combination was run, one after the other."""
    checkout = Checkout(tmp_path_factory.mktemp("aitk") / "ait")
    install(checkout.root)
    flux = make_tiny_flux(checkout.root / "models" / "flux")
    as_kontext(flux, checkout.root / KONTEXT)
    jobs = [(job_name(name), entry_of(changes)) for name, (changes, _, _) in RUNS.items()]
    checkout.printed = checkout.run_several(jobs, recover=True)  # type: ignore[attr-defined]
    return checkout


@pytest.mark.parametrize("name", RUNS)
def test_it_runs(name: str, checkout: Checkout) -> None:
    _, flow, words = RUNS[name]
    printed: str = checkout.printed  # type: ignore[attr-defined]
    of_job = printed.partition(f"# Running job: {job_name(name)}\n")[2].partition("# Running job: ")[0]
    assert (checkout.folder(job_name(name)) / f"{job_name(name)}.safetensors").exists(), of_job[-4000:]
    lora = checkout.lora(job_name(name))
    assert lora
    # of full-rank LoKr ai-toolkit saves alpha 9999999999, which float16 has not
    assert all(value.isfinite().all() for key, value in lora.items() if not key.endswith(".alpha"))
    log = (checkout.folder(job_name(name)) / "coat" / "log.txt").read_text(encoding="utf-8")
    assert f"kept in FP8, {flow} flow" in log
    assert words in of_job
