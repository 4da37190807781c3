"""What a reader of prepared data should know of it beyond its numbers: sentences for the report and the manifest."""

from collections.abc import Iterator, Mapping, Sequence

from megatron_allattn.data.interface import Tokenizer
from megatron_allattn.data.manifest import InputRecord, SplitRecord
from megatron_allattn.data.subwords import SentencePieceTokenizer
from megatron_allattn.data.words import WordTokenizer

_LINE_ENDS = {
    "eos": "line ends are <eos>; the last line of a file and split has one too, also if nothing ends it",
    "drop": "line ends are dropped; they cannot be decoded again",
}


def notes_on(
    tokenizer: Tokenizer,
    splits: Mapping[str, SplitRecord],
    inputs: Sequence[InputRecord],
    unknown_in_training: int,
    *,
    by_files: bool,
) -> tuple[str, ...]:
    """The notes; `unknown_in_training` is how often <unk> is a token of the training split, `by_files`: each split has
    files of its own."""
    empty = [name for name, record in splits.items() if by_files and not record.tokens]
    absent = [f"the {name} split is empty, since there is no --{name}-input" for name in empty]
    return (*_notes(tokenizer, splits, inputs, unknown_in_training), *absent)


def _notes(
    tokenizer: Tokenizer, splits: Mapping[str, SplitRecord], inputs: Sequence[InputRecord], unknown_in_training: int
) -> Iterator[str]:
    if rule := _LINE_ENDS.get(tokenizer.newline):
        yield rule
    if crlf := sum(record.crlf_lines for record in inputs):
        rule = "each is one line end" if isinstance(tokenizer, WordTokenizer) else "the \\r stays in its line"
        yield f"{crlf:,} line end{'s are' if crlf > 1 else ' is'} \\r\\n: {rule}"
    if isinstance(tokenizer, WordTokenizer):
        yield _origin_of_unknown(tokenizer, splits["train"].unknown_words, unknown_in_training)
    if isinstance(tokenizer, SentencePieceTokenizer) and not tokenizer.lossless:
        yield "the SentencePiece model changes text (it normalizes, adds or removes): decoding does not give all back"
    for name, record in splits.items():
        if record.unknown_words:
            what = (
                f"of {record.words:,} words" if isinstance(tokenizer, WordTokenizer) else f"of {record.tokens:,} tokens"
            )
            yield f"{name}: {record.unknown_words:,} {what} are not in the vocabulary and became <unk>"


def _origin_of_unknown(tokenizer: WordTokenizer, replaced: int, count: int) -> str:
    if tokenizer.unknown_id is None:
        return "the vocabulary has no <unk>: no split has a word that it lacks"
    if count > replaced:
        return f"<unk> is a word of the training text itself, {count - replaced:,} times"
    if count:
        return "<unk> is no word of the training text; there it stands for words that the vocabulary leaves out"
    return "<unk> is no word of the training text: it is in the vocabulary with frequency 0"
