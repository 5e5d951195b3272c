"""Pathfinder: pictures that follow from the seed, dots that tell the truth, and released files."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.lra.data import PathfinderOptions, load_task
from experiments.lra.data import pathfinder as module
from experiments.lra.data.pathfinder import picture
from latte.errors import LatteError
from tests.experiments.lra.test_listops import sequences

SMALL = PathfinderOptions(
    contour_length=6, train_examples=12, validation_examples=4, test_examples=4
)


def watch(monkeypatch):
    """What is drawn: (ends of all dashes, places of the dots)."""
    drawn, plain = [], module._draw
    monkeypatch.setattr(
        module, "_draw", lambda d, dots, o: drawn.append((d.copy(), dots)) or plain(d, dots, o)
    )
    return drawn


def test_dots_and_paths(monkeypatch):
    drawn = watch(monkeypatch)
    labels = [picture(SMALL, index)[1] for index in range(12)]
    assert set(labels) == {0, 1}
    for label, (dashes, dots) in zip(labels, drawn, strict=True):
        paths = dashes[:12].reshape(6, 2, 2).transpose(1, 0, 2)  # grown in turns
        starts, ends = paths[:, 0, 0], paths[:, -1, 1]
        first = int(np.abs(starts - dots[0]).argmin())
        last = int(np.abs(ends - dots[1]).argmin())
        assert starts[first] == dots[0] and ends[last] == dots[1]
        assert (first == last) == bool(label)
        assert abs(starts[0] - starts[1]) == pytest.approx(SMALL.seed_distance)
        assert np.abs(np.diff(dashes, axis=1)) == pytest.approx(SMALL.paddle_length)
        for path in paths:  # a gap of two margins, less when the path turns in it
            gaps = np.abs(path[1:, 0] - path[:-1, 1])
            assert (gaps <= 2 * SMALL.margin + 1e-9).all() and (gaps > SMALL.margin).all()
        short = (len(dashes) - 12) / SMALL.distractor_length
        assert short == int(short) <= SMALL.distractors == 10
        assert dashes.real.min() >= 1 and dashes.imag.max() <= 31


def test_a_picture_depends_on_seed_and_index_alone():
    one, label = picture(SMALL, 5)
    picture(SMALL, 2)
    again, same = picture(SMALL, 5)
    assert (one == again).all() and label == same
    assert (picture(replace(SMALL, seed=1), 5)[0] != one).any()
    assert one.shape == (32, 32) and one.dtype == np.uint8 and one.max() == 255
    assert 0.03 < (one > 100).mean() < 0.35  # lines, on black


def test_splits_are_kept_and_are_not_each_others(tmp_path):
    task = load_task("pathfinder", SMALL, tmp_path)
    again = load_task("pathfinder", SMALL, tmp_path)
    pictures = [one for examples in task.splits().values() for one in sequences(examples)]
    assert len(set(pictures)) == len(pictures) == 20
    assert (task.train.tokens_S == again.train.tokens_S).all()
    assert (task.test.sequence(1) == picture(SMALL, 1)[0].reshape(-1)).all()
    more = load_task("pathfinder", replace(SMALL, train_examples=14), tmp_path)
    assert (more.test.tokens_S == task.test.tokens_S).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 15}, "data.size: expected at least 16 pixels for seed_distance 7, got 15"),
        ({"contour_length": 0}, "data.contour_length: expected at least 1"),
        ({"continuity": 0.0}, "data.continuity: expected a number above 0"),
        ({"num_distractors": -1}, "data.num_distractors: expected 0 or more"),
        ({"seed": -1}, "data.seed: expected 0 or more"),
    ],
)
def test_impossible_options(changes, message, tmp_path):
    with pytest.raises(LatteError, match=message):
        load_task("pathfinder", replace(SMALL, **changes), tmp_path)


# ---- the released files


@pytest.fixture
def released(tmp_path):
    """Two lists, one as text and one as an array, of 10 pictures each."""
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "curv_baseline"
    (folder / "metadata").mkdir(parents=True)
    for part in (0, 1):
        (folder / "imgs" / str(part)).mkdir(parents=True)
        rows = []
        for i in range(10):
            pixels = np.full((32, 32), 10 * part + i, np.uint8)
            image.fromarray(pixels).save(folder / "imgs" / str(part) / f"sample_{i}.png")
            rows.append([f"imgs/{part}", f"sample_{i}.png", str(i), str(i % 2), "1.8", "6"])
        if part:
            np.save(folder / "metadata" / "1.npy", np.array(rows))
        else:
            text = "".join(" ".join(row) + "\n" for row in rows)
            (folder / "metadata" / "0.npy").write_text(text)
    return folder


def test_released_files(released):
    task = load_task("pathfinder", PathfinderOptions(source=str(released)), "unused")
    assert [len(examples) for examples in task.splits().values()] == [16, 2, 2]
    seen = []
    for examples in task.splits().values():
        for i in range(len(examples)):
            (value,) = set(examples.sequence(i).tolist())
            assert examples.labels_N[i] == value % 10 % 2
            seen.append(value)
    assert sorted(seen) == list(range(20))
    other = load_task("pathfinder", PathfinderOptions(source=str(released), seed=1), "unused")
    assert (other.train.tokens_S != task.train.tokens_S).any()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("metadata/0.npy", b"imgs/0 a.png 3 x 1.8 6", "0.npy, line 1: expected folder, file, numb"),
        ("metadata/1.npy", b"\x93NUMPY nonsense", "1.npy: not a list of pictures"),
        ("imgs/0/sample_3.png", b"", "sample_3.png: damaged picture"),
        ("imgs/0/sample_3.png", None, "sample_3.png: no such picture, though the list names it"),
        ("metadata", None, "no metadata/.*npy in it"),
        (".", None, "no such folder .expected 'generated'"),
    ],
)
def test_wrong_released_files(released, file, content, message):
    if content is not None:
        (released / file).write_bytes(content)
    else:
        (released / file).rename(released.parent / "elsewhere")
    with pytest.raises(LatteError, match=message):
        load_task("pathfinder", PathfinderOptions(source=str(released)), "unused")


def test_no_room(monkeypatch):
    monkeypatch.setattr(module, "MAX_TRIES", 3)
    with pytest.raises(LatteError, match="no room for two paths of contour_length 90 in 32 x 32"):
        picture(replace(SMALL, contour_length=90), 0)
