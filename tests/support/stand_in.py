"""A Python whose pretrain.py and preflight.py start at once: for tests of what SLURM and the batch script do.

`write` leaves a program that is Python in all but these two. Its training keeps to what the script builds on: it takes
a step every 0.1 s, has a loss that follows from the step, saves every --save-interval steps and on SIGUSR1, goes on
from the newest checkpoint, leaves outcome.json and exit codes. A rank that gets SIGUSR2 is gone with exit code 0.
Ranks do not know each other; the first one alone writes. A node that lacks a file of --need is unfit.
"""

import sys
from pathlib import Path

PROGRAM = """\
#!{python} -S
import json, os, pathlib, signal, sys, time

words = sys.argv[1:]
program = os.path.basename(words[0])
if program not in ("pretrain.py", "preflight.py"):
    os.execv({python!r}, [{python!r}, *words])


def after(flag, default=None):
    return words[words.index(flag) + 1] if flag in words else default


def check():
    node = os.environ["SLURMD_NODENAME"]
    needs = words[words.index("--need") + 1 :]
    checks = [
        {{"name": need, "node": node, "status": "ok" if os.path.exists(need) else "fault", "way_out": "mount it",
          "found": "is there" if os.path.exists(need) else "is not there", "asked": "to be read"}}
        for need in needs
    ]
    go = all(one["status"] == "ok" for one in checks)
    report = {{"format": 1, "node": node, "go": go, "time": 0.0, "facts": {{}}, "checks": checks}}
    pathlib.Path(after("--json"), node + ".json").write_text(json.dumps(report))
    sys.exit(0 if go else 1)


def train():
    asked = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append("SIGUSR1"))
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))
    run, last, every = pathlib.Path(after("--save")), int(after("--train-iters")), int(after("--save-interval", "0"))
    checkpoints, first = run / "checkpoints", os.environ["SLURM_PROCID"] == "0"
    lines = run / "metrics.jsonl"
    step = max((int(one.parent.name[5:]) for one in checkpoints.glob("step_*/COMPLETE")), default=0)
    if first and lines.exists():
        kept = [one for one in lines.read_text().splitlines() if json.loads(one)["step"] <= step]
        lines.write_text("".join(one + "\\n" for one in kept))

    def save():
        if first and not (checkpoints / f"step_{{step:08d}}").exists():
            import hashlib

            folder = checkpoints / f"step_{{step:08d}}"
            folder.mkdir(parents=True)
            head = {{"format": "megatron-allattn-checkpoint", "version": 1, "step": step, "files": {{}}}}
            (folder / "manifest.json").write_text(json.dumps(head))
            digest = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
            (folder / "COMPLETE").write_text(digest + "\\n")

    def leave(outcome, reason, code):
        if first:
            (run / "outcome.json").write_text(json.dumps({{"outcome": outcome, "step": step, "reason": reason}}))
        else:
            time.sleep(2)  # as real ones, which end together: srun ends all with the first
        sys.exit(code)

    while step < last:
        if asked:
            save()
            leave("stopped", asked[0], 3)
        time.sleep(0.1)
        step += 1
        if first:
            record = {{"kind": "train", "step": step, "loss": 1 / step, "tokens_per_second": 1.0}}
            with lines.open("a") as file:
                file.write(json.dumps(record) + "\\n")
            print(f"step {{step}}/{{last}}", flush=True)
        if every and step % every == 0:
            save()
    save()
    leave("done", "reached --train-iters", 0)


check() if program == "preflight.py" else train()
"""


def write(path: Path) -> Path:
    """Leave the program there."""
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    return path
