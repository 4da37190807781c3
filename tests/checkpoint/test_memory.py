"""What saving, loading and converting cost in memory, beside the state itself: a tensor or two, and no file."""

import os
import subprocess
import sys
from pathlib import Path

from megatron_allattn.config import ModelConfig
from tests.support.saved_runs import saved_run
from tests.support.template import ROOT

SCRIPT = """
import resource, sys
from pathlib import Path
import torch
from megatron_allattn.checkpoint import save
from megatron_allattn.config import ModelConfig, RunConfig
from megatron_allattn.engine.plain import PlainEngine
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.initialization import initialize
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import single_process_groups

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def engine(num_layers, vocab_size):
    model = ModelConfig(num_layers=num_layers, hidden_size=512, num_attention_heads=8, persistent_memory_size=1024)
    network = Network(model, vocab_size, groups.tensor, FusedOps("torch"))
    run = RunConfig(model=model)
    initialize(network, 1)
    made = PlainEngine(network, run, groups, torch.device("cpu"), torch.float32, FusedOps("torch"))
    for one in made.fragments():
        one.values.add_(1.0)  # memory that nothing has written to is none yet
    return made

groups, folder = single_process_groups(), Path(sys.argv[1])
small = engine(1, 100)  # what is loaded at the first time
save.save(folder / "small", 1, small, {"config": small.run.to_dict()})
save.load(folder / "small/checkpoints/step_00000001", small, 0)
large = engine(16, 8000)
before = peak()
save.save(folder / "large", 1, large, {"config": large.run.to_dict()})
saved = peak()
save.load(folder / "large/checkpoints/step_00000001", large, 0)
state = sum(one.values.numel() * 4 for one in large.fragments())
print(state, saved - before, peak() - saved)
"""


def test_memory_beside_the_state_is_that_of_a_tensor(tmp_path: Path) -> None:
    """Of a state of some 500 MB, whose largest tensor has 16 MB and whose files have up to 256 MiB."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120).stdout
    state, saving, loading = map(int, output.split())
    assert state > 300e6
    print(f"{saving:,} and {loading:,} bytes for a state of {state:,}")
    assert saving < 24e6, f"{saving:,} bytes for a state of {state:,}"
    assert loading < 96e6, f"{loading:,} bytes for a state of {state:,}"


CONVERSIONS = """
import sys, threading
from pathlib import Path
from megatron_allattn.checkpoint import shards, single_file, universal
from megatron_allattn.checkpoint.conversion import read_run
from megatron_allattn.config import ParallelConfig
from tools.convert_checkpoint import main

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():  # what is mapped from a file can be dropped and is not held
    global most
    while not over.wait(0.002):
        most = max(most, held())

def there_and_back(run, out):
    global most
    out.mkdir()
    single_file.write(read_run(run), out / "one.safetensors")
    single_file.read(out / "one.safetensors", out / "from_one")
    grid = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    shards.write(read_run(run), out / "grid", grid)
    shards.read(out / "grid", out / "from_grid")
    universal.write(read_run(run), out / "universal")
    universal.read(out / "universal", out / "from_universal")
    pickled = f"--load {run} --to adaptive-span --no-compare-logits --output {out}/one.pt"
    assert main(pickled.split()) == 0
    back = f"--from adaptive-span {out}/one.pt --lr-warmup-iters 0 --output {out}/from_pickled"
    assert main(back.split()) == 0
    found, most = most, 0
    return found

over, most = threading.Event(), 0
threading.Thread(target=watch, daemon=True).start()
small, large, folder = map(Path, sys.argv[1:])
before = there_and_back(small, folder / "small")
found = there_and_back(large, folder / "large") - before
over.set()
print(found)
"""


def test_conversions_hold_a_tensor_or_two(tmp_path: Path) -> None:
    """Each way between ours, one file, TP 2 × PP 2 shards, DeepSpeed's and the paper's, of a state of 100 MB beside one
    of 50, both with tensors of up to 4 MB."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "persistent_memory_size": 1024, "max_attention_span": 96}
    for name, num_layers in (("few", 2), ("many", 4)):
        saved_run(tmp_path / name, ModelConfig(num_layers=num_layers, **sizes), steps=1, vocab_size=1000)
    files = (tmp_path / "many").glob("checkpoints/*/*.safetensors")
    assert sum(path.stat().st_size for path in files) > 90e6
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", CONVERSIONS, *(str(tmp_path / name) for name in ("few", "many", "out"))]
    returns = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
    output = subprocess.run(
        command, cwd=ROOT, env=returns, check=True, capture_output=True, text=True, timeout=120
    ).stdout
    grown = int(output.splitlines()[-1])
    print(f"{grown:,} bytes")
    assert grown < 12e6  # what glibc would keep of what was freed is no part of it (`returns`)
