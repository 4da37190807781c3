"""What tools/generate.py prints of a checkpoint, for every kind of tokenizer, and the prompts that it refuses."""

import io
import json
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
from megatron_allattn.inference.generation import GenerationOptions, generate
from megatron_allattn.inference.model import load_model
from megatron_allattn.inference.prompts import PromptSource
from megatron_allattn.inference.reader import Reader
from megatron_allattn.inference.sampling import Sampling
from megatron_allattn.kernels import eager
from megatron_allattn.parallel.groups import single_process_groups
from tests.support.commands import english
from tests.support.pool import WorkerPools
from tests.support.runs import SMALL, untrained_run
from tests.support.trajectories import groups_of

CPU = torch.device("cpu")
TEXT = "the cat café\n" + "".join(f"{english(20, seed)}\n" for seed in range(100))
TOKENIZERS: dict[str, str | Learner] = {
    "byte": "byte",
    "char": "char",
    "word": WordLearner(min_frequency=2),
    "sentencepiece": SubwordLearner(vocab_size=290),
}
PROMPT = "the of\nand "
SEVERAL = ("the", PROMPT, " ".join(["and the of"] * 40))  # the last is longer than the caches


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
    (found / "adaptive_data.json").symlink_to("word_data.json")
    adaptive = replace(SMALL, adaptive_cutoffs="5,9,20", adaptive_div_value=2, empty_cache="mask")
    untrained_run(found / "adaptive", found / "word_data", adaptive)
    return found


def texts(*prompts: str | bytes) -> PromptSource:
    return PromptSource(texts=tuple(text.encode() if isinstance(text, str) else text for text in prompts))


def options(load: Path, **changes) -> GenerationOptions:
    given = {
        "load": load,
        "prompts": texts(PROMPT),
        "num_tokens": 12,
        "num_samples": 1,
        "batch_size": 16,
        "stops": (),
        "json": False,
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
    return [answer.tokens for answer in found], capsys.readouterr().out


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    decoded = tokenizer.decode(tokens)
    return decoded if isinstance(decoded, str) else decoded.decode(errors="replace")


@pytest.mark.parametrize("name", [*TOKENIZERS, "adaptive"])
def test_prompts_and_what_follows(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Against the likeliest tokens of one pass without a cache, through the eager backend."""
    given = options(folder / name, prompts=texts(*SEVERAL), precision="float64")
    found, text = printed(given, capsys)
    network = load_model(folder / name, single_process_groups(), CPU, torch.float64).network
    tokenizer, expected = tokenizer_of(folder / name), ""
    for number, (prompt, tokens) in enumerate(zip(SEVERAL, found, strict=True), start=1):
        ids = tokenizer.encode(prompt.encode()).tolist()
        reader = Reader(network, find_spans(network, local_spans(network)), 1, eager.attend)
        likeliest = reader(torch.tensor([ids + tokens]))[0].argmax(dim=-1).tolist()
        assert tokens == likeliest[len(ids) - 1 : -1]
        expected += f"--- prompt {number} of 3 ---\n{text_of(tokenizer, ids + tokens)}\n"
    assert text == expected
    assert printed(replace(given, prompts=texts(PROMPT)), capsys)[0] == found[1:2]


def _tokens(rank: int, size: int, given: GenerationOptions) -> list[list[int]]:
    return [answer.tokens for answer in generate(given, groups_of(size, 1), CPU)]


@pytest.mark.parametrize("name", ["byte", "adaptive"])
def test_two_ranks_write_the_same(folder: Path, pools: WorkerPools, name: str) -> None:
    given = options(folder / name, prompts=texts(*SEVERAL), sampling=Sampling(), num_samples=2, precision="float64")
    expected = [answer.tokens for answer in generate(given, single_process_groups(), CPU)]
    assert pools(2).run(_tokens, given) == [expected] * 2


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
    assert printed(options(folder / "char", prompts=PromptSource(file=file)), capsys) == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    assert printed(options(folder / "char", prompts=PromptSource()), capsys) == expected


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_samples_do_not_depend_on_the_batch(folder: Path, precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = options(
        folder / "char", prompts=texts(*SEVERAL), sampling=Sampling(), num_samples=3, num_tokens=40, precision=precision
    )
    expected = printed(given, capsys)
    assert len(set(map(tuple, expected[0]))) == 9
    for size in (1, 2, 5):  # two and five cut a prompt's samples apart
        assert printed(replace(given, batch_size=size), capsys) == expected


def test_lines_of_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = options(folder / "char", prompts=texts(*SEVERAL), sampling=Sampling(), num_samples=2, json=True)
    found, text = printed(given, capsys)
    tokenizer = tokenizer_of(folder / "char")
    assert [json.loads(line) for line in text.splitlines()] == [
        {
            "prompt": number // 2,
            "sample": number % 2,
            "prompt_text": SEVERAL[number // 2],
            "text": text_of(tokenizer, tokens),
            "tokens": tokens,
            "finish": "length",
            "stop": None,
        }
        for number, tokens in enumerate(found)
    ]


def test_stop_strings_end_each_sample_for_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = options(folder / "char", prompts=texts(*SEVERAL), sampling=Sampling(), num_samples=2, num_tokens=60)
    free = generate(given, single_process_groups(), CPU)
    stops = (free[0].text[20:22], free[3].text[5])
    capsys.readouterr()
    ended = generate(replace(given, stops=stops), single_process_groups(), CPU)
    places = [min(place for stop in stops if (place := one.text.find(stop)) >= 0) for one in free]
    assert len(set(places)) > 1
    assert [answer.text for answer in ended] == [one.text[:place] for one, place in zip(free, places, strict=True)]
    assert {answer.finish for answer in ended} == {"stop"}
    titles = [f"--- prompt {p} of 3, sample {s} of 2 ---\n" for p in (1, 2, 3) for s in (1, 2)]
    shown = "".join(f"{title}{answer.beginning}{answer.text}\n" for title, answer in zip(titles, ended, strict=True))
    assert capsys.readouterr().out == shown


def test_a_sample_is_shown_as_it_comes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen(io.StringIO):
        def flush(self) -> None:
            seen.append(self.getvalue())

    seen: list[str] = []
    monkeypatch.setattr(sys, "stdout", Seen())
    [answer] = generate(options(folder / "char"), single_process_groups(), CPU)
    assert seen == [*(PROMPT + answer.text[:number] for number in range(13)), f"{PROMPT}{answer.text}\n"]


def test_a_conversation(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first answer is that to a prompt."""
    [answer] = generate(options(folder / "char", sampling=Sampling()), single_process_groups(), CPU)
    stop = answer.text[7:9]
    capsys.readouterr()
    lines = PROMPT.replace("\n", " ")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    given = options(folder / "char", prompts=texts(lines), sampling=Sampling(), stops=(stop,))
    assert generate(replace(given, prompts=None), single_process_groups(), CPU) == []
    spoken = capsys.readouterr().out
    [answer] = generate(given, single_process_groups(), CPU)
    assert spoken == f"{answer.text}\n"


def test_words_that_the_vocabulary_lacks_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = options(folder / "word", prompts=texts("the zebra of the zoo"), num_tokens=1)
    generate(given, single_process_groups(), CPU)
    shown = capsys.readouterr()
    assert shown.out.startswith("the <unk> of the <unk>")
    assert shown.err == "note: 2 of the 5 tokens of --prompt are <unk>: the vocabulary lacks what they stand for\n"


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
    with pytest.raises(UsageError, match=f"^{line}"):
        generate(options(folder / name, prompts=texts(prompt)), single_process_groups(), CPU)


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
    source = PromptSource(file=None if name is None else tmp_path / name)
    with pytest.raises(UsageError, match=f"^{line}"):
        generate(options(Path("no run is here"), prompts=source), single_process_groups(), CPU)


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
