"""Package metadata. The ranges admit a GPU machine's own torch; requirements.txt has the exact versions we test."""

import re
from pathlib import Path

from setuptools import find_packages, setup

_ROOT = Path(__file__).parent
_SOURCE = (_ROOT / "megatron_allattn" / "__init__.py").read_text(encoding="utf-8")
_VERSION = re.search(r'^__version__ = "([^"]+)"$', _SOURCE, re.MULTILINE)
assert _VERSION is not None, "megatron_allattn/__init__.py has no __version__"

setup(
    name="megatron-allattn",
    version=_VERSION.group(1),
    description="Scale-out pretraining of all-attention language models: tensor parallelism under DeepSpeed",
    long_description=(_ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[*find_packages(include=["megatron_allattn", "megatron_allattn.*"]), "megatron_allattn.ds_configs"],
    # ds_configs/ stands in the root, where users look for it, and travels inside the package
    package_dir={"megatron_allattn.ds_configs": "ds_configs"},
    package_data={
        "megatron_allattn.ds_configs": ["*.json"],
        "megatron_allattn.benchmark": ["profiles/*.json"],
        "megatron_allattn.kernels": ["*.cpp", "*.h"],
    },
    py_modules=["pretrain"],
    entry_points={"console_scripts": ["megatron-allattn-pretrain = pretrain:command"]},
    install_requires=[
        "torch>=2.11,<3",
        "deepspeed>=0.19,<0.20",
        "numpy>=1.26,<3",
        "sentencepiece>=0.2,<1",
        "tyro>=1.0,<2",
        "tqdm>=4.66,<5",
        "mpi4py>=4.0,<5",
    ],
    extras_require={
        "test": [
            *("pytest>=8.4", "pytest-xdist>=3.6", "ruff>=0.14", "mypy>=1.18", "import-linter>=2.5", "mpich>=4.3"),
            *("safetensors>=0.5", "transformers>=5.20,<6", "hypothesis>=6.140", "playwright>=1.50"),
        ],
        "plots": ["matplotlib>=3.9"],
        "tensorboard": ["tensorboard>=2.17"],
        "wandb": ["wandb>=0.25"],
        "watch": ["rich>=13.7"],
        "hf": ["transformers>=5.20,<6"],
        "triton": ["triton>=3.4"],
    },
    classifiers=[
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
