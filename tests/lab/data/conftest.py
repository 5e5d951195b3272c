import json

import pytest

from latte.lab.data import open_corpus, tokenize_corpus

DOCUMENTS = [f"Document {i}: " + "some words, " * (i % 7) + f"the end of {i}.\n" for i in range(60)]


@pytest.fixture
def tokenizer(byte):
    return byte


@pytest.fixture
def jsonl(tmp_path):
    """Write texts as JSON lines; returns the path."""

    def write(texts=DOCUMENTS, name="corpus.jsonl", field="text"):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts))
        return path

    return write


@pytest.fixture
def token_file(tmp_path, jsonl, tokenizer):
    """Token file of the given documents, in bytes."""

    def make(texts=DOCUMENTS, tokenizer=tokenizer):
        train = jsonl(texts, "train.jsonl")
        other = jsonl(["Another document."], "validation.jsonl")
        corpus = open_corpus(train, validation=other)
        return tokenize_corpus(corpus, tokenizer, "train", tmp_path / "cache", progress=False)

    return make
