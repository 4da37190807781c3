"""What tests/support/template.py starts: `python -m tests.support.template_process PIPE_DESCRIPTOR`.

It has torch and DeepSpeed imported. Asked for a program or a worker of tests/support/pool.py, it forks a process; a
worker serves calls until its own pipe closes. Asked how a child has ended, it tells. It leaves when its pipe closes.
"""

import faulthandler
import gc
import importlib.util
import os
import pickle
import runpy
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

GROUP_TIMEOUT = timedelta(minutes=30)  # longer than any call's: a call that hangs is reported with its stacks


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    import torch
    import torch._dynamo

    from megatron_allattn.engine.deepspeed_engine import import_deepspeed

    torch.set_num_threads(1)
    import_deepspeed(verbose=False)
    importlib.import_module("megatron_allattn.training.main")  # what pretrain.py loads
    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage often, and what is here now is none
    codes: dict[int, int] = {}
    while True:
        try:
            kind, *request = pipe.recv()
        except (EOFError, ConnectionError):
            os._exit(0)  # workers notice
        if kind == "poll":
            (pid,) = request
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                codes |= {pid: os.waitstatus_to_exitcode(status)} if ended else {}
            pipe.send(codes.get(pid))
            continue
        handle = recv_handle(pipe) if kind == "worker" else None
        pid = os.fork()
        if pid == 0:
            pipe.close()
            if handle is None:
                _run(*request)
            _work(Connection(handle), *request)
        codes.pop(pid, None)  # of an earlier child: the system gives the same numbers again and again
        if handle is not None:
            os.close(handle)
        pipe.send(pid)


def _run(command: list[str], folder: str, environment: dict[str, str], outputs: tuple[str, str]) -> NoReturn:
    """What a program does: the file command[0], as `__main__`."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate((os.devnull, *outputs)):
        os.dup2(os.open(path, os.O_RDWR), number)
    sys.argv[:] = command
    extra = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(Path(command[0]).parent), *filter(None, extra)]
    code: Any = 0
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _work(pipe: Connection, environment: dict[str, str], log: str) -> NoReturn:
    """What a worker does."""
    os.environ.update(environment)
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

    def shared(ranks: Any = None, timeout: timedelta | None = None, backend: str | None = None) -> Any:
        key = (None if ranks is None else tuple(ranks), timeout, backend)
        if key not in kept:
            kept[key] = new_group(ranks, timeout, backend)
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
