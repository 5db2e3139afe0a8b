"""Test which files of a directory become training text, with the layouts that users download."""

import gzip
import json
import os
import shutil

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kha_megatron.data import prepare
from kha_megatron.documents.files import empty_skipped, find_files, select_text_files
from kha_megatron.documents.reader import Reader
from kha_megatron.errors import DataError

TEXTS = [f"row {number} of a dataset\nwith two lines" for number in range(60)]
ROWS = [json.dumps({"text": text, "meta": {"n": 1}}) for text in TEXTS]
LINES = "".join(f"{row}\n" for row in ROWS).encode()
ZSTD = pa.compress(LINES[100:], codec="zstd", asbytes=True)
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def write(root, files):
    """Write files, and link those whose content is a path."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, pa.Table):
            pq.write_table(content, path)
        else:
            path.symlink_to(content)
    return root


def read(root, globs=None):
    """Return the texts in a directory, and which files were skipped for each reason."""
    skipped = empty_skipped()
    reader = Reader(1 << 20)
    files = find_files(
        [root],
        globs=globs,
        exclude=(),
        output=root / "out",
        skipped=skipped,
    )
    text_files = select_text_files(
        files,
        reader,
        sources=[root],
        skipped=skipped,
        advance=lambda size: None,
    )
    texts = []
    for file in text_files:
        texts += reader.read(file)
    names = {}
    for reason, entry in skipped.items():
        if entry["count"]:
            names[reason] = [os.path.relpath(path, root) for path in entry["examples"]]
    return texts, names


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("part-000.json", LINES),
        ("a.ndjson", LINES),
        ("a.jsonlines", LINES),
        ("A.JSONL", LINES),
        ("part-000.json.gz", gzip.compress(LINES, mtime=0)),
        ("A.NDJSON.GZ", gzip.compress(LINES, mtime=0)),
        ("two_frames.json.zst", pa.compress(LINES[:100], codec="zstd", asbytes=True) + ZSTD),
        ("bom.json", b"\xef\xbb\xbf" + LINES),
        ("crlf.json", LINES.replace(b"\n", b"\r\n")),
        ("long_lines.json", LINES.replace(b'"n"', b'"' + b"n" * (1 << 20) + b'"')),
        ("TRAIN.PARQUET", pa.table({"text": TEXTS})),
    ],
)
def test_rows_are_read_whatever_the_name(name, content, tmp_path):
    write(tmp_path, {name: content, "one.json": b'{"text": "one row"}'})
    texts, _ = read(tmp_path)
    assert sorted(texts) == sorted([*TEXTS, "one row"])


@pytest.mark.parametrize(
    "name",
    ["a.csv", "A.TSV", "a.csv.gz", "deep/a.xlsx", "a.tar", "a.jsonl.lzma", "CC.warc.wet.gz"],
)
def test_unsupported_files_in_a_directory_are_refused_like_single_ones(name, run, tmp_path):
    root = write(tmp_path / "root", {"good.jsonl": LINES, name: b"text,label\nx,1\n"})
    for source in (root, root / name):
        words = ["data", "prepare", "--from", source, "--out", tmp_path / "out"]
        code, _, stderr = run(*words)
        assert code == 2
        assert f"{root / name}: " in stderr.replace("\n", "")
        assert "files are not supported" in " ".join(stderr.split())
    (root / name).unlink()
    texts, _ = read(root)
    assert texts == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", json.dumps([{"text": "x"}]).encode(), r"JSON array.* `jq -c '\.\[\]'`"),
        ("a.json", json.dumps([{"text": "x"}], indent=2).encode(), "JSON array"),
        ("a.json", json.dumps({"text": "x"}, indent=2).encode(), "not contain JSON Lines.*--exc"),
        ("a.json", b'{"text": "brok\n' + LINES, "not contain JSON Lines"),
        ("part-00000", LINES, r"contains JSON Lines, .* not end in \.jsonl\. Rename it"),
        ("a.txt", LINES, "contains JSON Lines"),
        ("train", b"PAR1" + b"\0" * 99, "contains Parquet"),
        ("a.parquet.gz", gzip.compress(b"PAR1", mtime=0), r"compressed \.parquet files"),
        ("a.jsonl", LFS_POINTER, "is a Git LFS pointer.* Run `git lfs pull`"),
        ("book.txt", LFS_POINTER, "is a Git LFS pointer"),
        ("b.parquet", LFS_POINTER, "is a Git LFS pointer"),
        ("a.jsonl", "nowhere", "cannot be opened|no such file"),
        ("a.txt", "/proc/self/mem", "cannot be read"),
    ],
)
def test_rows_never_become_text(name, content, message, tmp_path):
    write(tmp_path, {"other.txt": b"a text file", name: content})
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=message):
        prepare([tmp_path / name], tmp_path / "out")


HUB_FILES = {
    "README.md": b"# dataset card\n",
    "LICENSE": b"license",
    ".gitattributes": b"*.zst filter=lfs\n",
    ".cache/huggingface/download/a.jsonl.metadata": b"abc123\n1690000000.0\n",
    "dataset_infos.json": b'{"features": {}}\n' * 2,
    "statistics.json": b'{\n  "rows": 60\n}\n',
    "picture.png": b"\x89PNG\r\n\x1a\n\0\0",
}
METADATA = ["LICENSE", "README.md", "dataset_infos.json", "picture.png", "statistics.json"]
SHARDS = {
    "data/train-00000-of-00003.parquet": pa.table({"text": TEXTS[:20]}),
    "data/train-00001-of-00003.parquet": pa.table({"text": TEXTS[20:40]}),
    "data/train-00002-of-00003.parquet": pa.table({"text": TEXTS[40:]}),
}


@pytest.mark.parametrize("rows", [{"a.jsonl": LINES}, SHARDS], ids=["mixed", "parquet"])
def test_other_files_of_a_dataset_are_skipped_and_listed(rows, run, tmp_path):
    root = write(tmp_path / "root", HUB_FILES | rows)
    words = ["--from", root, "--out", tmp_path / "out", "--vocab-size", 300]
    code, stdout, stderr = run("data", "prepare", *words, "--json")
    assert code == 0, stderr
    report = json.loads(stdout)
    assert report["documents"] == 60
    assert report["files"] == len(rows)
    assert "Skipped 5 files with metadata or text" in " ".join(stderr.split())
    texts, skipped = read(root)
    assert texts == TEXTS
    assert skipped.keys() == {"hidden", "metadata"}
    assert sorted(skipped["hidden"]) == [".cache", ".gitattributes"]
    assert sorted(skipped["metadata"]) == METADATA
    chosen, skipped = read(root, ["*.md", "*.jsonl", "*.parquet", ".*"])
    assert sorted(chosen) == sorted([*TEXTS, "# dataset card\n"])
    assert skipped["hidden"] == [".cache", ".gitattributes"]


def test_directories_of_the_datasets_library(tmp_path):
    rows = datasets.Dataset.from_dict({"id": range(60), "text": TEXTS})
    split = datasets.DatasetDict({"test": rows.select(range(20)), "train": rows})
    split.save_to_disk(tmp_path / "saved", num_shards={"test": 1, "train": 3})
    reloaded = datasets.load_from_disk(tmp_path / "saved" / "train")
    reloaded.map(lambda row: row, load_from_cache_file=False)  # writes cache-*.arrow
    texts, skipped = read(tmp_path / "saved")
    assert texts == TEXTS[:20] + TEXTS
    assert len([path for path in skipped["metadata"] if "cache-" in path]) == 1
    with pa.OSFile(str(tmp_path / "one.arrow"), "wb") as file:  # Arrow's other format
        table = pa.table({"text": pa.array(TEXTS).dictionary_encode()})
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    report = prepare([tmp_path / "one.arrow"], tmp_path / "out", vocab_size=260)
    assert report.documents == 60
    with pytest.raises(DataError, match=r"has no column 'body'.*--json-key: id, text"):
        prepare([tmp_path / "saved"], tmp_path / "no", json_key="body")


def test_the_cache_of_the_hub(tmp_path):
    """Snapshots are links to files without an extension."""
    snapshot = "snapshots/0123abcd"
    root = write(
        tmp_path / "datasets--org--name",
        {
            "blobs/1f": LINES,
            "blobs/2e": b"# card",
            "refs/main": b"0123abcd",
            f"{snapshot}/data/a.jsonl": "../../../blobs/1f",
            f"{snapshot}/README.md": "../../blobs/2e",
        },
    )
    texts, skipped = read(root / snapshot)
    assert texts == TEXTS
    assert skipped == {"metadata": ["README.md"]}
    with pytest.raises(DataError, match=r"Pass one of the directories in .*snapshots"):
        read(root)
    (root / "blobs" / "1f").unlink()
    with pytest.raises(DataError, match=r"a\.jsonl cannot be opened .* Download the dataset again"):
        read(root / snapshot)


def test_text_files_with_equal_names_and_odd_beginnings(tmp_path):
    texts = {
        "a/part.txt": "first",
        "b/part.txt": "second",
        "c/BOM.TXT": "\ufeffthird\r\nline",
        "c/braces.txt": "{not JSON}\n{either}",
        "c/one.txt": '{"one": "line"}',
    }
    files = {name: text.encode() for name, text in texts.items()}
    write(tmp_path, files | {"c/empty.json": b"", ".hidden/x.txt": b"no", "c/.x.txt": b"no"})
    found, skipped = read(tmp_path)
    assert found == list(texts.values())
    assert skipped == {"hidden": [".hidden", "c/.x.txt"], "empty": ["c/empty.json"]}


@pytest.mark.parametrize("files", [{}, {"a.jsonl": b"\n"}, {"a.png": b"\0\xff"}, {".a": b"text"}])
def test_a_directory_without_text(files, tmp_path):
    root = write(tmp_path / "root", {"sub/none.parquet": pa.table({"text": []}), **files})
    if not files:
        shutil.rmtree(root / "sub")
    with pytest.raises(DataError, match=r"No UTF-8 text found in .*root \("):
        prepare([root], tmp_path / "out")
