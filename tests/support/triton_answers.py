"""A program: what the Triton backend answers in Triton's interpreter to problems of attention, on a CPU.

The interpreter is chosen when triton is imported, hence a process of its own; `ask` starts it.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from megatron_allattn.kernels.registry import Attend
from tests.support.attention_problems import answer, converted, gradients
from tests.support.slow_attention import Problem

ROOT = Path(__file__).resolve().parents[2]
Question = tuple[Problem, tuple[int, ...] | None]  # in float32, and how far each head is said to look
Answer = tuple[Tensor, dict[str, Tensor]]  # the output, and gradients by tensor


def ask(questions: dict[str, Question], folder: Path) -> dict[str, Answer]:
    """Questions by name, put to one process; folder: for files between the two."""
    files = folder / "questions.pt", folder / "answers.pt"
    torch.save({name: (vars(problem), spans) for name, (problem, spans) in questions.items()}, files[0])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore::RuntimeWarning", __file__, *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return torch.load(files[1], weights_only=True)


def _answered(attend: Attend, values: dict, spans: tuple[int, ...] | None) -> Answer:
    problem = converted(Problem(**values), torch.float32)
    output = answer(attend, problem, spans)
    return output.detach(), gradients(output, problem)


if __name__ == "__main__":
    from megatron_allattn.kernels.triton_attention import Triton
    from megatron_allattn.kernels.triton_launch import Tile, Tiles

    tiles = Tiles(*[Tile(64, 64, 4, 1)] * 5)  # few and large: a tile takes the interpreter milliseconds
    asked = torch.load(sys.argv[1], weights_only=True)
    torch.save({name: _answered(Triton(tiles), *question) for name, question in asked.items()}, sys.argv[2])
