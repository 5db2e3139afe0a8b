"""Iterate over the documents in a file."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from kha_megatron.documents.formats import Format, find_format, open_file, printable
from kha_megatron.documents.rows import read_rows
from kha_megatron.errors import DataError

_BYTES_PER_TOKEN = 64
"""How many bytes :func:`read_beginning` reads for each token. Tokens are shorter on average."""


class TextFile(NamedTuple):
    """A file with text, in any of the supported formats."""

    path: Path
    bytes: int
    """Size of the uncompressed text in UTF-8."""
    documents: int
    """Number of documents with text."""
    is_split: bool
    """Whether any document was longer than the limit."""


class Document(NamedTuple):
    text: str
    continues: bool = False
    """Whether this is the continuation of a document that was split."""


class Reader:
    """Iterates over the documents in a file.

    Args:
        limit: Maximum document size in bytes (at least 4). Longer documents are split at newlines
            if possible, otherwise between two characters.
        json_key: Name of the JSON Lines field, or Parquet or Arrow column, with the text.
    """

    def __init__(self, limit: int, json_key: str = "text") -> None:
        self.limit = limit
        self.json_key = json_key

    def documents(self, path: Path) -> Iterator[Document]:
        """Yield each document in a file. The text of rows without text is empty.

        Raises:
            DataError: See :func:`find_format` and :func:`read_rows`.
            UnicodeDecodeError: If a text file is not valid UTF-8.
        """
        file_format = find_format(path)
        if file_format is Format.TEXT:
            with open_file(path) as stream:
                yield from self._split(stream)
            return
        for text in read_rows(path, file_format, self.json_key):
            if text:
                stream = io.BytesIO(text.encode())
                yield from self._split(stream)
            else:
                yield Document("")

    def _split(self, stream: IO[bytes]) -> Iterator[Document]:
        continues = False
        for chunk in split_text(stream, self.limit):
            yield Document(chunk.decode(), continues)
            continues = True

    def read(self, file: TextFile) -> Iterator[str]:
        """Yield the non-empty documents. Raises DataError if the file changed in the meantime."""
        size = 0
        try:
            for document in self.documents(file.path):
                size += len(document.text.encode())
                if document.text:
                    yield document.text
            if size != file.bytes:
                raise ValueError(f"{size} bytes instead of {file.bytes}")
        except (OSError, EOFError, ValueError) as error:
            raise DataError(
                f"{printable(file.path)} changed while it was being read ({error})."
            ) from error


def split_text(stream: IO[bytes], limit: int) -> Iterator[bytes]:
    """Split a stream into chunks of at most ``limit`` bytes.

    Prefers to split after a newline. If a line is too long, we split it between two characters.
    """
    unfinished = b""  # what has been read, but does not belong to a chunk yet
    while True:
        # one more byte than fits shows whether this is the last chunk
        missing = limit + 1 - len(unfinished)
        block = unfinished + stream.read(missing)
        if len(block) <= limit:
            if block:
                yield block
            return
        end = block.rfind(b"\n", 0, limit) + 1
        if end == 0:
            end = _end_of_character(block, limit)
        yield block[:end]
        unfinished = block[end:]


def _end_of_character(block: bytes, limit: int) -> int:
    """Return the largest size up to ``limit`` that does not split a UTF-8 character."""
    for end in range(limit, limit - 4, -1):
        is_continuation_byte = block[end] & 0xC0 == 0x80
        if not is_continuation_byte:
            return end
    return limit


def read_beginning(file: Path, tokens: int) -> str:
    """Read enough text from a file to get ``tokens`` tokens."""
    try:
        file_format = find_format(file)
        if file_format is not Format.TEXT:
            raise DataError(f"{file} contains {file_format.value}. Pass a UTF-8 text file.")
        with open_file(file) as stream:
            chunks = split_text(stream, tokens * _BYTES_PER_TOKEN)
            text = next(chunks, b"").decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read {file} ({error}). Pass a UTF-8 text file.") from error
    if not text.strip():
        raise DataError(f"{file} contains no text.")
    return text
