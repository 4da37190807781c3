"""What our own formats say of a run beside its tensors: enough to make a run folder of them again."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatron_allattn.checkpoint.conversion import SavedRun, converted_state
from megatron_allattn.checkpoint.progress import Progress
from megatron_allattn.checkpoint.save import MODEL_FIELDS, check_fields, read_config
from megatron_allattn.config import RunConfig, UsageError

FORMAT, VERSION = "megatron-allattn-model", 2


@dataclass(frozen=True)
class Description:
    """step: of the weights; run: as they were trained; tokenizer: as JSON, and its SHA-256; progress: at that step."""

    step: int
    run: RunConfig
    vocab_size: int
    tokenizer: dict[str, Any]
    tokenizer_sha256: str
    progress: Progress

    @classmethod
    def of(cls, saved: SavedRun) -> Self:
        """Of a run's step."""
        state, step = saved.state, saved.state["step"]
        return cls(
            step,
            saved.run,
            state["vocab_size"],
            state["tokenizer"],
            state["tokenizer_sha256"],
            saved.progress,
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "config": self.run.to_dict(),
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer,
            "tokenizer_sha256": self.tokenizer_sha256,
            "progress": self.progress.to_dict(),
        }

    def state(self, progress: Progress, source: dict[str, Any]) -> dict[str, Any]:
        """state.json of the run folder that is made of it, but for its step; as `converted_state`.

        It says that the run's settings are known, to which one that goes on from its optimizer's state is held.
        """
        tokenizer = (self.tokenizer, self.tokenizer_sha256)
        return converted_state(self.run, progress, self.vocab_size, *tokenizer, {**source, "settings_known": True})

    @classmethod
    def from_dict(cls, path: Path, content: Any) -> Self:
        """What `to_dict` gave, as it stands in a file. Raises UsageError: it is something else."""
        if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
            raise UsageError(
                f"file {path}: has no description of format {FORMAT} {VERSION}; give one that was made here"
            )
        check_fields(path, content, MODEL_FIELDS)
        if not isinstance(content.get("progress"), dict):
            raise UsageError(f"file {path}: its description has no object for progress; give one that was made here")
        run, step = read_config(path, content), content["step"]
        progress = Progress.of(path, content["progress"], step, run)
        return cls(
            step,
            run,
            content["vocab_size"],
            content["tokenizer"],
            content["tokenizer_sha256"],
            progress,
        )

    @classmethod
    def from_text(cls, path: Path, text: str | None) -> Self:
        """The same from JSON, None for a file that has none."""
        try:
            content = None if text is None else json.loads(text)
        except (ValueError, RecursionError) as error:
            rule = f"its description is not JSON ({error})"
            raise UsageError(f"file {path}: {rule}; give one that was made here") from None
        return cls.from_dict(path, content)
