"""Text of tokens that come one at a time.

A token's text depends on those before it: a word has a space in front unless it starts a line, and a piece or a byte
may be part of a character. So a token is decoded together with those shown last, and shown once it does not end inside
a character. What is shown in all is what decoding all tokens at once gives.
"""

from megatron_allattn.data.tokenizers import Tokenizer

BROKEN = "\ufffd"  # what stands for bytes that are no character, or not one yet


class TextStream:
    """Add the tokens in order and show what comes back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # the last tokens whose text has been given
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """The text that can be shown now that this token has come; often of several tokens, or empty."""
        self._pending.append(token)
        text = self._new_text()
        if not text or text.endswith(BROKEN):
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def end(self) -> str:
        """What is left when no more tokens come."""
        return self._new_text() if self._pending else ""

    def _new_text(self) -> str:
        return self._decode(self._shown + self._pending)[len(self._decode(self._shown)) :]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens)
        return text if isinstance(text, str) else text.decode(errors="replace")
