"""The vocabulary of a model of the paper's published code, as a tokenizer.

That code reads tokens between white space and ends every line in `<eos>`. What a token is depends on how its files were
prepared, which the vocabulary shows:

    numbers 0 … 255 and <eos>               bytes (its enwik8): a line end is the byte \\n
    single characters and <eos>             characters (its text8): `_` is a space, a line end the character \\n
    anything else                           words
"""

from megatron_allattn.config.errors import usage_error
from megatron_allattn.data.interface import Newline, Tokenizer
from megatron_allattn.data.tokenizers import ByteTokenizer, CharTokenizer, WordTokenizer

END_OF_LINE, SPACE = "<eos>", "_"
BYTES = frozenset(map(str, range(256)))
_WHOLE = "give what says of itself what it is: the P.json of prepared data or a run's state.json"


def tokenizer_of(vocabulary: list[str]) -> Tokenizer:
    """The tokenizer of a vocabulary in the order of ids; one without `<eos>` is of text whose line ends are no tokens.

    Raises UsageError: a token stands in it twice, also as what it is written for.
    """
    newline: Newline = "eos" if END_OF_LINE in vocabulary else "drop"
    symbols = [token for token in vocabulary if token != END_OF_LINE]
    if BYTES.issuperset(symbols):
        return ByteTokenizer([ord("\n") if token == END_OF_LINE else int(token) for token in vocabulary], newline)
    if all(len(token) == 1 for token in symbols):
        written = {END_OF_LINE: "\n", SPACE: " "}
        for token, meant in written.items():
            if token in vocabulary and meant in vocabulary:
                rule = f"has both {token} and {meant!r}, and {token} is read as {meant!r}, which that code writes so"
                raise usage_error("vocabulary", f"of {len(vocabulary)}", rule, "leave one of them out, or " + _WHOLE)
        return CharTokenizer([written.get(token, token) for token in vocabulary], newline)
    return WordTokenizer(vocabulary, newline)
