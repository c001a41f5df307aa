"""Host and device tier: which rows are kept, in which order, and what is read back."""

import pytest
import torch
from sealing import is_resident, sampled_codes
from torch.testing import assert_close

from verkv.tiers import HostTier, ResidentRows, pad_rows

SHAPE = (2, 3, 11)  # contexts, KV heads, tokens


@pytest.fixture
def cache():
    keys = torch.arange(2 * 3 * 11, dtype=torch.float32).view(*SHAPE, 1).expand(*SHAPE, 4).contiguous()
    values = -keys[..., :3].contiguous()  # another head dim than the keys'
    codes = sampled_codes(SHAPE, level=8)
    codes[0, 1] &= 0x7F  # a unit without rows
    return keys, values, codes


def test_rows_are_those_of_the_resident_tokens(cache):
    keys, values, codes = cache
    rows = ResidentRows.gather(keys, values, codes)
    row, resident = 0, is_resident(codes)
    for unit in range(6):
        context, head = divmod(unit, 3)
        assert int(rows.offsets[unit]) == row
        for token in range(11):
            if resident[context, head, token]:
                assert torch.equal(rows.keys[row], keys[context, head, token])
                assert torch.equal(rows.values[row], values[context, head, token])
                assert rows.codes[row] == codes[context, head, token]
                row += 1
    assert row == len(rows.codes) == int(rows.offsets[-1]) == int(resident.sum())
    assert rows.offsets[1] == rows.offsets[2]


def test_padded_index_covers_every_row_once(cache):
    rows = ResidentRows.gather(*cache)
    index, is_row = rows.padded_index()
    assert index.shape == is_row.shape == (6, int(rows.offsets.diff().max()))
    assert index[is_row].tolist() == list(range(len(rows.codes)))
    assert not is_row[1].any()
    assert index.max() < len(rows.codes)


def test_padded_index_without_any_row(cache):
    keys, values, codes = cache
    rows = ResidentRows.gather(keys, values, torch.zeros_like(codes))
    index, is_row = rows.padded_index()
    assert index.shape == is_row.shape == (6, 0)


@pytest.mark.parametrize("contexts", [[1], [1, 0], [0, 0, 1]], ids=str)
def test_select_is_gathering_from_the_selected_contexts(cache, contexts):
    indices = torch.tensor(contexts)
    selected = ResidentRows.gather(*cache).select(indices, n_kv_heads=3)
    expected = ResidentRows.gather(*(t[indices] for t in cache))
    for name in ("keys", "values", "codes", "offsets"):
        assert torch.equal(getattr(selected, name), getattr(expected, name)), name
        assert getattr(selected, name).dtype == getattr(expected, name).dtype
    host = HostTier.copy_from(*cache[:2])
    assert torch.equal(host.select(indices).keys, cache[0][indices])
    assert torch.equal(host.select(indices).values, cache[1][indices])


def test_host_reads_rows_by_unit_and_position(cache):
    keys, values, _ = cache
    host = HostTier.copy_from(keys, values)
    units, positions = torch.tensor([0, 4, 5, 5]), torch.tensor([10, 0, 3, 3])
    assert torch.equal(host.read_keys(units, positions, keys.device), keys.flatten(0, 1)[units, positions])
    assert torch.equal(host.read_values(units, positions, keys.device), values.flatten(0, 1)[units, positions])
    nothing = torch.empty(0, dtype=torch.int64)
    assert host.read_keys(nothing, nothing, keys.device).shape == (0, 4)


@pytest.mark.parametrize("dtype,size", [(torch.float32, 4), (torch.bfloat16, 2)], ids=["fp32", "bf16"])
def test_bytes_of_a_row(cache, dtype, size):
    host = HostTier.copy_from(cache[0].to(dtype), cache[1].to(dtype))
    assert (host.key_row_bytes, host.row_bytes) == (4 * size, 7 * size)


def test_host_tier_is_a_copy(cache):
    keys, values, _ = cache
    host = HostTier.copy_from(keys, values)
    before = keys.clone()
    keys.zero_()
    assert torch.equal(host.keys, before)
    assert host.keys.device.type == "cpu"


@pytest.mark.gpu
def test_host_tier_is_pinned(cache):
    host = HostTier.copy_from(cache[0].cuda(), cache[1].cuda())
    assert host.keys.is_pinned() and host.values.is_pinned()
    assert host.read_keys(torch.tensor([1]), torch.tensor([2]), torch.device("cuda")).is_cuda


def test_pad_rows_spreads_rows_over_their_units():
    rows = torch.arange(8, dtype=torch.float32).view(4, 2)
    padded, is_row = pad_rows(rows, torch.tensor([0, 2, 2, 2]), n_units=4)
    assert_close(padded[is_row], rows)
    assert is_row.tolist() == [[True, False, False], [False] * 3, [True] * 3, [False] * 3]
    assert not padded[~is_row].any()


def test_pad_no_rows():
    padded, is_row = pad_rows(torch.empty(0, 2), torch.empty(0, dtype=torch.int64), n_units=3)
    assert padded.shape == (3, 1, 2) and not is_row.any()
