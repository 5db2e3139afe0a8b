"""Read the text of each row of a JSON Lines, Parquet or Arrow file."""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from kha_megatron.documents.formats import Format, import_pyarrow, open_file, printable
from kha_megatron.errors import DataError, in_one_line

_BATCH_ROWS = 1024
_ROWS_WITHOUT_FIELD = 10_000
"""If the first rows do not have the field, reading stops after this number of rows."""
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
        return
    pyarrow = import_pyarrow(path)
    read_columns = _read_parquet if file_format is Format.PARQUET else _read_arrow
    try:
        with path.open("rb") as file:
            for column in read_columns(pyarrow, path, file, key):
                column.validate(full=True)
                yield from column.to_pylist()
    except (pyarrow.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(
            f"{printable(path)} is damaged or cannot be read ({in_one_line(error)}). Copy the file "
            "again."
        ) from error


def _read_json_lines(path: Path, key: str) -> Iterator[str | None]:
    rows = 0
    has_field = False
    names: list[str] = []
    with open_file(path) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            where = f"{printable(path)}, line {number}"
            row = _parse(line, where)
            yield _text_of(row, key, where)
            rows += 1
            has_field |= key in row
            names = list(row)
            if rows == _ROWS_WITHOUT_FIELD and not has_field:
                break
    if rows and not has_field:
        what = f"{printable(path)}: none of the first {rows} rows has a field"
        raise _missing(what, key, names)


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _invalid_json(where, error) from error
    if not isinstance(row, dict):
        type_name = type(row).__name__
        raise DataError(f"{where}: expected a JSON object, but got {type_name}.")
    return row


def _text_of(row: dict[str, Any], key: str, where: str) -> str | None:
    text = row.get(key)
    if text is None:
        return None
    if not isinstance(text, str):
        names_with_text = []
        for name, value in row.items():
            if isinstance(value, str):
                names_with_text.append(name)
        field = f"{where}: field {key!r}"
        raise _wrong_type(field, type(text).__name__, names_with_text)
    try:
        text.encode()  # JSON can contain half of a surrogate pair
    except UnicodeEncodeError as error:
        raise _invalid_json(where, error) from error
    return text


def _read_parquet(pyarrow: Any, path: Path, file: IO[bytes], key: str) -> Iterator[Any]:
    with pyarrow.parquet.ParquetFile(file, page_checksum_verification=True) as parquet:
        _check_column(pyarrow.types, path, parquet.schema_arrow, key)
        batches = parquet.iter_batches(batch_size=_BATCH_ROWS, columns=[key])
        for batch in batches:
            yield batch.column(key)


def _read_arrow(pyarrow: Any, path: Path, file: IO[bytes], key: str) -> Iterator[Any]:
    """Read Arrow's streaming format (used by ``Dataset.save_to_disk``) or its file format."""
    is_file_format = file.read(6) == b"ARROW1"
    file.seek(0)
    if is_file_format:
        reader = pyarrow.ipc.open_file(file)
        _check_column(pyarrow.types, path, reader.schema, key)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            yield batch.column(key)
        return
    stream = pyarrow.ipc.open_stream(file)
    _check_column(pyarrow.types, path, stream.schema, key)
    for batch in stream:
        yield batch.column(key)
    file.seek(-len(_END_OF_STREAM), io.SEEK_END)
    if file.read() != _END_OF_STREAM:  # pyarrow accepts a file that ends between two batches
        raise EOFError("the file is truncated")


def _check_column(types: Any, path: Path, schema: Any, key: str) -> None:
    """Raise DataError unless the schema has a string column ``key``."""
    if key not in schema.names:
        what = f"{printable(path)} has no column"
        raise _missing(what, key, schema.names)
    column_type = schema.field(key).type
    if _is_text(types, column_type):
        return
    names_with_text = []
    for field in schema:
        if _is_text(types, field.type):
            names_with_text.append(field.name)
    where = f"{printable(path)}: column {key!r}"
    raise _wrong_type(where, str(column_type), names_with_text)


def _is_text(types: Any, column_type: Any) -> bool:
    """Return True for types of strings, and for the type of columns without any value."""
    if types.is_dictionary(column_type):
        column_type = column_type.value_type
    return (
        types.is_string(column_type)
        or types.is_large_string(column_type)
        or types.is_string_view(column_type)
        or types.is_null(column_type)
    )


def _invalid_json(where: str, error: Exception) -> DataError:
    return DataError(
        f"{where}: invalid JSON ({in_one_line(error)}). Copy the file again, or repair the line."
    )


def _missing(what: str, key: str, names: Iterable[str]) -> DataError:
    listed = ", ".join(names)
    return DataError(f"{what} {key!r}. Pass one of these names with --json-key: {listed:.200}.")


def _wrong_type(
    where: str,
    type_name: str,
    names_with_text: Sequence[str],
) -> DataError:
    remedy = "Convert it to strings"
    if names_with_text:
        listed = ", ".join(names_with_text)
        remedy += f", or pass one of these names with --json-key: {listed:.200}"
    return DataError(f"{where} has type {type_name:.80} instead of string. {remedy}.")
