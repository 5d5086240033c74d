"""Other models and options than the clothing config's, as jobs of the real ai-toolkit from start to saved LoRA."""

import os
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.architecture.sources import ROOT
from tests.helpers.aitk_standin.real import Checkout, make_real_entry
from tests.helpers.asserts import assert_all_bitwise

pytestmark = [pytest.mark.aitk, pytest.mark.timeout(3600)]

STEPS = 4
ARCHS = ("flux", "flux_kontext", "flux2_klein_4b", "zimage", "krea2")
NO_SAMPLES = ("flux_kontext",)  # its pipeline wants a control image
BASES = ("coat_fp8", "qfloat8", "uint4")
PHOTOS = "datasets_example/clothing"
KEEP = {"checkpointing": "none"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout with the tiny models, and the extension that substitutes sizes, in place."""
    checkout = Checkout(tmp_path_factory.mktemp("aitk") / "ait")
    command = [os.environ.get("AI_TOOLKIT_PYTHON", sys.executable), str(ROOT / "tests" / "helpers" / "aitk_folders.py")]
    done = subprocess.run([*command, str(checkout.root)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return checkout


def entry_of(arch: str, qtype: str, steps: int = STEPS, **changes: Any) -> dict[str, Any]:
    model = {"name_or_path": f"models/{arch}", "arch": arch, "quantize": True, "qtype": qtype, "quantize_te": False}
    saved = {"save.save_every": STEPS // 2, "save.dtype": "float32"}
    samples = {"sample.sample_every": STEPS, "sample.prompts": ["a plain red [trigger]"]}
    settings = {"model": model, "train.lr_scheduler": "constant", "coat.memory": KEEP, **saved, **samples}
    settings |= {"train.disable_sampling": arch in NO_SAMPLES, "datasets.0.cache_latents_to_disk": False}
    if arch == "flux_kontext":
        settings["datasets.0.control_path"] = PHOTOS
    return make_real_entry(settings | changes, steps=steps)


def test_streamed_weights_change_no_bit(checkout):
    """`coat.memory.stream_blocks`: quantized at load or after it, all or as memory needs it; and resumed."""

    def streamed(stream: Any, at_load: bool = True, steps: int = STEPS) -> dict[str, Any]:
        changes = {"coat.memory": {**KEEP, "stream_blocks": stream}}
        changes |= dict.fromkeys(("model.quantize", "model.quantize_te"), at_load)
        return entry_of("flux", "coat_fp8", steps, **changes)

    jobs = {"resident": streamed(0), "all": streamed("all"), "auto": streamed("auto"), "late": streamed("all", False)}
    resumed = [streamed("all", steps=steps) for steps in (STEPS // 2, STEPS)]
    checkout.run_several(
        [(f"streamed_{name}", entry) for name, entry in (*jobs.items(), *(("resumed", entry) for entry in resumed))]
    )
    for name in ("all", "auto", "resumed"):
        checkout.assert_same_lora("streamed_resident", f"streamed_{name}")
    assert checkout.lora("streamed_late").keys() == checkout.lora("streamed_resident").keys()
    assert re.search(r"streamed weights +4 of 4 blocks", checkout.log("streamed_all"))


@pytest.mark.parametrize("arch", ARCHS)
def test_jobs_run_to_their_loras_and_resumed_ones_end_with_the_same(checkout, arch):
    jobs = []
    for qtype in BASES:
        jobs.append((f"{arch}_{qtype}", entry_of(arch, qtype)))
        jobs += [(f"{arch}_{qtype}_resumed", entry_of(arch, qtype, steps)) for steps in (STEPS // 2, STEPS)]
    out = checkout.run_several(jobs)
    assert out.count(f"Found step {STEPS // 2} in metadata") == len(BASES)
    for qtype in BASES:
        whole, resumed = f"{arch}_{qtype}", f"{arch}_{qtype}_resumed"
        lora = checkout.lora(whole)
        assert lora
        assert all(value.isfinite().all() for value in lora.values())
        assert sum(bool(value.any()) for value in lora.values()) > 0.8 * len(lora)  # a last block's text leads nowhere
        samples = list((checkout.folder(whole) / "samples").glob("*.jpg"))
        assert bool(samples) == (arch not in NO_SAMPLES)
        log = checkout.log(whole)
        assert "kept in FP8" in log
        assert ("its own products, gradients by the dequantized weight" in log) == (qtype != "coat_fp8")
        checkout.assert_same_lora(whole, resumed)
        states = checkout.optimizer(whole)["state"], checkout.optimizer(resumed)["state"]
        for index, state in states[0].items():
            assert_all_bitwise(state, states[1][index])


def assert_a_killed_run_ends_as_the_whole(checkout: Checkout, name: str, entry: dict[str, Any]) -> str:
    """Of 6 steps, in the fused flow; returns what the whole one printed."""
    online = {"HF_HUB_OFFLINE": "0"}  # else diffusers reads no LoRA by its path
    code, out = checkout.start(f"{name}_whole", entry, environment=online)
    assert code == 0, out[-4000:]
    kill = {"at": f"Saving at step {STEPS}", "send": signal.SIGKILL}
    code, _ = checkout.start(f"{name}_killed", entry, environment=online, **kill)
    assert code == -signal.SIGKILL
    code, again = checkout.start(f"{name}_killed", entry, environment=online)
    assert code == 0, again[-4000:]
    log = checkout.log(f"{name}_killed")
    assert "resume: continues after step 3" in log
    assert "kept in FP8, fused flow" in log
    assert_all_bitwise(checkout.lora(f"{name}_whole"), checkout.lora(f"{name}_killed"))
    states = (checkout.optimizer(f"{name}_{run}")["state"] for run in ("whole", "killed"))
    for state, other in zip(*(each.values() for each in states), strict=True):
        assert_all_bitwise(state, other)
    return out


@pytest.mark.parametrize("arch", ["flux", "krea2"])
def test_a_killed_lokr_ends_as_the_one_that_was_not(checkout, arch):
    """Full rank, in the fused flow; lycoris-lora reads its file."""
    network = {"type": "lokr", "lokr_factor": 8}
    settings = {"network": network, "save.dtype": "bf16", "train.disable_sampling": True}
    entry = entry_of(arch, "coat_fp8", 3 * STEPS // 2, **settings)
    assert_a_killed_run_ends_as_the_whole(checkout, f"{arch}_lokr", entry)
    lora = checkout.lora(f"{arch}_lokr_whole")
    assert any(value.any() for key, value in lora.items() if key.endswith(".lokr_w2"))
    files = [checkout.folder(f"{arch}_lokr_whole") / f"{arch}_lokr_whole.safetensors"]
    python = os.environ.get("AI_TOOLKIT_PYTHON", sys.executable)
    done = subprocess.run([python, "-c", READ_BY_LYCORIS, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("arch", ["flux", "zimage"])
def test_with_an_assistant_adapter_as_distilled_models_have(checkout, arch):
    """It is in the base while training, not while sampling, and never in the saved file."""
    plain, assistant = f"{arch}_plain", f"models/{arch}_assistant.safetensors"
    checkout.run(plain, entry_of(arch, "coat_fp8", 1, **{"train.disable_sampling": True}))
    own, draw = checkout.lora(plain), torch.Generator().manual_seed(0)
    drawn = {key: torch.randn(value.shape, generator=draw) * 0.1 for key, value in own.items()}
    save_file(drawn, checkout.root / assistant)
    entry = entry_of(arch, "coat_fp8", 3 * STEPS // 2, **{"model.assistant_lora_path": assistant})
    out = assert_a_killed_run_ends_as_the_whole(checkout, f"{arch}_assisted", entry)
    assert out.count("Unloading assistant lora") == out.count("Loading assistant lora") - (arch == "flux") > 1
    lora = checkout.lora(f"{arch}_assisted_whole")
    assert lora.keys() == own.keys()
    for key, value in lora.items():
        assert float(torch.nn.functional.cosine_similarity(value.flatten(), drawn[key].flatten(), dim=0)) < 0.5, key
    first = [checkout.column(name, "loss")[0] for name in (plain, f"{arch}_assisted_whole")]
    assert first[0] != first[1]


# each of a file's LoKrs in lycoris-lora's module, and what that adds to a linear's weight
READ_BY_LYCORIS = """
import sys, torch
from lycoris.modules.lokr import LokrModule
from safetensors.torch import load_file
state = load_file(sys.argv[1])
for name in {key.rpartition(".")[0] for key in state}:
    own = {key.rpartition(".")[2]: value.float() for key, value in state.items() if key.rpartition(".")[0] == name}
    (a, c), (b, d) = own["lokr_w1"].shape, own["lokr_w2"].shape
    alpha = own["alpha"].item()
    module = LokrModule(name, torch.nn.Linear(c * d, a * b), lora_dim=int(alpha), alpha=alpha, factor=8)
    assert own.keys() == module.state_dict().keys() - {"scalar"}
    for key in ("lokr_w1", "lokr_w2"):  # its hook is not called as today's torch calls it in load_state_dict
        getattr(module, key).data.copy_(own[key])
    assert torch.allclose(module.get_weight(), torch.kron(own["lokr_w1"], own["lokr_w2"]))
"""


# -- what users combine with COAT: the table of docs/ai-toolkit.md has the same rows ----------------------------------
# name → changes of the job; all but DoRA take the fused flow
SECOND = {"folder_path": PHOTOS, "caption_ext": "txt"}
PRESERVED = {"train.diff_output_preservation": True, "train.diff_output_preservation_class": "dungarees"}
COMBINATIONS: dict[str, dict[str, Any]] = {
    "LoKr": {"network": {"type": "lokr", "linear": 4, "lokr_full_rank": False, "lokr_factor": 8}},
    "full-rank LoKr": {"network": {"type": "lokr", "lokr_factor": 8}},
    "DoRA": {"network": {"type": "dora", "linear": 4}},
    "EMA": {"train.ema_config": {"use_ema": True, "ema_decay": 0.9}},
    "masks": {"datasets.0.mask_path": PHOTOS},
    "regularization images": {"datasets.1": {**SECOND, "is_reg": True, "resolution": [64]}},
    "several data sets": {"datasets.1": {**SECOND, "resolution": [96]}},
    "control images": {},  # of FLUX.1 Kontext
    "text-encoder caching": {"train.cache_text_embeddings": True, "datasets.0.caption_dropout_rate": 0.0},
    "low_vram": {"model.low_vram": True},
    "layer_offloading": {"model.layer_offloading": True},
    "train_text_encoder": {"train.train_text_encoder": True},
    "differential output preservation": PRESERVED,
}


def job_name(combination: str) -> str:
    return combination.lower().replace(" ", "_")


@pytest.fixture(scope="module")
def printed(checkout: Checkout) -> str:
    """What all combinations print, run one after the other."""
    jobs = []
    for name, changes in COMBINATIONS.items():
        arch = "flux_kontext" if name == "control images" else "flux"
        settings = {"save.dtype": "float16", "train.disable_sampling": True}
        jobs.append((job_name(name), entry_of(arch, "coat_fp8", 2, **settings, **changes)))
    return checkout.run_several(jobs, recover=True)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_combination_runs(name, checkout, printed):
    job = job_name(name)
    of_job = printed.partition(f"# Running job: {job}\n")[2].partition("# Running job: ")[0]
    assert (checkout.folder(job) / f"{job}.safetensors").exists(), of_job[-4000:]
    lora = checkout.lora(job)
    assert lora
    # of full-rank LoKr ai-toolkit saves alpha 9999999999, which float16 has not
    assert all(value.isfinite().all() for key, value in lora.items() if not key.endswith(".alpha"))
    assert f"kept in FP8, {'generic' if name == 'DoRA' else 'fused'} flow" in checkout.log(job)
    assert "dora" in of_job or name != "DoRA"
