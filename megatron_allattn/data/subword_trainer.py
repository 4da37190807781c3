"""Run by data/subwords.py as a process of its own, so that an abort of SentencePiece's trainer ends only this one.

stdin: "word TAB count" a line · argument: the trainer's options as JSON · stdout: the model · stderr: what went wrong,
with exit code 1.
"""

import io
import json
import sys

import sentencepiece


def main() -> int:
    model = io.BytesIO()
    words = (line.rstrip(b"\n") for line in sys.stdin.buffer)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=words, model_writer=model, input_format="tsv", **json.loads(sys.argv[1])
        )
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(model.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main())
