"""Who is missing where not all ranks come, told once, and a meeting where all do."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_allattn.parallel.addresses import free_port
from megatron_allattn.parallel.meeting import Arrival, Missing, missing_words, open_store, spans, wait_for_all


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([], ""), ([3], "3"), ([3, 4], "3-4"), ([0, 2, 3, 4, 9], "0, 2-4, 9"), (range(64), "0-63")],
)
def test_spans(numbers: list[int], words: str) -> None:
    assert spans(numbers) == words


def test_missing_ranks_are_named_with_their_hosts() -> None:
    """Two hosts of four ranks each that came in part, and one of which nothing is known."""
    arrived = {rank: Arrival("n1", rank, 4) for rank in (0, 1, 3)} | {6: Arrival("n2", 2, 4)}
    assert missing_words(arrived, 12) == (
        "missing: rank 2, 4-5, 7-11 of 12 (2 on n1; 4-5, 7 on n2; 8-11 on hosts from which no rank came)"
    )


def test_a_host_that_cannot_be_told_is_not_guessed() -> None:
    """Ranks dealt to hosts in turns: a block of consecutive ones has those of both."""
    arrived = {0: Arrival("n1", 0, 2), 1: Arrival("n2", 0, 2), 2: Arrival("n1", 1, 2)}
    assert missing_words(arrived, 4) == "missing: rank 3 of 4 (3 on hosts from which no rank came)"


def test_ranks_that_torchrun_starts_anew_do_not_meet_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's store has been there before them."""
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for restart in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        alone = open_store(0, 2, "127.0.0.1", port, 5)
        assert isinstance(wait_for_all(alone, Arrival("h", 0, 2), 0, 2, 0.3), Missing)
        assert not open_store(1, 2, "127.0.0.1", port, 5).check(["all"])
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", f"{restart}-again")
        found = _meet_at(port, 2)
        assert found == [None, None]
    del agent


def _meet_at(port: int, world_size: int) -> list[Missing | None]:
    """Ranks that all come, at a store that is there."""
    results: dict[int, Missing | None] = {}

    def come(rank: int) -> None:
        store = open_store(rank, world_size, "127.0.0.1", port, 5)
        results[rank] = wait_for_all(store, Arrival("h", rank, world_size), rank, world_size, 5.0)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(world_size)]


def _meet(count: int, world_size: int, seconds: dict[int, float]) -> list[Missing | None]:
    """So many ranks, each a thread with a connection of its own, meet within `seconds` (1 if not given)."""
    port = free_port()
    results: dict[int, Missing | None] = {}
    first = open_store(0, world_size, "127.0.0.1", port, 5)

    def come(rank: int) -> None:
        store = first if rank == 0 else open_store(rank, world_size, "127.0.0.1", port, 5)
        results[rank] = wait_for_all(store, Arrival("h", rank, world_size), rank, world_size, seconds.get(rank, 1.0))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [results[rank] for rank in range(count)]


def test_all_come() -> None:
    assert _meet(3, 3, dict.fromkeys(range(3), 10.0)) == [None, None, None]


def test_the_first_to_give_up_speaks_and_the_others_hear_of_it_at_once() -> None:
    """Rank 2 of 4 does not come; rank 1 waits the least, the others would wait for far longer than the test may."""
    words = "missing: rank 3 of 4 (3 on h)"
    assert _meet(3, 4, {0: 60.0, 1: 0.5, 2: 60.0}) == [Missing(1), Missing(1, words), Missing(1)]


def test_nobody_at_the_address() -> None:
    with pytest.raises(dist.DistError, match=r"[Tt]imed? ?out"):
        open_store(1, 2, "127.0.0.1", free_port(), 1.0)


def test_the_store_serves_as_that_of_a_group() -> None:
    store = open_store(0, 1, "127.0.0.1", free_port(), 5)
    assert wait_for_all(store, Arrival("h", 0, 1), 0, 1, 5) is None
    assert store.wait(["all"], timedelta(seconds=1)) is None
