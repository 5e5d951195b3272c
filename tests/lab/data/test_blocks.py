import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from latte.errors import LatteError
from latte.lab.data import BlockCollator, PackedBlocks
from latte.lab.data.blocks import permuted


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097])
def test_permutation_is_a_bijection(size):
    orders = [[permuted(i, size, seed, epoch) for i in range(size)]
              for seed, epoch in ((0, 0), (0, 1), (1, 0), (123456789, 7))]  # fmt: skip
    for order in orders:
        assert sorted(order) == list(range(size))
    if size > 60:
        assert len({tuple(order) for order in orders}) == 4


def test_permutation_mixes():
    size = 10_000
    order = np.array([permuted(i, size, 3, 0) for i in range(size)])
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.05
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.01
    # Fixed points of random permutations: one on average.
    fixed = [sum(permuted(i, 100, s, 0) == i for i in range(100)) for s in range(100)]
    assert 0.5 < np.mean(fixed) < 1.6
    with pytest.raises(IndexError):
        permuted(10, 10, 0, 0)


def test_huge_sizes_take_no_memory():
    size = 10**12 + 39
    places = {permuted(i, size, 0, 0) for i in range(2000)}
    assert len(places) == 2000 and max(places) > size // 2


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_items_depend_on_seed_and_index_alone(token_file):
    tokens = token_file()
    blocks = PackedBlocks(tokens, 16, seed=5, length=1000)
    forward = [blocks[i] for i in range(200)]
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    again = PackedBlocks(tokens, 16, seed=5, length=1000)
    for i in reversed(range(200)):
        assert same(again[i], forward[i])
    assert torch.equal(torch.get_rng_state(), state[0])
    assert np.random.get_state()[1].tolist() == state[1] and random.getstate() == state[2]
    other = PackedBlocks(tokens, 16, seed=6, length=1000)
    assert not all(same(other[i], forward[i]) for i in range(20))


def test_items_are_the_same_in_other_processes(token_file):
    blocks = PackedBlocks(token_file(), 16, seed=5)
    loaded = DataLoader(
        blocks, batch_size=4, num_workers=1, collate_fn=BlockCollator("packed"),
        multiprocessing_context="spawn",
    )  # fmt: skip
    for batch, first in zip(loaded, (0, 4), strict=False):
        items = [blocks[first + i] for i in range(4)]
        assert same(batch, BlockCollator("packed")(items))


def test_each_epoch_is_every_block_once_in_a_new_order(token_file):
    tokens = token_file()
    blocks = PackedBlocks(tokens, 16, length=10_000)
    n = blocks.num_blocks
    orders = [[blocks.block_number(e * n + i) for i in range(n)] for e in range(3)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert orders[0] != orders[1] != orders[2] and orders[0] != list(range(n))
    assert len(PackedBlocks(tokens, 16)) == n == len(tokens) // 16
    plain = PackedBlocks(tokens, 16, shuffle=False)
    stream = torch.cat([plain[i]["input_ids"] for i in range(n)])
    assert stream.tolist() == tokens.tokens[: n * 16].tolist()
    with pytest.raises(IndexError):
        plain[n]
    assert same(plain[-1], plain[n - 1])


@pytest.mark.parametrize("T", [2, 7, 16, 64, 333])
def test_boundaries_and_labels(token_file, T):
    tokens = token_file()
    owner = np.repeat(np.arange(tokens.num_documents), np.diff(tokens.offsets))
    blocks = PackedBlocks(tokens, T, shuffle=False)
    for i in range(len(blocks)):
        item = blocks[i]
        own = owner[i * T : (i + 1) * T]
        cu = item["cu_seq_lens_q"]
        assert cu.dtype == torch.int32 and cu[0] == 0 and cu[-1] == T and (cu.diff() > 0).all()
        # A boundary is where, and only where, the document changes.
        assert cu[1:-1].tolist() == (np.flatnonzero(np.diff(own)) + 1).tolist()
        for t in range(T):
            # The loss of position t is at label t + 1 (the model shifts): same document only.
            first = t == 0 or own[t] != own[t - 1]
            assert item["labels"][t] == (-100 if first else item["input_ids"][t])
            assert item["position_ids"][t] == (0 if first else item["position_ids"][t - 1] + 1)


def test_without_documents_only_the_labels_know_them(token_file):
    tokens = token_file()
    apart, joined = (
        PackedBlocks(tokens, 64, shuffle=False, respect_documents=flag) for flag in (True, False)
    )
    assert torch.equal(apart[1]["labels"], joined[1]["labels"])
    assert joined[1]["cu_seq_lens_q"].tolist() == [0, 64]
    assert joined[1]["position_ids"].tolist() == list(range(64))
    assert len(apart[1]["cu_seq_lens_q"]) > 2


def test_started_blocks_begin_as_documents_do(token_file):
    tokens = token_file()
    options = {"shuffle": False, "respect_documents": False}
    plain, started = (PackedBlocks(tokens, 64, start_blocks=flag, **options) for flag in (0, 1))
    assert plain[1]["input_ids"][0] != tokens.tokens[0]
    for i in range(3):
        assert started[i]["input_ids"][0] == tokens.tokens[0]
        assert torch.equal(started[i]["input_ids"][1:], plain[i]["input_ids"][1:])
        assert torch.equal(started[i]["labels"], plain[i]["labels"])


def test_packed_batch(token_file):
    blocks = PackedBlocks(token_file(), 32, seed=1)
    items = [blocks[i] for i in range(5)]
    batch = BlockCollator("packed")(items)
    for name in ("input_ids", "labels", "position_ids"):
        assert batch[name].shape == (1, 160)
        assert torch.equal(batch[name][0], torch.cat([item[name] for item in items]))
    cu = batch["cu_seq_lens_q"]
    assert cu.dtype == torch.int32 and cu[0] == 0 and cu[-1] == 160
    starts = (batch["position_ids"][0] == 0).nonzero()[:, 0]
    assert torch.equal(cu[:-1].long(), starts)
    assert (batch["labels"][0, starts] == -100).all()
    assert ((batch["labels"] == -100).sum() == len(starts)).item()


def test_row_batch_and_auto(token_file):
    long = PackedBlocks(token_file(["one long document " * 100]), 32, shuffle=False)
    items = [long[i] for i in range(1, 5)]
    batch = BlockCollator()(items)
    assert batch.keys() == {"input_ids", "labels"} and batch["input_ids"].shape == (4, 32)
    assert BlockCollator("packed")(items)["cu_seq_lens_q"].tolist() == [0, 32, 64, 96, 128]
    short = PackedBlocks(token_file(), 64)
    items = [short[i] for i in range(3)]
    assert "cu_seq_lens_q" in BlockCollator("auto")(items)
    with pytest.raises(LatteError, match="layout='rows' needs blocks of one document each"):
        BlockCollator("rows")(items)
    with pytest.raises(LatteError, match="layout must be"):
        BlockCollator("columns")


def test_item_keys_are_model_arguments(token_file):
    # The Trainer drops keys that are no argument of the model's forward before collating.
    item = PackedBlocks(token_file(), 64)[0]
    assert set(item) == {"input_ids", "labels", "position_ids", "cu_seq_lens_q"}


def test_errors(token_file):
    tokens = token_file(["tiny"])
    with pytest.raises(LatteError, match="6 tokens are too few for a single block of 7"):
        PackedBlocks(tokens, 7)
    assert len(PackedBlocks(tokens, 6)) == 1
    with pytest.raises(LatteError, match="block_length must be at least 2"):
        PackedBlocks(tokens, 1)
    with pytest.raises(LatteError, match="length must be at least 1"):
        PackedBlocks(tokens, 6, length=0)
