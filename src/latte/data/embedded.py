"""The text that every Python installation carries: library sources and documentation topics.

No download and no licence to accept, so that the demo and the tests run anywhere. The exact
bytes depend on the Python version; a corpus fingerprint is a digest of the text itself.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from latte.errors import LatteError

EXCLUDED_FOLDERS = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__",
}  # fmt: skip
EXCLUDED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")
HELD_OUT_FRACTION = 0.065
# A family of look-alike files (the code pages under encodings/) beyond this share of the corpus
# is for training: held out, it alone would decide the score.
LARGEST_HELD_OUT_FAMILY = 0.008
# Two files are one family when this share of the smaller one's distinct lines is in the other.
SHARED_LINES = 0.3


@dataclass(frozen=True)
class EmbeddedFile:
    """One library source or documentation topic: a name for people, and its text."""

    name: str
    text: str


def _library_sources(root: Path) -> Iterator[EmbeddedFile]:
    for folder, names, files in os.walk(root):
        names[:] = sorted(
            name
            for name in names
            if name not in EXCLUDED_FOLDERS and not name.startswith(("config-", "."))
        )
        for name in sorted(files):
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            if (
                not name.endswith(".py")
                or name.startswith(EXCLUDED_PREFIXES)
                or relative == "pydoc_data/topics.py"  # its topics come as documents instead
            ):
                continue
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:  # a source in another encoding, by its coding cookie
                continue
            yield EmbeddedFile(relative, text.replace("\r\n", "\n"))


def _topics() -> Iterator[EmbeddedFile]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package the topics apart
        return
    for name in sorted(topics):
        yield EmbeddedFile(f"topics/{name}.rst", topics[name])


def families(texts: list[str]) -> list[int]:
    """Number the families of near-identical texts: ``family[i] == family[j]`` if i and j are kin.

    Two texts are kin when at least SHARED_LINES of the distinct lines of the smaller one occur in
    the other (identical texts always), and kinship is transitive.
    """
    parent = list(range(len(texts)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    holders: defaultdict[str, list[int]] = defaultdict(list)
    sizes = [0] * len(texts)
    first_with: dict[str, int] = {}
    for i, text in enumerate(texts):
        parent[find(i)] = find(first_with.setdefault(text, i))
        lines = {line for line in map(str.strip, text.splitlines()) if len(line) >= 12}
        sizes[i] = len(lines)
        for line in lines:
            holders[line].append(i)
    shared: Counter[tuple[int, int]] = Counter()
    for members in holders.values():
        # A line found in very many files ("from __future__ ...", a licence) says nothing.
        if len(members) <= 150:
            for position, i in enumerate(members):
                for j in members[position + 1 :]:
                    shared[i, j] += 1
    for (i, j), count in shared.items():
        if count >= 2 and count >= SHARED_LINES * min(sizes[i], sizes[j]):
            parent[find(j)] = find(i)
    return [find(i) for i in range(len(texts))]


@cache
def embedded_files() -> tuple[tuple[EmbeddedFile, ...], tuple[EmbeddedFile, ...]]:
    """The (train, held-out) files, split by the hash of a file's family.

    A family is the set of files that are near-identical to one another (:func:`families`), and
    all of it falls on one side. The result depends on nothing but the files' contents.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in (*_library_sources(root), *_topics()) if file.text.strip()]
    if sum(len(file.text) for file in files) < 1_000_000:
        raise LatteError(
            f"the embedded corpus needs this Python's library sources: expected over 1 MB of .py "
            f"files under {root}, found {len(files)} files; give corpus= a path instead"
        )
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for i, family in enumerate(families([file.text for file in files])):
        groups[family].append(i)
    sizes = [len(file.text.encode()) for file in files]
    limit = LARGEST_HELD_OUT_FAMILY * sum(sizes)
    held_out = set()
    for members in groups.values():
        key = min(hashlib.sha256(files[i].text.encode()).digest() for i in members)
        chance = int.from_bytes(key[:8], "big") / 2**64
        if chance < HELD_OUT_FRACTION and sum(sizes[i] for i in members) <= limit:
            held_out.update(members)
    train = tuple(file for i, file in enumerate(files) if i not in held_out)
    return train, tuple(file for i, file in enumerate(files) if i in held_out)


class EmbeddedSource:
    """One side of the embedded corpus, as a source of documents (see ``corpora.Source``)."""

    unit = "B"

    def __init__(self, held_out: bool) -> None:
        self._files = embedded_files()[held_out]
        self.total: int | None = sum(len(file.text.encode()) for file in self._files)
        self.name = f"embedded ({'held out' if held_out else 'train'})"

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for file in self._files:
            digest.update(hashlib.sha256(file.text.encode()).digest())
        return digest.hexdigest()

    def documents(self, meter=None) -> Iterator[str]:
        done = 0
        for file in self._files:
            done += len(file.text.encode())
            if meter is not None:
                meter(done)
            yield file.text
