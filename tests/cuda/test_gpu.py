"""The kernels on a real device: the same agreement with float64, CUDA graphs, and compute-sanitizer."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from agreement import DELTA, UPPER_SHARES
from problems import attend as attend_float64
from problems import make_layer, solve

import verkv.cuda
from verkv.cuda import layout, selfcheck
from verkv.cuda.launch import DeviceLayer, attend, plan_logits, plan_rope_pair, rope_pair_tensors, unpack_bits

pytestmark = pytest.mark.gpu
EPSILON = 0.05
# CUDA's fast exp2 and log2: tokens whose drops are as close as this may change places, and k* may move by one.
FAST_MATH = 1e-5
sided = pytest.mark.parametrize("upper_share", UPPER_SHARES, ids=str)


@pytest.fixture(autouse=True)
def _usable():
    if not verkv.cuda.is_available():
        pytest.skip(f"the kernels cannot run on this device: {verkv.cuda.dispatch.unavailable_because(0)}")


def on_device(layer) -> tuple[DeviceLayer, dict, torch.Tensor, torch.Tensor]:
    """Layer, sketch, query and tail of a CPU layer, on the device."""
    rows = layer.rows
    device_layer = DeviceLayer(
        codes=layer.unit_codes.contiguous().cuda(),
        row_keys=rows.keys.cuda(),
        row_values=rows.values.cuda(),
        row_codes=rows.codes.cuda(),
        row_positions=layer.row_positions.cuda(),
        row_offsets=rows.offsets.cuda(),
        host_keys=layer.keys.contiguous().pin_memory(),
        host_values=layer.values.contiguous().pin_memory(),
    )
    parts = {name: tensor.cuda() for name, tensor in rope_pair_tensors(layer.sketch).items()}
    return device_layer, parts, layer.query.cuda(), layer.tail_lse.cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "tile"), [(64, 1), (64, 5), (128, 4), (128, 8), (256, 4), (256, 8)])
def test_selfcheck_passes(head_dim, tile, dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    state = torch.cuda.get_rng_state(device)
    assert list(selfcheck.disagreements(device, head_dim, tile, dtype)) == []
    assert torch.equal(torch.cuda.get_rng_state(device), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "n_rows"), [(64, 3), (128, 4), (128, 7), (128, 8), (256, 4), (256, 8), (128, 40)])
def test_step_agrees_with_float64(head_dim, n_rows, dtype):
    layer = make_layer(
        9000, n_rows, head_dim, dtype, n_contexts=2, n_padding=700, sharpness=0.5, seed=head_dim + n_rows
    )
    sealed, sketch, query, tail_lse = on_device(layer)
    plan = plan_rope_pair(sealed, sketch, query, tail_lse, layer.scaling, EPSILON, DELTA, 128)
    union, shrunk = (unpack_bits(words, 9000).cpu() for words in (plan.promoted, plan.shrunk))
    for unit, missing in enumerate(union & ~layer.resident):
        assert torch.equal(plan.fetch_positions[unit, : plan.n_fetched[unit]].cpu().long(), missing.nonzero()[:, 0])
    output, lse = (tensor.cpu() for tensor in attend(sealed, plan, query, layer.scaling))
    expected, expected_lse = attend_float64(layer, union, shrunk)
    assert ((output - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < FAST_MATH
    assert (lse - expected_lse).abs().max() < FAST_MATH
    assert not plan.tickets.any() and not plan.unit_counts.any()


@pytest.mark.parametrize("n_tokens", [1, 33, 4097, 30000])
@sided
def test_plan_of_given_logits_agrees_with_float64(upper_share, n_tokens):
    layer = make_layer(n_tokens, 4, 128, sharpness=0.5, seed=n_tokens)
    sealed, _, _, tail_lse = on_device(layer)
    logits = layer.query @ layer.keys.flatten(0, 1).float().mT * layer.scaling + 0.3 * torch.randn(2, 4, n_tokens)
    known, sigma2 = torch.rand(2, n_tokens) < 0.05, torch.rand(2, 4)
    given = sealed, logits.cuda(), tail_lse, EPSILON, DELTA, known.cuda(), sigma2.cuda()
    plan = plan_logits(*given, upper_share=upper_share)
    given = logits, layer.tail_lse, layer.unit_codes, layout.safe_epsilon(EPSILON), DELTA, known, sigma2
    answer = solve(*given, upper_share=upper_share)
    assert (plan.n_promoted.cpu().long() - answer.plan.n_promoted).abs().max() <= 1
    differs = unpack_bits(plan.promoted, n_tokens).cpu() != answer.plan.promoted.any(1)
    assert differs.sum() <= 2 * answer.plan.n_promoted.numel()
    torch.testing.assert_close(plan.error_bound.cpu().double(), answer.plan.error_bound, rtol=FAST_MATH, atol=1e-8)


@sided
def test_no_plan_is_looser_than_epsilon_in_float64(upper_share):
    for seed in range(20):
        layer = make_layer(4000, 1, 128, sharpness=0.4, n_kv_heads=8, seed=seed)
        sealed, _, _, tail_lse = on_device(layer)
        logits = layer.query @ layer.keys.flatten(0, 1).float().mT * layer.scaling
        plan = plan_logits(sealed, logits.cuda(), tail_lse, EPSILON, DELTA, upper_share=upper_share)
        answer = solve(logits, layer.tail_lse, layer.unit_codes, EPSILON, DELTA, upper_share=upper_share)
        assert (answer.bound(unpack_bits(plan.promoted, 4000).cpu()[:, None]) < EPSILON).all()


def test_step_can_be_captured_in_a_graph():
    layer = make_layer(5000, 4, 128, sharpness=0.5, seed=1)
    sealed, sketch, query, tail_lse = on_device(layer)

    def step():
        plan = plan_rope_pair(sealed, sketch, query, tail_lse, layer.scaling, EPSILON, DELTA, 128, upper_share=0.7)
        return attend(sealed, plan, query, layer.scaling)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for scale in (1.0, -0.7):
        query.mul_(scale)
        graph.replay()
        for tensor, expected in zip(captured, step(), strict=True):
            assert torch.equal(tensor, expected)


def test_same_step_gives_the_same_bits():
    layer = make_layer(30000, 4, 128, sharpness=0.5, seed=2)
    sealed, sketch, query, tail_lse = on_device(layer)
    runs = []
    for _ in range(5):
        plan = plan_rope_pair(sealed, sketch, query, tail_lse, layer.scaling, EPSILON, DELTA, 128)
        runs.append([plan.promoted, plan.n_promoted, *attend(sealed, plan, query, layer.scaling)])
    for run in runs[1:]:
        assert all(torch.equal(first, other) for first, other in zip(runs[0], run, strict=True))


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer of a CUDA toolkit")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_compute_sanitizer_finds_nothing(tool):
    test = f"{Path(__file__)}::test_step_can_be_captured_in_a_graph"
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *pytest_command]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:]
