"""From the command line to a `RunConfig`.

tyro builds the flags from the dataclasses: one flag per field, without the section's name, converted to the field's
type. In front of it stands a reading of the raw arguments that tyro does not do: an unknown flag gets the nearest known
one, nothing may be abbreviated or given twice, launchers' own flags are taken out, and every error is one line. tyro
is imported only when there is something to convert, so that importing this module costs nothing.
"""

import contextlib
import dataclasses
import difflib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_allattn.config.checks import check_text, default_of, describe_type, field_types
from megatron_allattn.config.dry_run import DryRunConfig
from megatron_allattn.config.ds_config import read_zero_stage
from megatron_allattn.config.errors import UsageError, flag, usage_error
from megatron_allattn.config.recipes import RECIPES, recipe_table
from megatron_allattn.config.rules import check_run
from megatron_allattn.config.run import SECTIONS, RunConfig

_PROGRAM = "pretrain.py"

_LAUNCHER_SWITCHES = frozenset({"deepspeed"})
_LAUNCHER_VALUES = frozenset({"local-rank"})
"""What launchers add to a program's arguments; rank and device are found through the environment."""

_REFUSED = {
    "ffn-hidden-size": "an all-attention layer has no feed-forward sublayer, its persistent vectors take that place; "
    "use --persistent-memory-size (or --feed-forward-size with --variant transformer)",
    "dropout": "use --attention-dropout and --embedding-dropout",
    "hidden-dropout": "there is no dropout between sublayers; use --attention-dropout and --embedding-dropout",
    "kv-channels": "a head is as wide as --hidden-size / --num-attention-heads",
    "max-position-embeddings": "positions are relative; use --max-attention-span",
    "position-embedding-type": "positions are relative to the query; see --position-values",
    "normalization": "the model has LayerNorm after each sublayer, as in the paper",
    "init-method-std": "weights start as in the paper",
    "train-samples": "a run is counted in steps; use --train-iters",
    "lr-warmup-fraction": "the warm-up is counted in steps; use --lr-warmup-iters",
    "lr-warmup-samples": "the warm-up is counted in steps; use --lr-warmup-iters",
    "use-distributed-optimizer": "the optimizer's state is sharded by DeepSpeed; use --zero-stage 1",
    "distributed-backend": "it follows the device: nccl on GPUs, gloo on CPUs",
    "vocab-file": "use --tokenizer-model, or data from tools/prepare_data.py, which brings its vocabulary",
    "merge-file": "use data from tools/prepare_data.py, which brings its tokenizer",
    "num-gpus": "it belongs to the deepspeed launcher, before the program's name",
    "nproc-per-node": "it belongs to torchrun, before the program's name",
}
"""Flags of Megatron and of launchers that have no meaning here, with the reason and what to use instead."""


@dataclass(frozen=True, kw_only=True)
class _Known:
    """A flag as the dataclasses declare it."""

    section: type
    field: str
    switch: bool
    """Takes no value: --bf16, --no-bf16."""


@dataclass(frozen=True, kw_only=True)
class _Given:
    """A flag as the user gave it."""

    known: _Known
    name: str
    """Without the dashes in front, spelled with dashes."""

    value: str | None

    @property
    def arguments(self) -> list[str]:
        """The flag in the one form that leaves no doubt which value is its own."""
        return [f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"]


@dataclass(frozen=True, kw_only=True)
class _CommandLine(RunConfig):
    """Pretrain an all-attention language model.

    python pretrain.py --recipe demo --save runs/demo

    python pretrain.py --data-path data/books --num-layers 6 --save runs/books --load runs/books

    The same under deepspeed, torchrun, mpirun and srun. Flags may be written with - or _. The launchers' --deepspeed
    and --local_rank are accepted and have no effect.
    """

    rehearsal: DryRunConfig = field(default_factory=DryRunConfig)
    """A check of the whole job instead of training."""

    @property
    def run(self) -> RunConfig:
        return RunConfig(**{one.name: getattr(self, one.name) for one in dataclasses.fields(RunConfig)})


@dataclass(frozen=True)
class Command:
    """What the command line asks for: a run, the flags that were given for it (see `parse`), and with `--dry-run` the
    job whose processes are checked instead of training it, else None."""

    run: RunConfig
    explicit: frozenset[str]
    dry_run: DryRunConfig | None


def parse(argv: Sequence[str]) -> tuple[RunConfig, frozenset[str]]:
    """The same for a program that trains or describes a run: the run and the flags that were given.

    Raises:
        UsageError: the first mistake, in one line; `--dry-run` is one.
    """
    command = parse_command(argv)
    if command.dry_run is not None:
        raise UsageError(f"--dry-run: only {_PROGRAM} itself checks a job; leave it out here")
    return command.run, command.explicit


def parse_command(argv: Sequence[str]) -> Command:
    """Reads the command line (without the program's name).

    `--help` and `--recipe list` print and end the program with exit code 0.

    Returns:
        The checked configuration, and the flags that were given for it, in their positive spelling with dashes: who
        finds out later that one of them has no effect, such as --split for data that is already split, can refuse it.

    Raises:
        UsageError: the first mistake, in one line.
    """
    for word in argv:
        check_text(word)
    given, wants_help = _read(argv)
    recipe = _recipe(given)
    default = _CommandLine(**{one.name: getattr(recipe, one.name) for one in dataclasses.fields(recipe)})
    if wants_help:
        _convert(["--help"], default)
    everything = _convert_all([one for one in given if one.known.field != "recipe"], default)
    config, rehearsal = everything.run, everything.rehearsal
    explicit = frozenset(flag(one.known.field) for one in given if one.known.section is not DryRunConfig)
    check_run(config, explicit)
    return Command(_with_zero_stage(config, explicit), explicit, rehearsal if rehearsal.dry_run else None)


def without_flag(arguments: Sequence[str], name: str) -> list[str]:
    """The arguments without the flag of this name and its value, in any spelling (`--load X`, `--load=X`)."""
    kept, skip = [], False
    for word in arguments:
        if skip:
            skip = False
            continue
        spelled, equals, _ = word.partition("=")
        if spelled.lstrip("-").replace("_", "-") == name and spelled.startswith("--"):
            skip = not equals
            continue
        kept.append(word)
    return kept


def _known_flags() -> dict[str, _Known]:
    """Every flag by its name without the dashes in front."""
    flags: dict[str, _Known] = {"recipe": _Known(section=RunConfig, field="recipe", switch=False)}
    for section in (*SECTIONS.values(), DryRunConfig):
        for one, accepted in field_types(section).items():
            switch = accepted == (bool,)
            name = one.replace("_", "-")
            flags[name] = _Known(section=section, field=one, switch=switch)
            if switch:
                flags[f"no-{name}"] = flags[name]
    return flags


def _read(argv: Sequence[str]) -> tuple[list[_Given], bool]:
    """Splits the arguments into flags with their values; says whether --help is among them."""
    known = _known_flags()
    given: dict[str, _Given] = {}
    wants_help = False
    rest = list(argv)
    while rest:
        spelled, equals, inline = rest.pop(0).partition("=")
        if (not spelled.startswith("--") and spelled != "-h") or spelled == "--":
            raise usage_error(
                "argument", spelled + equals + inline, "every argument is a flag", f"see {_PROGRAM} --help"
            )
        name = spelled.lstrip("-").replace("_", "-")
        if name in ("h", "help"):
            wants_help = True
            continue
        declared = known.get(name)
        switch = name in _LAUNCHER_SWITCHES or (declared is not None and declared.switch)
        if declared is None and name not in _LAUNCHER_SWITCHES | _LAUNCHER_VALUES:
            raise _unknown(spelled, name, list(known))
        value = _value_of(spelled, inline if equals else None, switch, rest)
        if declared is None:
            continue
        if declared.field in given:
            first = f"--{given[declared.field].name}"
            raise UsageError(f"{spelled}: given twice (first as {first}); give it once")
        given[declared.field] = _Given(known=declared, name=name, value=value)
    return list(given.values()), wants_help


def _value_of(spelled: str, inline: str | None, switch: bool, rest: list[str]) -> str | None:
    """The value of a flag: after its =, or the next argument, which is then taken from `rest`."""
    if switch:
        if inline is not None:
            raise usage_error(spelled, inline, "takes no value", f"write {spelled} alone")
        return None
    value = inline
    if value is None and rest and not rest[0].startswith("--") and rest[0] != "-h":
        value = rest.pop(0)
    if not value:
        raise UsageError(f"{spelled}: needs a value; write {spelled} VALUE")
    return value


def _unknown(spelled: str, name: str, known: list[str]) -> UsageError:
    """The error for a flag that does not exist."""
    if name in _REFUSED:
        return UsageError(f"{spelled}: {_REFUSED[name]}")
    begins = [candidate for candidate in known if name and candidate.startswith(name)]
    near = begins[:1] or difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean --{near[0]}?" if near else f"see {_PROGRAM} --help"
    return UsageError(f"{spelled}: unknown flag; {hint}")


def _recipe(given: Sequence[_Given]) -> RunConfig:
    """The defaults that the other flags override."""
    name = next((one.value for one in given if one.known.field == "recipe"), None)
    if name is None:
        return RunConfig()
    if name == "list":
        if other := next((one for one in given if one.known.field != "recipe"), None):
            raise UsageError(
                f"--{other.name}: has no effect with --recipe list, which only prints; give one of the two"
            )
        print(recipe_table())
        raise SystemExit(0)
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        fix = f"did you mean {near[0]}? " if near else ""
        raise usage_error("--recipe", name, "unknown recipe", f"{fix}--recipe list shows all {len(RECIPES)}")
    return RECIPES[name]()


def _convert(arguments: list[str], default: _CommandLine) -> _CommandLine:
    """Lets tyro turn arguments into a configuration; it raises SystemExit (and prints nothing) if it cannot."""
    import tyro  # noqa: PLC0415

    with contextlib.redirect_stderr(io.StringIO()):
        return tyro.cli(
            _CommandLine, prog=_PROGRAM, args=arguments, default=default, config=(tyro.conf.OmitArgPrefixes,)
        )


def _convert_all(given: Sequence[_Given], default: _CommandLine) -> _CommandLine:
    """The configuration with every given flag.

    Raises:
        UsageError: what a section said about its values, or the first flag whose value is not of its type.
    """
    try:
        return _convert([argument for one in given for argument in one.arguments], default)
    except SystemExit as failure:
        refusal = _usage_error_behind(failure)
    if refusal is not None:
        raise refusal
    for one in given:
        try:
            _convert(one.arguments, default)
        except SystemExit as failure:
            if _usage_error_behind(failure) is None:
                expected = describe_type(one.known.section, one.known.field)
                fix = default_of(one.known.section, one.known.field)
                raise usage_error(f"--{one.name}", one.value, f"must be {expected}", fix) from None
    raise AssertionError("tyro refuses these flags together but none of them alone")


def _usage_error_behind(failure: BaseException) -> UsageError | None:
    """The error of a section's own check that tyro turned into an exit, if that was the reason."""
    cause: BaseException | None = failure
    while cause is not None and not isinstance(cause, UsageError):
        cause = cause.__context__
    return cause


def _with_zero_stage(config: RunConfig, explicit: frozenset[str]) -> RunConfig:
    """The configuration with the stage that a DeepSpeed JSON of the user's own asks for."""
    file, stage = config.parallel.deepspeed_config, config.parallel.zero_stage
    if file is None:
        return config
    stage_of_file = read_zero_stage(file)
    if "--zero-stage" in explicit and stage != stage_of_file:
        raise usage_error(
            "--zero-stage", stage, f"{file} says stage {stage_of_file}", "give one of the two, or make them equal"
        )
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, zero_stage=stage_of_file))
