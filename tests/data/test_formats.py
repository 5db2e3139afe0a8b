"""Test the file formats that ``data prepare`` reads, and the check of the tokenizer."""

import gzip
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from kha_megatron.data import check_data, indexed_dataset_module, prepare
from kha_megatron.errors import DataError
from tests.entry import run as train
from tests.faults.jobs import WORDS

pytestmark = pytest.mark.filterwarnings("ignore:Could not determine rank")

DOCUMENTS = ["first\nline two", "不🦜é, \u2028 and 'quotes'", "third " * 40]
RECORDS = [{"id": i, "body": text} for i, text in enumerate(DOCUMENTS)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)
TEXT = b'{"text": "x"}'
ZSTD = pa.compress(TEXT, codec="zstd", asbytes=True)


def write(file):
    match "".join(file.suffixes):
        case ".jsonl":
            file.write_text(LINES + "\n")
        case ".jsonl.gz":
            file.write_bytes(gzip.compress(LINES.encode(), mtime=0))
        case ".jsonl.zst":
            compressed = pa.compress(LINES.encode(), codec="zstd", asbytes=True)
            file.write_bytes(compressed)
        case ".parquet":
            table = pa.table({"id": [1, 2, 3], "body": DOCUMENTS})
            pq.write_table(table, file)
    return file


def decoded(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=False)
    dataset = indexed_dataset_module().IndexedDataset(str(folder / "corpus"))
    return [tokenizer.decode(np.array(document)[:-1]) for document in dataset]


@pytest.mark.versions
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_each_record_becomes_a_document(run, tmp_path, name):
    source = write(tmp_path / name)
    words = ["data", "prepare", "--from", source, "--out", tmp_path / "out"]
    words += ["--vocab-size", 300, "--json-key", "body", "--json"]
    code, out, err = run(*words)
    assert code == 0, err
    report = json.loads(out)
    assert report["files"] == 1
    assert report["documents"] == 3
    assert report["split_files"] == 0
    assert report["bytes"] == len("".join(DOCUMENTS).encode())
    assert decoded(tmp_path / "out") == DOCUMENTS


def test_long_records_are_split_and_empty_ones_are_counted(tmp_path):
    lines = [{"text": "one\ntwo\n"}, {"text": ""}, {"text": "three"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    report = prepare(
        [tmp_path / "a.jsonl"],
        tmp_path / "out",
        vocab_size=260,
        max_file_bytes=5,
    )
    assert decoded(tmp_path / "out") == ["one\n", "two\n", "three"]
    assert report.split_files == 1
    assert report.skipped["empty"]["count"] == 1


def damaged_parquet(*, checksum, first, last):
    """Return a Parquet file of 9 rows. One page is damaged."""
    table = pa.table({"text": [letter * 99 for letter in "abcdefghi"]})
    stream = pa.BufferOutputStream()
    pq.write_table(
        table,
        stream,
        write_page_checksum=checksum,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
    )
    content = stream.getvalue().to_pybytes()
    return content.replace(b"e" * 9, first + b"e" * 7 + last)


def arrow_stream():
    """Return an Arrow stream of two batches. The last 8 bytes are the end of the stream."""
    batch = pa.record_batch({"text": ["one", "two"]})
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, batch.schema) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch)
    return stream.getvalue().to_pybytes()


def parquet(column, name="text", **others):
    stream = pa.BufferOutputStream()
    pq.write_table(pa.table({name: column, **others}), stream)
    return stream.getvalue().to_pybytes()


BROKEN_LINE = '{"text": "x"}\n{"text": "x\n{"text": "x"}'
MESSAGES = [[{"role": "user", "content": "x"}]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"body": "x"}\n' * 3, r"none of the first 3 rows .*'text'.*-key: body\."),
        ("a.jsonl", '{"text": "x"}\n{"text": 7, "b": "x"}', r"line 2: field 'text' .* int .*: b\."),
        ("a.jsonl", '{"text": ["x"]}', "field 'text' has type list instead of string. Convert it"),
        ("a.jsonl", '["x"]', "line 1: expected a JSON object, but got list"),
        ("a.jsonl", r'{"text": "\ud800"}', "line 1: invalid JSON"),
        ("a.jsonl", BROKEN_LINE, "line 2: invalid JSON .* Copy the file again"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', "line 2: invalid JSON"),
        ("a.parquet", "not parquet", "a.parquet is damaged"),
        ("a.parquet", "", "a.parquet is damaged"),
        ("a.parquet", parquet(["x"])[:-1], "is damaged"),
        ("a.parquet", damaged_parquet(checksum=True, first=b"x", last=b""), "is damaged"),
        ("a.parquet", damaged_parquet(checksum=False, first=b"\xff", last=b"x"), "is damaged"),
        ("a.parquet", parquet([b"x"]), "column 'text' has type binary instead of string. Convert"),
        ("a.parquet", parquet([1], other=["x"]), r"has type int64 .*--json-key: other\."),
        ("a.parquet", parquet([["x"]]), "has type list<element: string> instead of string"),
        ("a.parquet", parquet(MESSAGES), "column 'text' has type list<element: struct<"),
        ("a.parquet", parquet(["x"], "body"), r"no column 'text'.*--json-key: body\."),
        ("a.arrow", arrow_stream()[:-8], "is damaged .*the file is truncated"),
        ("a.arrow", arrow_stream()[:-16], "is damaged"),
        ("a.arrow", "", "is damaged"),
        ("a.csv", "x,y", r"\.csv files are not supported\. Convert it to \.jsonl or \.parquet"),
        ("a.tar.gz", "", r"\.tar files are not supported\. Unpack it"),
        ("a.jsonl.gz", gzip.compress(TEXT, mtime=0)[:-1], "is damaged"),
        ("a.jsonl.gz", gzip.compress(TEXT, mtime=0)[:10] + b"\xff" * 9, "is damaged"),
        ("a.jsonl.gz", "", "is damaged"),
        ("a.jsonl.zst", ZSTD[:-1], r"a\.jsonl\.zst is damaged"),
        ("a.jsonl.zst", "junk", "is damaged"),
        ("a.txt", b"caf\xe9", "is not UTF-8"),
        ("a.txt", b"x\n" * 5000 + b"\xff", "is not UTF-8"),
        ("a.txt.gz", gzip.compress(b"x\n" * 5000 + b"\xff", mtime=0), "is not UTF-8"),
    ],
)
def test_other_content_is_refused(run, tmp_path, name, content, message):
    """A damaged file in a directory is an error as well, so that no shard gets lost."""
    root = tmp_path / "root"
    root.mkdir()
    file = root / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    (root / "good.txt").write_text("text")
    sources = [file]
    if content != b"caf\xe9":  # a small file in another encoding is skipped
        sources.append(root)
    for source in sources:
        code, _, err = run("data", "prepare", "--from", source, "--out", tmp_path / "out")
        (line,) = [line for line in err.splitlines() if line.startswith("error:")]
        assert code == 2
        assert re.search(message, line)
        assert not (tmp_path / "out").exists()


ROWS = ["first", None, "", "second"]
ARRAYS = {
    "string": pa.array(ROWS),
    "large_string": pa.array(ROWS, pa.large_string()),
    "category": pa.array(ROWS).dictionary_encode(),
}


@pytest.mark.parametrize("name", ["a.jsonl", *ARRAYS])
def test_rows_without_text_are_skipped_and_counted(name, tmp_path):
    if name == "a.jsonl":
        file = tmp_path / name
        rows = [{"text": "first"}, {"text": None}, {"other": 1}, {"text": "second"}]
        file.write_text("\n".join(map(json.dumps, rows)))
    else:
        file = tmp_path / "a.parquet"
        file.write_bytes(parquet(ARRAYS[name]))
    report = prepare([file], tmp_path / "out", vocab_size=260)
    assert decoded(tmp_path / "out") == ["first", "second"]
    assert report.documents == 2
    assert report.skipped["empty"] == {"count": 2, "examples": [str(file)] * 2}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Prepare data with a vocabulary of 400 tokens, and with one of 300 tokens."""
    root = tmp_path_factory.mktemp("datasets")
    for size in (400, 300):
        prepare(
            None,
            root / str(size),
            vocab_size=size,
            globs=["os*.py", "json*.py"],
        )
    return root


WITHOUT_DATA = [word for word in WORDS if word not in ("--mock-data", "--vocab-size", "56")]


def words_for(folder, tokenizer):
    words = ["--data-path", str(folder / "corpus"), "--split", "1,0,0"]
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    return words


def test_data_of_another_tokenizer_is_refused(run, datasets, tmp_path, faults_table):
    large = datasets / "400"
    small = datasets / "300"
    wrong = words_for(large, small / "tokenizer")
    message = "was tokenized with a vocabulary of 400 tokens, but the 300 tokens of"
    for words in (
        ["launch", "quickstart", "--output", tmp_path / "launch", "--", *wrong],
        ["compare", "--recipe", "quickstart", "--output", tmp_path / "compare", "--", *wrong],
    ):
        code, _, err = run(*words)
        assert code == 2
        assert message in " ".join(err.split())
    ended = train([*WITHOUT_DATA, *wrong, "--exit-interval", "1"], 2)
    assert ended.codes == [2, 2], ended.output[-3000:]
    assert all(message in error for error in ended.errors)
    faults_table("Datasets", "a tokenizer with fewer tokens", "refused before a rank starts")


def test_a_tokenizer_with_additional_tokens_is_accepted(datasets, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(datasets / "300" / "tokenizer")
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path)
    arguments = {
        "data_path": [str(datasets / "300" / "corpus")],
        "tokenizer_type": "HuggingFaceTokenizer",
        "split": "1,0,0",
    }
    for folder in (datasets / "300" / "tokenizer", tmp_path):
        check_data(arguments | {"tokenizer_model": str(folder)})
    arguments["tokenizer_type"] = "NullTokenizer"
    check_data(arguments | {"vocab_size": 300})
    with pytest.raises(DataError, match="Pass --vocab-size 300 instead of 299"):
        check_data(arguments | {"vocab_size": 299})


def test_a_token_outside_the_vocabulary_stops_training(datasets, tmp_path, faults_table):
    for name in ("corpus.bin", "corpus.idx"):  # as made by other tools, without data.json
        (tmp_path / name).symlink_to(datasets / "400" / name)
    words = words_for(tmp_path, datasets / "300" / "tokenizer")
    words += ["--exit-interval", "9", "--tensor-model-parallel-size", "2"]
    ended = train([*WITHOUT_DATA, *words], 2)
    assert 2 in ended.codes, ended.output[-3000:]
    assert any("The data contains token id 3" in error for error in ended.errors)
    faults_table("Datasets", "token ids outside the vocabulary, TP 2", "the run stops")
