"""``verkv bench --only kernels`` over the emulator, with a clock that knows how long each kernel takes."""

import contextlib
import json

import pytest
import torch
from agreement import needs_compiler

import verkv.cuda
from verkv.bench import kernels
from verkv.bench.kernel_layer import UPPER_SHARES, KernelStep, Model, Traffic, make_layer, traffic
from verkv.bench.run import run_bench
from verkv.bench.settings import BenchSettings
from verkv.bench.timing import Comparison
from verkv.cli import main
from verkv.cuda import dispatch, operators
from verkv.cuda.layout import safe_epsilon
from verkv.tiers import RESIDENT_BIT

TINY = Model("tiny", 4, 4, 2, 64)
CPU = torch.device("cpu")
N_TOKENS = 700
MICROSECONDS = {
    "vk_score": 5.0,
    "vk_shortlist": 7.0,
    "vk_plan": 11.0,
    "vk_emit": 1.0,
    "vk_settle": 2.0,
    "vk_attend": 13.0,
}
STAGE_MICROSECONDS = {"score": 5, "shortlist": 7, "plan": 11, "emit + settle": 3, "attend": 13, "whole step": 39}
CEILINGS = {"device_copy_GBps": 4000.0, "pinned_read_GBps": 50.0}


class Clock:
    """Milliseconds of a device, which pass while kernels run, and by ``tick`` from one event to the next."""

    def __init__(self):
        self.now, self.tick, self.slowness, self.n_timed = 0.0, 0.0, {}, 0

    def event(self, enable_timing):
        assert enable_timing
        clock = self

        class Event:
            def record(self):
                clock.now += clock.tick
                self.at = clock.now

            def synchronize(self):
                clock.n_timed += 1

            def elapsed_time(self, end):
                return end.at - self.at

        return Event()


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    return found


@pytest.fixture
def timed_device(emulated_device, clock, monkeypatch):
    """The emulator as a device on which kernels take their time; returns the names of those that ran."""
    run = operators.run_kernels

    def run_and_wait(names, *arguments):
        run(names, *arguments)
        clock.now += sum(MICROSECONDS[name] for name in names) / 1e3 * clock.slowness.get(clock.n_timed, 1)

    monkeypatch.setattr(operators, "run_kernels", run_and_wait)
    monkeypatch.setattr(kernels, "captured", lambda work, device: work)
    return emulated_device


@pytest.fixture
def bench(timed_device, monkeypatch):
    """``verkv bench`` takes the emulator for a GPU."""
    monkeypatch.setattr(kernels, "_is_gpu", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dispatch, "warmup", lambda *shape: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(kernels, "ceilings", lambda device, rounds, n_bytes: CEILINGS)
    monkeypatch.setattr(kernels, "MODEL", TINY)
    monkeypatch.setattr(kernels, "QUICK_TOKENS", N_TOKENS)
    return timed_device


def make_step(seed=3, upper_share=0.7):
    step = KernelStep(make_layer(TINY, N_TOKENS, 1, torch.bfloat16, CPU, seed))
    step.upper_share = upper_share
    return step


# --- the benchmark --------------------------------------------------------------------------------------------------


@needs_compiler
def test_every_stage_is_timed_and_its_bandwidth_fits_its_time(bench):
    first, second = kernels.run(BenchSettings(quick=True, rounds=3, device="cpu"))
    assert set(bench) == set(MICROSECONDS)
    assert "sides apart" in first.title and first.facts["upper share of delta"] == 0.7
    assert "Eq. (7)" in second.title and second.facts["upper share of delta"] == "none"
    for comparison in (first, second):
        assert comparison.baseline == kernels.STEP and comparison.clock == "GPU"
        assert {name: 1e6 * comparison.median(name) for name in comparison.seconds} == pytest.approx(STAGE_MICROSECONDS)
        assert all(len(seconds) == 3 for seconds in comparison.seconds.values())
        for name, seconds in STAGE_MICROSECONDS.items():
            check_bandwidths(comparison.facts[f"{name}, of one layer"], seconds)


def check_bandwidths(facts, microseconds):
    assert [facts["us, 10 %"], facts["us, 90 %"]] == pytest.approx([microseconds] * 2)
    for side, ceiling in (("device", "device_copy_GBps"), ("pinned", "pinned_read_GBps")):
        if f"GB/s, {side}" not in facts:
            assert side == "pinned" and not any("pinned" in name for name in facts)
            continue
        rate = facts[f"bytes that must move, {side}"] / microseconds / 1e3
        assert facts[f"GB/s, {side}"] == pytest.approx(rate)
        assert facts[f"share of the ceiling, {side}"] == pytest.approx(rate / CEILINGS[ceiling])


@needs_compiler
def test_whole_step_moves_what_its_stages_move(bench):
    for comparison in kernels.run(BenchSettings(quick=True, rounds=1, device="cpu", epsilon=0.02)):
        facts = {name: comparison.facts[f"{name}, of one layer"] for name in (*kernels.STAGES, kernels.STEP)}
        for side in ("device", "pinned"):
            by_stage = {name: fact.get(f"bytes that must move, {side}", 0) for name, fact in facts.items()}
            assert by_stage.pop(kernels.STEP) == sum(by_stage.values()) > 0
        fetched = comparison.facts["fetched rows of a KV head"] * TINY.n_kv_heads
        assert facts["attend"]["bytes that must move, pinned"] == fetched * 2 * TINY.head_dim * 2 > 0


@needs_compiler
def test_table_and_json(bench, tmp_path, capsys):
    file = tmp_path / "bench.json"
    arguments = ["--only", "kernels", "--quick", "--rounds", "2", "--device", "cpu", "--json", str(file)]
    assert main(["bench", *arguments]) == 0
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert lines.count(["whole", "step", "39.0", "us", "1.00"]) == 2
    assert lines.count(["plan", "11.0", "us", "0.28", "0.28", "-", "0.28"]) == 2
    assert "share of the ceiling, device" in printed and "device copy: 4000" in printed
    records = json.loads(file.read_text())["comparisons"]
    assert [record["benchmark"] for record in records] == ["kernels", "kernels"]
    for record in records:
        assert set(record["cases"]) == set(STAGE_MICROSECONDS) and record["clock"] == "GPU"
        assert record["cases"]["plan"]["ratio"] == pytest.approx(11 / 39)
        assert record["facts"]["ceilings, GB/s"] == {"device copy": 4000.0, "pinned read": 50.0}


@needs_compiler
def test_options_reach_the_layer_and_the_plan(bench):
    settings = {"quick": True, "rounds": 1, "device": "cpu", "tokens": 900}
    wide, _ = kernels.run(BenchSettings(**settings, compression_ratio=0.6, epsilon=1e6))
    narrow, _ = kernels.run(BenchSettings(**settings, compression_ratio=0.8, epsilon=1e-4))
    assert "900 tokens" in wide.title and wide.facts["epsilon"] == 1e6
    assert wide.facts["fetched rows of a KV head"] == 0 == wide.facts["promoted tokens of a query head"]
    assert "bytes that must move, pinned" not in wide.facts["attend, of one layer"]
    assert narrow.facts["fetched rows of a KV head"] > 300
    for comparison, kept in ((wide, 0.4), (narrow, 0.2)):
        n_bytes = 900 * (1 + 16 / 4) + 8 * 16 * 4  # codes, sketch, and its parameters of eight groups
        n_bytes += comparison.facts["resident rows of a KV head"] * (4 * TINY.head_dim + 5)
        assert n_bytes == pytest.approx(kept * 900 * 4 * TINY.head_dim, rel=0.15)


def test_a_gpu_without_the_kernels_is_skipped_with_the_reason(bench, monkeypatch):
    def warmup(*shape):
        assert shape == (64, 2, torch.bfloat16, 0)
        raise verkv.cuda.CudaUnavailable("no NVRTC")

    monkeypatch.setattr(dispatch, "warmup", warmup)
    skipped = run_bench(BenchSettings(quick=True, device="cpu", only=("kernels",)))["skipped"]
    assert skipped == {"kernels": "the kernels cannot run on this device: no NVRTC"}


def test_too_few_tokens_name_the_option(bench, capsys):
    assert main(["bench", "--only", "kernels", "--device", "cpu", "--tokens", "7"]) == 2
    assert "--tokens must be at least 8" in capsys.readouterr().err


def test_bounds_are_those_of_a_press():
    pytest.importorskip("kvpress")
    from verkv.presses.verkv_press import UPPER_SHARE

    assert UPPER_SHARES == (None, UPPER_SHARE)


# --- its parts ------------------------------------------------------------------------------------------------------


@needs_compiler
def test_the_first_round_is_not_counted(timed_device, clock):
    """A stage's time is the difference of one round's graphs: what slows a round down does not reach another."""
    n = len(kernels.STAGES)
    clock.slowness = dict.fromkeys(range(n), 100) | dict.fromkeys(range(2 * n, 3 * n), 3)
    found = kernels.time_stages([make_step()], 0.05, rounds=3, seed=0)
    for name, microseconds in STAGE_MICROSECONDS.items():
        assert [1e6 * s for s in found[name]] == pytest.approx([microseconds, 3 * microseconds, microseconds])


@needs_compiler
def test_graphs_take_turns_and_start_on_zeroed_counters(timed_device, monkeypatch):
    step, order, was_clear = make_step(), [], []
    zeroed = [step.shared[name] for name in ("peak", "tickets", "unit_counts")]

    def elapsed(work, before):
        assert work is before
        was_clear.append(not any(tensor.any() for tensor in zeroed))
        begin = len(timed_device)
        work()
        order.append(len(timed_device) - begin)
        return 1.0

    monkeypatch.setattr(kernels, "elapsed", elapsed)
    kernels.time_stages([step], 0.05, rounds=4, seed=0)
    assert all(was_clear)
    rounds = [order[i : i + 5] for i in range(0, len(order), 5)]
    assert len(rounds) == 5 and all(sorted(turn) == [1, 2, 3, 5, 6] for turn in rounds)
    assert len({tuple(turn) for turn in rounds}) > 1


@pytest.mark.parametrize("own_host", [True, False])
def test_copies_share_nothing_but_scratch(emulated_device, own_host):
    """Otherwise a GPU's cache would hold for one layer what the one before has read."""
    step = make_step()
    copy = step.copy(own_host)
    same = {name for name, tensor in step.arrays.items() if tensor.data_ptr() == copy.arrays[name].data_ptr()}
    assert same == set(step.shared) | (set() if own_host else {"host_keys", "host_values"})
    assert all(torch.equal(step.arrays[name], copy.arrays[name]) for name in step.layer.kernel_arrays())


@needs_compiler
@pytest.mark.parametrize("epsilon", [1e-3, 0.05, 0.35, 1e6])
@pytest.mark.parametrize("upper_share", UPPER_SHARES, ids=str)
def test_bytes_counted_token_by_token(emulated_device, epsilon, upper_share):
    step = make_step(upper_share=upper_share)
    step(tuple(step.stages), safe_epsilon(epsilon))
    assert traffic(step, epsilon) == count_bytes(step)


@needs_compiler
def test_bytes_where_some_rows_promote_nothing(emulated_device):
    """Their logits need not be read again."""
    step = make_step()
    step(tuple(step.stages), 1.0)
    epsilon = float(step.arrays["bound"].flatten().sort().values[1:3].mean())
    step(tuple(step.stages), safe_epsilon(epsilon))
    assert (step.arrays["n_promoted"] > 0).sum() == 2
    assert traffic(step, epsilon) == count_bytes(step)


def count_bytes(step):
    """The same by loops over units, query rows and tokens, from the layer's tensors and the kernels' results."""
    layer, arrays, d = step.layer, step.arrays, TINY.head_dim
    row, n_groups, n_words = 2 * d, -(-N_TOKENS // 128), -(-N_TOKENS // 32)
    is_set = lambda words, token: int(words[token // 32]) >> (token % 32) & 1  # noqa: E731
    device, host = dict.fromkeys(kernels.STAGES, 0), dict.fromkeys(kernels.STAGES, 0)
    for unit, codes in enumerate(layer.codes.tolist()):
        device["score"] += d // 4 + n_groups * d // 4 * 4  # channels; zero and scale
        device["shortlist"] += 4 * n_words
        device["emit + settle"] += 4 * n_words
        device["attend"] += 4 * n_words
        for token, code in enumerate(codes):
            resident, residual = code & RESIDENT_BIT, code % RESIDENT_BIT != 0
            device["score"] += 1 + d // 16  # code, sketch
            for stage in ("shortlist", "plan", "emit + settle"):
                device[stage] += 1
            if resident:
                device["score"] += 1 + (0 if residual else row + 4)
                device["attend"] += 2 * row + 1 + 4
            if is_set(arrays["known"][unit], token):
                (device if resident else host)["shortlist"] += row
            if is_set(arrays["mask"][unit], token) and not resident:
                host["attend"] += 2 * row
                device["attend"] += 4
                device["emit + settle"] += 4
        for promoted in arrays["n_promoted"][unit].tolist():
            device["score"] += 4 * d + 4 * N_TOKENS
            device["shortlist"] += 4 * N_TOKENS
            device["plan"] += 4 * N_TOKENS + 4 * n_words
            device["emit + settle"] += 4 * N_TOKENS + 4 * n_words if promoted else 0
            device["attend"] += 4 * d + 4 * n_words + 4 * d
    return {stage: Traffic(device[stage], host[stage]) for stage in kernels.STAGES}


def test_a_stage_that_noise_hides_has_no_bandwidth():
    comparison = Comparison("", "plan", {"plan": [1e-6, -2e-6, -3e-6]}, "GPU")
    found = kernels._achieved(comparison, "plan", Traffic(100), CEILINGS)
    assert found["bytes that must move, device"] == 100 and found["us, 10 %"] < found["us, 90 %"]
    assert not any(name.startswith(("GB/s", "share")) for name in found)


def test_ceilings_count_a_copy_twice(clock):
    clock.tick = 0.5  # ms from one event to the next
    found = kernels.ceilings(CPU, rounds=3, n_bytes=2**20)
    assert found["device_copy_GBps"] == pytest.approx(2 * 2**20 / 0.5e-3 / 1e9)
    assert found["pinned_read_GBps"] == pytest.approx(2**19 / 0.5e-3 / 1e9)
    assert clock.n_timed == 8


def test_elapsed_does_not_count_what_runs_before(clock):
    def wait(milliseconds):
        clock.now += milliseconds

    assert kernels.elapsed(lambda: wait(3.0), before=lambda: wait(50.0)) == pytest.approx(3e-3)
    assert kernels.elapsed(lambda: wait(4.0)) == pytest.approx(4e-3)


@pytest.mark.gpu
def test_on_a_device():
    if not verkv.cuda.is_available():
        pytest.skip("the kernels cannot run on this device")
    for comparison in kernels.run(BenchSettings(quick=True, rounds=5)):
        step = comparison.facts["whole step, of one layer"]
        assert comparison.median(kernels.STEP) > 0 and all(len(times) == 5 for times in comparison.seconds.values())
        assert 0 < step["share of the ceiling, device"] < 1
