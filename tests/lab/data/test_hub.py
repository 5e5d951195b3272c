import importlib.util

import pytest

from latte.errors import LatteError
from latte.lab.data import open_corpus

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="needs the package datasets"
)
TEXTS = [f"a story with the number {i}" for i in range(300)]


@pytest.fixture
def local_cache(tmp_path, monkeypatch):
    """datasets without network and with its own cache folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return tmp_path / "hf"


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_folder_goes_through_load_dataset(jsonl, tmp_path, local_cache, kind):
    folder = tmp_path / "dataset"
    folder.mkdir()
    if kind == "json":
        jsonl(TEXTS, "dataset/train.jsonl")
        jsonl(["held out"], "dataset/validation.jsonl")
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": TEXTS}), folder / "train.parquet")
        pq.write_table(pa.table({"text": ["held out"]}), folder / "validation.parquet")
    corpus = open_corpus(f"hub:{folder}", validation_split="validation", cache_dir=local_cache)
    assert corpus.train.total is None  # nothing is loaded yet
    seen = []
    assert list(corpus.documents("train", seen.append)) == TEXTS
    assert list(corpus.documents("validation")) == ["held out"]
    assert seen[-1] == corpus.train.total == len(TEXTS)


def test_hash_split_and_data_files(jsonl, local_cache):
    path = jsonl(TEXTS, field="story")
    options = dict(data_files=str(path), field="story", cache_dir=local_cache, held_out=0.1)
    corpus = open_corpus("hub:json", **options)
    train, held_out = (list(corpus.documents(s)) for s in ("train", "validation"))
    assert sorted(train + held_out) == sorted(TEXTS) and 10 < len(held_out) < 60
    before = corpus.fingerprint("train")
    jsonl([*TEXTS, "one more"], field="story")
    assert open_corpus("hub:json", **options).fingerprint("train") != before


def test_options_reach_load_dataset(monkeypatch):
    import datasets

    calls = []

    def load_dataset(*args, **options):
        calls.append((args, options))
        return datasets.Dataset.from_dict({"content": ["x", "y"], "n": [1, 2]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = open_corpus(
        "hub:Skylion007/openwebtext", field="content", config="plain_text", revision="abc",
        split="train[:1%]", validation_split="train[99%:]", cache_dir="/somewhere",
    )  # fmt: skip
    assert not calls
    assert list(corpus.documents("train")) == ["x", "y"]
    ((name, config), options) = calls[0]
    assert (name, config) == ("Skylion007/openwebtext", "plain_text")
    assert options == dict(
        split="train[:1%]", revision="abc", data_files=None, cache_dir="/somewhere", streaming=False
    )
    with pytest.raises(LatteError, match="no column 'text'; there is 'content', 'n'"):
        list(open_corpus("hub:some/name").documents("train"))
    with pytest.raises(LatteError, match="column 'n' must hold text, found int64"):
        list(open_corpus("hub:some/name", field="n").documents("train"))


def test_a_failing_download_is_one_line(monkeypatch):
    import datasets

    def load_dataset(*args, **options):
        raise ConnectionError("Couldn't reach the Hub\nTraceback ...\nmore")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("latte.models.hub.hub_answers", lambda: True)
    with pytest.raises(
        LatteError, match="^hub:roneneldan/TinyStories .train.: cannot be"
    ) as caught:
        next(open_corpus("hub:roneneldan/TinyStories").documents("train"))
    assert "ConnectionError: Couldn't reach the Hub" in str(caught.value)
    monkeypatch.setattr("latte.models.hub.hub_answers", lambda: False)
    with pytest.raises(LatteError, match="no folder or file .* and the Hugging Face Hub cannot be"):
        next(open_corpus("hub:roneneldan/TinyStories").documents("train"))
    assert "\n" not in str(caught.value)


def test_unknown_split_is_one_line(jsonl, local_cache):
    path = jsonl(TEXTS)
    corpus = open_corpus("hub:json", data_files=str(path), split="dev", cache_dir=local_cache)
    with pytest.raises(LatteError, match="cannot be loaded: ValueError: Unknown split") as caught:
        next(corpus.documents("train"))
    assert "\n" not in str(caught.value)
