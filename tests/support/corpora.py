"""Small archives of the same structure as those of the paper's corpora."""

import io
import zipfile

# 40 bytes, so 36, 2 and 2. A cut falls into the é; the second split ends in a newline, the others in no line end.
ENWIK8 = b"ab\n\nba\xc3\xa9 \xff\0cab\r\nb" * 2 + b"a\xc3" + b"\xa9\n" + b"bb"
TEXT8 = b" anarchism originated as a term of abuse"  # 40 characters
WIKITEXT = {  # a thin space and an ideographic space separate words too
    "train": " \n = Title = \n \n the cat <unk> the \u2009dog\u3000cat \n".encode(),
    "valid": b"the bird \n\n",
    "test": b"dog",
}


def zipped(members: dict[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip of these members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


ARCHIVES = {
    "enwik8": zipped({"enwik8": ENWIK8}),
    "text8": zipped({"text8": TEXT8}),
    "wikitext-103": zipped(
        {"wikitext-103/": b""} | {f"wikitext-103/wiki.{split}.tokens": text for split, text in WIKITEXT.items()}
    ),
}
