"""Read the text of each row of a JSON Lines, Parquet or Arrow file."""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from kha_megatron.documents.formats import Format, import_pyarrow, open_file, printable
from kha_megatron.errors import DataError, in_one_line

_ROWS_PER_BATCH = 1024
_ROWS_WITHOUT_FIELD = 10_000
"""If the first rows do not have the field, reading stops after this number of rows."""
_ARROW_FILE_MAGIC = b"ARROW1"
"""First bytes of Arrow's file format. Its streaming format starts with other bytes."""
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of Arrow's streaming format: the marker of a message, and its length 0."""


def read_rows(path: Path, file_format: Format, key: str) -> Iterator[str | None]:
    """Yield the text of each row, or None for rows without text.

    Args:
        path: File to read.
        file_format: Any format but ``Format.TEXT``.
        key: Name of the JSON Lines field, or Parquet or Arrow column, with the text.

    Raises:
        DataError: If the file is damaged or cannot be read, has no such field or column, or if it
            does not contain strings.
    """
    if file_format is Format.JSON_LINES:
        yield from _read_json_lines(path, key)
    else:
        yield from _read_table(path, file_format, key)


def _read_json_lines(path: Path, key: str) -> Iterator[str | None]:
    row_count = 0
    has_field = False
    field_names: list[str] = []
    with open_file(path) as stream:
        for line_number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            position = f"{printable(path)}, line {line_number}"
            row = _parse_row(line, position)
            yield _get_text(row, key, position)
            row_count += 1
            has_field |= key in row
            field_names = list(row)
            if row_count == _ROWS_WITHOUT_FIELD and not has_field:
                break
    if row_count and not has_field:
        raise DataError(
            f"{printable(path)}: none of the first {row_count} rows has a field {key!r}. "
            + _suggest_names(field_names)
        )


def _parse_row(line: bytes, position: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _invalid_json(position, error) from error
    if not isinstance(row, dict):
        type_name = type(row).__name__
        raise DataError(f"{position}: expected a JSON object, but got {type_name}.")
    return row


def _get_text(row: dict[str, Any], key: str, position: str) -> str | None:
    text = row.get(key)
    if text is None:
        return None
    if not isinstance(text, str):
        subject = f"{position}: field {key!r}"
        text_fields = [name for name, value in row.items() if isinstance(value, str)]
        raise _not_strings(subject, type(text).__name__, text_fields)
    try:
        text.encode()  # JSON can contain half of a surrogate pair
    except UnicodeEncodeError as error:
        raise _invalid_json(position, error) from error
    return text


def _invalid_json(position: str, error: Exception) -> DataError:
    return DataError(
        f"{position}: invalid JSON ({in_one_line(error)}). Copy the file again, or repair the line."
    )


def _read_table(path: Path, file_format: Format, key: str) -> Iterator[str | None]:
    """Yield the values of a column of a Parquet or Arrow file."""
    pyarrow = import_pyarrow(path)
    try:
        with path.open("rb") as file:
            if file_format is Format.PARQUET:
                batches = _read_parquet(file, path, key)
            else:
                batches = _read_arrow(file, path, key)
            for batch in batches:
                column = batch.column(key)
                column.validate(full=True)
                yield from column.to_pylist()
    except (pyarrow.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(
            f"{printable(path)} is damaged or cannot be read ({in_one_line(error)}). Copy the file "
            "again."
        ) from error


def _read_parquet(file: IO[bytes], path: Path, key: str) -> Iterator[Any]:
    """Yield the record batches of a Parquet file."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file, page_checksum_verification=True) as parquet:
        _check_column(parquet.schema_arrow, path, key)
        yield from parquet.iter_batches(batch_size=_ROWS_PER_BATCH, columns=[key])


def _read_arrow(file: IO[bytes], path: Path, key: str) -> Iterator[Any]:
    """Yield the record batches of a file in Arrow's file format or its streaming format.

    The latter is used by ``Dataset.save_to_disk``.
    """
    from pyarrow import ipc

    magic = file.read(len(_ARROW_FILE_MAGIC))
    file.seek(0)
    if magic == _ARROW_FILE_MAGIC:
        reader = ipc.open_file(file)
        _check_column(reader.schema, path, key)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
        return
    stream = ipc.open_stream(file)
    _check_column(stream.schema, path, key)
    yield from stream
    file.seek(-len(_END_OF_STREAM), io.SEEK_END)
    if file.read() != _END_OF_STREAM:  # pyarrow accepts a file that ends between two batches
        raise EOFError("the file is truncated")


def _check_column(schema: Any, path: Path, key: str) -> None:
    """Raise DataError unless the schema has a string column ``key``."""
    if key not in schema.names:
        raise DataError(f"{printable(path)} has no column {key!r}. " + _suggest_names(schema.names))
    column_type = schema.field(key).type
    if not _is_text(column_type):
        subject = f"{printable(path)}: column {key!r}"
        text_columns = [field.name for field in schema if _is_text(field.type)]
        raise _not_strings(subject, str(column_type), text_columns)


def _is_text(column_type: Any) -> bool:
    """Return True for types of strings, and for the type of columns without any value."""
    from pyarrow import types

    if types.is_dictionary(column_type):
        column_type = column_type.value_type
    return (
        types.is_string(column_type)
        or types.is_large_string(column_type)
        or types.is_string_view(column_type)
        or types.is_null(column_type)
    )


def _suggest_names(names: Iterable[str]) -> str:
    listed_names = ", ".join(names)
    return f"Pass one of these names with --json-key: {listed_names:.200}."


def _not_strings(subject: str, type_name: str, text_names: Sequence[str]) -> DataError:
    """Return the error for a field or column (``subject``) that does not contain strings.

    Args:
        text_names: Names of the fields or columns that contain strings.
    """
    remedy = "Convert it to strings"
    if text_names:
        listed_names = ", ".join(text_names)
        remedy += f", or pass one of these names with --json-key: {listed_names:.200}"
    return DataError(f"{subject} has type {type_name:.80} instead of string. {remedy}.")
