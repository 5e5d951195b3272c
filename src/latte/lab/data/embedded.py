"""The embedded corpus: this Python's library sources and documentation topics.

Every Python installation has them. They need no download and no licence to accept, so the demo and
the tests run anywhere. Their exact bytes depend on the Python version.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from latte.errors import LatteError
from latte.lab.data.document_source import Meter, Source, no_meter

EXCLUDED_FOLDERS = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__",
}  # fmt: skip
EXCLUDED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")
HELD_OUT_FRACTION = 0.065
# A family of similar files (the code pages under encodings/) with more than this share of the
# corpus is training text. If it were held out, it would decide the score alone.
LARGEST_HELD_OUT_FAMILY = 0.008
# Two files are one family when this share of the smaller one's distinct lines is in the other.
SHARED_LINES = 0.3


@dataclass(frozen=True)
class EmbeddedFile:
    """One library source or documentation topic: a readable name, and its text."""

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
                or relative == "pydoc_data/topics.py"  # its topics are separate documents
            ):
                continue
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:  # a source in another encoding, by its coding cookie
                continue
            yield EmbeddedFile(relative, text.replace("\r\n", "\n"))


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
        # A line that is in very many files ("from __future__ ...", a licence) is ignored.
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

    A family is a set of files that are near-identical to one another (:func:`families`). All its
    files are on one side. The result depends only on the files' contents.
    """
    documented: dict[str, str] = {}
    with contextlib.suppress(ImportError):  # in some distributions the topics are another package
        from pydoc_data.topics import topics

        documented = topics
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [EmbeddedFile(f"topics/{name}.rst", text) for name, text in sorted(documented.items())]
    files = [file for file in (*_library_sources(root), *found) if file.text.strip()]
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


class EmbeddedSource(Source):
    """One side of the embedded corpus."""

    def __init__(self, held_out: bool) -> None:
        self._texts = [file.text for file in embedded_files()[held_out]]
        self.total = sum(len(text.encode()) for text in self._texts)
        self.name = f"embedded ({'held out' if held_out else 'train'})"

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for text in self._texts:
            digest.update(hashlib.sha256(text.encode()).digest())
        return digest.hexdigest()

    def documents(self, meter: Meter = no_meter) -> Iterator[str]:
        done = 0
        for text in self._texts:
            done += len(text.encode())
            meter(done)
            yield text
