"""A tokenizer as files for Hugging Face transformers, and back.

OUT/tokenizer_config.json    what AutoTokenizer reads first
OUT/tokenization_allattn.py  the file of this package that needs nothing of it but configuration_allattn.py
OUT/allattn_tokenizer.json   the tokenizer's `to_json`, but for a SentencePiece model
OUT/sentencepiece.model      that, as SentencePiece itself reads it
"""

import base64
from pathlib import Path

from megatron_allattn.checkpoint.files import write_json_atomic
from megatron_allattn.config.disk import sync_file
from megatron_allattn.config.json_files import MAX_TOKENIZER_BYTES, read_bytes, read_json_object
from megatron_allattn.data.tokenizers import SentencePieceTokenizer, Tokenizer, tokenizer_from_json

CODE, DESCRIPTION, MODEL = "tokenization_allattn.py", "allattn_tokenizer.json", "sentencepiece.model"
_CLASS = "AllAttentionTokenizer"
_FIX = "give a folder that was made here, or one that transformers has saved from it"


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """All of them but the code."""
    description = tokenizer.to_json()
    if isinstance(tokenizer, SentencePieceTokenizer):
        del description["model"]
        (folder / MODEL).write_bytes(tokenizer.model)
        sync_file(folder / MODEL)
    write_json_atomic(folder / DESCRIPTION, description)
    auto_map = {"AutoTokenizer": [f"{CODE.removesuffix('.py')}.{_CLASS}", None]}
    write_json_atomic(folder / "tokenizer_config.json", {"tokenizer_class": _CLASS, "auto_map": auto_map})


def read(folder: Path) -> Tokenizer | None:
    """The tokenizer of such a folder, None if it has none. Raises UsageError: it is damaged."""
    path = folder / DESCRIPTION
    if not path.is_file():
        return None
    description = read_json_object("file", path, _FIX, MAX_TOKENIZER_BYTES)
    if description.get("type") == SentencePieceTokenizer.name:
        model = read_bytes("file", folder / MODEL, _FIX, MAX_TOKENIZER_BYTES)
        description["model"] = base64.b64encode(model).decode()
    return tokenizer_from_json(description, str(path))
