"""The evaluation card: what was scored, under which rules, and what came out; as JSON and, from that, as text.

Numbers per byte, character and word refer to the original text of the split, whose counts prepared data carries. The
first token of a split has nothing before it and is not predicted, so its bytes and characters are not counted.
"""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_allattn.checkpoint.conversion import SavedRun
from megatron_allattn.config.errors import usage_error
from megatron_allattn.config.json_files import read_json_object
from megatron_allattn.data.dataset import Dataset
from megatron_allattn.data.manifest import SplitRecord
from megatron_allattn.data.pieces import starts_character
from megatron_allattn.data.tokenizers import SentencePieceTokenizer, Tokenizer, WordTokenizer
from megatron_allattn.inference.model import LoadedModel
from megatron_allattn.inference.scoring import CodeProtocol, Score
from megatron_allattn.training.resume import UNKNOWN_TOKENS, knows_its_tokens

Card = dict[str, Any]
FORMAT, VERSION = "megatron_allattn evaluation card", 1
UNKNOWN = {"word": "words", "sentencepiece": "pieces"}  # what <unk> stands for, by tokenizer
UNKNOWN_TEXT = "unknown: the data does not say what its original text was"


def evaluation_card(
    model: LoadedModel,
    dataset: Dataset,
    split: str,
    score: Score,
    code: CodeProtocol | str,
    settings: Card,
) -> Card:
    """Everything as JSON's types, in full precision.

    code: what the paper's code would report, or why that is not known · settings: how it was computed (precision,
    device, layout, block_length, overlap), which is passed through.
    """
    tokens, tokenizer = getattr(dataset, split), dataset.tokenizer
    text = dataset.splits[split] if dataset.splits is not None else None
    known = knows_its_tokens(model.state)
    return {
        "format": FORMAT,
        "version": VERSION,
        "checkpoint": {"folder": str(model.step_folder), "step": model.state["step"], "recipe": model.run.recipe},
        "data": {
            "description": dataset.description,
            "sha256": dataset.fingerprint,
            "split": split,
            "original_text": asdict(text) if text is not None else None,
            "tokenizer": {
                "type": tokenizer.name,
                "newline": tokenizer.newline,
                "sha256": tokenizer.fingerprint,
                "is_the_checkpoints": True if known else None,
            },
            "not_in_the_tokens": _not_in_the_tokens(tokenizer) if text is not None else None,
            "vocab_size": tokenizer.vocab_size,
        },
        "settings": settings,
        "tokens": len(tokens),
        "predictions": score.predictions,
        **_quality(score, tokenizer, int(tokens[0]), text),
        "context": {
            "full": score.overlap,
            "predictions_with_less": score.lost_context,
            "num_streams": score.num_streams,
            "before_the_split": model.run.model.empty_cache,
        },
        "code_protocol": _code_protocol(code, tokenizer.unit),
        "notes": [*model.notes, *([] if known else [UNKNOWN_TOKENS])],
    }


def _quality(score: Score, tokenizer: Tokenizer, first_token: int, text: SplitRecord | None) -> Card:
    bits, predicted = score.total_nats / math.log(2), None
    if text is not None:
        first_bytes, first_characters = _size(tokenizer.decode([first_token]))
        predicted = {"characters": text.characters - first_characters, "bytes": text.bytes - first_bytes}
    return {
        "total_nats": score.total_nats,
        "nats_per_token": score.mean_nats,
        "bits_per_token": bits / score.predictions,
        "bits_per_byte": _ratio(bits, predicted["bytes"]) if predicted is not None else None,
        "bits_per_character": _ratio(bits, predicted["characters"]) if predicted is not None else None,
        "predicted_text": predicted,
        "word_perplexity": _word_perplexity(score, tokenizer, text),
    }


def _not_in_the_tokens(tokenizer: Tokenizer) -> list[str]:
    """What the tokens do not tell of the original text, beside what became <unk>.

    It costs no bits, while its bytes and characters are counted: bits per byte and character are a lower bound then.
    """
    found = []
    if isinstance(tokenizer, WordTokenizer):
        found.append("which white space stands between words")
    elif isinstance(tokenizer, SentencePieceTokenizer) and not tokenizer.lossless:
        found.append("what the SentencePiece model normalizes or removes")
    return found + (["line ends"] if tokenizer.newline == "drop" else [])


def _size(text: bytes | str) -> tuple[int, int]:
    """Bytes, and characters; of bytes alone those that do not go on with a character of UTF-8."""
    if isinstance(text, str):
        return len(text.encode()), len(text)
    return len(text), int(starts_character(text).sum())


def _ratio(amount: float, count: int) -> float | None:
    return amount / count if count > 0 else None


def _word_perplexity(score: Score, tokenizer: Tokenizer, text: SplitRecord | None) -> Card | None:
    """exp of the nats per word, line ends counted as words and not; `missing` says why one is null.

    Where words are tokens, leaving line ends out takes their nats away too; elsewhere all nats are spread over the
    words, or the words and lines, of the original text.
    """
    line_end = tokenizer.newline_id
    if tokenizer.name == "word":
        nats, count = score.total_nats, score.predictions
        if line_end is not None:
            nats, count = nats - float(score.nats_by_id[line_end]), count - int(score.count_by_id[line_end])
        with_ends, without, of = (score.total_nats, score.predictions), (nats, count), "tokens"
    elif text is not None:
        with_ends, without = (score.total_nats, text.words + text.lines), (score.total_nats, text.words)
        of = "original text"
    else:
        return None
    values = {
        "with_line_ends": _perplexity(*with_ends) if line_end is not None else None,
        "without_line_ends": _perplexity(*without),
    }
    reasons = {
        "with_line_ends": "no line end is a token" if line_end is None else _no_perplexity(with_ends[1]),
        "without_line_ends": _no_perplexity(without[1]),
    }
    return {"of": of, **values, "missing": {key: reasons[key] for key, value in values.items() if value is None}}


def _perplexity(nats: float, count: int) -> float | None:
    """exp(nats / count); None where there is nothing to count or no float holds it."""
    try:
        return math.exp(nats / count) if count > 0 else None
    except OverflowError:
        return None


def _no_perplexity(count: int) -> str:
    """Why `_perplexity` is None."""
    return "it is beyond any float" if count > 0 else "there is no word"


def _code_protocol(code: CodeProtocol | str, unit: str) -> Card:
    if isinstance(code, str):
        return {"missing": code}
    name, value = ("ppl", _perplexity(code.mean_nats, 1)) if unit == "token" else ("bpc", code.mean_nats / math.log(2))
    return {"nats_per_token": code.mean_nats, name: value, **asdict(code)}


def card_text(card: Card) -> str:
    """The card for a terminal."""
    checkpoint, data, settings = card["checkpoint"], card["data"], card["settings"]
    recipe = f", recipe {checkpoint['recipe']}" if checkpoint["recipe"] else ""
    newline = f"; newline rule: {data['tokenizer']['newline']}" if data["original_text"] is not None else ""
    rows = [
        ("checkpoint", f"{checkpoint['folder']} (step {checkpoint['step']:,}{recipe})"),
        ("data", f"{data['split']} split of {data['description']}{newline}"),
        ("computed", ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())),
        (
            "scored",
            f"{card['predictions']:,} of {card['tokens']:,} tokens, each once, tails included; "
            "the first has nothing before it and is context only",
        ),
        ("loss", f"{card['nats_per_token']:.6f} nats = {card['bits_per_token']:.6f} bits per token"),
        ("bits", _bits_text(card)),
        ("perplexity", _perplexity_text(card["word_perplexity"])),
        ("context", _context_text(card)),
        ("paper's code", _code_text(card["code_protocol"])),
    ]
    if data["original_text"] is not None and data["tokenizer"]["type"] in UNKNOWN:
        rows.insert(-2, ("unknown", _unknown_text(data)))
    rows += [("note", note) for note in card["notes"]]
    return "\n".join(f"{name:<13} {text}" for name, text in rows)


def _bits_text(card: Card) -> str:
    text = card["data"]["original_text"]
    if text is None:
        return UNKNOWN_TEXT
    parts = [
        f"{card[key]:.6f} per {name}" if card[key] is not None else f"none per {name}: there is no further {name}"
        for key, name in (("bits_per_character", "character"), ("bits_per_byte", "byte"))
    ]
    predicted = [f"{count:,} of {text[name]:,} {name}" for name, count in card["predicted_text"].items()]
    counts = f"{' and '.join(predicted)} are predicted; {text['words']:,} words, {text['lines']:,} lines"
    absent = card["data"]["not_in_the_tokens"]
    bound = f"; lower bounds, for this is in the text and in no token: {', '.join(absent)}" if absent else ""
    return f"{', '.join(parts)} of the original text ({counts}){bound}"


def _perplexity_text(perplexity: Card | None) -> str:
    if perplexity is None:
        return UNKNOWN_TEXT
    rules = {
        "tokens": ("exp(nats / tokens)", "exp(nats / tokens) over the tokens that are no line ends"),
        "original text": ("exp(nats / (words + lines))", "exp(nats / words)"),
    }[perplexity["of"]]
    parts = []
    for key, rule in zip(("with_line_ends", "without_line_ends"), rules, strict=True):
        value = perplexity[key]
        shown = _few_digits(value, ",.4f") if value is not None else f"none ({perplexity['missing'][key]})"
        parts.append(f"{shown} {key.replace('_', ' ')}, {rule}")
    return f"per word: {'; '.join(parts)}"


def _few_digits(value: float, form: str) -> str:
    """The value in that form, from a million on as 1.014e+304."""
    return f"{value:{form if value < 1e6 else '.4g'}}"


def _context_text(card: Card) -> str:
    context, settings = card["context"], card["settings"]
    plural = "s" if context["num_streams"] > 1 else ""
    streams = f"{context['num_streams']} stream{plural} in blocks of {settings['block_length']}"
    start = {"attend": "zeros that are attended to", "mask": "nothing"}[context["before_the_split"]]
    if settings["overlap"]:
        what = (
            f"full: {streams}, each after an unscored overlap of {context['full']:,} tokens, the sum of the layers' "
            "windows, capped at the split's start"
        )
    else:
        lost = context["predictions_with_less"]
        what = (
            f"lost: {streams} start with empty caches (--no-overlap): {lost:,} tokens "
            f"({100 * lost / card['predictions']:.2f} %) have less than the {context['full']:,} before them that count"
        )
    return f"{what}; before the split: {start}"


def _unknown_text(data: Card) -> str:
    count, tokens = data["original_text"]["unknown_words"], data["original_text"]["tokens"]
    share = f"{count:,} of {tokens:,} tokens ({100 * count / max(1, tokens):.2f} %)"
    bound = "; what they were is not scored, so bits per character and byte are a lower bound" if count else ""
    return f"{share} are <unk> for {UNKNOWN[data['tokenizer']['type']]} outside the vocabulary{bound}"


def _code_text(code: Card) -> str:
    if "missing" in code:
        return code["missing"]
    unit = "bpc" if "bpc" in code else "ppl"
    value = _few_digits(code[unit], ".6f") if code[unit] is not None else "beyond any float"
    return (
        f"would report {unit} {value} ({code['nats_per_token']:.6f} nats): {code['num_streams']} streams in blocks of "
        f"{code['block_length']} with empty caches at their start, {code['predictions']:,} tokens, "
        f"{code['dropped']:,} in tails dropped"
    )


def text_of_file(what: str, path: Path, saved: SavedRun) -> str:
    """The text of a card that was written as JSON, if it is of this step. Raises UsageError; `what`: the flag."""
    fix = f"give what tools/evaluate.py --load {saved.step_folder} --json FILE writes"
    card = read_json_object(what, path, fix)
    if (card.get("format"), card.get("version")) != (FORMAT, VERSION):
        raise usage_error(what, path, f"is no evaluation card of version {VERSION}", fix)
    try:
        checkpoint, found = card["checkpoint"], card["data"]["tokenizer"]["sha256"]
        folder = Path(checkpoint["folder"]).parts[-3:]  # run, checkpoints, step: it may have been computed elsewhere
        text = card_text(card)
    except (KeyError, TypeError, ValueError) as error:
        raise usage_error(what, path, f"is damaged ({error!r})", fix) from None
    same_folder = folder == saved.step_folder.resolve().parts[-len(folder) or None :]
    if not same_folder or checkpoint["step"] != saved.state["step"] or found != saved.state["tokenizer_sha256"]:
        raise usage_error(what, path, f"is of {checkpoint['folder']}, step {checkpoint['step']}", fix)
    return text
