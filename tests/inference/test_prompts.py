"""Where prompts come from, and files of many that are refused with the line."""

from pathlib import Path

import pytest

from megatron_allattn.config import UsageError
from megatron_allattn.data.tokenizers import ByteTokenizer, CharTokenizer, NullTokenizer
from megatron_allattn.inference.prompts import Prompt, PromptSource, encode_all


def texts(tmp_path: Path, name: str, content: bytes) -> list[bytes]:
    (tmp_path / name).write_bytes(content)
    return [prompt.text for prompt in PromptSource(file_of_many=tmp_path / name).read()]


def test_one_a_line(tmp_path: Path) -> None:
    assert texts(tmp_path, "p.txt", b"the cat\n  caf\xc3\xa9 \n\xff\n") == [b"the cat", "  café ".encode(), b"\xff"]
    assert texts(tmp_path, "p.txt", b'"a"\nno line end') == [b'"a"', b"no line end"]
    assert texts(tmp_path, "p.txt", b"a\n\nb\n") == [b"a", b"", b"b"]  # what has no token is refused below


def test_lines_of_json(tmp_path: Path) -> None:
    content = b'"two\\nlines"\n{"id": 7, "prompt": "caf\\u00e9 \\ud83d\\ude00"}\n'
    assert texts(tmp_path, "p.jsonl", content) == [b"two\nlines", "café \U0001f600".encode()]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("p.txt", b"", "p.txt: is empty; give a file with one prompt a line"),
        ("p.jsonl", b'"a"\n{"text": "b"}\n', r"p.jsonl line 2: has no prompt; write \"a text\", or"),
        ("p.jsonl", b"3\n", "p.jsonl line 1: has no prompt"),
        ("p.jsonl", b'"a"\n"b\n', "p.jsonl line 2: is not JSON"),
        ("p.jsonl", b'"a"\n\n"b"\n', "p.jsonl line 2: is not JSON"),
        ("p.jsonl", b'"\xff"\n', "p.jsonl line 1: is not JSON"),
        ("p.jsonl", b'"\\ud83d"\n', "p.jsonl line 1: has half of a surrogate pair"),
        ("p.jsonl", b"[" * 100_000, "p.jsonl line 1: is not JSON"),
    ],
)
def test_a_file_that_is_refused(tmp_path: Path, name: str, content: bytes, line: str) -> None:
    with pytest.raises(UsageError, match=rf"^--prompts-file \S*{line}"):
        texts(tmp_path, name, content)


def test_a_prompt_that_is_refused_is_named() -> None:
    def refused(*prompts: Prompt) -> str:
        with pytest.raises(UsageError) as error:
            encode_all(prompts, CharTokenizer(["a", "b"]))
        return str(error.value)

    first, second = PromptSource(texts=(b"ab", b"ax")).read()
    assert refused(first, second).startswith("text of --prompt (number 2): character 'x'")
    assert refused(first, Prompt(b"", "p.txt line 2")).startswith("text of p.txt line 2: has no token of the char")
    (alone,) = PromptSource(texts=(b"",)).read()
    assert refused(alone).startswith("--prompt '': has no token of the char vocabulary")


def test_every_prompt_in_tokens() -> None:
    source = PromptSource(texts=(b"a", b"bc"))
    assert encode_all(source.read(), ByteTokenizer()) == [[97], [98, 99]]
    assert encode_all([Prompt(b"3 17\n5", "x")], NullTokenizer(20)) == [[3, 17, 5]]
