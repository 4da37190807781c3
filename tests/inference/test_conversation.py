"""A text that is written in turns: the same as in one piece, whatever is typed and whenever somebody interrupts."""

import io
import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch

from megatron_allattn.data.tokenizers import CharTokenizer, Tokenizer, WordTokenizer
from megatron_allattn.engine.interface import find_spans, local_spans
from megatron_allattn.inference import conversation as module
from megatron_allattn.inference.conversation import Conversation, Listener, Order, converse
from megatron_allattn.inference.reader import Reader
from megatron_allattn.inference.sampling import Sampler, Sampling, greedy
from megatron_allattn.inference.terminal import Interrupts
from megatron_allattn.kernels import eager
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.initialization import initialize
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import ALONE, Group
from tests.support.pool import WorkerPools
from tests.support.trajectories import groups_of
from tests.support.variants import model_of

WORDS = WordTokenizer(["<eos>", "the", "cat", "hat", "and", "<unk>"])
CHARACTERS = CharTokenizer([*"abcdefgh ./\n"])


def network_of(tokenizer: Tokenizer, group: Group = ALONE) -> Network:
    network = Network(model_of("all-attn", max_attention_span=12), tokenizer.vocab_size, group, FusedOps("torch"))
    initialize(network, 4)
    return network.double()


def conversation_of(
    tokenizer: Tokenizer, group: Group = ALONE, *, num_tokens: int = 8, sampled: bool = False
) -> Conversation:
    network = network_of(tokenizer, group)
    spans = find_spans(network, local_spans(network))
    return Conversation(
        tokenizer,
        lambda: Reader(network, spans, 1),
        (lambda turn: Sampler(Sampling(), 4, [(turn, 0)])) if sampled else lambda turn: greedy,
        num_tokens=num_tokens,
    )


def never() -> bool:
    return False


def after(number: int) -> Callable[[], bool]:
    """Somebody interrupts once this many blocks and tokens have passed without."""
    asked = iter(range(number))
    return lambda: next(asked, None) is None


def answer(conversation: Conversation, tokens: list[int], interrupted: Callable[[], bool] = never) -> list[int]:
    *_, last = conversation.answer(tokens, interrupted)
    return last.tokens


def likeliest(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    """After every token, from one pass over all without a cache."""
    network = network_of(tokenizer)
    reader = Reader(network, find_spans(network, local_spans(network)), 1, eager.attend)
    return reader(torch.tensor([tokens]))[0].argmax(dim=-1).tolist()


def test_turns_make_one_text() -> None:
    conversation, text, said = conversation_of(CHARACTERS), [], []
    for typed in ("a cab", "", " fed.", "h", "a" * 30):
        ids = CHARACTERS.encode(typed.encode()).tolist()
        found = answer(conversation, ids)
        text += ids
        said += [(len(text) + place, token) for place, token in enumerate(found)]
        text += found
    expected = likeliest(CHARACTERS, text)
    assert len(said) == 5 * 8 and all(expected[place - 1] == token for place, token in said)


def test_forgetting_is_a_new_beginning() -> None:
    conversation = conversation_of(CHARACTERS, sampled=True)
    first = [answer(conversation, [1, 2]), answer(conversation, [])]
    assert first[0] != first[1]
    conversation.reset()
    assert [answer(conversation, [1, 2]), answer(conversation, [])] == first
    conversation.reset()
    assert list(conversation.answer([], never)) == []  # there is nothing to go on from


@pytest.mark.parametrize("stopped", [1, 2, 5])
def test_an_answer_that_is_stopped_is_gone_on_with(stopped: int) -> None:
    whole = answer(conversation_of(CHARACTERS, num_tokens=12), [1, 2, 3])
    conversation = conversation_of(CHARACTERS, num_tokens=12)
    *_, last = conversation.answer([1, 2, 3], after(stopped))
    assert last.finish == "interrupted" and len(last.tokens) == stopped
    assert (last.tokens + answer(conversation, []))[:12] == whole


def test_a_long_text_that_is_interrupted_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROMPT_BLOCK", 4)
    tokens = [(3 * i) % 12 for i in range(18)]
    whole = answer(conversation_of(CHARACTERS), tokens)
    for stopped in (0, 1, 4):
        conversation = conversation_of(CHARACTERS)
        assert answer(conversation, tokens, after(stopped)) == []
        assert answer(conversation, []) == whole


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Gives standard input."""

    def give(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return give


def orders_of(tokenizer: Tokenizer) -> list[Order]:
    with Interrupts(heeded=True) as interrupts:
        return list(Listener(tokenizer, interrupts, float("inf")).orders())


def test_whatever_is_typed(typed: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["", "abc", "abß", "\U0001f600", "", "/what now", "//a", "/reset", "", "h" * 10, "/help", "b"]
    typed("\n".join(lines).encode() + b"\n\xff\xfe\na\0b\nc")
    assert [order for order in orders_of(CHARACTERS) if order != Order()] == [
        Order(tokens=[0, 1, 2]),
        Order(tokens=[]),
        Order(tokens=[10, 0]),
        Order(reset=True),
        Order(tokens=[7] * 10),
        Order(tokens=[1]),
        Order(tokens=[2]),  # a last line without an end
        Order(end=True),
    ]
    shown = capsys.readouterr()
    assert "Ctrl-C" in shown.out
    starts = (
        "note: there is nothing yet to go on from",
        "note: text of this line: character 'ß' (U+00DF LATIN SMALL LETTER SHARP S) at byte offset 2 is not in the",
        "note: text of this line: character '\U0001f600'",
        "note: /what is no command; there are /reset and /help",
        "note: there is nothing yet to go on from",
        "note: text of this line: byte 0 (0xff) is not valid UTF-8",
        "note: text of this line: character",
    )
    notes = shown.err.splitlines()
    assert len(notes) == len(starts) and all(map(str.startswith, notes, starts)), notes


def test_unknown_words_are_told(typed: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]) -> None:
    typed("the dog and the \U0001f436\n   \n".encode())
    assert orders_of(WORDS) == [Order(tokens=[1, 5, 4, 1, 5]), Order(tokens=[]), Order(end=True)]
    assert capsys.readouterr().err.startswith("note: 2 of the 5 tokens of this line are <unk>")


def test_ten_thousand_words(typed: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]) -> None:
    typed(b"the cat " * 5000 + b"\n\n")
    converse(conversation_of(WORDS), ALONE, 60.0)
    alone = conversation_of(WORDS)
    turns = [list(alone.answer(tokens, never))[-1] for tokens in ([1, 2] * 5000, [])]
    assert capsys.readouterr().out == "".join(f"{turn.text}\n" for turn in turns)
    beginning = [1, 2] * 30  # further back no span reaches
    assert turns[0].tokens == likeliest(WORDS, beginning + turns[0].tokens)[len(beginning) - 1 : -1]


def test_no_input_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert orders_of(CHARACTERS) == [Order(end=True)]


def test_an_interrupt_while_nobody_types_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(io.StringIO):
        def readline(self, *_: object) -> str:
            signal.raise_signal(signal.SIGINT)
            signal.pause()
            return ""

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "stdin", Silent())
    assert orders_of(CHARACTERS) == [Order(end=True)]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("times", "answers"), [(1, 2), (2, 1)])
def test_an_interrupt_stops_the_answer_and_a_second_one_ends(
    typed: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch, times: int, answers: int
) -> None:
    shown: list[str] = []

    def interrupting(text: str) -> None:
        shown.append(text)
        if len(shown) == 1:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(module, "write", interrupting)
    typed(b"abc\ncab\n")
    conversation = conversation_of(CHARACTERS)
    converse(conversation, ALONE, 60.0)
    alone = conversation_of(CHARACTERS)
    turns = [list(alone.answer(*given))[-1] for given in (([0, 1, 2], after(1)), ([2, 0, 1], never))]
    assert [len(turn.tokens) for turn in turns] == [1, 8]
    assert "".join(shown) == "".join(f"{turn.text}\n" for turn in turns[:answers])


def test_reading_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def readline(self, *_: object) -> str:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stdin", Broken())
    with pytest.raises(OSError, match="Input/output error"):
        orders_of(CHARACTERS)


class _Slow(io.StringIO):
    """Each line takes a moment."""

    def readline(self, *_: object) -> str:
        time.sleep(0.4)
        return super().readline()


def _conversed(rank: int, world_size: int, lines: str, slow: bool) -> str:
    """What this rank prints; the others have no input."""
    before = sys.stdin, sys.stdout
    sys.stdin = (_Slow(lines) if slow else io.StringIO(lines)) if rank == 0 else None  # type: ignore[assignment]
    sys.stdout = found = io.StringIO()
    try:
        group = groups_of(world_size, 1).tensor
        converse(conversation_of(CHARACTERS, group, sampled=True), group, 0.8 if slow else 60.0)
        return found.getvalue()
    finally:
        sys.stdin, sys.stdout = before


@pytest.mark.parametrize("slow", [False, True])
def test_the_first_rank_listens_and_prints(
    pools: WorkerPools, typed: Callable[[bytes], None], capsys: pytest.CaptureFixture[str], slow: bool
) -> None:
    lines = "abc\n\nß\n/reset\nabc\n"
    typed(lines.encode())
    converse(conversation_of(CHARACTERS, sampled=True), ALONE, 60.0)
    alone = capsys.readouterr().out
    assert pools(2).run(_conversed, lines, slow) == [alone, ""]
