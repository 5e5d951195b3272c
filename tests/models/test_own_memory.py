"""Weights in memory of their own keep their numbers, and lie in huge pages."""

import mmap
import pickle

import pytest
import torch
from torch import nn

from latte.models.own_memory import PAGE, own_memory

NEEDS = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux gives them")


@NEEDS
def test_tensors_are_next_to_each_other_in_huge_pages():
    large = nn.Parameter(torch.randn(700, 1000))
    integers = nn.Parameter(torch.arange(66, dtype=torch.int8).view(2, 33), requires_grad=False)
    moved = [large, integers, torch.empty(0, 3), torch.randn(5).double()]
    apart = torch.randn(4, 6).t()
    before, place = [x.detach().clone() for x in (*moved, apart)], apart.data_ptr()
    own_memory([*moved, apart])
    for x, numbers in zip((*moved, apart), before, strict=True):
        assert torch.equal(x, numbers)
    first = large.data_ptr()
    assert first % PAGE == 0 and apart.data_ptr() != place
    assert apart.stride() == (1, 6)
    assert integers.data_ptr() == first + 2_800_000 and moved[3].data_ptr() % 64 == 0
    for x in (large, integers, moved[3]):
        assert x.untyped_storage().nbytes() == x.nbytes  # as files of weights are written
    assert "hg" in flags_of(first)
    assert torch.equal(pickle.loads(pickle.dumps(large)), before[0])
    large.sum().backward()
    assert large.grad is not None and large.grad.shape == large.shape


def flags_of(address):
    """What the kernel says of the memory at this address."""
    inside = False
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if "-" in name:
                begin, end = (int(x, 16) for x in name.split("-"))
                inside = begin <= address < end
            elif inside and name == "VmFlags:":
                return rest.split()
    return []


@NEEDS
def test_few_bytes_need_no_page_of_their_own():
    small = torch.randn(1000)
    numbers, place = small.clone(), small.data_ptr()
    own_memory([small])
    assert small.data_ptr() != place and torch.equal(small, numbers)
    assert "hg" not in flags_of(small.data_ptr())
