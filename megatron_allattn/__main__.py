"""`python -m megatron_allattn`: what there is, a line each, and which versions are installed."""

import ast
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron_allattn import __version__
from megatron_allattn.config.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "deepspeed", "triton", "matplotlib", "transformers", "tensorboard", "wandb")
TRAINING = {
    "pretrain.py": "train, under python, deepspeed, torchrun, mpirun or srun; --help lists the flags",
    "launch/submit.py": "train under SLURM, checked before it is queued",
}


def main() -> int:
    """Print it; exit code 0."""
    print(f"megatron_allattn {__version__}: pretraining of all-attention language models\n")
    commands = TRAINING | {f"tools/{path.name}": purpose(path) for path in sorted((ROOT / "tools").glob("*.py"))}
    width = max(map(len, commands))
    for name, about in commands.items():
        print(f"  {name:<{width}}  {about}")
    print(f"\n{len(RECIPES)} recipes: python pretrain.py --recipe list; a page on each in docs/cookbook")
    print("docs/README.md leads to everything else\n")
    print(f"Python {sys.version.split()[0]}; " + ", ".join(map(_installed, PACKAGES)))
    return 0


def purpose(path: Path) -> str:
    """The first sentence of a program's docstring."""
    first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    return first.replace("\n", " ").split(". ")[0].rstrip(".")


def _installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


if __name__ == "__main__":
    sys.exit(main())
