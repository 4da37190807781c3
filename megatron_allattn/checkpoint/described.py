"""What our own formats say of a model beside its tensors: enough to make a run folder of them again."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatron_allattn.checkpoint.conversion import SavedRun
from megatron_allattn.checkpoint.save import read_config
from megatron_allattn.config import RunConfig, UsageError

FORMAT, VERSION = "megatron-allattn-model", 1


@dataclass(frozen=True)
class Description:
    """step: of the weights; run: as they were trained; tokenizer: as JSON, and its SHA-256."""

    step: int
    run: RunConfig
    vocab_size: int
    tokenizer: dict[str, Any]
    tokenizer_sha256: str

    @classmethod
    def of(cls, saved: SavedRun) -> Self:
        """Of a run's step."""
        state = saved.state
        return cls(state["step"], saved.run, state["vocab_size"], state["tokenizer"], state["tokenizer_sha256"])

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "config": self.run.to_dict(),
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer,
            "tokenizer_sha256": self.tokenizer_sha256,
        }

    @classmethod
    def from_dict(cls, path: Path, content: Any) -> Self:
        """What `to_dict` gave, as it stands in a file. Raises UsageError: it is something else."""
        if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
            raise UsageError(
                f"file {path}: has no description of format {FORMAT} {VERSION}; give one that was made here"
            )
        kinds = {"step": int, "config": dict, "vocab_size": int, "tokenizer": dict, "tokenizer_sha256": str}
        for name, kind in kinds.items():
            if type(content.get(name)) is not kind:
                rule = f"its description has {content.get(name)!r} for {name}, expected {kind.__name__}"
                raise UsageError(f"file {path}: {rule}; give one that was made here")
        run = read_config(path, content)
        return cls(content["step"], run, content["vocab_size"], content["tokenizer"], content["tokenizer_sha256"])

    @classmethod
    def from_text(cls, path: Path, text: str | None) -> Self:
        """The same from JSON, None for a file that has none."""
        try:
            return cls.from_dict(path, None if text is None else json.loads(text))
        except (ValueError, RecursionError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"file {path}: its description is not JSON ({error}); give one that was made here"
            ) from None
