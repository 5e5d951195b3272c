"""Files of tensors: what was written is read, and a file that was changed is refused."""

import json
import random
import struct

import pytest
import torch
from safetensors.torch import save_file

from latte.errors import LatteError
from latte.models.tensor_file import read_tensors, write_tensors

TENSORS = {
    "layers.0.x": torch.arange(6.0).reshape(2, 3),
    "half": torch.arange(4.0).bfloat16(),
    "ids": torch.arange(3, dtype=torch.int32),
    "mask": torch.tensor([True, False]),
    "one": torch.tensor(3.0),
    "none": torch.zeros(0, 4),
}
ABOUT = {"config": json.dumps({"a": 1}), "base": ""}


@pytest.fixture
def path(tmp_path):
    write_tensors(tmp_path / "file", TENSORS, ABOUT, "state")
    return tmp_path / "file"


def read(path, kind="state"):
    return read_tensors(path, kind, "save_state")


def refused(path, said):
    with pytest.raises(LatteError, match=said) as error:
        read(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_what_was_written_is_read(path):
    about, tensors = read(path)
    assert about == ABOUT | {"format": "latte state 2"}
    assert tensors.keys() == TENSORS.keys()
    for name, x in tensors.items():
        assert x.dtype == TENSORS[name].dtype and torch.equal(x, TENSORS[name])


def test_every_flipped_bit_is_refused(path):
    whole = path.read_bytes()
    rng = random.Random(0)
    for place in range(len(whole)):  # one bit of each byte
        harmed = bytearray(whole)
        harmed[place] ^= 1 << rng.randrange(8)
        path.write_bytes(harmed)
        refused(path, "truncated or damaged|another kind of file")


def test_a_truncated_file_is_refused(path):
    whole = path.read_bytes()
    for length in (0, 4, 8, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(path, "truncated or damaged")


def test_a_header_that_says_something_else_is_refused(path):
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = whole[8 : 8 + length]
    for was, now in (
        (b'"shape":[2,3]', b'"shape":[3,2]'),
        (b'"dtype":"BF16"', b'"dtype":"I16"'),
        (b'"dtype":"BF16"', b'"dtype":"F8_E8M0"'),
        (b'"half"', b'"hald"'),
        (b'"base":""', b'"base":"x"'),
    ):
        assert was in header
        other = header.replace(was, now)
        path.write_bytes(struct.pack("<Q", len(other)) + other + whole[8 + length :])
        refused(path, "truncated or damaged")


def test_a_file_of_another_kind_is_refused(path, tmp_path):
    with pytest.raises(LatteError, match="latents .*found another kind of file"):
        read(path, "latents")
    save_file(TENSORS, path)
    refused(path, "expected a file written by save_state, found another kind of file")
    refused(tmp_path / "none", "does not exist; expected a file written by save_state")


def test_files_of_the_first_format_have_no_checksum(path):
    save_file(TENSORS, path, ABOUT | {"format": "latte state 1"})
    assert read(path)[1].keys() == TENSORS.keys()
    save_file(TENSORS, path, ABOUT | {"format": "latte state 2"})
    refused(path, "its checksum is not that of its contents")
