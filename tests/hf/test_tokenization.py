"""Tokenizers for transformers: the ids, the text and the refusals of ours, from files that need nothing of ours."""

import ast
import io
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megatron_allattn.config import UsageError
from megatron_allattn.data.subwords import WINDOW_BYTES, SentencePieceTokenizer, SubwordLearner
from megatron_allattn.data.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer
from megatron_allattn.hf import export, tokenizer_files

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
CODE = Path(export.__file__).parent
ALL_FILES = [*export.CODE, tokenizer_files.CODE]
TRAPS = [
    "",
    "\n",
    "\n\n a\n",
    "  two  spaces   three ",
    "tab\tand\ttab\t\r\n CR\r LF\r\n",
    "\u2581 \u2581\u2581x\u2581\u2585",
    "<s> </s> <unk> a<unk>b <pad> <0x0A> <0x41> <eos>\n<eos> -1",
    "e\u0301 \u00e9 \ufb01 \u3000 \u00a0 \u0085 \u2028 \u2029 \ufeff",
    "\x00\x01\x07\x1b[0m\x7f",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0010ffff",
    "\u4e2d\u6587 \u0627\u0644 the word",
]
TEXT = (CODE.parents[1] / "LICENSE").read_text() + "caf\u00e9 and na\u00efve\n" * 9
CHARACTERS = sorted({*TEXT, *"".join(TRAPS)} - {"\x07"})


def learned(**settings: Any) -> Tokenizer:
    return SubwordLearner(**{"vocab_size": 500} | settings).learn(iter([TEXT.encode()]), iter([]), TEXT.count("\n"))


def foreign() -> Tokenizer:
    """A model as others make them, which normalizes."""
    model = io.BytesIO()
    settings: dict[str, Any] = {"vocab_size": 120, "hard_vocab_limit": False, "minloglevel": 2, "pad_id": 3}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXT.split("\n")), model_writer=model, **settings)
    return SentencePieceTokenizer(model.getvalue(), "drop", "their.model")


WORDS = ["the", "<unk>", "word", "a", "x", "two", "-1", "-"]
TOKENIZERS = {
    "byte": lambda: ByteTokenizer(),
    "byte drop": lambda: ByteTokenizer(newline="drop"),
    "byte eos compact": lambda: ByteTokenizer([value for value in range(255, -1, -1) if value != 7], "eos"),
    "char": lambda: CharTokenizer(CHARACTERS),
    "char eos": lambda: CharTokenizer(CHARACTERS, "eos"),
    "char of one line": lambda: CharTokenizer([one for one in CHARACTERS if one != "\n"]),
    "char drop": lambda: CharTokenizer([one for one in CHARACTERS if one != "\n"], "drop"),
    "word": lambda: WordTokenizer(["<eos>", *WORDS]),
    "word symbol": lambda: WordTokenizer([*WORDS, "\n", "<eos>"], "symbol"),
    "word drop": lambda: WordTokenizer(WORDS, "drop"),
    "word all known": lambda: WordTokenizer(["two", "spaces", "three", "a", "<eos>"]),
    "unigram": learned,
    "bpe eos": lambda: learned(model_type="bpe", newline="eos", pad_id=2),
    "foreign": foreign,
}
Pair = tuple[Tokenizer, Any]


@pytest.fixture(scope="module", params=TOKENIZERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Ours, and transformers' of its files."""
    ours = TOKENIZERS[request.param]()
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in (export.CODE[0], tokenizer_files.CODE):
        shutil.copyfile(CODE / name, folder / name)
    tokenizer_files.write(ours, folder)
    return ours, transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


def texts(ours: Tokenizer) -> list[str]:
    generator = random.Random(11)
    mixed = ["".join(generator.choices([*TRAPS, *TEXT.split(" ")], k=20)) for _ in range(20)]
    long = "word " * (WINDOW_BYTES // 4) + "y" * (2 * WINDOW_BYTES) + "\u00e9 " * WINDOW_BYTES
    return [*TRAPS, *mixed, *([long] if ours.name == "sentencepiece" else [])]


def test_ids_and_text_are_ours(pair: Pair) -> None:
    ours, theirs = pair
    refused = 0
    for text in texts(ours):
        try:
            ids = ours.encode(text.encode()).tolist()
        except UsageError:
            refused += 1
            with pytest.raises(ValueError, match=r"vocabulary|NUL"):
                theirs(text)
            continue
        decoded = ours.decode(ids)
        expected = decoded.decode(errors="replace") if isinstance(decoded, bytes) else decoded
        assert theirs(text)["input_ids"] == theirs.encode(text) == ids
        assert theirs.convert_tokens_to_ids(theirs.tokenize(text)) == ids
        assert theirs.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == expected
    assert refused < len(texts(ours))


def test_its_vocabulary_is_ours(pair: Pair) -> None:
    ours, theirs = pair
    size = ours.vocab_size
    assert (theirs.vocab_size, len(theirs)) == (size, size)
    assert sorted(theirs.get_vocab().values()) == list(range(size))
    assert theirs.eos_token_id == ours.newline_id
    for wrong in (-1, size):
        with pytest.raises(ValueError, match=f"token id {wrong} is not in the vocabulary: ids are 0 to {size - 1}"):
            theirs.decode([wrong])


def test_it_is_saved_and_comes_back(pair: Pair, tmp_path: Path) -> None:
    """Through transformers, more than once, also with a padding token and one that was added."""
    ours, theirs = pair
    theirs.save_pretrained(tmp_path / "one")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "one", trust_remote_code=True)
    again.pad_token = again.convert_ids_to_tokens(0)
    again.add_tokens(["<added>"])
    again.save_pretrained(tmp_path / "two")
    last = transformers.AutoTokenizer.from_pretrained(tmp_path / "two", trust_remote_code=True)
    text = "a two two a"
    assert last.encode(text) == ours.encode(text.encode()).tolist()
    assert last.pad_token_id == 0 and last.decode([ours.vocab_size]) == "<added>"
    for folder in ("one", "two"):
        back = tokenizer_files.read(tmp_path / folder)
        assert back is not None and back.fingerprint == ours.fingerprint


def test_batches_are_padded_on_the_left(tmp_path: Path) -> None:
    tokenizer_files.write(ByteTokenizer(), tmp_path)
    for name in (export.CODE[0], tokenizer_files.CODE):
        shutil.copyfile(CODE / name, tmp_path / name)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True, pad_token="<0x00>")
    batch = theirs(["abc", "d"], padding=True)
    assert batch["input_ids"] == [[97, 98, 99], [0, 0, 100]]
    assert batch["attention_mask"] == [[1, 1, 1], [0, 0, 1]]
    assert theirs.batch_decode(batch["input_ids"], skip_special_tokens=True) == ["abc", "d"]


def test_what_is_damaged_is_told(tmp_path: Path) -> None:
    tokenizer_files.write(learned(), tmp_path)
    (tmp_path / tokenizer_files.MODEL).unlink()
    with pytest.raises(UsageError, match=r"sentencepiece\.model"):
        tokenizer_files.read(tmp_path)
    for name in (export.CODE[0], tokenizer_files.CODE):
        shutil.copyfile(CODE / name, tmp_path / name)
    with pytest.raises(ValueError, match=r"of type 'sentencepiece' without sentencepiece\.model beside it"):
        transformers.AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    (tmp_path / tokenizer_files.DESCRIPTION).write_text("{}")
    with pytest.raises(UsageError, match="does not describe"):
        tokenizer_files.read(tmp_path)


@pytest.mark.parametrize("name", ALL_FILES)
def test_exported_code_needs_nothing_of_ours(name: str) -> None:
    """Only transformers, torch, Python's library, and files that lie beside it."""
    modules = set()
    for node in ast.walk(ast.parse((CODE / name).read_text())):
        if isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    beside = {f".{one.removesuffix('.py')}" for one in ALL_FILES}
    assert {one for one in modules if one.startswith(".")} <= beside
    library = {"ast", "importlib", "itertools", "json", "math", "pathlib", "re", "typing", "collections"}
    assert {one.split(".")[0] for one in modules if not one.startswith(".")} <= library | {"torch", "transformers"}
