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
LINES = "".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(DOCUMENTS))
TEXT = b'{"text": "x"}'
ZSTD = pa.compress(TEXT, codec="zstd", asbytes=True)


def write(file):
    match "".join(file.suffixes):
        case ".jsonl":
            file.write_text(LINES + "\n")
        case ".jsonl.gz":
            file.write_bytes(gzip.compress(LINES.encode()))
        case ".jsonl.zst":
            file.write_bytes(pa.compress(LINES.encode(), codec="zstd", asbytes=True))
        case ".parquet":
            pq.write_table(pa.table({"id": [1, 2, 3], "body": DOCUMENTS}), file)
    return file


def decoded(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=False)
    dataset = indexed_dataset_module().IndexedDataset(str(folder / "corpus"))
    return [tokenizer.decode(np.array(document)[:-1]) for document in dataset]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_each_record_becomes_a_document(run, tmp_path, name):
    source = write(tmp_path / name)
    options = ["--vocab-size", 300, "--json-key", "body", "--json"]
    code, out, err = run("data", "prepare", "--from", source, "--out", tmp_path / "out", *options)
    assert code == 0, err
    report = json.loads(out)
    assert (report["files"], report["documents"], report["split_files"]) == (1, 3, 0)
    assert report["bytes"] == len("".join(DOCUMENTS).encode())
    assert decoded(tmp_path / "out") == DOCUMENTS


def test_long_records_are_split_and_empty_ones_are_counted(tmp_path):
    lines = [{"text": "one\ntwo\n"}, {"text": ""}, {"text": "three"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    report = prepare([tmp_path / "a.jsonl"], tmp_path / "out", vocab_size=260, max_file_bytes=5)
    assert decoded(tmp_path / "out") == ["one\n", "two\n", "three"]
    assert (report.split_files, report.skipped["empty"]["count"]) == (1, 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"body": "x"}', r"a\.jsonl, line 2: .* 'text' .*--json-key"),
        ("a.jsonl", '{"text": 7}', "line 1: not a JSON object with a string 'text'"),
        ("a.jsonl", r'{"text": "\ud800"}', "line 1: not a JSON object"),
        ("a.parquet", "not parquet", "has no text column 'text', or is damaged"),
        ("a.csv", "x,y", r"\.csv files are not supported\. Convert it to \.jsonl or \.parquet"),
        ("a.tar.gz", "", r"\.tar files are not supported\. Unpack it"),
        ("a.jsonl.gz", gzip.compress(TEXT, mtime=0)[:-1], "is damaged"),
        ("a.jsonl.gz", gzip.compress(TEXT, mtime=0)[:10] + b"\xff" * 9, "is damaged"),
        ("a.jsonl.zst", ZSTD[:-1], r"a\.jsonl\.zst is damaged"),
        ("a.jsonl.zst", "junk", "is damaged"),
    ],
)
def test_other_content_is_refused(run, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    code, _, err = run("data", "prepare", "--from", tmp_path / name, "--out", tmp_path / "out")
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert code == 2
    assert re.search(message, line)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Data of a vocabulary of 400 tokens, and of one of 300 tokens."""
    root = tmp_path_factory.mktemp("datasets")
    for size in (400, 300):
        prepare(None, root / str(size), vocab_size=size, globs=["os*.py", "json*.py"])
    return root


def words_for(folder, tokenizer):
    data = ["--data-path", str(folder / "corpus"), "--split", "1,0,0"]
    return [*data, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]


def test_data_of_another_tokenizer_is_refused(run, datasets, tmp_path, faults_table):
    large, small = datasets / "400", datasets / "300"
    wrong = words_for(large, small / "tokenizer")
    message = "was tokenized with a vocabulary of 400 tokens, but the 300 tokens of"
    for words in (
        ["launch", "quickstart", "--output", tmp_path / "launch", "--", *wrong],
        ["compare", "--recipe", "quickstart", "--output", tmp_path / "compare", "--", *wrong],
    ):
        code, _, err = run(*words)
        assert code == 2
        assert message in " ".join(err.split())
    mock = [word for word in WORDS if word not in ("--mock-data", "--vocab-size", "56")]
    ended = train([*mock, *wrong, "--exit-interval", "1"], 2)
    assert ended.codes == [2, 2], ended.output[-3000:]
    assert all(message in error for error in ended.errors)
    faults_table("Datasets", "a tokenizer with fewer tokens", "refused before a rank starts")


def test_a_tokenizer_with_additional_tokens_is_accepted(datasets, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(datasets / "300" / "tokenizer")
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path)
    names = ("data_path", "tokenizer_type", "tokenizer_model", "split")
    for folder in (datasets / "300" / "tokenizer", tmp_path):
        values = ([str(datasets / "300" / "corpus")], "HuggingFaceTokenizer", str(folder), "1,0,0")
        check_data(dict(zip(names, values, strict=True)))
    null = {"data_path": values[0], "tokenizer_type": "NullTokenizer", "split": "1,0,0"}
    check_data(null | {"vocab_size": 300})
    with pytest.raises(DataError, match="Pass --vocab-size 300 instead of 299"):
        check_data(null | {"vocab_size": 299})


def test_a_token_outside_the_vocabulary_stops_training(datasets, tmp_path, faults_table):
    for name in ("corpus.bin", "corpus.idx"):  # as made by other tools, without data.json
        (tmp_path / name).symlink_to(datasets / "400" / name)
    mock = [word for word in WORDS if word not in ("--mock-data", "--vocab-size", "56")]
    words = words_for(tmp_path, datasets / "300" / "tokenizer")
    ended = train([*mock, *words, "--exit-interval", "9", "--tensor-model-parallel-size", "2"], 2)
    assert 2 in ended.codes, ended.output[-3000:]
    assert any("The data contains token id 3" in error for error in ended.errors)
    faults_table("Datasets", "token ids outside the vocabulary, TP 2", "the run stops")
