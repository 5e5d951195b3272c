"""CIFAR-10 in grey from files made on the spot: both original formats, and a dataset."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.lra.data import ImageOptions, load_task
from experiments.lra.data.image import TEST_FILES, TRAIN_FILES, to_grey
from latte.errors import LatteError

RNG = np.random.default_rng(0)
PLANES = {name: RNG.integers(256, size=(4, 3072)).astype(np.uint8) for name in TRAIN_FILES}
PLANES["test_batch"] = RNG.integers(256, size=(4, 3072)).astype(np.uint8)
LABELS = [3, 0, 9, 5]
NAMES = (*TRAIN_FILES, *TEST_FILES)


def pickled(folder: Path, protocol: int = 2) -> ImageOptions:
    """As the published files: bytes for keys, a list of labels."""
    inner = folder / "cifar-10-batches-py"
    inner.mkdir()
    for name in NAMES:
        content = {b"data": PLANES[name], b"labels": LABELS, b"batch_label": b"one of five"}
        (inner / name).write_bytes(pickle.dumps(content, protocol=protocol))
    return ImageOptions(source=str(folder), validation_share=0.2)


def binary(folder: Path) -> ImageOptions:
    for name in NAMES:
        rows = [bytes([label]) + p.tobytes() for label, p in zip(LABELS, PLANES[name], strict=True)]
        (folder / f"{name}.bin").write_bytes(b"".join(rows))
    return ImageOptions(source=str(folder), validation_share=0.2)


def grey(planes: np.ndarray) -> np.ndarray:
    red, green, blue = planes.astype(float).reshape(3, 1024)
    return np.round(0.2989 * red + 0.587 * green + 0.114 * blue).astype(np.uint8)


@pytest.mark.parametrize("make", [pickled, binary])
def test_both_original_formats(tmp_path: Path, make: Any) -> None:
    task = load_task("image", make(tmp_path), "unused")
    assert [len(examples) for examples in task.splits().values()] == [16, 4, 4]
    assert task.train.labels_N.tolist() == LABELS * 4
    assert (task.train.sequence(5) == grey(PLANES["data_batch_2"][1])).all()
    assert (task.validation.sequence(0) == grey(PLANES["data_batch_5"][0])).all()  # the last ones
    assert (task.test.sequence(3) == grey(PLANES["test_batch"][3])).all()
    assert "attention_mask" not in task.test.batch([0, 1])


def test_white_is_white() -> None:
    assert to_grey(np.array([[255, 255, 255], [0, 0, 0]], np.uint8)).tolist() == [255, 0]


def test_a_dataset_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    image = pytest.importorskip("PIL.Image")
    arrays = [p.reshape(3, 32, 32).transpose(1, 2, 0) for p in PLANES["test_batch"]]

    def load_dataset(name: str, *_: Any, **__: Any) -> Any:
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


class Evil:
    def __reduce__(self) -> Any:
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
def test_wrong_files_are_one_line_and_run_nothing(
    tmp_path: Path, capsys: Any, content: bytes, message: str
) -> None:
    options = pickled(tmp_path)
    bad = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    bad.write_bytes(content)
    with pytest.raises(LatteError, match=f"{bad}: .*{message}") as caught:
        load_task("image", options, "unused")
    assert "\n" not in str(caught.value) and not capsys.readouterr().out


def test_missing_and_truncated_files(tmp_path: Path) -> None:
    options = binary(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(b"x" * 100)
    with pytest.raises(LatteError, match="expected a multiple of 3073 bytes, found 100"):
        load_task("image", options, "unused")
    (tmp_path / "data_batch_4.bin").unlink()
    with pytest.raises(LatteError, match="no file data_batch_4 or data_batch_4.bin"):
        load_task("image", options, "unused")
    with pytest.raises(LatteError, match="none: no such folder"):
        load_task("image", ImageOptions(source=str(tmp_path / "none")), "unused")
    with pytest.raises(LatteError, match="data.validation_share: expected between 0 and 1"):
        load_task("image", ImageOptions(validation_share=0), "unused")
