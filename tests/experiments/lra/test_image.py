"""CIFAR-10 in grey from files made on the spot: both original formats, and a dataset."""

import pickle

import numpy as np
import pytest

from experiments.lra.data import ImageOptions, load_task
from experiments.lra.data.image import TEST_FILES, TRAIN_FILES
from latte.errors import LatteError

RNG = np.random.default_rng(0)
PLANES = {name: RNG.integers(256, size=(4, 3072)).astype(np.uint8) for name in TRAIN_FILES}
PLANES["test_batch"] = RNG.integers(256, size=(4, 3072)).astype(np.uint8)
LABELS = [3, 0, 9, 5]
NAMES = (*TRAIN_FILES, *TEST_FILES)


def pickled(folder, protocol=2):
    """As the published files: bytes for keys, a list of labels."""
    inner = folder / "cifar-10-batches-py"
    inner.mkdir()
    for name in NAMES:
        content = {b"data": PLANES[name], b"labels": LABELS, b"batch_label": b"one of five"}
        (inner / name).write_bytes(pickle.dumps(content, protocol=protocol))
    return ImageOptions(source=str(folder), validation_share=0.2)


def binary(folder):
    for name in NAMES:
        rows = [bytes([label]) + p.tobytes() for label, p in zip(LABELS, PLANES[name], strict=True)]
        (folder / f"{name}.bin").write_bytes(b"".join(rows))
    return ImageOptions(source=str(folder), validation_share=0.2)


def grey(planes):
    red, green, blue = planes.astype(float).reshape(3, 1024)
    return np.round(0.2989 * red + 0.587 * green + 0.114 * blue).astype(np.uint8)


@pytest.mark.parametrize("make", [pickled, binary])
def test_both_original_formats(tmp_path, make):
    task = load_task("image", make(tmp_path), "unused")
    assert [len(examples) for examples in task.splits().values()] == [16, 4, 4]
    assert task.train.labels_N.tolist() == LABELS * 4
    assert (task.train.sequence(5) == grey(PLANES["data_batch_2"][1])).all()
    assert (task.validation.sequence(0) == grey(PLANES["data_batch_5"][0])).all()  # the last ones
    assert (task.test.sequence(3) == grey(PLANES["test_batch"][3])).all()
    assert "attention_mask" not in task.test.batch([0, 1])


class Evil:
    def __reduce__(self):
        return (print, ("code was run",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({b"data": Evil(), b"labels": []}), "refused to load builtins.print"),
        (pickle.dumps([1, 2]), "expected a batch of CIFAR-10"),
        (pickle.dumps({b"labels": [1]}), "expected a batch of CIFAR-10"),
        (pickle.dumps({b"data": PLANES["test_batch"], b"labels": [1]}), r"expected data \(1, 3072"),
        (pickle.dumps({b"data": PLANES["test_batch"], b"labels": [1, 2, 3, 10]}), "labels 0 to 9"),
        (b"\x80\x02}", "expected a batch of CIFAR-10"),
    ],
)
def test_wrong_files_are_one_line_and_run_nothing(tmp_path, capsys, content, message):
    options = pickled(tmp_path)
    bad = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    bad.write_bytes(content)
    with pytest.raises(LatteError, match=f"{bad}: .*{message}") as caught:
        load_task("image", options, "unused")
    assert "\n" not in str(caught.value) and not capsys.readouterr().out


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / "test_batch.bin").write_bytes(b"x" * 100), "a multiple of 3073 bytes, fou"),
        (lambda f: (f / "data_batch_4.bin").unlink(), "no file data_batch_4 or data_batch_4.bin"),
        (lambda f: f.rename(f.with_name("elsewhere")), "images: no such folder"),
    ],
)
def test_missing_and_truncated_files(tmp_path, harm, message):
    folder = tmp_path / "images"
    folder.mkdir()
    options = binary(folder)
    harm(folder)
    with pytest.raises(LatteError, match=message):
        load_task("image", options, "unused")


def test_a_dataset_of_the_hub(monkeypatch):
    datasets = pytest.importorskip("datasets")
    image = pytest.importorskip("PIL.Image")
    arrays = [p.reshape(3, 32, 32).transpose(1, 2, 0) for p in PLANES["test_batch"]]

    def load_dataset(name, *_, **__):
        assert name == "uoft-cs/cifar10"
        columns = {"img": [image.fromarray(a) for a in arrays], "label": LABELS}
        columns |= {"name": ["cat"] * len(LABELS), "share": [0.5] * len(LABELS)}
        kinds = {"label": "int64", "name": "string", "share": "float64"}
        features = {name: datasets.Value(kind) for name, kind in kinds.items()}
        return datasets.Dataset.from_dict(
            columns, features=datasets.Features({"img": datasets.Image(), **features})
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load_task("image", ImageOptions(validation_share=0.5), "unused")
    assert (task.test.sequence(1) == grey(PLANES["test_batch"][1])).all()
    assert task.validation.labels_N.tolist() == LABELS[2:]
    with pytest.raises(LatteError, match="no column 'image'; there is 'img', 'label', 'name'"):
        load_task("image", ImageOptions(image_column="image"), "unused")
    with pytest.raises(LatteError, match="expected an image of 32 x 32 in column 'label'"):
        load_task("image", ImageOptions(image_column="label"), "unused")
    for column, found in (("name", "<U3"), ("share", "float64"), ("img", "images or lists")):
        with pytest.raises(LatteError, match=f"in every row of column '{column}', found {found}"):
            load_task("image", ImageOptions(label_column=column), "unused")
