"""The memory budget: what stays on the device is what was paid for, every part counted."""

import math

import pytest
import torch
from kvpress import KnormPress
from press_helpers import SHORT, decode, full_layers, inclusion_probs, left_padded, prefill, random_ids
from transformers import DynamicCache, LlamaConfig

from verkv import ExactSketch, PoissonCompPress, RopePairSketch, VerKVPress, make_cache
from verkv.presses.budget import LayerGeometry, token_budget

RATIOS = {8: 0.875, 16: 0.9375, 32: 0.96875}
SCOPES = ["head", "layer", "model"]
N_KV_HEADS = 2


class StandIn:
    """What :meth:`seal` needs to know of a model."""

    def __init__(self, head_dim, n_layers=1):
        self.config = LlamaConfig(
            hidden_size=4 * head_dim,
            head_dim=head_dim,
            num_attention_heads=4,
            num_key_value_heads=N_KV_HEADS,
            num_hidden_layers=n_layers,
        )


def synthetic(head_dim, n_tokens, n_layers=1, batch=1, dtype=torch.bfloat16, seed=0):
    """A model's stand-in, keys and values of every layer, and scores with a heavy tail."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, N_KV_HEADS, n_tokens, head_dim)
    tensors = [
        tuple(torch.randn(shape, generator=generator).to(dtype) for _ in ("keys", "values")) for _ in range(n_layers)
    ]
    uniform = torch.rand(n_layers, *shape[:3], generator=generator)
    scale = torch.tensor([1.0, 0.2])[:, None]  # heads and layers differ, so that shared budgets are not even
    scores = {i: uniform[i] ** 6 * scale / (1 + i) for i in range(n_layers)}
    return StandIn(head_dim, n_layers), tensors, scores


def sealed(press, model, tensors, scores, **kwargs):
    cache = DynamicCache()
    for i, (keys, values) in enumerate(tensors):
        cache.update(keys, values, i)
    press.seal(model, cache, scores, **kwargs)
    return cache


def device_bytes(press):
    return sum(press.memory_report().device.values())


def expected_device_bytes(cache, press):
    """Expectation of the device bytes over draws: kept rows replaced by the sum of r, the other parts as they are."""
    total = 0.0
    for layer in cache.layers:
        context, memory = layer.context, layer.memory()["device"]
        fixed = sum(size for part, size in memory.items() if part not in ("row_keys", "row_values", "row_codes"))
        row_bytes = (context.key_dim + context.value_dim) * context.rows.keys.element_size() + 1
        total += fixed + inclusion_probs(context.codes).sum().item() * row_bytes
    return total


# --- what is kept is what was paid for --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("factor", RATIOS, ids=lambda f: f"{f}x")
@pytest.mark.parametrize(
    ("head_dim", "n_tokens", "dtype"),
    [(64, 16384, torch.bfloat16), (128, 16384, torch.bfloat16), (64, 16383, torch.float32)],
    ids=["d64_bf16", "d128_bf16", "d64_fp32"],
)
def test_device_memory_is_within_the_budget_in_expectation(head_dim, n_tokens, dtype, factor):
    """Mean over 20 draws against the budget plus four standard errors of the mean: 3 in 100,000 by chance."""
    model, tensors, scores = synthetic(head_dim, n_tokens, dtype=dtype)
    sizes = []
    for seed in range(20):
        press = VerKVPress(KnormPress(), RATIOS[factor], seed=seed)
        cache = sealed(press, model, tensors, scores)
        sizes.append(device_bytes(press))
    sizes = torch.tensor(sizes, dtype=torch.float64)
    full = 2 * N_KV_HEADS * n_tokens * head_dim * dtype.itemsize
    assert press.memory_report().full_bytes == full
    assert sizes.std() > 0
    margin = 4 * sizes.std() / math.sqrt(len(sizes))
    assert sizes.mean() <= full / factor + margin
    assert sizes.mean() >= 0.99 * full / factor - margin  # nothing is given away either
    # The same without chance: the sum of r is what the budget pays for, to one step of one token's r per head.
    expected = expected_device_bytes(cache, press)
    row_bytes = 2 * head_dim * dtype.itemsize + 1
    step = 1 - 2 ** (-1 / 8)
    assert full / factor - N_KV_HEADS * step * row_bytes <= expected <= full / factor


@pytest.mark.parametrize(
    "sketch", ["rope_pair", RopePairSketch(fraction=0.5, group_size=64)], ids=["default", "larger"]
)
@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("scope", SCOPES)
def test_expected_bytes_use_up_every_scopes_budget(scope, alpha, sketch):
    model, tensors, scores = synthetic(64, 2048, n_layers=3)
    press = VerKVPress(KnormPress(), 0.875, budget_scope=scope, alpha=alpha, sketch=sketch, outliers=0.0)
    cache = sealed(press, model, tensors, scores)
    full = 3 * 2 * N_KV_HEADS * 2048 * 64 * 2
    n_groups = {"head": 3 * N_KV_HEADS, "layer": 3, "model": 1}[scope]
    step = (1 - 2 ** (-1 / 8)) * (2 * 64 * 2 + 1)
    assert full / 8 - n_groups * step <= expected_device_bytes(cache, press) <= full / 8

    share = torch.stack([inclusion_probs(layer.context.codes).sum(-1) for layer in cache.layers])  # (L, Hkv)
    spread = {"head": share.flatten(), "layer": share.sum(1), "model": share.sum()[None]}[scope]
    assert spread.max() - spread.min() < 1.0
    if scope == "layer":
        assert (share[:, 0] > 1.3 * share[:, 1]).all()  # heads of a layer compete
    if scope == "model":
        assert share[0].sum() > 1.2 * share[2].sum()  # layers compete


@pytest.mark.parametrize("scope", SCOPES)
def test_poissoncomp_pays_for_rows_only(scope):
    model, tensors, scores = synthetic(64, 2048, n_layers=2)
    full = 2 * 2 * N_KV_HEADS * 2048 * 64 * 2
    sizes = []
    for seed in range(20):
        press = PoissonCompPress(KnormPress(), 0.875, budget_scope=scope, seed=seed)
        cache = sealed(press, model, tensors, scores)
        memory = press.memory_report()
        assert (
            len(cache.layers) == 2
            and set(memory.device) == {"row_keys", "row_values", "row_codes", "row_offsets"}
            and memory.host == {}
        )
        sizes.append(device_bytes(press))
    sizes = torch.tensor(sizes, dtype=torch.float64)
    margin = 4 * sizes.std() / math.sqrt(len(sizes))
    assert abs(sizes.mean() - full / 8) <= margin + 2 * N_KV_HEADS * 64
    # The note's standard deviation is that of the number of rows: a factor 2 is far outside the noise of 20 draws.
    stated = float(press.stats.notes[0].rsplit(" ", 1)[1])
    assert 0.5 < sizes.std() / (2 * 64 * 2 + 1) / stated < 2


def test_memory_report_counts_what_the_layers_hold():
    """Every tensor of a sealed layer is in the report, none twice (layers share that of the padding)."""
    model, tensors, scores = synthetic(64, 1024, n_layers=2)
    press = VerKVPress(KnormPress(), 0.8)
    cache = sealed(press, model, tensors, scores)
    held = {}

    def collect(thing, layer):
        if isinstance(thing, torch.Tensor):
            held[layer, thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif hasattr(thing, "__dict__") and type(thing).__module__.startswith("verkv"):
            for name, value in vars(thing).items():
                if name not in ("stats", "_siblings"):
                    collect(value, layer)

    for i, layer in enumerate(cache.layers):
        collect(layer, i)
    memory = press.memory_report()
    reported = sum(sum(part.values()) for part in (memory.device, memory.device_uncharged, memory.host))
    assert sum(held.values()) == reported
    assert sum(memory.host.values()) == memory.full_bytes
    assert memory.resident_share == device_bytes(press) / memory.full_bytes


def test_exact_sketch_leaves_the_sample_as_large_as_the_rope_pair_sketchs():
    model, tensors, scores = synthetic(64, 1024)
    caches = []
    for sketch in ("rope_pair", "exact", ExactSketch()):
        press = VerKVPress(KnormPress(), 0.8, sketch=sketch, outliers=0.0)
        caches.append(sealed(press, model, tensors, scores))
    assert all(torch.equal(c.layers[0].context.codes, caches[0].layers[0].context.codes) for c in caches)
    assert "sketch_codes" not in press.memory_report().device
    assert any("oracle" in note for note in press.stats.notes)


def test_padding_is_not_paid_for(tiny_model):
    """A padded row keeps what it would keep alone: its budget is a share of its own tokens."""
    model = tiny_model("llama")
    rows = [random_ids(1, 60), random_ids(1, 120, seed=2)]
    ids, mask = left_padded(rows)
    press = VerKVPress(KnormPress(), 0.5, **SHORT)
    batched = prefill(model, ids, press, attention_mask=mask).layers[0].context.codes.unflatten(0, (2, 2))
    for i, row in enumerate(rows):
        alone = prefill(model, row, press).layers[0].context.codes
        pad = ids.shape[1] - row.shape[1]
        totals = [inclusion_probs(codes).sum(-1) for codes in (batched[i][:, pad:], alone)]
        assert (totals[0] - totals[1]).abs().max() < 0.2
        assert (batched[i][:, :pad] == 0).all()


# --- impossible budgets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("n_tokens", "ratio", "options"),
    [
        (1024, 0.9375, {}),
        (1024, 0.99, {}),
        (300, 0.875, {}),
        (200, 0.5, {}),
        (8192, 0.985, {}),
        (2048, 0.9999, {"n_sink": 0, "n_local": 0}),
        (2048, 0.97, {"n_sink": 0, "n_local": 0, "sketch": RopePairSketch(fraction=1.0)}),
        (1024, 0.9375, {"sketch": "exact", "budget_scope": "model"}),
    ],
)
def test_impossible_budget_names_a_ratio_that_works(head_dim, n_tokens, ratio, options):
    model, tensors, scores = synthetic(head_dim, n_tokens, n_layers=2)
    press = VerKVPress(KnormPress(), ratio, **options)
    with pytest.raises(ValueError) as caught:
        sealed(press, model, tensors, scores)
    message = str(caught.value)
    for part in (f"compression_ratio={ratio:g}", "protected tokens (n_sink, n_local", "sketch", "inclusion", "offsets"):
        assert part in message
    largest = float(message.split("use compression_ratio <= ")[1].split(",")[0])
    assert 0 < largest < ratio
    press.compression_ratio = largest
    cache = sealed(press, model, tensors, scores)
    assert full_layers(cache) == [0, 1]
    press.compression_ratio = largest + 2e-4  # it is the largest, to the digits that are printed
    with pytest.raises(ValueError, match="fixed parts"):
        sealed(press, model, tensors, scores)


def test_named_parts_add_up():
    model, tensors, scores = synthetic(64, 1024)
    with pytest.raises(ValueError) as caught:
        sealed(VerKVPress(KnormPress(), 0.9375), model, tensors, scores)
    numbers = [float(word) for word in str(caught.value).replace(",", " ").split() if _is_share(word)]
    allowed, needed, *parts = numbers[1:7] if numbers[0] == 0.9375 else numbers[:7]
    assert allowed == 6.25
    assert sum(parts) == pytest.approx(needed, abs=0.03)


def _is_share(word):
    return word.count(".") == 1 and word.replace(".", "").isdigit()


@pytest.mark.parametrize("ratio", [0.9, 0.9825, 0.99])
def test_named_ratio_works_for_every_row_of_a_padded_batch(ratio):
    model, tensors, scores = synthetic(64, 4096, batch=2)
    mask = torch.ones(2, 4096, dtype=torch.long)
    mask[0, :-300] = 0
    press = VerKVPress(KnormPress(), ratio)
    with pytest.raises(ValueError) as caught:
        sealed(press, model, tensors, scores, attention_mask=mask)
    press.compression_ratio = float(str(caught.value).split("use compression_ratio <= ")[1].split(",")[0])
    assert full_layers(sealed(press, model, tensors, scores, attention_mask=mask)) == [0]


def test_no_ratio_works_for_a_context_barely_longer_than_its_protection():
    model, tensors, scores = synthetic(64, 129)
    with pytest.raises(ValueError, match="leave so short a context as it is"):
        sealed(VerKVPress(KnormPress(), 0.5), model, tensors, scores)


def test_impossible_budget_leaves_the_cache_exact(tiny_model):
    model = tiny_model("llama")
    ids, question = random_ids(1, 140), random_ids(1, 4, seed=3)
    cache = make_cache(model.config)
    with pytest.raises(ValueError, match="fixed parts"):
        prefill(model, ids, VerKVPress(KnormPress(), 0.9), cache=cache)
    expected = decode(model, question, prefill(model, ids))
    assert torch.equal(decode(model, question, cache), expected)


# --- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_tokens", "ratio", "reason"),
    [(140, 0.0, "compression_ratio is 0"), (128, 0.9375, "all 128 tokens"), (50, 0.5, "all 50 tokens")],
)
@pytest.mark.parametrize("press_class", [PoissonCompPress, VerKVPress])
def test_left_unsealed_and_exact(tiny_model, press_class, n_tokens, ratio, reason):
    model = tiny_model("llama")
    ids, question = random_ids(1, n_tokens), random_ids(1, 4, seed=3)
    press = press_class(KnormPress(), ratio)
    cache = prefill(model, ids, press)
    assert full_layers(cache) == [] and press.stats.sealed_layers == ()
    assert [note for note in press.stats.notes if "not sealed, attention is exact" in note and reason in note]
    assert press.stats.kv_read_per_forward == 0.0
    memory = press.memory_report()
    assert memory.device == {"unsealed": memory.full_bytes} and memory.resident_share == 1.0
    assert torch.equal(decode(model, question, cache), decode(model, question, prefill(model, ids)))


def test_fully_protected_row_of_a_batch_is_kept_whole(tiny_model):
    model = tiny_model("llama")
    ids, mask = left_padded([random_ids(1, 12), random_ids(1, 120, seed=2)])
    press = VerKVPress(KnormPress(), 0.5, **SHORT)
    codes = prefill(model, ids, press, attention_mask=mask).layers[0].context.codes.unflatten(0, (2, 2))
    assert (codes[0, :, -12:] == 0x80).all() and (codes[0, :, :-12] == 0).all()
    assert (codes[1] & 0x7F).any()


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("press_class", [PoissonCompPress, VerKVPress])
@pytest.mark.parametrize("value", [1, 1.0, 16, -0.1, float("nan"), "16", "much", [0.5]])
def test_compression_ratio_out_of_range(press_class, value):
    with pytest.raises(ValueError, match=r"compression_ratio must be.*16x is 0\.9375"):
        press_class(KnormPress(), value)
    press = press_class(KnormPress(), 0.5)
    with pytest.raises(ValueError, match="compression_ratio"):
        press.compression_ratio = value
    assert press.compression_ratio == 0.5


def test_compression_factor_is_translated():
    with pytest.raises(ValueError, match=r"for 16x pass 0\.9375"):
        VerKVPress(KnormPress(), 16)


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": -0.1},
        {"alpha": 1.5},
        {"alpha": float("nan")},
        {"alpha": "0.3"},
        {"n_sink": 3.5},
        {"n_local": None},
        {"seed": 1.5},
        {"seed": 2**70},
        {"n_sink": -1},
        {"n_local": -5},
        {"budget_scope": "token"},
    ],
)
@pytest.mark.parametrize("press_class", [PoissonCompPress, VerKVPress])
def test_sampling_options_out_of_range(press_class, options):
    _refused_now_and_later(press_class, options)


@pytest.mark.parametrize(
    "options",
    [
        {"delta": 0.0},
        {"delta": 1.0},
        {"delta": float("nan")},
        {"epsilon": 0.0},
        {"epsilon": -1.0},
        {"epsilon": float("nan")},
        {"epsilon": float("inf")},
        {"epsilon": None},
        {"delta": "a"},
        {"shortlist": 1.5},
        {"shrinkage": ["binary"]},
        {"sketch": 2},
        {"alpha": 1.5},
        {"outliers": 1.0},
        {"outliers": -0.1},
        {"outliers": "many"},
        {"key_rounds": -1},
        {"key_rounds": 1.5},
        {"key_rounds": 1, "paper": True},
        {"max_read": 0.0},
        {"max_read": 1.1},
        {"target": "logits"},
        {"on_violation": "ignore"},
        {"on_violation": "exact"},  # without an audit
        {"error_aware": "always"},
        {"calibrate": "token"},
        {"calibrate": "head", "paper": True},
        {"target": "output", "paper": True},
        {"sketch": RopePairSketch},
        {"shortlist": -1},
        {"shrinkage": "none"},
        {"sketch": "random"},
    ],
)
def test_fetching_options_out_of_range(options):
    _refused_now_and_later(VerKVPress, options)


def _refused_now_and_later(press_class, options):
    """At construction, and when set on the object before the next prompt."""
    name = next(iter(options))
    with pytest.raises(ValueError, match=name):
        press_class(KnormPress(), 0.5, **options)
    model, tensors, scores = synthetic(64, 400)
    press = press_class(KnormPress(), 0.5)
    for option, value in options.items():
        setattr(press, option, value)
    with pytest.raises(ValueError, match=name):
        sealed(press, model, tensors, scores)


def test_ratio_is_taken_from_the_inner_press_if_not_given():
    assert PoissonCompPress(KnormPress(0.3)).compression_ratio == 0.3
    assert VerKVPress(KnormPress(0.3), 0.6).compression_ratio == 0.6
    assert VerKVPress(KnormPress(0.3), 0.0).compression_ratio == 0.0


def test_token_budget_by_hand():
    """One KV head, 1,000 tokens of 100 bytes, a tenth of them left: 10,000 bytes."""
    geometry = LayerGeometry(n_units=1, key_dim=25, value_dim=25, element_size=2)
    count = lambda n: torch.tensor([n])  # noqa: E731
    budget = token_budget(count(1000), count(10), 0.9, geometry, None, bytes_per_token=1, floor=0.0)
    # 1,000 bytes of r and two offsets of 8 are taken off; a row costs 101
    assert budget.item() == pytest.approx((10_000 - 1_000 - 16) / 101)
    assert token_budget(count(10), count(10), 0.9, geometry, None, bytes_per_token=1, floor=0.0).item() == 10


def test_sketch_charges_what_it_takes():
    """The bytes announced before the fit are those of the fitted sketch."""
    sketch = RopePairSketch(group_size=100)
    keys = torch.randn(1, 2, 1234, 64)
    assert 2 * sketch.charged_bytes(1234, 64) == sketch.build(keys).nbytes
