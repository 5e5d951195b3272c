from latte.lab.data import open_corpus
from latte.lab.data.embedded import embedded_files, families
from tests.helpers import python


def test_sizes_and_both_kinds_of_text():
    train, held_out = embedded_files()
    sizes = [sum(len(file.text.encode()) for file in side) for side in (train, held_out)]
    assert 5_000_000 < sizes[0] < 20_000_000
    assert 0.02 < sizes[1] / sum(sizes) < 0.1
    for side in (train, held_out):
        assert any(file.name.startswith("topics/") for file in side)
        assert any(file.name.endswith(".py") for file in side)
    names = [file.name for file in (*train, *held_out)]
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert len(names) == len(set(names))


def test_near_identical_files_fall_on_one_side():
    train, held_out = embedded_files()
    files = [*train, *held_out]
    numbers = families([file.text for file in files])
    assert not set(numbers[: len(train)]) & set(numbers[len(train) :])
    assert not {file.text for file in train} & {file.text for file in held_out}
    # An independent look: no held-out file of some length has half of its lines in one train file.

    def lines(file):
        return {line.strip() for line in file.text.splitlines() if len(line.strip()) > 20}

    train_lines = [lines(file) for file in train]
    for file in held_out:
        own = lines(file)
        if len(own) >= 10:
            assert max(len(own & other) for other in train_lines) < 0.5 * len(own), file.name


def test_another_process_has_the_same_split_and_imports_little():
    """Neither importing the package nor opening a corpus loads what only a few functions need."""
    code = (
        "from latte.lab.data import open_corpus; import sys; c = open_corpus('embedded');"
        "print(c.fingerprint('train'), c.fingerprint('validation'), *[name for name in "
        "('datasets', 'transformers', 'tokenizers', 'pyarrow', 'pandas', 'torch')"
        " if name in sys.modules])"
    )
    corpus = open_corpus("embedded")
    assert python("-c", code).stdout.split() == [
        corpus.fingerprint("train"),
        corpus.fingerprint("validation"),
    ]
