"""Compare the documents of each part of a split with those of Megatron's builder."""

import os

import numpy as np
import pytest

from kha_megatron.data import check_split, count_documents, documents_of
from kha_megatron.errors import DataError


@pytest.mark.parametrize("split", ["969,30,1", "99,1,0", "99,1", "7", "0.5, 0.25, 0.25", "0,1,1"])
@pytest.mark.parametrize("documents", [1, 7, 50, 501])
def test_documents_of_a_split_equal_those_of_megatron(split, documents):
    from megatron.core.datasets import blended_megatron_dataset_config as megatron

    vector = megatron.parse_and_normalize_split(split)
    matrix = megatron.convert_split_vector_to_split_matrix(vector)
    theirs = [  # as `_build_megatron_dataset_splits` numbers the documents
        None if ends is None else round(ends[1] * documents) - round(ends[0] * documents)
        for ends in matrix
    ]
    assert documents_of(split, documents) == theirs
    if 0 not in theirs:
        check_split(split, documents, "corpus")
        return
    with pytest.raises(DataError, match=rf"in corpus: {documents}\).* --split 1,0,0 to use"):
        check_split(split, documents, "corpus")
    assert documents_of("1,0,0", documents) == [documents, None, None]


def test_documents_are_counted_from_the_index(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path / "corpus"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for length in (3, 1, 7):
        builder.add_document(np.arange(length), [length])
    builder.finalize(f"{prefix}.idx")
    assert count_documents(prefix) == 3
    (tmp_path / "other.idx").write_bytes(b"MMIDIDX")
    os.mkfifo(tmp_path / "fifo.idx")  # must not wait for its writer
    for name in ("other", "fifo"):
        with pytest.raises(DataError, match="Could not read the index"):
            count_documents(tmp_path / name)
