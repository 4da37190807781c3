"""Folders for Hugging Face transformers: the same log-probabilities, cached generation, and the way back."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_allattn.checkpoint.conversion import SavedRun, read_run
from megatron_allattn.config import RunConfig, UsageError
from megatron_allattn.data.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    NullTokenizer,
    SubwordLearner,
    Tokenizer,
    WordTokenizer,
)
from megatron_allattn.hf import export, tokenizer_files
from tests.support.layouts import rest
from tests.support.saved_runs import MODELS, VOCABULARY, same_weights, saved_run

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
CACHED = ("all-attn", "masked", "head-split", "adaptive")


TEXT = "to be, or not to be:\n that is the question"
TOKENIZERS: dict[str, Any] = {  # and a model
    "byte": lambda: (ByteTokenizer(), "all-attn"),
    "char": lambda: (CharTokenizer(sorted(set(TEXT))), "tied"),
    "word": lambda: (WordTokenizer(["<eos>", *sorted(set(TEXT.split())), "<unk>"]), "adaptive tied"),
    "word adaptive": lambda: (WordTokenizer(["<eos>", "to", "that", "<unk>", *map(str, range(9))]), "adaptive"),
    "sentencepiece": lambda: (
        SubwordLearner(vocab_size=272).learn(iter([TEXT.encode() * 3]), iter([]), 3),
        "window",
    ),
}


def exported(folder: Path, name: str) -> tuple[SavedRun, Any]:
    saved = saved_run(folder / "run", MODELS[name])
    line = export.write(saved, folder / "out")
    assert line.startswith("log-probabilities under transformers ")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "out", trust_remote_code=True)
    return saved, model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_the_same(tmp_path: Path, name: str) -> None:
    """Of a text that is longer than the longest span and than what is computed at a time."""
    saved, model = exported(tmp_path, name)
    ids = torch.randint(0, VOCABULARY, (1, 400), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(ids).logits.log_softmax(-1)
    torch.testing.assert_close(found, export.log_probabilities(saved, ids), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [*CACHED, *rest(*(name for name in MODELS if name not in CACHED))])
def test_cached_generation_is_that_without_a_cache(tmp_path: Path, name: str) -> None:
    _, model = exported(tmp_path, name)
    prompt = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(2))
    given: dict[str, Any] = {"max_new_tokens": 120, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(prompt, use_cache=True, **given)
    assert cached.shape == (2, 127)
    assert cached.equal(model.generate(prompt, use_cache=False, **given))


@pytest.mark.parametrize("name", ["all-attn", "masked", "head-split", "adaptive"])
def test_padding_on_the_left_changes_nothing(tmp_path: Path, name: str) -> None:
    _, model = exported(tmp_path, name)
    long, short = (
        torch.randint(0, VOCABULARY, (1, size), generator=torch.Generator().manual_seed(size)) for size in (9, 4)
    )
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), short], dim=1)
    mask = torch.tensor([[1] * 9, [0] * 5 + [1] * 4])
    given: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    together = model.generate(torch.cat([long, padded]), attention_mask=mask, **given)
    assert together[0, 9:].equal(model.generate(long, attention_mask=torch.ones_like(long), **given)[0, 9:])
    assert together[1, 9:].equal(model.generate(short, attention_mask=torch.ones_like(short), **given)[0, 4:])


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    saved, model = exported(tmp_path, name)
    export.read(tmp_path / "out", tmp_path / "back", RunConfig())
    back = read_run(tmp_path / "back")
    assert same_weights(saved, back) and back.run == saved.run
    model.save_pretrained(tmp_path / "theirs")  # what transformers writes has no description of ours
    export.read(tmp_path / "theirs", tmp_path / "again", RunConfig())
    assert same_weights(saved, read_run(tmp_path / "again"))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizer_and_model_there_and_back(tmp_path: Path, kind: str) -> None:
    """Text to log-probabilities under transformers, before and after it saved both; then the way back."""
    ours, name = TOKENIZERS[kind]()
    saved = saved_run(tmp_path / "run", MODELS[name], tokenizer=ours)
    export.write(saved, tmp_path / "out", compare_logits=False)
    expected = export.log_probabilities(saved, torch.from_numpy(ours.encode(TEXT.encode()).astype("int64"))[None])
    for source, target in (("out", "theirs"), ("theirs", "again")):
        loaded = {"trust_remote_code": True}
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / source, **loaded)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / source, **loaded).eval()
        with torch.no_grad():
            found = model(**tokenizer(TEXT, return_tensors="pt")).logits.log_softmax(-1)
        atol = export.TOLERANCE * expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0.0, atol=atol)
        model.save_pretrained(tmp_path / target)
        tokenizer.save_pretrained(tmp_path / target)
    for source in ("out", "theirs", "again"):
        export.read(tmp_path / source, tmp_path / f"from {source}", RunConfig())
        back = read_run(tmp_path / f"from {source}")
        assert same_weights(saved, back)
        assert all(back.state[key] == saved.state[key] for key in ("tokenizer", "tokenizer_sha256"))


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), NullTokenizer(VOCABULARY)], ids=["byte", "null"])
def test_the_code_of_the_model_card_works(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = saved_run(tmp_path / "run", MODELS["all-attn"], tokenizer=tokenizer)
    export.write(saved, tmp_path / "out", compare_logits=False)
    code = (tmp_path / "out/README.md").read_text().split("```python\n")[1].split("```")[0]
    capsys.readouterr()
    names: dict[str, Any] = {}
    exec(code.replace("FOLDER", str(tmp_path / "out")), names)
    if tokenizer.name == "byte":
        assert names["output"].shape == (1, 106) and capsys.readouterr().out.startswith("a text")
    else:
        assert names["output"].shape == (1, 102)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    ours = CharTokenizer(sorted(set(TEXT)))
    export.write(saved_run(tmp_path / "run", MODELS["fixed"], tokenizer=ours), tmp_path / "out", compare_logits=False)
    for other, message in (
        (CharTokenizer(sorted(set(TEXT), reverse=True)), f"is another tokenizer than that of {export.DESCRIPTION}"),
        (ByteTokenizer(), f"has 256 tokens, the model {ours.vocab_size}; give a folder"),
    ):
        tokenizer_files.write(other, tmp_path / "out")
        with pytest.raises(UsageError, match=message):
            export.read(tmp_path / "out", tmp_path / "back", RunConfig())
        assert not (tmp_path / "back").exists()


def test_it_can_be_trained(tmp_path: Path) -> None:
    _, model = exported(tmp_path, "all-attn")
    model.train()
    ids = torch.randint(0, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["all-attn", "adaptive"])
def test_accumulated_gradients_are_those_of_one_batch(tmp_path: Path, kind: str) -> None:
    """As transformers' Trainer asks for them: every part of a batch with the number of labels in the whole of it."""
    _, model = exported(tmp_path, kind)
    model.eval()
    ids = torch.randint(0, VOCABULARY, (4, 30), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[2, :20] = -100
    whole = model(ids, labels=labels).loss
    expected = torch.autograd.grad(whole, [*model.parameters()])
    number = (labels[:, 1:] != -100).sum()
    parts = [model(ids[row, None], labels=labels[row, None], num_items_in_batch=number).loss for row in range(4)]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-5)
    for one, other in zip(torch.autograd.grad(sum(parts), [*model.parameters()]), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.layouts
def test_a_vocabulary_of_hundreds_of_thousands_of_words(tmp_path: Path) -> None:
    """Fewer tokens are compared, and float32 does not add up so many probabilities."""
    model = replace(MODELS["adaptive"], adaptive_cutoffs="20000,100000")
    saved = saved_run(tmp_path / "run", model, vocab_size=270_000)
    assert export.tried(saved).shape == (1, 62) and export.TRIED == 512
    line = export.write(saved, tmp_path / "out")
    assert re.fullmatch(r"log-probabilities under transformers \S+ differ by \d\.\de-0[5-9] at most", line)


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    exported(tmp_path, "all-attn")
    path = tmp_path / "out/config.json"
    content = json.loads(path.read_text())
    for change, message in (
        ({"model_type": "gpt2"}, "is of a model of type 'gpt2', not all_attention"),
        ({"hidden_size": 64}, r"tensor embedding.weight has shape \(17, 32\), the model wants \(17, 64\)"),
        ({"vocab_size": None}, "has vocab_size None"),
        ({"num_layers": "three"}, "--num-layers"),
    ):
        path.write_text(json.dumps(content | change))
        with pytest.raises(UsageError, match=message):
            export.read(tmp_path / "out", tmp_path / "back", RunConfig())
        assert not (tmp_path / "back").exists()


def test_versions_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release candidate is as good as its release; an older one is refused before it runs."""
    saved = saved_run(tmp_path / "run", MODELS["fixed"])
    for number, installed in enumerate(("5.20rc1", "5.20.0.dev0", "6.0")):
        monkeypatch.setattr(export, "version", lambda _, installed=installed: installed)
        line = export.write(saved, tmp_path / f"out{number}")
        assert line.startswith(f"log-probabilities under transformers {installed} differ by ")
    for installed in ("5.19.4", "5.19rc1", "4.57"):
        monkeypatch.setattr(export, "version", lambda _, installed=installed: installed)
        with pytest.raises(UsageError, match=rf"^transformers {installed}: the files are for transformers 5.20 and"):
            export.write(saved, tmp_path / "old")
        assert not (tmp_path / "old").exists()


def test_exported_files_refuse_older_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that may be loaded first, in one line that names both versions."""
    saved = saved_run(tmp_path / "run", MODELS["fixed"], tokenizer=ByteTokenizer())
    export.write(saved, tmp_path / "old_and_new", compare_logits=False)
    config = json.loads((tmp_path / "old_and_new/config.json").read_text())
    assert config["transformers_version"] == export.OLDEST
    load = {"trust_remote_code": True}
    for number, installed in enumerate(("4.57.6", "5.19.4")):
        monkeypatch.setattr(transformers, "__version__", installed)
        message = rf"^transformers {installed} is installed, these files need {export.OLDEST} or newer: pip install"
        for auto in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"):
            folder = (tmp_path / "old_and_new").rename(tmp_path / f"{auto}{number}")  # a module that is new to Python
            with pytest.raises(ImportError, match=message) as error:
                getattr(transformers, auto).from_pretrained(folder, **load)
            assert "\n" not in str(error.value)
            folder.rename(tmp_path / "old_and_new")
