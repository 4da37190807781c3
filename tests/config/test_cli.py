"""The command line: what it accepts, and one line for each thing it does not."""

from pathlib import Path

import pytest

from megatron_allattn.config import RECIPES, DryRunConfig, RunConfig, UsageError, parse, parse_command
from megatron_allattn.config.cli import without_flag


def test_no_flags_give_the_defaults() -> None:
    assert parse([]) == (RunConfig(), frozenset())


def test_flags_reach_their_field_in_either_spelling() -> None:
    text = "--num_layers 3 --lr=1e-4 --tensor-model-parallel-size=2 --bf16 --no_adaptive_span --clip-grad 0"
    text += " --optimizer adagrad --seed=9223372036854775807"
    config, explicit = parse([*text.split(), "--save", "runs/a b"])
    assert config.model.num_layers == 3
    assert config.optimizer.lr == 0.0001
    assert config.optimizer.clip_grad == 0.0
    assert config.optimizer.optimizer == "adagrad"
    assert config.parallel.tensor_model_parallel_size == 2
    assert (config.training.bf16, config.training.fp16) == (True, False)
    assert config.training.seed == 2**63 - 1
    assert config.model.adaptive_span is False
    assert config.checkpoint.save == Path("runs/a b")
    assert explicit == {
        "--num-layers",
        "--lr",
        "--tensor-model-parallel-size",
        "--bf16",
        "--adaptive-span",
        "--clip-grad",
        "--save",
        "--optimizer",
        "--seed",
    }


def test_a_value_may_begin_with_dashes_after_an_equals_sign() -> None:
    assert parse(["--save=--odd"])[0].checkpoint.save == Path("--odd")


def test_flags_override_a_recipe_wherever_it_stands() -> None:
    config, explicit = parse(["--lr", "0.007", "--recipe", "enwik8-small"])
    expected = RECIPES["enwik8-small"]().to_dict()
    expected["optimizer"]["lr"] = 0.007
    assert config.to_dict() == expected
    assert explicit == {"--lr", "--recipe"}


def test_a_recipes_value_is_not_a_flag_without_effect() -> None:
    config, _ = parse(["--recipe", "demo", "--lr-decay-style", "constant"])
    assert (config.optimizer.lr_decay_style, config.optimizer.min_lr) == ("constant", 1e-4)


@pytest.mark.parametrize(
    "launcher", [["--local_rank=3"], ["--local-rank", "3"], ["--local_rank", "0"], ["--deepspeed"]]
)
def test_launchers_flags_are_accepted_and_have_no_effect(launcher: list[str]) -> None:
    assert parse([*launcher, "--seed", "7"]) == parse(["--seed", "7", *launcher]) == parse(["--seed", "7"])


def test_recipe_list_prints_every_name_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--recipe", "list"])
    assert end.value.code == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["recipe", "parameters", "persistent", "tokens/step", "GPUs"]
    assert [line.split()[0] for line in lines] == list(RECIPES)


def test_help_shows_the_recipes_defaults_and_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--recipe", "text8-large", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: pretrain.py")
    for name in ("--persistent-memory-size", "--no-adaptive-span", "--deepspeed-config", "--wandb-project"):
        assert name in text
    assert "(default: 2048)" in " ".join(text.replace("│", " ").split())  # wherever its lines break


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-layer", "3"], "--num-layer: unknown flag; did you mean --num-layers?"),
        (["--hidden", "3"], "--hidden: unknown flag; did you mean --hidden-size?"),
        (["--presistent_memory-size=3"], "--presistent_memory-size: unknown flag; did you mean --persistent-memory-si"),
        (["--no-adaptive-spam"], "--no-adaptive-spam: unknown flag; did you mean --no-adaptive-span?"),
        (["--zzz"], "--zzz: unknown flag; see pretrain.py --help"),
        (["--ffn-hidden-size", "2048"], "--ffn-hidden-size: an all-attention layer has no feed-forward sublayer"),
        (["--train_samples=5"], "--train_samples: a run is counted in steps; use --train-iters"),
        (["--seed", "1", "--seed=1"], "--seed: given twice (first as --seed); give it once"),
        (["--num-layers", "1", "--num_layers", "1"], "--num_layers: given twice (first as --num-layers)"),
        (["--bf16", "--no-bf16"], "--no-bf16: given twice (first as --bf16)"),
        (["--bf16=true"], "--bf16 true: takes no value; write --bf16 alone"),
        (["--bf16", "true"], "argument true: every argument is a flag"),
        (["demo"], "argument demo: every argument is a flag"),
        (["-x"], "argument -x: every argument is a flag"),
        (["--", "--seed"], "argument --: every argument is a flag"),
        ([""], "argument '': every argument is a flag"),
        (["--save"], "--save: needs a value; write --save VALUE"),
        (["--save="], "--save: needs a value"),
        (["--save", ""], "--save: needs a value"),
        (["--save", "--seed", "1"], "--save: needs a value"),
        (["--lr", "abc"], "--lr abc: must be a number; the default is 0.001"),
        (["--vocab-size", "few"], "--vocab-size few: must be an integer; correct it or leave the flag out"),
        (["--seed", "1", "--num-layers", "3.5"], "--num-layers 3.5: must be an integer; the default is 4"),
        (["--num-layers", "9" * 5000], "--num-layers 9999999999"),
        (["--num-layers", "9" * 30], "--num-layers 999999999999999999999999999999: must be at least 1 and at most"),
        (["--micro-batch-size", "two"], "--micro-batch-size two: must be an integer"),
        (["--tokenizer-type", "bpe"], "--tokenizer-type bpe: must be one of byte, char, word, sentencepiece, null"),
        (["--lr", "nan"], "--lr nan: must be a finite number"),
        (["--lr", "-1"], "--lr -1.0: must be above 0"),
        (["--optimizer", "adagrad", "--adam-beta1", "0.5"], "--adam-beta1 0.5: has no effect with --optimizer adagrad"),
        (["--no-adaptive-span", "--span-loss", "1e-6"], "--span-loss 1e-06: has no effect with --no-adaptive-span"),
        (["--save-interval", "5"], "--save-interval 5: has no effect without --save"),
        (["--bf16", "--fp16"], "--bf16 --fp16: a run has one precision"),
        (
            ["--pipeline-model-parallel-size", "2", "--zero-stage", "2"],
            "--pipeline-model-parallel-size 2: ZeRO 2 cuts gradients, which a pipeline keeps whole while micro-batches "
            "pass; give --zero-stage 1 (or 0), or leave the pipeline and keep the stage",
        ),
        (
            ["--pipeline-model-parallel-size", "3", "--num-layers", "2"],
            "--pipeline-model-parallel-size 3: every stage needs a layer, and --num-layers is 2",
        ),
        (["--pipeline-layers", "2,2"], "--pipeline-layers 2,2: without a pipeline (--pipeline-model-parallel-size 1)"),
        (
            ["--pipeline-model-parallel-size", "2", "--pipeline-layers", "1,2", "--num-layers", "4"],
            "--pipeline-layers 1,2: together they are 3 layers, --num-layers is 4",
        ),
        (["--sequence-parallel"], "--sequence-parallel True: has no effect with --tensor-model-parallel-size 1"),
        (["--shard-caches"], "--shard-caches True: has no effect with --tensor-model-parallel-size 1"),
        (["--balance-heads"], "--balance-heads True: has no effect with --tensor-model-parallel-size 1"),
        (["--pipeline-partition", "cost"], "--pipeline-partition cost: has no effect without a pipeline"),
        (
            ["--recipe", "enwik8smal"],
            f"--recipe enwik8smal: unknown recipe; did you mean enwik8-small? --recipe list shows all {len(RECIPES)}",
        ),
        (
            ["--recipe", "list", "--no-adaptive-span"],
            "--no-adaptive-span: has no effect with --recipe list, which only",
        ),
        (
            ["--lr", "3", "--recipe=list"],
            "--lr: has no effect with --recipe list, which only prints; give one of the two",
        ),
        (["--recipe", "None"], "--recipe None: unknown recipe; --recipe list shows all "),
        (["--local_rank"], "--local_rank: needs a value"),
        (["--deepspeed", "zero.json"], "argument zero.json: every argument is a flag"),
    ],
)
def test_mistakes_are_one_line_naming_the_flag(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(argv)
    assert str(caught.value).startswith(message)
    assert str(caught.value).isprintable()


def test_the_first_unusable_value_is_named_whichever_flags_surround_it(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"^--adam-eps tiny: must be a number; the default is 1e-08$"):
        parse(["--recipe", "demo", "--seed", "3", "--adam-eps", "tiny", "--train-iters", "x"])
    assert capfd.readouterr() == ("", "")


def test_flags_of_a_dry_run_are_no_part_of_the_run() -> None:
    flags = ["--recipe", "demo", "--seed", "7"]
    command = parse_command([*flags, "--dry-run", "--world-size=8", "--gpu", "h100-80"])
    assert (command.run, command.explicit) == parse(flags)
    assert command.dry_run == DryRunConfig(dry_run=True, world_size=8, gpu="h100-80")
    assert "world_size" not in str(command.run.to_dict())
    assert parse_command(flags).dry_run is None
    with pytest.raises(UsageError, match=r"^--dry-run: only pretrain\.py itself checks a job; leave it out here$"):
        parse(["--dry-run", "--world-size", "8"])


def test_without_flag() -> None:
    words = ["--load", "a", "--bf16", "--load=b", "--load_fallback", "--save", "--load x"]
    assert without_flag(words, "load") == ["--bf16", "--load_fallback", "--save", "--load x"]
    assert without_flag(words, "load-fallback") == ["--load", "a", "--bf16", "--load=b", "--load x"]
