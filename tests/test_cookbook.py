"""Every page of docs/cookbook: its commands parse and divide, its numbers are those of the recipe."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch

from megatron_allattn.config import RECIPES, RunConfig, batch_shape, check_world, load_deepspeed_json, parse
from megatron_allattn.config.recipes import prepare_arguments
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.accounting import cache_bytes, count_parameters, state_bytes
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import Group
from tests.support.documentation import commands

ROOT = Path(__file__).resolve().parents[1]
COOKBOOK = ROOT / "docs" / "cookbook"
SLURM_FLAGS = {  # of sbatch, scancel and launch/submit.py
    *("--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--spare-nodes", "--export", "--signal"),
    *("--partition", "--account", "--qos", "--constraint", "--batch", "--no-deps", "--time"),
}
LAUNCHERS = {1: "python pretrain.py ", 64: "deepspeed --hostfile hosts pretrain.py "}


def page(name: str) -> str:
    return (COOKBOOK / f"{name}.md").read_text()


def runs(name: str) -> dict[int, list[str]]:
    """The flags of the command that each heading `## N GPUs` of a page has."""
    found = {}
    for heading, body in re.findall(r"^## (\d+) GPUs?$(.*?)(?=^## |\Z)", page(name), re.M | re.S):
        (command,) = (one.text for one in commands(body))
        launcher = LAUNCHERS.get(int(heading), f"deepspeed --num_gpus {heading} pretrain.py ")
        assert command.startswith(launcher)
        found[int(heading)] = shlex.split(command.removeprefix(launcher))
    return found


def size(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes < 2**30 / 10 else f"{num_bytes / 2**30:.2f} GiB"


def memory(run: RunConfig, world_size: int) -> str:
    """The row of a page's table of memory."""
    assert run.recipe is not None
    shape, parallel, model, half = batch_shape(run, world_size), run.parallel, run.model, run.training.bf16
    tensor_size = parallel.tensor_model_parallel_size
    with torch.device("meta"):
        group = Group(ranks=tuple(range(tensor_size)), rank=0, handle=None)
        local = count_parameters(Network(model, RECIPES[run.recipe].vocab_size, group, FusedOps("torch"))).local
    state = state_bytes(
        local,
        zero_stage=parallel.zero_stage,
        data_size=shape.data_parallel_size,
        half=half,
        moments=2 if run.optimizer.optimizer == "adam" else 1,
    )
    streams = shape.accumulation_steps * shape.micro_batch_size
    caches = cache_bytes([model.max_attention_span] * model.num_layers, streams, model.hidden_size, 2 if half else 4)
    where = " in host memory" if "offload" in str(parallel.deepspeed_config) else ""
    layout = f"TP {tensor_size} × DP {shape.data_parallel_size}, ZeRO {parallel.zero_stage}"
    slots = f"{shape.accumulation_steps} × {shape.micro_batch_size}"
    return f"| {world_size} | {layout} | {slots} | {size(state)}{where} | {size(caches)} |"


@pytest.mark.parametrize("name", RECIPES)
def test_commands_parse_and_divide(name: str) -> None:
    found = runs(name)
    assert {1, 8, 64} <= found.keys()
    rows = [line for line in page(name).splitlines() if re.match(r"\| \d", line)]
    for world_size, flags in found.items():
        run, explicit = parse(flags)
        check_world(run, world_size)
        load_deepspeed_json(run, world_size)
        assert (run.recipe, str(run.checkpoint.save)) == (name, f"runs/{name}")
        changed = explicit & {"--global-batch-size", "--seq-length"}
        assert not changed or "it is another run" in page(name)
        assert memory(run, world_size) in rows
    assert len(rows) == len(found)


@pytest.mark.parametrize("name", RECIPES)
def test_numbers_are_those_of_the_recipe(name: str) -> None:
    recipe = RECIPES[name]
    text = " ".join(page(name).split())
    count = recipe.parameters
    share = f"{100 * count.persistent / count.total:.0f} % of them in persistent vectors"
    assert text.startswith(f"# {name} ")
    assert f"**{count.total:,}** parameters over a vocabulary of {recipe.vocab_size:,}, {share}" in text
    assert f"Sized for {recipe.gpus} GPUs; one step is {recipe.tokens_per_step:,} tokens." in text
    assert (f"The paper says {recipe.paper_millions}M." in text) == (recipe.paper_millions is not None)
    assert recipe.paper_test is None or f"{recipe.paper_test} " in text.partition("## Expected")[2]
    model = recipe().model
    for num_layers, hidden_size in re.findall(r"(\d+) layers of (\d+)", text):
        assert (int(num_layers), int(hidden_size)) == (model.num_layers, model.hidden_size)


def test_data_is_prepared_where_the_recipe_reads_it() -> None:
    read = runpy.run_path(str(ROOT / "tools" / "prepare_data.py"))["parse"]
    for name, recipe in RECIPES.items():
        (command,) = (one.text for one in commands(page(name).partition("## Data")[2].partition("## 1 GPU")[0]))
        arguments = command.removeprefix("python tools/prepare_data.py ")
        options = read(shlex.split(arguments))
        hint = arguments.partition(" --output-prefix")[0].replace("TEXT_FILES", "FILE")
        assert prepare_arguments(name) == ("byte --input FILE" if name == "demo" else hint)  # demo brings its text
        assert options.output_prefix == (recipe().data.data_path or "data/demo/stdlib")
        assert options.kind in {"sentencepiece", "stdlib"} or f"data/{options.kind}" == options.output_prefix
        assert options.kind != "sentencepiece" or options.vocab_size == recipe.vocab_size


def test_index_lists_every_page() -> None:
    index = page("README")
    found = re.findall(r"^\| \[(.*?)\]\((.*?)\.md\) \| ([\d,]+) \| (.*?) \| (.*?) \|$", index, re.M)
    assert [(name, link) for name, link, *_ in found] == [(name, name) for name in RECIPES]
    assert {path.stem for path in COOKBOOK.glob("*.md")} == {"README", "hostfile", "slurm", *RECIPES}
    for name, _, total, paper, result in found:
        recipe = RECIPES[name]
        assert total == f"{recipe.parameters.total:,}"
        assert paper == ("–" if recipe.paper_millions is None else f"{recipe.paper_millions}M")
        assert result.split()[0] == ("–" if recipe.paper_test is None else f"{recipe.paper_test}")


def test_the_demos_result_is_the_measured_one() -> None:
    measured = re.search(r"[\d.]+ bits per byte on validation", (ROOT / "docs" / "results.md").read_text())
    assert measured is not None
    assert measured[0] in page("demo")


@pytest.mark.parametrize("path", [*COOKBOOK.glob("*.md"), ROOT / "docs" / "paper_versus_code.md"], ids=lambda p: p.name)
def test_flags_and_recipes_in_the_text_exist(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"--recipe ([\w.-]+)", text):
        assert name in {*RECIPES, "list"}
    shown = " ".join(part for part in re.findall(r"`([^`\n]+)`", text))
    known = {f"--{field}" for field in known_flags()}
    elsewhere = {
        "--newline",
        "--archive",
        "--no-overlap",
        "--hostfile",
        "--num_gpus",
        "--nproc-per-node",
        "--split-name",
        *SLURM_FLAGS,
        "--timeout-seconds",
    }
    assert set(re.findall(r"--[a-z][\w-]+", shown)) <= known | elsewhere | {"--deepspeed_config"}


def known_flags() -> set[str]:
    sections = RunConfig().to_dict()
    names = {key for value in sections.values() if isinstance(value, dict) for key in value} | {"recipe"}
    return {name.replace("_", "-") for name in names}
