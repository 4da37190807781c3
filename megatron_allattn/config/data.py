"""Which text is read and how it becomes tokens.

Whether the flags agree with each other and with the data is checked by data/dataset.py, which knows what the data says
of itself.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_allattn.config.checks import LARGEST, check_range, conform_types


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data: a prepared corpus, or a Megatron token file and its tokenizer."""

    data_path: str | None = None
    """Prefix P of P_train.bin … from tools/prepare_data.py or of a Megatron P.bin; else Python's own sources."""

    split: str = "90,5,5"
    """Shares of train, validation and test in a single Megatron file."""

    tokenizer_type: Literal["byte", "char", "word", "sentencepiece", "null"] | None = None
    """Tokenizer of a single Megatron file; prepared data brings its own."""

    tokenizer_model: Path | None = None
    """Vocabulary: JSON of char or word, or a P.json; FILE.model of sentencepiece."""

    vocab_size: int | None = None
    """Vocabulary size of bare token numbers (--tokenizer-type null only)."""

    def __post_init__(self) -> None:
        conform_types(self)
        check_range(self, "vocab_size", at_least=1, at_most=LARGEST)
