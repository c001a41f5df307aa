"""A sealed cache on a device goes through the kernels, and what they decide and give is what torch does.

The emulator takes the kernels' place, and CPU tensors the device's: the dispatching code is told that they are on one.
"""

import contextlib
import copy
import dataclasses
import pickle
import re
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from agreement import needs_compiler
from problems import make_layer

from verkv import device_step, kvfetch
from verkv.branching import branch
from verkv.cache import reseal
from verkv.context import SealedContext, SealPlan, ToleranceViolation
from verkv.cuda import build, dispatch
from verkv.kvfetch import FetchConfig
from verkv.sketches import ExactSketch, QueryPCASketch, RopePairSketch
from verkv.sketches.error import SketchError
from verkv.stats import FetchStats, memory_report
from verkv.tiers import HostTier

GROUP, TAIL, N_TOKENS = 3, 5, 600
CAN_LAUNCH = dispatch.can_launch
# Eq. (7), as the paper has it, and the two sides of the error apart, as the library's default has it.
sided = pytest.mark.parametrize("upper_share", [None, 0.7], ids=["eq7", "sided"])


@pytest.fixture
def device(emulated_device):
    """Names of the kernels that ran, on CPU tensors."""
    return emulated_device


def sealed(layer, sketch=None, beams=1, tolerances=None, error=None, audit=False, record_bounds=True, **fetch):
    """A context of the layer's tensors, and the statistics that it fills."""
    fetch = FetchConfig(**{"epsilon": 0.2, "shortlist": 20} | fetch)
    stats = FetchStats("test", fetch.epsilon, fetch.delta, sealed_layers=(0,), record_bounds=record_bounds)
    n_padding = (layer.codes == 0).long().cumprod(-1).sum(-1)[:, 0]
    plan = SealPlan(layer.codes, n_padding, fetch, sketch or RopePairSketch(), tolerances=tolerances, beams=beams)
    context = SealedContext(layer.keys, layer.values, dataclasses.replace(plan, audit=audit), 0, stats)
    context.sketch_error = error
    return context


def inputs(layer, beams=1, n_queries=1, seed=0):
    """Query, tail keys and tail values of a pass."""
    generator = torch.Generator().manual_seed(seed)
    contexts, heads, _, d = layer.keys.shape
    query = 0.6 * torch.randn(contexts * beams, heads * GROUP, n_queries, d, generator=generator)
    tail = torch.randn(2, contexts * beams, heads, TAIL, d, generator=generator).to(layer.keys.dtype)
    return query, *tail


def twin(context):
    """The same context, with statistics of its own."""
    other = copy.copy(context)
    other.stats = copy.deepcopy(context.stats)
    return other


def make_press(**options):
    from kvpress import KnormPress

    from verkv import VerKVPress

    options = {"epsilon": 0.2, "n_sink": 4, "n_local": 8, "record_bounds": True} | options
    return VerKVPress(KnormPress(), 0.5, **options)


@contextlib.contextmanager
def by_torch(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("VERKV_CUDA", "0")
        yield


@pytest.fixture
def both(device, monkeypatch):
    """Takes a pass of a context by the kernels and by torch; returns both outputs and both statistics."""

    def take(context, *arguments, mask=None, scaling=0.125):
        other = twin(context)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            device.clear()
            output = context.attend(*arguments, mask, scaling)
            assert "vk_attend" in device
            device.clear()
            with by_torch(monkeypatch):
                expected = other.attend(*arguments, mask, scaling)
            assert not device
        return output, expected, context.stats, other.stats

    return take


def check(output, expected, stats, reference, rounding=1e-5, n_ties=0):
    """Outputs agree, and so do the records of the last pass, but for ties."""
    assert (output.float() - expected.float()).norm() <= rounding * expected.float().norm()
    own, other = stats.passes[-1][-1], reference.passes[-1][-1]
    for name in ("layer_idx", "n_queries", "n_contexts", "full_bytes", "shortlisted", "keys_first", "exact_heads"):
        assert getattr(own, name) == getattr(other, name), name
    for name in ("decisions", "fetching", "kv_fetching"):
        assert torch.equal(getattr(own, name), getattr(other, name)), name
    assert (own.promoted - other.promoted).abs().sum() <= n_ties
    assert abs(own.fetched - other.fetched) <= n_ties
    if other.error_bound is not None:
        torch.testing.assert_close(own.error_bound, other.error_bound, rtol=1e-5, atol=1e-6)


def check_bytes(context, record):
    """What crosses the bus: keys of the shortlist, and keys and values of what is fetched."""
    row_bytes = 2 * context.host.key_row_bytes
    assert record.bytes_read == record.fetched * row_bytes + record.shortlisted * row_bytes // 2


@needs_compiler
class TestStep:
    """One pass of a context on the same tensors."""

    @pytest.mark.parametrize("n_queries", [1, 3], ids=["decode", "question"])
    @pytest.mark.parametrize("beams", [1, 2])
    @pytest.mark.parametrize("paper", [False, True], ids=["blind", "paper"])
    @sided
    def test_two_bit_sketch(self, both, upper_share, paper, beams, n_queries):
        layer = make_layer(N_TOKENS, GROUP, 64, n_contexts=2, n_padding=150, sharpness=0.6, seed=3)
        context = sealed(layer, beams=beams, paper=paper, upper_share=upper_share)
        check(*both(context, *inputs(layer, beams, n_queries)), n_ties=2)
        record = context.stats.passes[-1][-1]
        assert record.fetched and record.shortlisted and record.fetching.any()
        check_bytes(context, record)

    @pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float16), (128, torch.bfloat16)])
    def test_other_shapes(self, both, head_dim, dtype):
        layer = make_layer(N_TOKENS, GROUP, head_dim, dtype, n_contexts=1, n_kv_heads=3, sharpness=0.5, seed=4)
        check(*both(sealed(layer), *inputs(layer)), n_ties=2)

    def test_scores_are_the_kernels_own(self, both, device):
        """The two-bit sketch never comes to torch."""
        layer = make_layer(N_TOKENS, GROUP, 64, sharpness=0.6, seed=3)
        context = sealed(layer)
        context.sketch.logits = None
        context.attend(*inputs(layer), None, 0.125)
        assert device[:2] == ["vk_score", "vk_shortlist"]

    @pytest.mark.parametrize(
        ("paper", "upper_share"), [(False, None), (False, 0.7), (True, None)], ids=["blind", "sided", "paper"]
    )
    @pytest.mark.parametrize(
        ("sketch", "options"),
        [
            (RopePairSketch(fraction=0.5), {}),
            (RopePairSketch(), {"shortlist": 1025}),
            (QueryPCASketch(), {"shortlist": 7}),
            (ExactSketch(), {}),
            (ExactSketch(), {"key_rounds": 2, "paper": False}),
        ],
        ids=["finer", "long_shortlist", "query_pca", "exact", "exact_rounds"],
    )
    def test_sketches_that_torch_scores(self, both, device, upper_share, paper, sketch, options):
        n_tokens = 1600 if options.get("shortlist") == 1025 else N_TOKENS
        layer = make_layer(n_tokens, GROUP, 64, n_contexts=2, n_padding=150, sharpness=0.6, seed=5)
        context = sealed(layer, sketch, beams=2, **{"paper": paper, "upper_share": upper_share} | options)
        check(*both(context, *inputs(layer, 2, 2)), n_ties=2)
        record = context.stats.passes[-1][-1]
        assert record.fetched and (record.shortlisted > 0) == (not context.sketch.is_oracle)
        check_bytes(context, record)

    def test_rows_are_scored_in_chunks(self, both, monkeypatch):
        """Beams and chunks keep their order, and the shortlist is one for the pass."""
        layer = make_layer(N_TOKENS, GROUP, 64, n_contexts=2, sharpness=0.6, seed=6)
        context = sealed(layer, RopePairSketch(fraction=0.5), beams=2)
        monkeypatch.setattr(kvfetch, "MAX_PLANNED_PAIRS", 4 * 2 * N_TOKENS * 4)  # of 4 units, 2 beams and 9 rows
        assert len(kvfetch.row_chunks(8, 9, N_TOKENS)) == 3
        check(*both(context, *inputs(layer, 2, 3)), n_ties=2)

    def test_no_shortlist(self, both):
        layer = make_layer(N_TOKENS, GROUP, 64, sharpness=0.6, seed=7)
        context = sealed(layer, shortlist=0)
        check(*both(context, *inputs(layer)), n_ties=2)
        record = context.stats.passes[-1][-1]
        assert record.shortlisted == 0 and record.fetched
        check_bytes(context, record)

    def test_promoted_tokens_that_are_resident_are_not_fetched(self, both):
        layer = make_layer(N_TOKENS, GROUP, 64, n_kv_heads=8, sharpness=0.6, fraction=0.3, seed=7)
        context = sealed(layer, shortlist=0, epsilon=0.3)
        check(*both(context, *inputs(layer)), n_ties=2)
        record = context.stats.passes[-1][-1]
        assert ((record.promoted > 0) & (record.fetching == 0)).any() and record.fetching.any()

    @pytest.mark.parametrize("sketch", [RopePairSketch(), RopePairSketch(fraction=0.5)], ids=["kernels", "torch"])
    @sided
    def test_tolerance_of_each_query_head(self, both, upper_share, sketch):
        layer = make_layer(N_TOKENS, GROUP, 64, n_contexts=2, sharpness=0.6, seed=8)
        tolerances = torch.logspace(-2, 1, 12).view(2, 6)[:, torch.randperm(6)]
        context = sealed(layer, sketch, beams=2, tolerances=tolerances, upper_share=upper_share)
        check(*both(context, *inputs(layer, 2, 2)), n_ties=2)
        promoted = context.stats.passes[-1][-1].promoted
        uncalibrated = sealed(layer, sketch, beams=2, upper_share=upper_share)
        uncalibrated.attend(*inputs(layer, 2, 2), None, 0.125)
        assert not torch.equal(promoted, uncalibrated.stats.passes[-1][-1].promoted)

    def test_a_head_that_is_to_be_exact_is(self, both):
        """Calibration that found no tolerance gives the smallest."""
        layer = make_layer(N_TOKENS, GROUP, 64, n_contexts=2, sharpness=0.6, seed=8)
        context = sealed(layer, tolerances=torch.full((2, 6), 1e-9))
        check(*both(context, *inputs(layer)))
        assert context.stats.passes[-1][-1].exact_heads == 4

    @pytest.mark.parametrize("sketch", [RopePairSketch(), RopePairSketch(fraction=0.5)], ids=["kernels", "torch"])
    @sided
    def test_moments_of_the_sketchs_error(self, both, upper_share, sketch):
        layer = make_layer(N_TOKENS, GROUP, 64, n_contexts=2, sharpness=0.6, seed=9)
        decoded = sketch.build(layer.keys).decode()
        error = SketchError.measure(layer.keys, decoded, layer.codes > 0)
        context = sealed(layer, sketch, error=error, shortlist=0, upper_share=upper_share)
        check(*both(context, *inputs(layer, n_queries=2)), n_ties=2)
        plain = sealed(layer, sketch, shortlist=0, upper_share=upper_share)
        plain.attend(*inputs(layer, n_queries=2), None, 0.125)
        assert not torch.equal(context.stats.bounds(), plain.stats.bounds())

    def test_shortlist_by_logits_with_the_errors_mean(self, device):
        """The kernel chooses it by other logits than torch, blind to the draw as well: errors stay within bounds."""
        layer = make_layer(N_TOKENS, GROUP, 64, n_contexts=2, sharpness=0.6, seed=9)
        error = SketchError.measure(layer.keys, RopePairSketch().build(layer.keys).decode(), layer.codes > 0)
        context = sealed(layer, error=error, audit=True, epsilon=0.3)
        context.attend(*inputs(layer, n_queries=2), None, 0.125)
        record = context.stats.passes[-1][-1]
        assert record.shortlisted and record.fetched and device.count("vk_shortlist") == 1
        assert (record.relative_error < 0.3).all()

    @sided
    def test_too_large_a_plan_reads_everything(self, both, upper_share):
        layer = make_layer(N_TOKENS, GROUP, 64, n_contexts=2, n_padding=150, sharpness=0.6, seed=3)
        context = sealed(layer, max_read=0.2, epsilon=0.05, upper_share=upper_share)
        check(*both(context, *inputs(layer)))
        record = context.stats.passes[-1][-1]
        assert record.exact_heads and record.fetched == sum(
            int((layer.unit_codes[unit] > 0).sum() - layer.resident[unit].sum()) for unit in range(4)
        )

    def test_audit(self, both):
        layer = make_layer(N_TOKENS, GROUP, 64, n_contexts=2, n_padding=150, sharpness=0.6, seed=3)
        context = sealed(layer, audit=True, epsilon=0.5)
        output, expected, stats, reference = both(context, *inputs(layer, n_queries=2))
        check(output, expected, stats, reference, n_ties=2)
        for name in ("relative_errors", "output_errors"):
            torch.testing.assert_close(getattr(stats, name)(), getattr(reference, name)(), rtol=1e-3, atol=1e-5)

    def test_violations_are_answered(self, device):
        layer = make_layer(N_TOKENS, GROUP, 64, sharpness=0.6, seed=3)
        context = sealed(layer, audit=True, epsilon=0.5)
        context.attend(*inputs(layer), None, 0.125)
        worst = float(context.stats.relative_errors().max())
        context.fetch = dataclasses.replace(context.fetch, epsilon=worst / 2)
        context.on_violation, context.tolerances = "raise", torch.full((1, 6), 0.5)
        with pytest.raises(ToleranceViolation):
            context.attend(*inputs(layer), None, 0.125)

    def test_hidden_tokens_of_segments_in_one_host_tier(self, both, device):
        """As a context of several segments comes from a file: torch scores its sketches."""
        layer = make_layer(N_TOKENS, GROUP, 64, n_contexts=2, n_padding=150, sharpness=0.6, seed=3)
        later = make_layer(200, GROUP, 64, n_contexts=2, sharpness=0.6, seed=4)
        context, is_token = sealed(layer), torch.ones(2, 200, dtype=torch.bool)
        is_token[1, 20:90] = False
        codes = torch.where(is_token[:, None], later.codes, 0)
        none = torch.zeros(2, dtype=torch.int64)
        context.append(
            later.keys, later.values, SealPlan(codes, none, context.fetch, RopePairSketch(), is_token=is_token)
        )
        context.host = HostTier(context.host.keys, context.host.values)
        assert context.hidden is not None and context.n_tokens == N_TOKENS + 200
        check(*both(context, *inputs(layer, n_queries=2)), n_ties=2)

    @pytest.mark.parametrize("hidden", [1, TAIL], ids=["one", "all"])
    def test_masked_tail(self, both, hidden):
        """Also where nothing of the tail is seen at all."""
        layer = make_layer(N_TOKENS, GROUP, 64, n_contexts=2, n_padding=150, sharpness=0.6, seed=3)
        context = sealed(layer)
        mask = torch.cat([context.is_token(), torch.arange(TAIL).expand(2, -1) >= hidden], 1)
        check(*both(context, *inputs(layer), mask=mask), n_ties=2)

    def test_one_copy_to_the_cpu(self, device, monkeypatch):
        """A decode step reads the device's counts once."""
        layer = make_layer(N_TOKENS, GROUP, 64, n_contexts=2, sharpness=0.6, seed=3)
        context = sealed(layer, record_bounds=False)
        context.attend(*inputs(layer), None, 0.125)
        reads = []
        for name in ("cpu", "item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
            own = getattr(torch.Tensor, name)
            count = lambda tensor, *args, own=own, name=name, **options: (  # noqa: E731
                reads.append((name, tensor.numel())),
                own(tensor, *args, **options),
            )[1]
            monkeypatch.setattr(torch.Tensor, name, count)
        context.attend(*inputs(layer), None, 0.125)
        monkeypatch.undo()
        assert reads == [("cpu", 2 * 6 + 2 + 3), ("tolist", 3)]  # the second of what is on the CPU then


@needs_compiler
class TestLifetime:
    """What the kernels need follows a context's state, and is part of no copy."""

    @pytest.fixture
    def layer(self):
        return make_layer(N_TOKENS, GROUP, 64, n_contexts=2, n_padding=150, sharpness=0.6, seed=3)

    def test_is_asked_once(self, device, layer, monkeypatch):
        asked, ask = [], dispatch.select_backend
        monkeypatch.setattr(
            dispatch, "select_backend", lambda *args, **facts: asked.append(facts) or ask(*args, **facts)
        )
        context = sealed(layer)
        for seed in range(3):
            context.attend(*inputs(layer, seed=seed), None, 0.125)
        assert len(asked) == 1
        assert asked[0]["n_tokens"] == N_TOKENS and asked[0]["n_units"] == 4

    def test_its_bytes_are_reported(self, device, layer):
        context = sealed(layer)
        assert "row_positions" not in context.memory()["device_uncharged"]
        context.attend(*inputs(layer), None, 0.125)
        assert context.memory()["device_uncharged"]["row_positions"] == 4 * len(context.rows.codes)

    def test_goes_with_its_context(self, device, layer):
        context = sealed(layer)
        context.attend(*inputs(layer), None, 0.125)
        gone = weakref.ref(device_step._steps[context].layer)
        del context
        assert gone() is None

    @pytest.mark.parametrize(
        "copied",
        [copy.copy, copy.deepcopy, lambda context: pickle.loads(pickle.dumps(context))],
        ids=["branch", "deep", "pickle"],
    )
    def test_copies_begin_anew(self, both, layer, copied):
        context = sealed(layer)
        context.attend(*inputs(layer), None, 0.125)
        other = copied(context)
        assert other not in device_step._steps and vars(other).keys() == vars(context).keys()
        output, expected, *stats = both(other, *inputs(layer, seed=1))
        check(output, expected, *stats, n_ties=2)
        again = both(context, *inputs(layer, seed=1))[0]
        assert torch.equal(output, again)

    def test_selected_contexts_are_served(self, both, layer):
        context = sealed(layer, beams=2)
        context.attend(*inputs(layer, 2), None, 0.125)
        chosen = context.select(torch.tensor([2, 0, 3]))
        query, keys, values = (torch.cat([t, t])[:3] for t in inputs(layer, 1))
        check(*both(chosen, query, keys, values), n_ties=3)

    def test_growing_falls_back_and_shrinking_returns(self, both, device, layer):
        context = sealed(layer)
        first = both(context, *inputs(layer))[0]
        later = make_layer(64, GROUP, 64, n_contexts=2, seed=5)
        plan = SealPlan(later.codes, torch.zeros(2, dtype=torch.int64), context.fetch, RopePairSketch())
        context.append(later.keys, later.values, plan)
        assert "row_positions" not in context.memory()["device_uncharged"]
        device.clear()
        with pytest.warns(UserWarning, match="several segments") as caught:
            for seed in range(3):
                context.attend(*inputs(layer, seed=seed), None, 0.125)
        assert len(caught) == 1 and not device
        context.drop_last()
        output, expected, *stats = both(context, *inputs(layer))
        assert torch.equal(output, first)
        check(output, expected, *stats, n_ties=2)

    def test_a_changed_recipe_is_seen(self, device, layer):
        """Whatever is replaced: the answer is never of an earlier state."""
        context = sealed(layer)
        context.attend(*inputs(layer), None, 0.125)
        device.clear()
        context.fetch = dataclasses.replace(context.fetch, shrinkage="optimal")
        with pytest.warns(UserWarning, match="'optimal'"):
            context.attend(*inputs(layer), None, 0.125)
        assert not device


REASONS = {
    "not the output": {"target": "output"},
    "'optimal'": {"shrinkage": "optimal"},
    "key_rounds=1": {"key_rounds": 1},
}


class Coded:
    """A host tier that keeps its rows in some other form."""

    is_coded = True

    def __init__(self, host):
        self.host = host

    def __getattr__(self, name):
        return getattr(self.host, name)


@needs_compiler
class TestFallback:
    """What the kernels cannot serve is served by torch, with one warning that says why."""

    @pytest.fixture
    def layer(self):
        return make_layer(300, GROUP, 64, sharpness=0.6, seed=3)

    def assert_torch_serves(self, context, layer, device, message, monkeypatch):
        given, other = inputs(layer), twin(context)
        with pytest.warns(UserWarning, match=message) as caught:
            outputs = [context.attend(*given, None, 0.125) for _ in range(3)]
        assert len(caught) == 1 and not device
        with by_torch(monkeypatch):
            assert torch.equal(outputs[0], other.attend(*given, None, 0.125))

    @pytest.mark.parametrize("reason", REASONS)
    def test_plans_of_another_kind(self, device, layer, monkeypatch, reason):
        context = sealed(layer, **REASONS[reason])
        self.assert_torch_serves(context, layer, device, re.escape(reason), monkeypatch)

    def test_dtype(self, device, monkeypatch):
        layer = make_layer(300, GROUP, 64, torch.float32, sharpness=0.6, seed=3)
        self.assert_torch_serves(sealed(layer), layer, device, "torch.float32", monkeypatch)

    def test_head_dim(self, device, monkeypatch):
        layer = make_layer(300, GROUP, 32, sharpness=0.6, seed=3)
        self.assert_torch_serves(sealed(layer), layer, device, "got 32 for keys", monkeypatch)

    def test_pageable_memory(self, device, layer, monkeypatch):
        monkeypatch.setattr(device_step, "_is_pinned", lambda host: False)
        self.assert_torch_serves(sealed(layer), layer, device, "not in pinned", monkeypatch)

    def test_coded_host(self, device, layer, monkeypatch):
        context = sealed(layer)
        context.host = Coded(context.host)
        self.assert_torch_serves(context, layer, device, "keeps them coded", monkeypatch)

    def test_beginning_of_a_longer_host_copy(self, device, layer, monkeypatch):
        context = sealed(layer)
        longer = [torch.cat([t, t], 2)[:, :, :300] for t in (layer.keys, layer.values)]
        context.host = HostTier(*longer)
        self.assert_torch_serves(context, layer, device, "beginning of a longer", monkeypatch)

    def test_too_large_a_pass_for_a_sketch_of_torch(self, device, layer, monkeypatch):
        monkeypatch.setattr(device_step, "MAX_SCORED_PAIRS", 2 * 300 * GROUP - 1)
        context = sealed(layer, RopePairSketch(fraction=0.5))
        self.assert_torch_serves(context, layer, device, "too many query rows", monkeypatch)
        sealed(layer).attend(*inputs(layer), None, 0.125)
        assert device  # the kernels' own sketch has no such limit

    def test_kernels_that_do_not_compile(self, device, layer, monkeypatch):
        tried = []

        def refuse(*shape):
            tried.append(shape)
            raise build.CudaUnavailable("NVRTC cannot compile (of this test)")

        monkeypatch.setattr(dispatch, "can_launch", CAN_LAUNCH)
        monkeypatch.setattr(dispatch, "load_kernels", refuse)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        dispatch._unloaded_because.cache_clear()
        self.assert_torch_serves(sealed(layer), layer, device, "of this test", monkeypatch)
        dispatch._unloaded_because.cache_clear()
        assert tried == [(0, 64, GROUP, False)]

    def test_without_fetching_nothing_is_asked(self, device, layer, monkeypatch):
        monkeypatch.setattr(dispatch, "select_backend", None)
        stats = FetchStats("test", sealed_layers=(0,))
        context = SealedContext(layer.keys, layer.values, SealPlan(layer.codes, torch.zeros(1).long()), 0, stats)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            context.attend(*inputs(layer), None, 0.125)
        assert not device

    def test_streaming_is_torchs(self, device, layer):
        context = sealed(layer)
        context.is_streaming = True
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            context.attend(*inputs(layer), None, 0.125)
        assert not device

    def test_environment(self, device, layer, monkeypatch):
        monkeypatch.setenv("VERKV_CUDA", "off")
        with pytest.raises(ValueError, match="VERKV_CUDA must be 0"):
            sealed(layer).attend(*inputs(layer), None, 0.125)


@needs_compiler
class TestModel:
    """A model of several layers, sealed by a press, with each attention of the kernels compared with torch's."""

    @pytest.fixture
    def served(self, device, monkeypatch):
        """Every pass of a sealed context is taken by both; returns the kernels' records."""
        attend, records = SealedContext.attend, []

        def take(context, *arguments):
            other = twin(context)
            output = attend(context, *arguments)
            with by_torch(monkeypatch):
                check(output, attend(other, *arguments), context.stats, other.stats, rounding=2**-8, n_ties=3)
            records.append(context.stats.passes[-1][-1])
            return output

        monkeypatch.setattr(SealedContext, "attend", take)
        return records

    @pytest.fixture
    def model(self, tiny_model):
        return tiny_model("llama", head_dim=64).to(torch.bfloat16)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"sided": False},
            {"paper": True},
            {"paper": True, "sided": True},
            {"sketch": "rope_pair"},
            {"sketch": "rope_pair", "sided": False},
            {"sketch": "rope_pair", "sided": False, "error_aware": True, "shortlist": 0},
            {"audit": True, "max_read": 0.3},
            {"sided": False, "audit": True, "max_read": 0.3},
            {"sketch": "rope_pair", "sided": False, "calibrate": "head", "target": "denominator"},
        ],
        ids=[
            "default",
            "eq7",
            "paper",
            "sided_paper",
            "two_bit",
            "eq7_two_bit",
            "eq7_error_aware",
            "audit",
            "eq7_audit",
            "eq7_calibrated",
        ],
    )
    @torch.no_grad()
    def test_generates_and_answers(self, model, served, device, options):
        from press_helpers import prefill, random_ids

        press = make_press(**options)
        cache = prefill(model, random_ids(1, 400), press)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(random_ids(1, 7, seed=2), past_key_values=cache)
            for seed in range(3, 6):
                model(random_ids(1, 1, seed=seed), past_key_values=cache)
        assert len(served) == 4 * 4 == device.count("vk_emit")
        assert press.stats.fetched("question") and press.stats.fetched("decode")

    @pytest.mark.parametrize("options", [{}, {"paper": True}], ids=["default", "paper"])
    @torch.no_grad()
    def test_batches_with_padding_and_beams(self, model, served, device, options):
        from press_helpers import left_padded, random_ids

        ids, mask = left_padded([random_ids(1, 300), random_ids(1, 240, seed=2)])
        press = make_press(**options)
        with press(model):
            model.generate(ids, attention_mask=mask, num_beams=2, max_new_tokens=4, do_sample=False)
        assert len(served) == 3 * 4 == device.count("vk_attend") and press.stats.fetched()

    @torch.no_grad()
    def test_the_memory_report_has_what_the_kernels_keep(self, model, served):
        from press_helpers import prefill, random_ids

        cache = prefill(model, random_ids(1, 300), make_press(paper=True))
        model(random_ids(1, 1), past_key_values=cache)
        n_rows = sum(len(layer.context.rows.codes) for layer in cache.layers)
        assert memory_report(cache).device_uncharged["row_positions"] == 4 * n_rows

    @torch.no_grad()
    def test_branches_and_resealing(self, model, device):
        from press_helpers import prefill, random_ids

        cache = prefill(model, random_ids(1, 300), make_press(paper=True))
        model(random_ids(1, 30, seed=2), past_key_values=cache)
        fork = branch(cache)
        with pytest.warns(UserWarning, match="several segments") as caught:
            reseal(cache, scores={i: torch.rand(1, 2, 30) for i in range(4)})
            device.clear()
            model(random_ids(1, 1), past_key_values=cache)
        assert sum("several segments" in str(warning.message) for warning in caught) == 1 and not device
        model(random_ids(1, 1), past_key_values=fork)
        assert device.count("vk_attend") == 4


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"paper": True}], ids=["default", "paper"])
@torch.no_grad()
def test_a_model_on_a_gpu(tiny_model, monkeypatch, options):
    """Question and decode steps of a sealed cache by the kernels, and of its branch by torch."""
    from press_helpers import prefill, random_ids

    monkeypatch.delenv("VERKV_CUDA", raising=False)
    model = tiny_model("llama", head_dim=64).to("cuda", torch.bfloat16)
    cache = prefill(model, random_ids(1, 400).to("cuda"), make_press(**options))
    fork = branch(cache)
    for step, length in enumerate((7, 1, 1)):
        ids = random_ids(1, length, seed=step).to("cuda")
        logits = model(ids, past_key_values=cache).logits.float()
        with by_torch(monkeypatch):
            expected = model(ids, past_key_values=fork).logits.float()
        assert (logits - expected).norm() < 0.02 * expected.norm()
    assert "row_positions" in memory_report(cache).device_uncharged
    assert "row_positions" not in memory_report(fork).device_uncharged
    assert cache.stats.fetched() == pytest.approx(fork.stats.fetched(), rel=0.02)


def loaded_by(code: str) -> str:
    """Modules of CUDA that a process of its own has loaded after running some code, in which warnings are errors."""
    before = (
        "import sys, torch, warnings; torch.cuda.is_available(); before = set(sys.modules)"  # torch's own, with CUDA
    )
    names = "name.split('.')[0] == 'cuda' or name.startswith('verkv.cuda')"
    shown = f"print([name for name in sys.modules if name not in before and ({names})])"
    code = f"{before}\nwarnings.simplefilter('error', UserWarning)\n{code}\n{shown}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not run.returncode, run.stderr
    return run.stdout.strip()


def test_attention_on_a_cpu_loads_nothing_of_cuda():
    assert (
        loaded_by(
            """
import torch
from verkv.context import FetchConfig, FetchStats, SealedContext, SealPlan
from verkv.sketches import RopePairSketch

keys, values = torch.randn(2, 1, 2, 200, 64).bfloat16()
codes = torch.full((1, 2, 200), 30, dtype=torch.uint8)
codes[..., ::9] = 128
plan = SealPlan(codes, torch.zeros(1, dtype=torch.int64), FetchConfig(), RopePairSketch())
context = SealedContext(keys, values, plan, 0, FetchStats("test", sealed_layers=(0,)))
context.attend(torch.randn(1, 4, 1, 64), *torch.randn(2, 1, 2, 3, 64), None, 0.125)
assert context.memory() and context.stats.fetched()
"""
        )
        == "[]"
    )


def test_generating_on_a_cpu_loads_nothing_of_cuda():
    import kvpress  # noqa: F401  (skips the test where it is not installed)

    assert (
        loaded_by(
            """
import torch, verkv
from kvpress import KnormPress
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes)).bfloat16()
press = verkv.VerKVPress(KnormPress(), 0.5, n_sink=4, n_local=8, paper=True)
with press(model):
    model.generate(torch.arange(3, 203)[None], attention_mask=torch.ones(1, 200), max_new_tokens=3, do_sample=False)
assert verkv.memory_report and press.stats.n_passes == 2
"""
        )
        == "[]"
    )
