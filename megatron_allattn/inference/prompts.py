"""Prompts: from where the command line says, as text, and then as tokens of a model's vocabulary."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_allattn.config import UsageError, usage_error
from megatron_allattn.config.checks import check_regular
from megatron_allattn.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """A text exactly as it is, and where it is from, for messages."""

    text: bytes
    source: str


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """What the command line says; nothing: standard input.

    texts: of --prompt · file: one prompt · file_of_many: one a line.
    """

    texts: tuple[bytes, ...] = ()
    file: Path | None = None
    file_of_many: Path | None = None

    def read(self) -> list[Prompt]:
        """At least one prompt. Raises UsageError."""
        if self.file_of_many is not None:
            return _lines(_content("--prompts-file", self.file_of_many), self.file_of_many)
        if self.file is not None:
            return [Prompt(_content("--prompt-file", self.file), str(self.file))]
        if self.texts:
            many = len(self.texts) > 1
            return [Prompt(t, f"--prompt (number {i})" if many else "--prompt") for i, t in enumerate(self.texts, 1)]
        if sys.stdin is None or sys.stdin.isatty():
            rule, fix = "standard input has no text", "give --prompt or --prompt-file, pipe a text in, or --interactive"
            raise usage_error("--prompt", "(left out)", rule, fix)
        return [Prompt(sys.stdin.buffer.read(), "standard input")]


def _content(flag: str, path: Path) -> bytes:
    fix = "give a text file, or pipe the text in"
    try:
        check_regular(flag, path, fix)
        return path.read_bytes()
    except OSError as error:
        raise usage_error(flag, path, f"cannot be read ({error.strerror})", fix) from None


def _lines(content: bytes, path: Path) -> list[Prompt]:
    """A prompt a line, without its line end; of a .jsonl file a line is a JSON string or an object with "prompt"."""
    lines = content.removesuffix(b"\n").split(b"\n")
    if lines == [b""]:
        raise usage_error("--prompts-file", path, "is empty", "give a file with one prompt a line")
    prompts = []
    for number, line in enumerate(lines, start=1):
        source = f"{path} line {number}"
        prompts.append(Prompt(_of_json(line, source) if path.suffix == ".jsonl" else line, source))
    return prompts


def _of_json(line: bytes, source: str) -> bytes:
    fix = 'write "a text", or {"prompt": "a text"}'
    try:
        value = json.loads(line)
        text = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise usage_error("--prompts-file", source, "has no prompt", fix)
        return text.encode()
    except UnicodeEncodeError:
        raise usage_error("--prompts-file", source, "has half of a surrogate pair", "write whole characters") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise usage_error("--prompts-file", source, f"is not JSON ({error})", fix) from None


def encode(prompt: Prompt, tokenizer: Tokenizer) -> tuple[list[int], str]:
    """A prompt's tokens, and a note where some stand for what the vocabulary lacks, else nothing.

    Raises UsageError: it is not of the model's vocabulary.
    """
    text, source = prompt.text, prompt.source
    if tokenizer.unit != "byte":
        try:
            text.decode()
        except UnicodeDecodeError as error:
            rule = f"byte {error.start} (0x{text[error.start]:02x}) is not valid UTF-8"
            raise usage_error("text of", source, rule, "give UTF-8 text") from None
    try:
        ids, unknown = tokenizer.encode_counting(text, source=source)
    except UsageError as error:  # its way out is for those who prepare data
        raise UsageError(f"{str(error).rpartition('; ')[0]}; leave it out of the prompt") from None
    what = f"{unknown:,} of the {len(ids):,} tokens of {source} are <unk>: the vocabulary lacks what they stand for"
    return ids.tolist(), what if unknown else ""


def encode_all(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of every prompt, at least one each; notes go to stderr. Raises UsageError."""
    found = []
    for prompt in prompts:
        ids, note = encode(prompt, tokenizer)
        if not ids:
            rule, fix = f"has no token of the {tokenizer.name} vocabulary", "give at least one token to go on from"
            if prompt.source.startswith("--prompt"):
                raise usage_error(prompt.source, repr(os.fsdecode(prompt.text)), rule, fix)
            raise usage_error("text of", prompt.source, rule, fix)
        if note:
            print(f"note: {note}", file=sys.stderr, flush=True)
        found.append(ids)
    return found
