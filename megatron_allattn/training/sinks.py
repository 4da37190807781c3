"""TensorBoard and Weights & Biases: the numbers of metrics.jsonl under the names KIND/NAME, such as train/loss.

A run that goes on from an earlier step makes records again, and its curves must neither repeat nor go back.

- TensorBoard: a new event file tells it to forget what it has from that step on (purge_step); the records of the step
  itself that stay are written again.
- W&B keeps the run's id in RUN/wandb.json. Online it is the same run (resume="allow"), whose server has what was
  logged, and W&B leaves out what is logged again. Offline there is no server to ask, and a killed run leaves up to 15 s
  unwritten (found with wandb 0.31): each start makes a folder that has all of the run's records so far, from
  metrics.jsonl, and tells W&B of the folders before it that there is nothing to upload in them.

W&B is offline unless WANDB_MODE says otherwise, and writes into the run folder unless WANDB_DIR does.
"""

import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from megatron_allattn.checkpoint.files import write_json_atomic
from megatron_allattn.config import RunConfig, UsageError, usage_error
from megatron_allattn.config.json_files import read_json_object
from megatron_allattn.training.mirror import Mirror, Record, Sink

OPEN_SECONDS = 30.0
"""What a sink gets to open, or half of what ranks wait for each other if that is less, before training begins."""

WANDB_RUN = "wandb.json"
_LAST_BYTES = 2**18  # of metrics.jsonl, in which the records of its last step are


def open_mirrors(run: RunConfig, step: int) -> list[Mirror]:
    """The sinks that a run asks for, on its first rank. step: from which it goes on, 0 of a new one.

    One that cannot be used is told, and a run that goes on does so without it. Raises UsageError: of a new run.
    """
    logging, goes_on = run.logging, run.checkpoint.goes_on
    wanted: list[_Wanted] = []
    if (events := logging.tensorboard_dir) is not None:
        # in its own folder the records of `step` that stay are written again; another one's are not to be had
        purged = step if goes_on or not step else step + 1
        wanted.append(_Wanted("--tensorboard-dir", events, "tensorboard", partial(TensorBoard, events, purged)))
    if (project := logging.wandb_project) is not None:
        opener = partial(WeightsAndBiases, project, run.checkpoint.save, run.to_dict(), goes_on=goes_on)
        wanted.append(_Wanted("--wandb-project", project, "wandb", opener))
    begun = [(one, Mirror(one.package, one.opener) if find_spec(one.package) else None) for one in wanted]
    seconds = min(OPEN_SECONDS, 30 * run.parallel.distributed_timeout_minutes)
    opened = []
    for one, mirror in begun:
        try:
            opened.append(one.opened(mirror, seconds))
        except UsageError as error:
            if not (goes_on and step):
                raise
            print(f"warning: {error}; the run goes on without it, metrics.jsonl has all", file=sys.stderr, flush=True)
    return opened


class _Wanted(NamedTuple):
    """A sink that a flag asks for; package: what it needs, and its name."""

    flag: str
    value: object
    package: str
    opener: Callable[[], Sink]

    def opened(self, mirror: Mirror | None, seconds: float) -> Mirror:
        """Raises UsageError: it cannot be used; mirror: None, where its package is not installed."""
        if mirror is None:
            fix = f"pip install {self.package}, or leave the flag out"
            raise usage_error(self.flag, self.value, f"the package {self.package} is not installed", fix)
        try:
            mirror.wait_until_open(seconds)
        except Exception as error:  # the package's own: a folder that cannot be written, no login, no network
            rule = f"cannot be used ({error})"
            raise usage_error(self.flag, self.value, rule, "correct it or leave the flag out") from error
        return mirror


class TensorBoard(Sink):
    """Event files in a folder. purged: the step from which on earlier ones do not count."""

    note = None

    def __init__(self, folder: Path, purged: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (optional)

        self._writer, self._purged = SummaryWriter(str(folder), purge_step=purged), purged

    def catch_up(self, path: Path, size: int) -> None:
        for record in _records(path, max(0, size - _LAST_BYTES), size):
            if record["step"] >= self._purged:
                self.write(record)

    def write(self, record: Record) -> None:
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Sink):
    """A run of W&B. run_folder: that of --save, where its id is kept, if there is one; goes_on: with what is there."""

    def __init__(self, project: str, run_folder: Path | None, config: Record, *, goes_on: bool) -> None:
        import wandb  # noqa: PLC0415  (optional)

        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        self._offline = mode in ("offline", "dryrun")
        kept = _kept_id(run_folder, project) if run_folder is not None and goes_on else None
        name = kept or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        self._run = wandb.init(
            project=project,
            id=name,
            resume="allow",
            mode=mode,
            dir=os.environ.get("WANDB_DIR") or run_folder,
            config=config,
            settings=wandb.Settings(console="off", silent=True),  # what the run prints is its own to print
        )
        self._folder = Path(self._run.dir).parent
        if run_folder is not None:
            write_json_atomic(run_folder / WANDB_RUN, {"id": name, "project": project})
        latest = self._folder.with_name("latest-run")
        way = f"offline; upload it with: wandb sync {latest}" if self._offline else self._run.url or mode
        self.note = f"wandb: run {name}, {way}"

    def catch_up(self, path: Path, size: int) -> None:
        if not self._offline:
            return
        for record in _records(path, 0, size):
            self.write(record)
        for earlier in self._folder.parent.glob(f"offline-run-*-{self._run.id}/run-*.wandb"):
            if earlier.parent.name != self._folder.name:
                earlier.with_suffix(".wandb.synced").touch()

    def write(self, record: Record) -> None:
        values = {
            f"{record['kind']}/{name}": value
            for name, value in record.items()
            if name not in ("kind", "step") and value is not None
        }
        self._run.log(values, step=record["step"])

    def flush(self) -> None:
        """W&B's own process has it."""

    def close(self) -> None:
        self._run.finish()


def _kept_id(run_folder: Path, project: str) -> str | None:
    """The id of the run of W&B that this run has been; None where it was in no project or another one."""
    if not (run_folder / WANDB_RUN).exists():
        return None
    try:
        kept = read_json_object("file", run_folder / WANDB_RUN, "remove it, and the run gets another id")
    except UsageError as error:
        raise RuntimeError(str(error)) from error
    name = kept.get("id")
    return name if kept.get("project") == project and isinstance(name, str) and name else None


def _records(path: Path, begin: int, end: int) -> Iterator[dict[str, Any]]:
    """The whole lines between two bytes of metrics.jsonl, one after the other: it may be large."""
    with path.open("rb") as file:
        file.seek(begin)
        if begin:
            file.readline()  # its beginning is not there
        while file.tell() < end and (line := file.readline()).endswith(b"\n"):
            yield json.loads(line)
