"""The host's side of a step, with the emulator in place of a device: checks, buffers, chunks of rows, operators."""

import copy
import dataclasses

import pytest
import torch
from agreement import DELTA, UPPER_SHARES, needs_compiler
from problems import attend as attend_float64
from problems import make_layer, solve

from verkv.cuda import launch, layout
from verkv.cuda.launch import DeviceLayer, pack_bits, plan_logits, plan_rope_pair, rope_pair_tensors, unpack_bits
from verkv.sketches import RopePairSketch

pytestmark = needs_compiler
EPSILON = 0.05
sided = pytest.mark.parametrize("upper_share", UPPER_SHARES, ids=str)


def device_layer(layer, **changes) -> DeviceLayer:
    rows = layer.rows
    tensors = {
        "codes": layer.unit_codes.contiguous(),
        "row_keys": rows.keys,
        "row_values": rows.values,
        "row_codes": rows.codes,
        "row_positions": layer.row_positions,
        "row_offsets": rows.offsets,
        "host_keys": layer.keys,
        "host_values": layer.values,
    }
    return DeviceLayer(**tensors | changes)


def rope_pair_plan(layer, n_shortlist=16, epsilon=EPSILON, **options):
    return plan_rope_pair(
        device_layer(layer),
        rope_pair_tensors(layer.sketch),
        layer.query,
        layer.tail_lse,
        layer.scaling,
        epsilon,
        DELTA,
        n_shortlist,
        **options,
    )


def check_step(layer, plan, scaling):
    """Attention of the plan's rows is float64's, and the fetch list is what is promoted and not resident."""
    n_tokens = layer.keys.shape[2]
    union = unpack_bits(plan.promoted, n_tokens)
    for unit, missing in enumerate(union & ~layer.resident):
        assert torch.equal(plan.fetch_positions[unit, : plan.n_fetched[unit]].long(), missing.nonzero()[:, 0])
    output, lse = launch.attend(device_layer(layer), plan, layer.query, scaling)
    expected, expected_lse = attend_float64(layer, union, unpack_bits(plan.shrunk, n_tokens))
    assert ((output - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-5
    assert (lse - expected_lse).abs().max() < 1e-5
    assert not plan.tickets.any()


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16)])
@sided
def test_decode_step(on_emulator, upper_share, head_dim, dtype):
    layer = make_layer(1500, 3, head_dim, dtype, n_contexts=2, n_padding=200, sharpness=0.5, seed=1)
    plan = rope_pair_plan(layer, upper_share=upper_share)
    check_step(layer, plan, layer.scaling)
    assert (plan.n_shortlisted > 0).all() and plan.n_fetched.any()
    assert on_emulator == ["vk_score", "vk_shortlist", "vk_plan", "vk_emit", "vk_settle", "vk_attend"]


@pytest.mark.parametrize("paper", [False, True], ids=["blind", "paper"])
def test_only_the_bound_depends_on_the_sides(on_emulator, paper):
    """Equal parts are never above Eq. (7) and promote no more; shrinkage and shortlist are the same."""
    layer = make_layer(1500, 3, 64, sharpness=0.5, seed=1)
    whole, sides = (rope_pair_plan(layer, epsilon=0.3, paper=paper, upper_share=share) for share in (None, 0.5))
    assert torch.equal(whole.shrunk, sides.shrunk) and torch.equal(whole.n_shortlisted, sides.n_shortlisted)
    assert (sides.error_bound < whole.error_bound).all() and (sides.n_promoted <= whole.n_promoted).all()
    assert (sides.n_promoted < whole.n_promoted).any() and not (sides.promoted & ~whole.promoted).any()


def test_question_pass_copies_fetched_rows_once(on_emulator):
    layer = make_layer(1500, 20, 64, sharpness=0.5, seed=2)
    check_step(layer, rope_pair_plan(layer), layer.scaling)
    assert on_emulator[-2:] == ["vk_gather", "vk_attend"]


@pytest.mark.parametrize("upper_share", [None, 0.7], ids=str)
def test_rows_planned_in_chunks_make_one_union(on_emulator, monkeypatch, upper_share):
    layer = make_layer(1500, 11, 64, sharpness=0.5, seed=3)
    whole = rope_pair_plan(layer, n_shortlist=0, upper_share=upper_share)
    monkeypatch.setattr(launch, "MAX_PLANNED_PAIRS", 2 * 1500 * 4)
    on_emulator.clear()
    parts = rope_pair_plan(layer, n_shortlist=0, upper_share=upper_share)
    assert on_emulator.count("vk_plan") == 3
    for name in ("promoted", "shrunk", "n_promoted", "n_row_fetched", "error_bound", "n_fetched"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name
    check_step(layer, parts, layer.scaling)
    shortlisted = rope_pair_plan(layer, upper_share=upper_share)  # and with a shortlist for each chunk
    check_step(layer, shortlisted, layer.scaling)


@pytest.mark.parametrize("chunked", [False, True])
@sided
def test_plan_of_given_logits(on_emulator, monkeypatch, upper_share, chunked):
    """Any logits, with known tokens and an error variance: the float64 plan at the tolerance that is handed over."""
    if chunked:
        monkeypatch.setattr(launch, "MAX_PLANNED_PAIRS", 2 * 1500 * 2)
    layer = make_layer(1500, 5, 128, sharpness=0.5, seed=4)
    logits = layer.query @ layer.keys.flatten(0, 1).float().mT * layer.scaling + 0.3 * torch.randn(2, 5, 1500)
    known, sigma2 = torch.rand(2, 1500) < 0.05, torch.rand(2, 5)
    rows = torch.full((2, 5), EPSILON) if chunked else EPSILON  # one tolerance for all, or one for each
    given = device_layer(layer), logits, layer.tail_lse, rows, DELTA, known, sigma2
    plan = plan_logits(*given, upper_share=upper_share)
    given = logits, layer.tail_lse, layer.unit_codes, layout.safe_epsilon(EPSILON), DELTA, known, sigma2
    answer = solve(*given, upper_share=upper_share)
    torch.testing.assert_close(plan.error_bound.double(), answer.plan.error_bound, rtol=layout.BOUND_MARGIN, atol=0)
    assert torch.equal(plan.n_promoted.long(), answer.plan.n_promoted)
    assert torch.equal(unpack_bits(plan.promoted, 1500), answer.plan.promoted.any(1))
    assert torch.equal(unpack_bits(plan.shrunk, 1500), answer.shrinkage < 1)
    assert torch.equal(plan.n_row_fetched.long(), (answer.plan.promoted & ~layer.resident[:, None]).sum(-1))
    check_step(layer, plan, layer.scaling)


def test_step_is_one_graph_for_compile(on_emulator):
    layer = make_layer(300, 3, 64, sharpness=0.5, seed=5)
    sealed, sketch = device_layer(layer), rope_pair_tensors(layer.sketch)

    def step(query):
        given = sealed, sketch, query, layer.tail_lse, layer.scaling, EPSILON, DELTA, 16
        plan = plan_rope_pair(*given, upper_share=0.7)
        return launch.attend(sealed, plan, query, layer.scaling)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for eager, traced in zip(step(layer.query), compiled(layer.query), strict=True):
        assert torch.equal(eager, traced)


def test_sketches_of_another_layout_are_left_to_torch():
    keys = torch.randn(1, 2, 300, 64)
    assert rope_pair_tensors(RopePairSketch().build(keys))["codes"].shape == (2, 300, 4)
    for options in ({"fraction": 0.5}, {"group_size": 64}):
        assert rope_pair_tensors(RopePairSketch(**options).build(keys)) is None


def test_bits_round_trip():
    for n_tokens in (1, 31, 32, 33, 500):
        mask = torch.rand(2, 3, n_tokens) < 0.5
        assert torch.equal(unpack_bits(pack_bits(mask), n_tokens), mask)


# --- the border -----------------------------------------------------------------------------------------------------


def shifted(tensor):
    """The same values at an address that is no multiple of 16."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)


BAD_LAYERS = {
    "head dims must be": lambda x: {"row_keys": x.rows.keys[:, :32].contiguous()},
    "must be bfloat16 or float16": lambda x: {"row_keys": x.rows.keys.float()},
    "row_values must be torch.bfloat16": lambda x: {"row_values": x.rows.values.half()},
    "codes must be torch.uint8": lambda x: {"codes": x.unit_codes.int()},
    "row_positions must be torch.int32": lambda x: {"row_positions": x.row_positions.long()},
    "row_offsets must have shape": lambda x: {"row_offsets": x.rows.offsets[:-1]},
    "host_keys must hold": lambda x: {"host_keys": x.keys[:, :, :-1].contiguous()},
    "host_values must be contiguous": lambda x: {"host_values": x.values.mT.contiguous().mT},
    "row_keys must start at a multiple of 16": lambda x: {"row_keys": shifted(x.rows.keys)},
    "row_codes must have shape": lambda x: {"row_codes": x.rows.codes[:-1]},
}


@pytest.mark.parametrize("message", BAD_LAYERS)
def test_bad_layer_is_refused(on_emulator, message):
    layer = make_layer(200, 2, 64)
    with pytest.raises(ValueError, match=message):
        device_layer(layer, **BAD_LAYERS[message](layer))


def test_layer_off_the_device_is_refused():
    with pytest.raises(ValueError, match="CUDA device, got cpu"):
        device_layer(make_layer(200, 2, 64))


def test_layer_in_pageable_memory_is_refused(on_emulator, monkeypatch):
    sealed = device_layer(make_layer(200, 2, 64))
    monkeypatch.undo()
    monkeypatch.setattr(launch, "_check_device", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    for make in (lambda: device_layer(make_layer(200, 2, 64)), lambda: copy.deepcopy(sealed)):
        with pytest.raises(ValueError, match="host_keys must be in pinned memory"):
            make()


def test_bad_queries_sketches_and_options_are_refused(on_emulator):
    layer = make_layer(200, 2, 64)
    sealed, sketch = device_layer(layer), rope_pair_tensors(layer.sketch)

    def plan(
        query=layer.query, tail_lse=layer.tail_lse, n_shortlist=4, epsilon=EPSILON, delta=DELTA, share=None, **parts
    ):
        given = sealed, sketch | parts, query, tail_lse, layer.scaling, epsilon, delta, n_shortlist
        return plan_rope_pair(*given, upper_share=share)

    for message, arguments in {
        "query must be torch.float32": {"query": layer.query.half()},
        "query must have shape": {"query": layer.query[:, :, :32].contiguous()},
        "query must be contiguous": {"query": layer.query.mT.contiguous().mT},
        "at least one row": {"query": layer.query[:, :0]},
        "tail_lse must have shape": {"tail_lse": layer.tail_lse[:, :1].contiguous()},
        r"n_shortlist must be in \[0, 1024\]": {"n_shortlist": 1025},
        "epsilon must be > 0": {"epsilon": 0.0},
        r"delta must be in \(0, 1\)": {"delta": 1.0},
        r"upper_share must be in \(0, 1\), got 0\.0": {"share": 0.0},
        r"upper_share must be in \(0, 1\), got 1\.0": {"share": 1.0},
        "channels.* must be torch.uint8": {"channels": sketch["channels"].short()},
        "zero.* must have shape": {"zero": sketch["zero"][:, :1].contiguous()},
    }.items():
        with pytest.raises(ValueError, match=message):
            plan(**arguments)
    with pytest.raises(ValueError, match=r"known must be torch\.bool"):
        logits = torch.zeros(2, 2, 200)
        plan_logits(sealed, logits, layer.tail_lse, EPSILON, DELTA, torch.zeros(2, 200, dtype=torch.uint8))
    with pytest.raises(ValueError, match="upper_share must be in"):
        plan_logits(sealed, torch.zeros(2, 2, 200), layer.tail_lse, EPSILON, DELTA, upper_share=1.5)
    longer = dataclasses.replace(plan(), n_promoted=torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="plan is of rows"):
        launch.attend(sealed, longer, layer.query, layer.scaling)
