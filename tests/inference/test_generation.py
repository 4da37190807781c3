"""What tools/generate.py prints of a checkpoint, for every kind of tokenizer, and the prompts that it refuses."""

import io
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_allattn.config import ParallelConfig, UsageError
from megatron_allattn.data.corpora import files_corpus
from megatron_allattn.data.prepare import Preparation, prepare
from megatron_allattn.data.tokenizers import Learner, SubwordLearner, Tokenizer, WordLearner, tokenizer_from_file
from megatron_allattn.engine.interface import find_spans, local_spans
from megatron_allattn.inference.decoding import continuations
from megatron_allattn.inference.generation import GenerationOptions, generate
from megatron_allattn.inference.model import load_model
from megatron_allattn.inference.reader import Reader
from megatron_allattn.inference.sampling import Sampling, greedy
from megatron_allattn.parallel.groups import single_process_groups
from tests.support.commands import english
from tests.support.runs import untrained_run

CPU = torch.device("cpu")
TEXT = "the cat café\n" + "".join(f"{english(20, seed)}\n" for seed in range(100))
TOKENIZERS: dict[str, str | Learner] = {
    "byte": "byte",
    "char": "char",
    "word": WordLearner(min_frequency=2),
    "sentencepiece": SubwordLearner(vocab_size=290),
}
PROMPT = "the of\nand "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of an untrained network for every tokenizer, under its name."""
    found = tmp_path_factory.mktemp("generation")
    (found / "text.txt").write_text(TEXT)
    for name, tokenizer in TOKENIZERS.items():
        prepare(
            Preparation(corpus=files_corpus([found / "text.txt"]), prefix=found / f"{name}_data", tokenizer=tokenizer)
        )
        untrained_run(found / name, found / f"{name}_data")
    return found


def options(load: Path, **changes) -> GenerationOptions:
    given = {
        "load": load,
        "prompt": PROMPT.encode(),
        "num_tokens": 12,
        "num_samples": 1,
        "sampling": None,
        "seed": 1,
        "parallel": ParallelConfig(),
        "precision": "float32",
    }
    return GenerationOptions(**{**given, **changes})


def tokenizer_of(load: Path) -> Tokenizer:
    return tokenizer_from_file(load.parent / f"{load.name}_data.json")


def printed(options: GenerationOptions, capsys: pytest.CaptureFixture[str]) -> tuple[list[list[int]], str]:
    """The tokens of the samples, and what was printed."""
    found = generate(options, single_process_groups(), CPU)
    return found, capsys.readouterr().out


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_prompt_and_what_follows(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    [tokens], text = printed(options(folder / name), capsys)
    model = load_model(folder / name, single_process_groups(), CPU, torch.float32)
    tokenizer = tokenizer_of(folder / name)
    prompt = tokenizer.encode(PROMPT.encode()).tolist()
    reader = Reader(model.network, find_spans(model.network, local_spans(model.network)), 1)
    steps = continuations(reader, prompt, greedy)
    assert tokens == [next(steps)[0] for _ in range(12)]
    decoded = tokenizer.decode(prompt + tokens)
    assert text == (decoded if isinstance(decoded, str) else decoded.decode(errors="replace")) + "\n"


def test_several_samples(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampled = options(folder / "char", sampling=Sampling(top_k=5), num_samples=3)
    samples, text = printed(sampled, capsys)
    tokenizer = tokenizer_of(folder / "char")
    parts = [f"--- sample {number} of 3 ---\n{PROMPT}{tokenizer.decode(samples[number - 1])}\n" for number in (1, 2, 3)]
    assert text == "".join(parts)
    assert len(set(map(tuple, samples))) == 3
    again, alone = printed(sampled, capsys)[0], printed(replace(sampled, num_samples=1), capsys)[0]
    assert again == samples and alone == samples[:1]
    assert printed(replace(sampled, seed=2), capsys)[0] != samples


def test_a_prompt_from_a_file_or_standard_input(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = printed(options(folder / "char"), capsys)
    file = folder / "prompt.txt"
    file.write_text(PROMPT)
    assert printed(options(folder / "char", prompt=file), capsys) == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    assert printed(options(folder / "char", prompt=None), capsys) == expected


def test_words_that_the_vocabulary_lacks_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate(options(folder / "word", prompt=b"the zebra of the zoo", num_tokens=1), single_process_groups(), CPU)
    shown = capsys.readouterr()
    assert shown.out.startswith("the <unk> of the <unk>")
    assert shown.err == "note: 2 of the prompt's 5 tokens are <unk>: the vocabulary lacks what they stand for\n"


@pytest.mark.parametrize(
    ("name", "prompt", "line"),
    [
        (
            "char",
            "the ß",
            r"text of --prompt: character 'ß' \(U\+00DF .*\) at byte offset 4 is not in the vocabulary of \d+ chars; "
            "leave it out of the prompt",
        ),
        ("char", "", "--prompt '': has no token of the char vocabulary; give at least one token to go on from"),
        ("word", "  ", "--prompt ' ': has no token of the word vocabulary"),
        ("char", b"the \xff", r"text of --prompt: byte 4 \(0xff\) is not valid UTF-8; give UTF-8 text"),
        ("sentencepiece", b"\xc3", r"text of --prompt: byte 0 \(0xc3\) is not valid UTF-8"),
    ],
)
def test_a_prompt_that_is_not_of_the_vocabulary_is_refused(
    folder: Path, name: str, prompt: str | bytes, line: str
) -> None:
    given = prompt.encode() if isinstance(prompt, str) else prompt
    with pytest.raises(UsageError, match=f"^{line}"):
        generate(options(folder / name, prompt=given), single_process_groups(), CPU)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("none", r"--prompt-file \S+none: cannot be read \(No such file or directory\); give a text file, or pipe the"),
        ("pipe", r"--prompt-file \S+pipe: is not a regular file; give a text file, or pipe the text in"),
        ("", r"--prompt-file \S+: is not a regular file; give a text file"),
        (None, r"--prompt \(left out\): standard input has no text; give --prompt or --prompt-file"),
    ],
)
def test_what_is_no_prompt_is_told_before_the_model_is_loaded(
    tmp_path: Path, name: str | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    os.mkfifo(tmp_path / "pipe")  # that nobody writes to: reading it would wait for ever
    prompt = None if name is None else tmp_path / name
    with pytest.raises(UsageError, match=f"^{line}"):
        generate(options(Path("no run is here"), prompt=prompt), single_process_groups(), CPU)


def test_a_checkpoint_that_has_run_away_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = load_model

    def broken(*args):
        model = load(*args)
        model.network.layers[1].attention.query.data[0, 0] = float("nan")
        return model

    monkeypatch.setattr("megatron_allattn.inference.generation.load_model", broken)
    with pytest.raises(UsageError, match=r"step_00000007: layers.1.query.weight holds numbers that are not finite"):
        generate(options(folder / "char"), single_process_groups(), CPU)


def test_a_newer_step_that_is_damaged_is_not_passed_over(folder: Path, tmp_path: Path) -> None:
    untrained_run(tmp_path, folder / "byte_data", steps=(3, 7))
    file = tmp_path / "checkpoints/step_00000007/weights-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"step_00000007: weights-.*; name an older step folder to take that$"):
        generate(options(tmp_path), single_process_groups(), CPU)
    assert len(generate(options(tmp_path / "checkpoints/step_00000003"), single_process_groups(), CPU)) == 1
