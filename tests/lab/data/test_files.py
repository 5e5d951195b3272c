import bz2
import gzip
import json
import lzma
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from latte.errors import LatteError
from latte.lab.data import open_corpus, sample_text

TEXTS = ["one\ttext\n", "zwei Wörter 😀", "drei\r\nLines\n\nof it", "vier"]


def compress(data, suffix):
    if suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(data) // 2  # two frames, as parallel zstd writes them
        return b"".join(zstandard.compress(part) for part in (data[:half], data[half:]))
    return {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}[suffix](
        data
    )


def parquet_bytes(texts, column="text"):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"n": list(range(len(texts))), column: texts}), sink)
    return sink.getvalue().to_pybytes()


def jsonl_bytes(texts, field="text"):
    return "".join(json.dumps({field: text}) + "\n" for text in texts).encode()


def read(path, **options):
    folder = path.parent if path.parent.is_dir() else path.parents[2]  # a glob's parent is none
    other = folder / "other.txt"
    other.write_text("held out")
    corpus = open_corpus(path, validation=other, **options)
    return list(corpus.documents("train"))


@pytest.mark.parametrize("compression", ["", ".gz", ".xz", ".bz2", ".zst"])
@pytest.mark.parametrize("kind", [".jsonl", ".parquet", ".txt", ".md", ".py"])
def test_every_format_round_trips(tmp_path, kind, compression):
    path = tmp_path / f"corpus{kind}{compression}"
    texts = TEXTS if kind in (".jsonl", ".parquet") else TEXTS[1:2]
    data = {".jsonl": jsonl_bytes, ".parquet": parquet_bytes}.get(kind, lambda t: t[0].encode())
    path.write_bytes(compress(data(texts), compression))
    assert read(path) == texts


def test_a_pipe_in_a_folder_is_one_line(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "b.txt")
    with pytest.raises(LatteError, match=r"b.txt is a pipe, a socket or a device"):
        open_corpus(tmp_path)


@pytest.mark.parametrize("compression", [".gz", ".xz", ".bz2", ".zst"])
@pytest.mark.parametrize("damage", ["truncated", "garbage"])
def test_damaged_compression_is_one_line(tmp_path, compression, damage):
    path = tmp_path / f"corpus.jsonl{compression}"
    whole = compress(jsonl_bytes([f"{i} {hash(str(i))}" for i in range(500)]), compression)
    path.write_bytes(whole[:-40] if damage == "truncated" else b"this is not compressed at all")
    with pytest.raises(LatteError, match=r"damaged or truncated \.\w+ file") as caught:
        read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_folders_and_globs(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / ".hidden").mkdir()
    (tmp_path / "in" / "b.txt").write_text("b")
    (tmp_path / "in" / "deep" / "a.md").write_text("a")
    (tmp_path / "in" / ".hidden" / "c.txt").write_text("c")
    (tmp_path / "in" / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / "in" / "empty.txt").write_text("")
    assert read(tmp_path / "in") == ["b", "a"]
    assert read(tmp_path / "in" / "**" / "*.md") == ["a"]


def test_other_field_and_fingerprint(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(jsonl_bytes(TEXTS, "body"))
    assert read(path, field="body") == TEXTS
    before = open_corpus(path, field="body").fingerprint("train")
    assert before == open_corpus(path, field="body").fingerprint("train")
    assert before != open_corpus(path, field="body", held_out=0.2).fingerprint("train")
    assert before != open_corpus(path, field="body").fingerprint("validation")
    path.write_bytes(jsonl_bytes([*TEXTS[:-1], "fünf"], "body"))
    assert before != open_corpus(path, field="body").fingerprint("train")


def test_held_out_by_hash_splits_and_keeps_copies_together(jsonl):
    texts = [f"text {i}" for i in range(1000)]
    path = jsonl(texts + [f"TEXT  {i}\n" for i in range(1000)])
    corpus = open_corpus(path, held_out=0.1)
    train, held_out = (list(corpus.documents(s)) for s in ("train", "validation"))
    assert len(train) + len(held_out) == 2000 and 120 < len(held_out) < 280
    sides = [{text.casefold().strip().replace("  ", " ") for text in s} for s in (train, held_out)]
    assert not sides[0] & sides[1]
    assert held_out == list(open_corpus(path, held_out=0.1).documents("validation"))


def test_sample_text_is_drawn_from_everywhere(jsonl):
    path = jsonl([f"{i} " * 50 for i in range(400)])
    corpus = open_corpus(path)
    sample = sample_text(corpus, 20_000)
    assert sample == sample_text(corpus, 20_000) != sample_text(corpus, 20_000, seed=1)
    assert 15_000 < sum(map(len, sample)) <= 20_000
    numbers = [int(text.split()[0]) for text in sample]
    assert numbers == sorted(numbers) and numbers[0] < 50 and numbers[-1] > 350


NOT_UTF8 = [pa.py_buffer(x) for x in (b"\0\0\0\0\3\0\0\0\6\0\0\0", b"abc\xff\xfed")]
BAD_FILES = [
    (".jsonl", b'{"text": "a"}\n{"text": "b"\n', r"c\.jsonl, line 2: malformed JSON"),
    (".jsonl", b'{"text": "a"}\n\n["b"]\n', r"line 3: expected a JSON object, found list"),
    (".jsonl", b'{"body": "a", "id": 1}\n', r"line 1: no field 'text'; there is 'body', 'id'"),
    (".jsonl", b'{"text": 7}\n', r"line 1: field 'text' must hold text, found int"),
    (".jsonl", b'{"text": "a"}\n\0\1\n', "line 2: expected UTF-8 text, found a binary file"),
    (".jsonl", b'{"text": "a", "n": ' + b"7" * 5000 + b"}\n", "malformed JSON .*dig"),
    (".jsonl", b"[" * 100_000 + b"\n", "line 1: malformed JSON"),
    (".jsonl", b'{"text": "\xe9"}\n', "line 1: expected UTF-8 text, found byte 0xe9"),
    (".parquet", parquet_bytes(TEXTS, "body"), "no column 'text'; there is 'n', 'body'"),
    (".parquet", parquet_bytes([1, 2]), "column 'text' must hold text, found int64"),
    (".parquet", parquet_bytes(["a", None]), "row 2: column 'text' holds no text"),
    (".parquet", parquet_bytes(TEXTS)[:-30], "not a Parquet file, or a truncated one"),
    (
        ".parquet",
        parquet_bytes(pa.StringArray.from_buffers(2, *NOT_UTF8)),
        r"c\.parquet, rows 1 to 2: expected UTF-8 text",
    ),
    (".txt", b"\x7fELF\0\0", r"c\.txt: expected UTF-8 text, found a binary file"),
    (".txt", b"caf\xe9", "found byte 0xe9 at position 3"),
]


@pytest.mark.parametrize(("suffix", "data", "message"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_files(tmp_path, suffix, data, message):
    path = tmp_path / f"c{suffix}"
    path.write_bytes(data)
    with pytest.raises(LatteError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_lone_surrogates_become_replacement_characters(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"text": "a\\ud800b \\ud83d\\ude00"}\n')
    assert read(path) == ["a\ufffdb 😀"]


@pytest.mark.parametrize("kind", ["dictionary", "string_view", "large_string"])
def test_every_kind_of_text_in_parquet(tmp_path, kind):
    kinds = {
        "dictionary": pa.dictionary(pa.int32(), pa.string()),
        "string_view": pa.string_view(),
        "large_string": pa.large_string(),
    }
    path = tmp_path / "c.parquet"
    path.write_bytes(parquet_bytes(pa.array(["one", "two", "one"]).cast(kinds[kind])))
    assert read(path) == ["one", "two", "one"]


def test_zstd_with_its_widest_window(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    options = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    writer = zstandard.ZstdCompressor(compression_params=options).compressobj()
    path = tmp_path / "c.jsonl.zst"  # of unknown size, as from a stream, so that the window counts
    path.write_bytes(writer.compress(jsonl_bytes(TEXTS)) + writer.flush())
    assert read(path) == TEXTS


def test_a_single_text_is_cut_near_its_end(tmp_path):
    path = tmp_path / "c.txt"
    for text, cut in (
        ("A title\n" + "x" * 100_000, 99_007),  # no line end there: where it is
        ("A title\n" + "x" * 98_500 + "\n" + "y" * 1_000, 98_509),
    ):
        path.write_text(text)
        corpus = open_corpus(path, held_out=0.01)
        train, held_out = (list(corpus.documents(s))[0] for s in ("train", "validation"))
        assert train + held_out == text and len(train) == cut


def test_bad_specs(tmp_path):
    (tmp_path / "x.pdf").write_bytes(b"%PDF")
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    cases = [
        (dict(spec=tmp_path / "x.pdf"), r"unknown extension for a corpus; expected \.txt"),
        (dict(spec=tmp_path / "none.txt"), "no such file or folder"),
        (dict(spec="embeded"), "no such file or folder .expected 'embedded'"),
        (dict(spec=str(tmp_path / "*.csv")), "no file matches"),
        (dict(spec=tmp_path / "empty"), "no corpus file in it; .*found no files at all"),
        (dict(spec=[]), "at least one path"),
        (dict(spec=""), "expected the path of a corpus, got an empty one"),
        (dict(spec=[3]), "must be text, got int"),
        (dict(spec=tmp_path / "good.txt", held_out=1.5), "held_out must be a fraction"),
        (dict(spec=tmp_path / "good.txt", held_out="0.1"), "held_out must be a fraction"),
        (dict(spec=tmp_path / "good.txt", config="en"), "config: only for a 'hub:NAME' corpus"),
        (dict(spec=tmp_path / "good.txt", validation=tmp_path / "good.txt"), "in both"),
        (dict(spec="embedded", validation=tmp_path / "good.txt"), "its own held-out part"),
        (dict(spec="hub:"), "must be followed by a dataset name"),
        (dict(spec="hub:x", validation="y"), "takes validation_split"),
        (dict(spec="hub:x", validation_split="train"), "must differ from split"),
    ]
    for options, message in cases:
        with pytest.raises(LatteError, match=message) as caught:
            open_corpus(**options)
        assert "\n" not in str(caught.value)
    with pytest.raises(LatteError, match="split must be"):
        open_corpus("embedded").documents("test")


def test_file_that_vanishes(tmp_path):
    path = tmp_path / "c.txt"
    path.write_text("x")
    corpus = open_corpus(path)
    path.unlink()
    with pytest.raises(LatteError, match=r"c\.txt: cannot be read"):
        list(corpus.documents("train"))


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_of_few_documents_the_last_part_of_each_is_held_out(tmp_path, kind):
    """A hundredth of them is none, by their hash."""
    texts = ["".join(f"line {i} of text {n}\n" for i in range(400)) for n in range(3)]
    if kind == "txt":
        for n, text in enumerate(texts):
            (tmp_path / f"{n}.txt").write_text(text)
    else:
        (tmp_path / "all.jsonl").write_bytes(jsonl_bytes(texts))
    corpus = open_corpus(tmp_path)
    train, held_out = (list(corpus.documents(side)) for side in ("train", "validation"))
    assert [a + b for a, b in zip(train, held_out, strict=True)] == texts
    assert 50 <= len(held_out[0]) <= 100
    assert "3 documents, too few to hold out whole ones: the last part of each" in corpus.note()
    assert corpus.train.fingerprint() != corpus.validation.fingerprint()


def test_of_many_documents_whole_ones_are_held_out(jsonl):
    corpus = open_corpus(jsonl([f"a story with the number {i}" for i in range(1000)]))
    assert corpus.note() == "" and len(list(corpus.documents("validation"))) > 3
