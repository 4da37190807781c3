"""Which runs an ablation has: the paper's own sizes by its own numbers, and models that pretrain.py takes."""

import re
import runpy
import shlex
from dataclasses import replace

import pytest

from megatron_allattn.ablation.cells import VARIANTS, cells, check_seeds, sizes_of, variants_of, versions, with_flags
from megatron_allattn.config import RECIPES, ModelConfig, UsageError, check_world, parse
from megatron_allattn.config.parameters import count_parameters
from megatron_allattn.config.recipes.ablations import ABLATIONS
from tests.support.template import ROOT

SMALL = ModelConfig(num_layers=6, hidden_size=48, num_attention_heads=4, persistent_memory_size=64)
VOCABULARY = 28


def test_the_papers_figure() -> None:
    """Of its large model on text8, by the page's command: every recipe of it but FF-attn of fewer parameters (24 layers
    of 3,584 are those with 114M; config/recipes/ablations.py)."""
    page = (ROOT / "docs" / "ablation.md").read_text()
    (command,) = re.findall(r"^    python tools/ablation\.py (.*--recipe text8-large .*)$", page, re.M)
    parser = runpy.run_path(str(ROOT / "tools" / "ablation.py"))["_parser"]()
    own, others = parser.split(shlex.split(command))
    options = parser.parse_args(own)
    base = parse(others)[0]
    found = {one.name: one for one in versions(base.model, variants_of(options.variants), sizes_of(options.sizes))}
    assert list(found) == [*VARIANTS, "n0", "n128", "n256", "n512", "n1024", "n4096"]
    assert [one.vectors for one in found.values()] == [2048, None, None, None, None, 0, 128, 256, 512, 1024, 4096]
    assert (options.sbatch, options.seeds) == (True, 1) and f"\n    sbatch --array=0-{len(found) - 1}%4 " in page
    recipes = {"text8-large": "all-attn", "text8-large-ff-attn-3584": "ff-attn"}
    for recipe in ("text8-large", *(one.name for one in ABLATIONS if one.name != "text8-large-ff-attn")):
        name = recipes.get(recipe, recipe.removeprefix("text8-large-"))
        run = parse(with_flags(others, found.pop(name).flags))[0]
        same = RECIPES[recipe]()
        assert (run.model, run.optimizer, run.data) == (same.model, same.optimizer, same.data), name
        check_world(run, options.nodes * options.gpus_per_node)
    assert not found


@pytest.mark.parametrize("model", [SMALL, replace(SMALL, persistent_memory_size=200, hidden_size=32)])
def test_versions_have_as_many_parameters(model: ModelConfig) -> None:
    total = count_parameters(model, VOCABULARY).total
    base = ["--num-layers", "6", f"--hidden-size={model.hidden_size}", "--persistent_memory_size"]
    base += [str(model.persistent_memory_size), "--variant", "all-attn"]
    for one in versions(model, VARIANTS, ()):
        other = parse(with_flags(base, one.flags))[0].model
        found = count_parameters(other, VOCABULARY).total
        if one.name != "head-split":
            assert found == pytest.approx(total, rel=0.002), one.name  # a unit of the sublayer more or less


def test_a_flag_is_replaced_however_it_is_spelled() -> None:
    arguments = ["--seed", "3", "--lr=1", "--persistent_memory_size=7", "--bf16", "--seed_of", "x"]
    assert with_flags(arguments, ["--seed", "4", "--persistent-memory-size", "0"]) == [
        *("--lr=1", "--bf16", "--seed_of", "x", "--seed", "4", "--persistent-memory-size", "0")
    ]


def test_seeds_come_one_after_another() -> None:
    found = cells(versions(SMALL, ("attn-split",), (0,)), check_seeds(2, 5))
    names = ["all-attn-seed5", "attn-split-seed5", "n0-seed5", "all-attn-seed6", "attn-split-seed6", "n0-seed6"]
    assert [one.name for one in found] == names
    assert found[4].flags == ("--variant", "attn-split", "--seed", "6")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: versions(replace(SMALL, num_layers=4), VARIANTS, ()), "--num-layers 4: ff-attn has two thirds"),
        (lambda: versions(replace(SMALL, variant="attn-split"), VARIANTS, ()), "--variant attn-split: versions differ"),
        (
            lambda: versions(replace(SMALL, persistent_memory_size=0), (), ()),
            "--variant with --persistent-memory-size 0",
        ),
        (lambda: sizes_of("0,64,0"), "--sizes 0,64,0: must be different whole numbers"),
        (lambda: sizes_of("0,-4"), "--sizes 0,-4: must be"),
        (lambda: variants_of("attn-split,ff"), "--variants attn-split,ff: ff is none of all-attn"),
        (lambda: check_seeds(10, 2**31 - 5), "--seeds 10: the first is 2147483643"),
    ],
)
def test_what_cannot_be_is_refused(make, words: str) -> None:
    with pytest.raises(UsageError) as error:
        make()
    assert str(error.value).startswith(words)


def test_lists() -> None:
    assert sizes_of("") == () and sizes_of("64, 0,") == (64, 0)
    assert variants_of("ff-attn,attn-split") == ("all-attn", "attn-split", "ff-attn")
