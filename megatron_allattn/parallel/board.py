"""The store at which ranks have met, as a board for messages, with a limit for every answer.

torch's TCPStore answers a dead holder with an exception, and a frozen one (SIGSTOP, a host that has lost its network)
not at all: its time-out holds for keys that are missing, not for an answer that does not come. So questions are put on
threads of their own, which nobody waits for longer than he wants to.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Silent(RuntimeError):
    """The store has not answered in time."""


class Board:
    """Messages under this prefix, through a connection of its own. seconds: what `ask` gives the store for an answer.

    A question is a function of the store, `set`, `get`, `check`, … of torch.distributed.Store.
    """

    def __init__(self, prefix: str, seconds: float) -> None:
        default: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(prefix, default.clone())
        self._seconds = seconds
        self._silent = False

    def begin(self, question: "Callable[[dist.Store], T]") -> "Future[T]":
        """Ask, and let the answer come when it does: perhaps never. The future raises RuntimeError: no store there."""
        answer: Future[T] = Future()

        def wait() -> None:
            try:
                answer.set_result(question(self._store))
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=wait, name="question", daemon=True).start()
        return answer

    def ask(self, question: "Callable[[dist.Store], T]") -> T:
        """The answer. Raises RuntimeError where the store is gone, Silent where it does not answer, now or before."""
        if self._silent:
            raise Silent
        try:
            return self.begin(question).result(self._seconds)
        except TimeoutError:
            self._silent = True
            raise Silent from None
