"""A run folder as it is looked at again and again: its files followed, its standing asked for."""

import time
from pathlib import Path

from megatron_allattn.checkpoint.run_folder import CONFIG, METRICS, OBSERVATIONS
from megatron_allattn.config import RunConfig, UsageError
from megatron_allattn.config.json_files import read_json_object
from megatron_allattn.watching.progress import Progress
from megatron_allattn.watching.standing import Standing, standing
from megatron_allattn.watching.tail import Tail

STANDING_SECONDS = 2.0  # between two looks at the outcome and the lock


class View:
    """What is known of a run. `look` brings it up to date; notes: what is odd about its files.

    Raises UsageError: a file cannot be read, or is none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: RunConfig | None = None
        self.progress = Progress()
        self.reading = True
        self._metrics, self._observations = Tail(folder / METRICS), Tail(folder / OBSERVATIONS)
        self._observed = Progress()
        self._config_state: tuple[int, int] | None = None
        self._config_note: str | None = None
        self._looked = -STANDING_SECONDS
        self.standing = Standing("starting", "starting: no record yet")

    def look(self) -> None:
        """Read what is new, at most a piece of each file (`reading`: there is more), and see how the run stands."""
        self._look_at_config()
        news, observed = self._metrics.look(), self._observations.look()
        if news.anew:
            self.progress = Progress()
        if observed.anew:
            self._observed = Progress()
        for record in news.records:
            self.progress.add(record)
        for record in observed.records:
            self._observed.add(record)
        self.reading = news.more or observed.more
        if time.monotonic() - self._looked >= STANDING_SECONDS:
            self.standing = standing(self.folder)
            self._looked = time.monotonic()

    def look_at_all(self) -> None:
        """`look` until nothing is left to read."""
        self.look()
        while self.reading:
            self.look()

    @property
    def start(self) -> dict[str, object]:
        """The layout of the last start that is on record, of observations.jsonl; empty where there is none."""
        return self._observed.last.get("start", {})

    @property
    def memory(self) -> dict[str, object]:
        """The last record of peak memory; empty where there is none."""
        return self._observed.last.get("memory", {})

    @property
    def restarts(self) -> int:
        """How often the run has gone on, as far as it is on record."""
        return max(0, self._observed.counts["start"] - 1)

    @property
    def last_step(self) -> int | None:
        """The step after which the run ends, as far as is known."""
        if (plateau := self.progress.last.get("plateau")) is not None and type(plateau.get("last_step")) is int:
            return int(plateau["last_step"])
        return None if self.config is None else self.config.training.train_iters

    @property
    def notes(self) -> list[str]:
        """What a reader should know about the files."""
        notes = [] if self._config_note is None else [self._config_note]
        if (count := self._metrics.no_records) > 0:
            notes.append(f"{METRICS}: {count:,} line{'s are no records' if count > 1 else ' is no record'}")
        return notes

    def _look_at_config(self) -> None:
        """Again where it has changed. One that is no configuration of this version is a note, not the end."""
        path = self.folder / CONFIG
        try:
            found = path.stat()
        except FileNotFoundError:
            return
        state = (found.st_ino, found.st_mtime_ns)
        if state == self._config_state:
            return
        self._config_state, self._config_note = state, None
        try:
            self.config = RunConfig.from_dict(read_json_object("file", path, "the rest is shown without it"))
        except UsageError as error:
            self.config, self._config_note = None, str(error)
