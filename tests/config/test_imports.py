"""The configuration needs nothing but the standard library until flags are converted, and never torch."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_python(*arguments: str) -> str:
    """Standard output of a fresh Python in the repository's root."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_dataclasses_recipes_and_rules_work_without_any_installed_package() -> None:
    program = (
        "from megatron_allattn.config import RECIPES, check_world, load_deepspeed_json; import sys; "
        "run = RECIPES['enwik8-large'](); check_world(run, 8); "
        "print(load_deepspeed_json(run, 8)['zero_optimization']['stage'], 'tyro' in sys.modules)"
    )
    assert run_python("-S", "-c", program) == "1 False\n"


def test_parsing_imports_tyro_but_neither_torch_nor_numpy_nor_deepspeed() -> None:
    program = (
        "from megatron_allattn.config import parse; import sys; run, _ = parse(['--num-layers', '7']); "
        "print(run.model.num_layers, [n in sys.modules for n in ('tyro', 'torch', 'numpy', 'deepspeed')])"
    )
    assert run_python("-c", program) == "7 [True, False, False, False]\n"
