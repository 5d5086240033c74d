"""Installs `coat_core`, `coat_flux` (the folder `extensions/coat_flux`) and the `coat-flux` command.

The lower bounds are chosen so that installing into an existing ai-toolkit environment moves none of its pins
(it runs on a 0.39 development build of diffusers, transformers 5.5, peft 0.18, accelerate, torch 2.13).
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
FLUX_DIR = "extensions/coat_flux"
SHIPPED_FOLDERS = ("configs", "datasets_example")  # inside coat_flux in a wheel; see config.shipped_folder

# scripts/test_versions.py installs exactly these lower bounds, on every Python; they have wheels there.
INSTALL_REQUIRES = [
    "torch>=2.9",
    "diffusers>=0.36",
    "transformers>=4.57.1",  # 4.57.0 was withdrawn
    "peft>=0.17",
    "accelerate>=1.10",
    "safetensors>=0.5",
    "pyyaml>=6.0.1; python_version < '3.13'",
    "pyyaml>=6.0.2; python_version >= '3.13'",
    "oyaml>=1.0",
    "numpy>=1.26; python_version < '3.13'",
    "numpy>=2.1; python_version >= '3.13'",
    "packaging>=23",
    "pillow>=10.1; python_version < '3.13'",
    "pillow>=10.4; python_version >= '3.13'",
    "psutil>=5.9.5",
    "tensorboard>=2.15",
    "tqdm>=4.66",
    "werkzeug>=3.0",  # tensorboard needs it, too
]

EXTRAS_REQUIRE = {
    "bench": [  # the baselines of `coat-flux bench`, and what its tests need; install with the torch you have pinned
        "bitsandbytes>=0.45; platform_system == 'Linux'",
        "hypothesis>=6.100",
        "optimum-quanto>=0.2.7",
        "pytest>=8.0",
        "pytest-timeout>=2.3",
        "torchao>=0.18",
    ],
    "gguf": ["gguf>=0.17"],  # models in GGUF files
    "heic": ["pillow-heif>=0.18"],  # photos of a phone
    "garments": ["scikit-image>=0.22"],  # validation.fidelity
    "sweep": ["optuna>=4.0"],  # coat-flux sweep
    "test": [
        "bitsandbytes>=0.45; platform_system == 'Linux'",
        "gguf>=0.17",
        "hypothesis>=6.100",
        "lion-pytorch>=0.2",
        "matplotlib>=3.9.2",  # scripts/bench_memory.py --picture
        "ml_dtypes>=0.5",
        "mypy>=1.15",
        "optuna>=4.0",
        "pillow-heif>=0.18",
        "prodigyopt>=1.1",
        "pytest>=8.0",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.8",
        "ruff>=0.12",
        "scikit-image>=0.22",
        "setuptools>=70",  # builds the wheel that tests/integration/test_readme_commands.py unpacks
        "triton>=3.5,<3.8; platform_system == 'Linux'",  # torch 2.13 pins 3.7.1; kernels run in its interpreter
        "types-PyYAML",
    ],
}

core_packages = find_packages(include=["coat_core", "coat_core.*"])
flux_packages = ["coat_flux"] + [f"coat_flux.{name}" for name in find_packages(where=FLUX_DIR)]

setup(
    name="coat-flux",
    version="0.1.0",
    description="Train FLUX LoRAs in FP8 after the COAT paper: an ai-toolkit extension and a stand-alone trainer",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=core_packages + flux_packages + [f"coat_flux.{folder}" for folder in SHIPPED_FOLDERS],
    package_dir={"coat_flux": FLUX_DIR, **{f"coat_flux.{folder}": folder for folder in SHIPPED_FOLDERS}},
    package_data={
        "coat_flux.bench": ["*.tsv"],
        "coat_flux.blocks.models": ["*.tsv", "*.json"],
        "coat_flux.config": ["*.tsv"],
        "coat_flux.pages": ["page.css", "live.js"],
        "coat_flux.plan": ["cards.tsv"],
        "coat_flux.mini_flux": ["files/*.json", "files/*/*"],
        "coat_flux.configs": ["*.yaml", "accelerate/*.yaml"],
        "coat_flux.datasets_example": ["*.md", "*/*.jpg", "*/*.png", "*/*.txt"],
    },
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["coat-flux=coat_flux.cli:main"]},
)
