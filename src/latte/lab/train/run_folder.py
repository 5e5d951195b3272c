"""The folder of a training run: its identity, its complete checkpoints, its result.

    output_dir/
      run.json            the recipe, the number of processes and digests of what is read: the
                          run's identity
      metrics.jsonl       one line per log or evaluation step
      tensorboard/        the same for TensorBoard
      checkpoint-<step>/  everything needed to continue; appears by one rename, complete
      config.json, model.safetensors, tokenizer.json   the result, once the run has finished
      finished.json       written last

A checkpoint is written in `.staging/`, given a manifest of its files' sizes, flushed to disk and
renamed, so a killed process leaves either all of it or nothing. No torch here.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO, Any, Protocol

from latte.errors import LatteError, one_line
from latte.lab.data.tokenfile import checksum
from latte.lab.results import first_difference
from latte.lab.train.recipe import current
from latte.models.atomic_files import writable_folder, write_json
from latte.models.plain_files import read_object

RUN_FILE = "run.json"
FINISHED_FILE = "finished.json"
MANIFEST_FILE = "manifest.json"
STAGING = ".staging"
LOCK_FILE = ".lock"
OTHER_FOLDER = "choose another output_dir"  # what to do, in errors


class Identified(Protocol):
    """What a run is made from: a recipe, or one run of a recipe's grid."""

    output_dir: str

    def identity(self) -> dict[str, Any]:
        """What makes two runs the same run, as plain JSON."""

    def as_dict(self) -> dict[str, Any]:
        """All of it, as plain JSON."""


class FolderInUse(LatteError):
    """Another process is training in the folder."""


@dataclass
class Claim:
    """A folder that is ours while `lock` is held.

    `resume` is a run's newest complete checkpoint, if there is one.
    """

    folder: Path
    resume: Path | None = None
    finished: bool = False
    lock: IO[str] | None = None
    skipped: tuple[str, ...] = ()  # damaged checkpoints that were passed over
    file: str = RUN_FILE  # stores the folder's identity
    made: bool = False  # the folder was not there before

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lock": None}  # a lock belongs to one process

    def check_inputs(self, inputs: dict[str, Any], *, begun: bool, what: str = "run") -> None:
        """Compare the run's inputs with those recorded at its start; at the start, record them.

        Args:
            inputs: Names of what is read, and their digests.
            begun: Whether the folder has a part of the work that is used.

        Raises:
            LatteError: Something has changed. The folder is as it was then.
        """
        file = self.folder / self.file
        content = read_object(file, then=OTHER_FOLDER)
        if not begun:
            write_json(file, {**content, "inputs": inputs})
            return
        stored = content.get("inputs", {})  # an earlier version's folder has none
        for name, digest in inputs.items():
            if name in stored and stored[name] != digest:
                raise LatteError(
                    f"{self.folder}: {name} has changed since this {what} began; put the earlier"
                    f" one back to continue it, or choose another output folder to begin anew"
                )

    def give_back(self) -> None:
        """Remove a new folder whose run could not start.

        A run that has begun keeps its files. Only the process that holds the lock does this.
        """
        if self.lock is None or self.resume is not None:
            return
        if {path.name for path in self.folder.iterdir()} <= {self.file, LOCK_FILE}:
            (self.folder / self.file).unlink()
            (self.folder / LOCK_FILE).unlink()
            if self.made:
                self.folder.rmdir()
            self.lock.close()


def claim(recipe: Identified, processes: int = 1) -> Claim:
    """Lock `recipe.output_dir` for this run. Nothing is overwritten.

    Raises:
        LatteError: The folder cannot be written, has another run or other files, is in use by
            another process, or all its checkpoints are damaged.
    """
    identity = {"recipe": recipe.identity(), "processes": processes}
    owner, new = lock_folder(
        Path(recipe.output_dir),
        RUN_FILE,
        {"identity": identity, "recipe": recipe.as_dict()},
        identity,
    )
    if new:
        return owner
    folder = owner.folder
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    owner.finished = (folder / FINISHED_FILE).exists()
    if not owner.finished:
        owner.resume, skipped = newest_checkpoint(folder)
        owner.skipped = tuple(skipped)
        if owner.resume is None and skipped:
            raise LatteError(
                f"no complete checkpoint in {folder}: {skipped[0]}; delete the damaged"
                " checkpoint folders to start from step 0"
            )
    return owner


def lock_folder(
    folder: Path,
    name: str,
    content: Any,
    wanted: dict[str, Any],
    *,
    what: str = "run",
    identity: Callable[[Any], dict[str, Any]] = lambda content: content["identity"],
) -> tuple[Claim, bool]:
    """Lock a folder whose file `name` stores its identity. Returns the lock, and whether it is new.

    Args:
        content: Content of the file of a new folder.
        wanted, what, identity: Arguments of `check_same`, for a file that exists.

    Raises:
        LatteError: The folder cannot be written, has other files, or is in use.
    """
    made = not folder.exists()
    writable_folder(folder)
    for path in folder.iterdir():  # to write into a pipe would not end
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise LatteError(f"{path} is a pipe, a socket or a device; {OTHER_FOLDER}")
    file, lock = folder / name, None
    if not file.exists():
        strangers = [
            path.name
            for path in folder.iterdir()
            if path.name not in (LOCK_FILE, STAGING) and not path.name.startswith(f"{name}.tmp-")
        ]
        # Unless another process has made it its own in this very moment.
        if strangers and not file.exists():
            raise LatteError(
                f"output folder {folder} is not empty and holds no run of latte (it has"
                f" {min(strangers)!r}); choose another output_dir"
            )
        lock = _lock(folder)
        if not file.exists():
            write_json(file, content)
            return Claim(folder, lock=lock, file=name, made=made), True
    check_same(file, wanted, what=what, identity=identity)
    return Claim(folder, lock=lock or _lock(folder), file=name), False


def _lock(folder: Path) -> IO[str]:
    """Hold the folder until this process ends, however it ends."""
    lock = open(folder / LOCK_FILE, "w")  # noqa: SIM115  held open on purpose
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise FolderInUse(f"another process is training in {folder}") from None
    return lock


def check_same_recipe(recipe: Identified) -> None:
    """Raise LatteError if `recipe.output_dir` holds a run of another recipe.

    By however many processes: a result may be read by one that was computed by many.
    """
    run_file = Path(recipe.output_dir) / RUN_FILE
    if run_file.exists():
        check_same(run_file, {"recipe": recipe.identity()})


def check_same(
    file: Path,
    wanted: dict[str, Any],
    *,
    what: str = "run",
    identity: Callable[[Any], dict[str, Any]] = lambda content: content["identity"],
) -> None:
    """Raise LatteError if a folder's file names another identity than `wanted`, by its first key.

    Args:
        what: Name of what the folder should have, for the error.
        identity: Function that gives the identity of the file's content.
    """
    content = read_object(file, then=OTHER_FOLDER)
    try:
        found = identity(content)
        stored = {key: found[key] for key in wanted}
        if "recipe" in stored:
            stored["recipe"] = current(stored["recipe"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LatteError(f"{file} is damaged ({one_line(error)}); {OTHER_FOLDER}") from None
    difference = first_difference(stored, json.loads(json.dumps(wanted)))
    if difference:
        key, there, here = difference
        raise LatteError(
            f"output folder {file.parent} holds another {what}: {key} is {there!r} there and"
            f" {here!r} here; {OTHER_FOLDER}"
        )


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint, and what is wrong with the newer ones passed over."""
    skipped: list[str] = []
    for path in reversed(checkpoints(folder)):
        problem = checkpoint_problem(path)
        if problem is None:
            return path, skipped
        skipped.append(problem)
    return None, skipped


def checkpoints(folder: Path) -> list[Path]:
    """Folders named checkpoint-<step>, by step."""
    found = [
        path
        for path in folder.glob("checkpoint-*")
        if path.is_dir() and path.name.removeprefix("checkpoint-").isdigit()
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def checkpoint_problem(folder: Path, only: str = "*") -> str | None:
    """None if the manifest's files are there, with their sizes and checksums, else a sentence.

    `only` restricts the check to names that match the pattern.
    """
    manifest = folder / MANIFEST_FILE
    try:
        files = read_object(manifest)["files"]
        for name, (size, wanted) in files.items():
            path = folder / name
            if not PurePath(name).match(only):
                continue
            if not path.is_file():
                return f"{path} is missing"
            if path.stat().st_size != size:
                return f"{path} has {path.stat().st_size} bytes, expected {size}"
            if checksum(path) != wanted:
                return f"{path} was edited: its checksum does not match"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{manifest} is missing or damaged"
    return None


def write_manifest(folder: Path, files: list[Path]) -> None:
    """Record sizes and checksums of `files`, and flush them and the record to disk."""
    record = {}
    for path in files:
        record[str(path.relative_to(folder))] = [path.stat().st_size, checksum(path)]
        _flush(path)
    write_json(folder / MANIFEST_FILE, {"files": record})
    _flush(folder / MANIFEST_FILE)


def seal(staged: Path, final: Path) -> None:
    """Write the manifest of a staged checkpoint, flush it to disk and move it into place."""
    write_manifest(staged, sorted(path for path in staged.rglob("*") if path.is_file()))
    for path in [staged, *(p for p in staged.rglob("*") if p.is_dir())]:
        _flush(path)
    if final.exists():  # the same step, reached again after a damaged checkpoint
        shutil.rmtree(final)
    os.replace(staged, final)
    _flush(final.parent)


def rotate(newest: Path, keep: int) -> None:
    """Delete all but `keep` checkpoints, the newest and those before it.

    Later ones are damaged: the run continued from an earlier one. They are not counted, and are
    not deleted.
    """
    found = checkpoints(newest.parent)
    for path in found[: found.index(newest) + 1][:-keep]:
        shutil.rmtree(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
