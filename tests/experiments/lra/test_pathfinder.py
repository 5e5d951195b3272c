"""Pathfinder: pictures that follow from the seed, dots that tell the truth, and released files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.lra.data import PathfinderOptions, load_task
from experiments.lra.data import pathfinder as module
from experiments.lra.data.pathfinder import picture
from latte.errors import LatteError

SMALL = PathfinderOptions(
    contour_length=6, train_examples=12, validation_examples=4, test_examples=4
)


def watch(monkeypatch: pytest.MonkeyPatch) -> list:
    """What is drawn: (ends of all dashes, places of the dots)."""
    drawn, plain = [], module._draw
    monkeypatch.setattr(
        module, "_draw", lambda d, dots, o: drawn.append((d.copy(), dots)) or plain(d, dots, o)
    )
    return drawn


def test_dots_and_paths(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_dashes_of_different_paths_keep_their_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = watch(monkeypatch)
    for index in range(4):
        picture(SMALL, index)
    for dashes, _ in drawn:
        points = dashes[:, :1] + np.linspace(0, 1, 3) * (dashes[:, 1:] - dashes[:, :1])
        near = np.abs(points[:, None, :, None] - points[None, :, None, :]).min((2, 3))
        one, other = np.nonzero(near < SMALL.clearance - 1e-9)
        steps = np.abs(one - other)
        # A dash itself, the one before and after it: two apart in the two long paths, which grow
        # in turns, and one apart in the short ones.
        long = (one < 12) & (other < 12)
        assert np.isin(steps[long], (0, 2)).all() and (steps[~long] <= 1).all()


def test_a_picture_depends_on_seed_and_index_alone() -> None:
    one, label = picture(SMALL, 5)
    picture(SMALL, 2)
    again, same = picture(SMALL, 5)
    assert (one == again).all() and label == same
    assert (picture(replace(SMALL, seed=1), 5)[0] != one).any()
    assert one.shape == (32, 32) and one.dtype == np.uint8 and one.max() == 255
    assert 0.03 < (one > 100).mean() < 0.35  # lines, on black


def test_the_hard_version() -> None:
    hard = PathfinderOptions()
    assert (hard.distractor_length, hard.distractors) == (4, 5)
    image, _ = picture(hard, 0)
    assert (image > 100).mean() > (picture(replace(hard, num_distractors=0), 0)[0] > 100).mean()


def test_splits_are_kept_and_are_not_each_others(tmp_path: Path) -> None:
    task = load_task("pathfinder", SMALL, tmp_path)
    again = load_task("pathfinder", SMALL, tmp_path)
    pictures = [e.sequence(i).tobytes() for e in task.splits().values() for i in range(len(e))]
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
def test_impossible_options(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(LatteError, match=message):
        load_task("pathfinder", replace(SMALL, **changes), tmp_path)


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TRIES", 3)
    with pytest.raises(LatteError, match="no room for two paths of contour_length 90 in 32 x 32"):
        picture(replace(SMALL, contour_length=90), 0)


# ---- the released files


@pytest.fixture
def released(tmp_path: Path) -> Path:
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


def test_released_files(released: Path) -> None:
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


def test_wrong_released_files(released: Path) -> None:
    def load() -> None:
        load_task("pathfinder", PathfinderOptions(source=str(released)), "unused")

    listed = released / "metadata" / "0.npy"
    text = listed.read_text()
    listed.write_text(text.replace("sample_3.png 3 1", "sample_3.png 3 x"))
    with pytest.raises(LatteError, match="0.npy, line 4: expected folder, file, number and label"):
        load()
    listed.write_text(text)
    (released / "imgs" / "0" / "sample_3.png").write_bytes(b"")
    with pytest.raises(LatteError, match="sample_3.png: damaged picture"):
        load()
    (released / "imgs" / "0" / "sample_3.png").unlink()
    with pytest.raises(LatteError, match="sample_3.png: no such picture, though the list names it"):
        load()
    (released / "metadata" / "1.npy").write_bytes(b"\x93NUMPY nonsense")
    with pytest.raises(LatteError, match="1.npy: not a list of pictures"):
        load()
    for file in (released / "metadata").iterdir():
        file.unlink()
    with pytest.raises(LatteError, match="no metadata/.*npy in it"):
        load()
    with pytest.raises(LatteError, match="no such folder .expected 'generated'"):
        load_task("pathfinder", PathfinderOptions(source="nowhere"), "unused")
