"""A run's weights as a folder for Hugging Face transformers, and back.

OUT/config.json, generation_config.json          what transformers reads first
OUT/configuration_allattn.py, modeling_allattn.py  two files of this package that need nothing else of it
OUT/tokenization_allattn.py, …                   the tokenizer (hf/tokenizer_files.py), unless tokens are bare numbers
OUT/README.md                                    the model card (hf/model_card.py)
OUT/model.safetensors                            the weights by our names; from 4 GiB on in several files with an index
OUT/megatron_allattn.json                        the `Description`; without it (a model that was trained on there)
                                                 the way back takes the run from flags

AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True), and AutoTokenizer alike
"""

import re
import shutil
from dataclasses import asdict, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_allattn.checkpoint.conversion import SavedRun, Tensors, write_run
from megatron_allattn.checkpoint.described import Description
from megatron_allattn.checkpoint.files import made_whole, storage_errors, write_json_atomic, write_text_atomic
from megatron_allattn.checkpoint.progress import Progress
from megatron_allattn.checkpoint.save import check_weights
from megatron_allattn.checkpoint.single_file import check_copy
from megatron_allattn.checkpoint.tensors import TensorReader, cut, write_tensors
from megatron_allattn.config import ModelConfig, RunConfig, UsageError, usage_error
from megatron_allattn.config.disk import sync_file
from megatron_allattn.config.json_files import MAX_STATE_BYTES, read_json_object
from megatron_allattn.data.tokenizers import NullTokenizer, tokenizer_from_json
from megatron_allattn.engine.caches import CacheSlot
from megatron_allattn.hf import tokenizer_files
from megatron_allattn.hf.model_card import Told, model_card
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.network import Network
from megatron_allattn.model.span import layer_windows
from megatron_allattn.parallel.groups import ALONE

FORMAT = "huggingface"
DESCRIPTION, SINGLE, INDEX = "megatron_allattn.json", "model.safetensors", "model.safetensors.index.json"
CODE = ("configuration_allattn.py", "modeling_allattn.py")
MAX_BYTES = 4 * 2**30
OLDEST = "5.20"  # of transformers, with which the files are tested; configuration_allattn.py says the same
TRIED, TRIED_NUMBERS = 512, 2**24
"""Tokens for which logits are compared: more than heads of most models look back, so that masks are seen; but no more
log-probabilities than these, which are 64 MiB."""

TOLERANCE = 1e-6  # of the largest log-probability
_OURS = ("span_loss",)  # of no meaning without training
_GIVE = "give a folder that was made here, or one that transformers has saved from it"


def write(saved: SavedRun, output: Path, *, compare_logits: bool = True, told: Told | None = None) -> str:
    """Make the folder, one tensor in memory at a time; a line on what was compared. Raises UsageError, StorageError.

    compare_logits: also run it under transformers, if that is installed, and before that the network here; each then
    takes the memory of all weights, and the log-probabilities of up to `TRIED` tokens some copies of 64 MiB. told: what
    the model card cannot know of itself.
    """
    tokenizer = tokenizer_from_json(saved.state["tokenizer"], str(saved.step_folder / "state.json"))
    with made_whole(output) as temporary:
        with storage_errors(temporary, 0):
            temporary.mkdir()
            for name in CODE:
                _copy_code(name, temporary)
            if not isinstance(tokenizer, NullTokenizer):
                _copy_code(tokenizer_files.CODE, temporary)
                tokenizer_files.write(tokenizer, temporary)
        write_json_atomic(temporary / "config.json", _config(saved.run.model, saved.state["vocab_size"]))
        write_json_atomic(temporary / "generation_config.json", {"do_sample": True})
        write_json_atomic(temporary / DESCRIPTION, Description.of(saved).to_dict())
        write_text_atomic(temporary / "README.md", model_card(saved, tokenizer, told or Told(), OLDEST))
        _write_weights(saved, temporary)
        check_copy(saved.weights, _reader(temporary))
        if not compare_logits:
            return "logits were not compared (--no-compare-logits), only the tensors were"
        return _compare_logits(saved, temporary)


def _copy_code(name: str, folder: Path) -> None:
    shutil.copyfile(Path(__file__).with_name(name), folder / name)
    sync_file(folder / name)


def _config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """config.json."""
    own = {name: value for name, value in asdict(model).items() if name not in _OURS}
    own["adaptive_cutoffs"] = list(model.cutoffs) or None
    return {
        "architectures": ["AllAttentionForCausalLM"],
        "model_type": "all_attention",
        "auto_map": {
            "AutoConfig": "configuration_allattn.AllAttentionConfig",
            "AutoModelForCausalLM": "modeling_allattn.AllAttentionForCausalLM",
        },
        "dtype": "float32",
        "transformers_version": OLDEST,
        "vocab_size": vocab_size,
        **own,
    }


def _write_weights(saved: SavedRun, folder: Path) -> None:
    infos = list(saved.weights.infos.values())
    parts = cut(infos, lambda info: info.num_bytes, MAX_BYTES)
    where: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        name = SINGLE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        write_tensors(folder / name, part, (saved.weights.read(info.name) for info in part), {"format": "pt"})
        where |= {info.name: name for info in part}
    if len(parts) > 1:
        total = sum(info.num_bytes for info in infos)
        write_json_atomic(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _reader(folder: Path) -> TensorReader:
    """The weights of such a folder. Raises UsageError: there are none."""
    if (folder / SINGLE).is_file():
        return TensorReader.of_files(folder / SINGLE)
    index = _json(folder / INDEX)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(one, str) and Path(one).name == one for one in names.values()):
        raise usage_error("file", folder / INDEX, "has no weight_map of files beside it", _GIVE)
    return TensorReader.of_files(*(folder / name for name in sorted(set(names.values()))))


def _json(path: Path) -> dict[str, Any]:
    return read_json_object("file", path, _GIVE, MAX_STATE_BYTES)


def _compare_logits(saved: SavedRun, folder: Path) -> str:
    """Hold the logits of both against each other, where transformers is installed. Raises UsageError: they differ."""
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        return "logits were not compared, since transformers is not installed: only the tensors were"
    if _release(installed) < _release(OLDEST):
        rule = f"the files are for transformers {OLDEST} and newer"
        raise usage_error("transformers", installed, rule, f"pip install 'transformers>={OLDEST}', or none")
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  (optional)
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()
    ids = tried(saved)
    expected = log_probabilities(saved, ids)  # before the other model is there: one of the two in memory at a time
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        found = theirs(ids).logits.double().log_softmax(-1)  # those of adaptive softmax are normalized already
    apart, largest = ((values.abs().max().item()) for values in (found - expected, expected))
    if not apart <= TOLERANCE * largest:
        rule = (
            f"its log-probabilities differ by {apart:.1e} from those here, of up to {largest:.1f}; {TOLERANCE:.0e} of"
        )
        rule += " that is rounding"
        raise UsageError(f"transformers {installed}: {rule}; nothing is kept")
    return f"log-probabilities under transformers {installed} differ by {apart:.1e} at most"


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; what comes before a release (5.20rc1, 5.21.dev0) counts as it."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def tried(saved: SavedRun) -> Tensor:
    """The text of which logits are compared: ids [1, M] in order, from 0."""
    vocab_size = saved.state["vocab_size"]
    return torch.arange(min(TRIED, max(TRIED_NUMBERS // vocab_size, 1)))[None] % vocab_size


def log_probabilities(saved: SavedRun, ids: Tensor) -> Tensor:
    """Of the network of a checkpoint, after every token of a text [1, M]: float32 [1, M, V]."""
    model, vocab_size = saved.run.model, saved.state["vocab_size"]
    network = Network(model, vocab_size, ALONE, FusedOps("torch")).requires_grad_(False)
    for logical, parameter in network.logical_parameters():
        parameter.copy_(saved.weights.read(logical.name))
    z = [span.flatten().tolist() for span in network.span_parameters()]
    sizes = (model.max_attention_span, model.span_ramp)
    windows = layer_windows(z, *sizes) if z else (model.max_attention_span,) * model.num_layers
    slot = CacheSlot(network.part.layers, 1, model.hidden_size, torch.float32, torch.device("cpu"))
    return network(ids, BlockContext(windows, slot, dropout_keys=None))


def read(source: Path, output: Path, given: RunConfig) -> Description:
    """Make the run folder `output` of such a folder: the weights, as step 0. Raises UsageError, StorageError.

    given: the run, but for its model, where the folder does not say it.
    """
    weights, config = _reader(source), _json(source / "config.json")
    model, vocab_size = _model(source, config, given.model), config.get("vocab_size")
    if type(vocab_size) is not int or vocab_size < 1:
        raise usage_error("file", source / "config.json", f"has vocab_size {vocab_size!r}", _GIVE)
    found = _description(source, replace(given, model=model), vocab_size)
    check_weights(source, weights, model, vocab_size)
    state = found.state(Progress(), {"format": FORMAT, "step": found.step})
    write_run(source, output, found.run, 0, state, Tensors(list(weights.infos.values()), weights.read), Tensors.of({}))
    return found


def _description(source: Path, run: RunConfig, vocab_size: int) -> Description:
    """What is known beside the weights: what was written here, if it is of this model, else the run and the tokenizer.

    Raises UsageError: the tokenizer does not fit the model, or is another than the model was trained with.
    """
    tokenizer = tokenizer_files.read(source)
    path = source / tokenizer_files.DESCRIPTION
    if tokenizer is not None and tokenizer.vocab_size != vocab_size:
        raise usage_error("file", path, f"has {tokenizer.vocab_size} tokens, the model {vocab_size}", _GIVE)
    known = tokenizer or NullTokenizer(vocab_size)
    found = Description(0, run, vocab_size, known.to_json(), known.fingerprint, Progress())
    if not (source / DESCRIPTION).is_file():
        return found
    told = Description.from_dict(source / DESCRIPTION, _json(source / DESCRIPTION))
    if (replace(told.run.model, span_loss=run.model.span_loss), told.vocab_size) != (run.model, vocab_size):
        return found
    if tokenizer is not None and tokenizer.fingerprint != told.tokenizer_sha256:
        raise usage_error("file", path, f"is another tokenizer than that of {DESCRIPTION} beside it", _GIVE)
    return told


def _model(source: Path, config: dict[str, Any], given: ModelConfig) -> ModelConfig:
    """The model of a config.json. Raises UsageError."""
    if config.get("model_type") != "all_attention":
        rule = f"is of a model of type {config.get('model_type')!r}, not all_attention"
        raise usage_error("file", source / "config.json", rule, _GIVE)
    values = asdict(given)
    for field in fields(ModelConfig):
        if field.name in config and field.name not in _OURS:
            values[field.name] = config[field.name]
    if isinstance(values["adaptive_cutoffs"], list):
        values["adaptive_cutoffs"] = ",".join(map(str, values["adaptive_cutoffs"]))
    try:
        return ModelConfig(**values)
    except UsageError as error:
        raise UsageError(f"file {source / 'config.json'}: {error}") from error
