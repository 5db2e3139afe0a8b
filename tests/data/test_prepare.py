"""Test that ``data prepare`` loses no text, leaves no partial output and is deterministic."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kha_megatron.data import DataReport, indexed_dataset_module, prepare, verify
from kha_megatron.errors import ConfigError, DataError, OutputError

pytestmark = pytest.mark.filterwarnings("ignore:Could not determine rank")

LIMIT = 700  # bytes: some of the files below are longer
TEXTS = {
    "a/code.py": "def main():\n    print('knock, knock')\n\n\n\treturn 7\n" * 19,
    "a/crlf.txt": "one\r\ntwo\r\n\r\nthree\rfour",
    "b/end.txt": "<|endoftext|>before<|endoftext|> and after <|endoftext|>",
    "b/line.txt": "不🦜é" * 300,  # longer than LIMIT and not one line end
    "b/odd.txt": "\ufeff\0\x1b[0m\u2028\u00a0 e\u0301 \U0010ffff\t  \n ",
    "b/space.txt": "   \n\n \t \n",
}
OTHERS = {
    "a/empty.py": b"",
    "b/latin.txt": b"caf\xe9",
    "b/late.txt": b"x\n" * 500 + b"\xff",
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    contents = {name: text.encode() for name, text in TEXTS.items()}
    for name, content in (contents | OTHERS).items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    (root / "a" / "loop").symlink_to(root, target_is_directory=True)
    (root / "b" / "broken.txt").symlink_to(root / "gone")
    return root


@pytest.fixture(scope="module")
def prepared(sources, tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared") / "new" / "data"
    report = prepare(
        [sources],
        out,
        vocab_size=300,
        workers=2,
        max_file_bytes=LIMIT,
    )
    return out, report


def documents(folder):
    dataset = indexed_dataset_module().IndexedDataset(str(folder / "corpus"))
    return [np.array(document) for document in dataset]


def files(folder):
    contents = {}
    for path in folder.rglob("*"):
        if path.is_file():
            contents[path.relative_to(folder)] = path.read_bytes()
    return contents


@pytest.mark.fast
@pytest.mark.versions
def test_text_comes_back_from_the_dataset(prepared):
    out, report = prepared
    tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer", trust_remote_code=False)
    texts = []
    for ids in documents(out):
        assert list(ids).count(report.eod_id) == 1
        assert ids[-1] == report.eod_id
        texts.append(tokenizer.decode(ids[:-1]))
    assert "".join(texts) == "".join(TEXTS[name] for name in sorted(TEXTS))
    assert all(len(text.encode()) <= LIMIT for text in texts)
    for text in TEXTS.values():
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_report_counts_what_is_there(prepared, sources):
    out, report = prepared
    ids = documents(out)
    assert report.files == len(TEXTS)
    assert report.split_files == 2
    assert report.documents == len(ids) > len(TEXTS)
    assert report.tokens == sum(map(len, ids))
    assert report.bytes == sum(len(text.encode()) for text in TEXTS.values())
    assert report.altered_documents == 0
    assert report.dtype == "uint16"
    counts = Counter({reason: value["count"] for reason, value in report.skipped.items()})
    assert +counts == {"empty": 1, "not_utf8": 2, "unreadable": 1, "repeated": 1}
    examples = [str(sources / name) for name in ("b/late.txt", "b/latin.txt")]
    assert report.skipped["not_utf8"]["examples"] == examples
    assert DataReport.read(out) == report
    assert verify(out) == report


def make_tokenizer(folder, *, eos=True, normalizer=None, template="<s> $A </s>"):
    """Write a byte-level tokenizer that truncates, pads and adds special tokens."""
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.normalizer = normalizer
    backend.post_processor = processors.TemplateProcessing(
        single=template,
        special_tokens=[("<s>", 0), ("</s>", 1)],
    )
    backend.enable_truncation(16)
    backend.enable_padding(length=64, pad_id=1, pad_token="</s>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>" if eos else None,
    )
    tokenizer.save_pretrained(folder)
    return folder


def test_a_given_tokenizer_is_used_without_truncation_and_padding(sources, tmp_path):
    folder = make_tokenizer(tmp_path / "mine")
    report = prepare([sources / "b"], tmp_path / "out", tokenizer=folder)
    assert report.vocab_size == 258
    assert report.eod_id == 1
    assert report.vocab_size_asked is None
    assert report.tokenizer == str(folder)
    assert report.tokens == report.bytes + 2 * report.documents  # bytes, BOS and EOS
    assert report.altered_documents == 0
    assert verify(tmp_path / "out") == report
    folder = make_tokenizer(tmp_path / "altering", normalizer=normalizers.NFC())
    report = prepare([sources / "b"], tmp_path / "altered", tokenizer=folder)
    assert report.altered_documents == 1  # the combining accent of b/odd.txt


@pytest.mark.parametrize(
    ("template", "before"),
    [("<s> $A", ["<s>"]), ("<s> $A </s>", ["<s>"]), ("<s> <s> $A", ["<s>", "<s>"]), ("$A", [])],
)
def test_special_tokens_equal_those_of_megatron(template, before, tmp_path):
    """``preprocess_data.py`` adds EOD to the tokens. We do so unless it is the last one."""
    from megatron.core.tokenizers import MegatronTokenizer

    folder = make_tokenizer(tmp_path / "tokenizer", template=template)
    megatron = MegatronTokenizer.from_pretrained(
        tokenizer_path=str(folder),
        metadata_path={"library": "huggingface"},
    )
    texts = ["first", "second \N{PARROT}\n", "x" * 40]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    report = prepare(sorted(tmp_path.glob("*.txt")), tmp_path / "out", tokenizer=folder)
    for text, ids in zip(texts, documents(tmp_path / "out"), strict=True):
        expected = megatron.tokenize(text)
        if expected[-1] != megatron.eod:
            expected.append(megatron.eod)
        assert list(ids) == expected
    assert report.tokens_before == before
    assert report.tokens_after == ["</s>"]


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"vocab_size": 300, "tokenizer": Path("t")}, ConfigError, ["--vocab-size", "--tokenizer"]),
        ({"sources": [Path("gone")]}, DataError, ["gone", "no such file"]),
        ({"out": Path("full")}, OutputError, ["full", "--overwrite"]),
        ({"out": Path("full"), "overwrite": True}, OutputError, ["full", "contains no data.json"]),
        ({"tokenizer": Path("full")}, DataError, ["full", "save_pretrained"]),
        ({"tokenizer": Path("endless")}, DataError, ["endless", "eos_token"]),
        ({"sources": [Path("useless")]}, DataError, ["useless", "1 empty, 1 not_utf8"]),
    ],
)
def test_bad_input_is_refused_before_any_work(changes, kind, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("full/inner/file.txt", "text.txt", "other.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("text")
    Path("useless").mkdir()
    Path("useless/empty").touch()
    Path("useless/bytes").write_bytes(b"\xff")
    make_tokenizer(tmp_path / "endless", eos=False)
    before = files(tmp_path)
    stages = set()
    arguments = {"sources": [Path("text.txt")], "out": Path("out")}
    arguments |= changes
    with pytest.raises(kind) as caught:
        prepare(**arguments, on_progress=lambda step: stages.add(step.stage))
    message = str(caught.value)
    assert all(word in message for word in words)
    assert "\n" not in message
    assert stages <= {"checking"}
    assert files(tmp_path) == before
    assert not Path("out").exists()


@pytest.mark.parametrize("stage", ["training tokenizer", "tokenizing"])
def test_interrupted_work_leaves_what_was_there(stage, prepared, sources, tmp_path):
    out = tmp_path / "out"
    prepare([sources / "a"], out, vocab_size=260)
    before = files(tmp_path)

    def interrupt(step):
        if step.stage == stage and step.files == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(
            [sources],
            out,
            vocab_size=300,
            overwrite=True,
            on_progress=interrupt,
        )
    assert files(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # and no hidden leftover
    prepare(
        [sources],
        out,
        vocab_size=300,
        overwrite=True,
        workers=1,
        max_file_bytes=LIMIT,
    )
    assert files(out) == files(prepared[0])  # which two workers prepared
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (out / "book.txt").write_text("a source that --overwrite would delete")
    with pytest.raises(OutputError, match=r"contains book\.txt"):
        prepare([out / "book.txt"], out, vocab_size=300, overwrite=True)


@pytest.mark.parametrize("content", [b"\xff", b"short", None])
def test_a_file_that_changes_while_it_is_read_is_an_error(content, tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"text number {number}\n" * 20)
    victim = tmp_path / "2.txt"

    def change(step):
        if step.stage != "checking":
            victim.unlink(missing_ok=True)
            if content is not None:
                victim.write_bytes(content)

    with pytest.raises(DataError, match=r"2\.txt changed while it was being read"):
        prepare(
            sorted(tmp_path.glob("*.txt")),
            tmp_path / "out",
            workers=1,
            on_progress=change,
        )
    assert not list(tmp_path.glob("*out*"))


PREPARE = """
import sys
from pathlib import Path
from kha_megatron.data import prepare
print(prepare([Path(sys.argv[1])], Path(sys.argv[2]), vocab_size=260).documents)
"""


def test_prepare_needs_no_other_import(tmp_path):
    """An empty Transformer Engine is only hidden from Megatron by ``kha_megatron.mcore``."""
    source = tmp_path / "text.txt"
    source.write_text("one document")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PREPARE, source, tmp_path / "out"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "1\n"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("data.json", lambda old: None, "No such file"),
        ("data.json", lambda old: b"[" * 100_000, "recursion depth"),
        ("corpus.bin", lambda old: None, "corpus.bin"),
        ("corpus.bin", lambda old: old[:-2], "file_sha256 should be"),
        ("corpus.idx", lambda old: b"x" * len(old), "file_sha256 should be"),
        ("tokenizer/tokenizer.json", lambda old: None, "tokenizer"),
    ],
)
def test_verify_detects_damage(name, damage, words, tmp_path):
    source = tmp_path / "text.txt"
    source.write_text("three lines\nof\ntext\n")
    out = tmp_path / "out"
    prepare([source], out, vocab_size=260, max_file_bytes=12)
    verify(out)
    file = out / name
    content = damage(file.read_bytes())
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        verify(out)
    assert "\n" not in str(caught.value)


def test_the_tokenizer_is_trained_on_an_even_sample(tmp_path):
    root = tmp_path / "text"
    root.mkdir()
    letters = "abcdefghij"
    for i in range(40):  # of 1,000 bytes each
        word = f"word{letters[i % 10] * 5} "
        (root / f"{i:02}.txt").write_text(word * 100)
    report = prepare(
        [root],
        tmp_path / "out",
        vocab_size=400,
        tokenizer_sample=10_000,
    )
    assert 10_000 <= report.tokenizer_sample_bytes < 10_000 + 1_000
    assert report == verify(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    tokens = tokenizer.get_vocab()
    assert sum(f"\u0120word{letter * 5}" in tokens for letter in letters) >= 5
