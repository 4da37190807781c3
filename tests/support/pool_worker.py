"""The workers of tests/support/pool.py and what forks them: `python pool_worker.py PIPE_DESCRIPTOR`.

The template has torch and DeepSpeed imported. Asked for a worker, it forks a process, which serves calls until its own
pipe closes; asked for a worker's exit code, it tells it. It leaves when its pipe closes.
"""

import faulthandler
import importlib.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
GROUP_TIMEOUT = timedelta(minutes=30)  # longer than any call's: a call that hangs is reported with its stacks


def main() -> None:
    sys.path[0] = str(ROOT)
    pipe = Connection(int(sys.argv[1]))
    import torch

    from megatron_allattn.engine.deepspeed_engine import import_deepspeed

    torch.set_num_threads(1)
    import_deepspeed(verbose=False)
    codes: dict[int, int] = {}
    while True:
        try:
            kind, *request = pipe.recv()
        except (EOFError, ConnectionError):
            os._exit(0)  # workers notice
        if kind == "fork":
            environment, log = request
            descriptor = recv_handle(pipe)
            pid = os.fork()
            if pid == 0:
                pipe.close()
                os.environ.update(environment)
                _work(Connection(descriptor), log)
            os.close(descriptor)
            pipe.send(pid)
        else:
            (pid,) = request
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                codes |= {pid: os.waitstatus_to_exitcode(status)} if ended else {}
            pipe.send(codes.get(pid))


def _work(pipe: Connection, log: str) -> NoReturn:
    """What a worker does."""
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), number)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _join(pipe, rank, world_size)
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, ConnectionError):
            os._exit(0)  # without Python's clean-up, which could wait for a peer
        pipe.send_bytes(_answer(request, rank, world_size))


def _join(pipe: Connection, rank: int, world_size: int) -> None:
    import torch.distributed as dist

    port = 0 if rank == 0 else pickle.loads(pipe.recv_bytes())  # 0: a free one
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, wait_for_workers=False)
    os.environ["MASTER_PORT"] = str(store.port)
    if rank == 0:
        pipe.send_bytes(pickle.dumps((True, store.port, None)))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
    dist.new_group = _shared(dist.new_group)
    pipe.send_bytes(pickle.dumps((True, None, None)))


def _shared(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Groups of the same ranks are one group: each of gloo's has a thread that wakes up a hundred times a second, no
    test ends its groups, and a pipeline of DeepSpeed's makes a dozen."""
    kept: dict[tuple[Any, ...], Any] = {}

    def shared(ranks: Any = None, timeout: timedelta | None = None) -> Any:
        key = (None if ranks is None else tuple(ranks), timeout)
        if key not in kept:
            kept[key] = new_group(ranks, timeout)
        return kept[key]

    return shared


def _answer(request: bytes, rank: int, world_size: int) -> bytes:
    """(ok, result or traceback, pickled exception or None), pickled."""
    try:
        path, module, qualname, args = pickle.loads(request)
        function = _load(path, module, qualname)
        return pickle.dumps((True, function(rank, world_size, *pickle.loads(args)), None))
    except BaseException as error:
        text = "raised\n" + traceback.format_exc()
        try:
            original = pickle.dumps(error)
            pickle.loads(original)
        except Exception:
            original = None
        return pickle.dumps((False, text, original))


def _load(path: str, module: str, qualname: str) -> Callable[..., Any]:
    """The function, from its file; the module is loaded once, under the name that pickles of its objects carry."""
    if module not in sys.modules:
        specification = importlib.util.spec_from_file_location(module, path)
        assert specification is not None and specification.loader is not None, f"{path} is not a Python file"
        loaded = importlib.util.module_from_spec(specification)
        sys.modules[module] = loaded
        try:
            specification.loader.exec_module(loaded)
        except BaseException:
            del sys.modules[module]
            raise
    value: Any = sys.modules[module]
    for name in qualname.split("."):
        value = getattr(value, name)
    return value


def _leave_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main()
