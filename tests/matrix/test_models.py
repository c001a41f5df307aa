"""Every model against every press, attention function, dtype, kind of batch and way of decoding.

A cell is one value of each of the six ``AXES``; questions asked one after the other are part of every cell. Llama and
Qwen3.5 (the one with full attention alone, the other a hybrid) go through the full product. For the other models
:func:`pairwise` chooses cells so that any two values of different axes meet in at least one: it takes, again and again,
the cell that covers most pairs not seen yet, the first of them in the order of the product. Pairs that no cell can have
are left out: prompt lookup with a batch of two, or with states that cannot be rolled back token by token, is refused by
transformers. ``test_every_pair_is_covered`` counts the pairs independently.

What a cell must do depends on its press. Those in ``EXACT`` leave nothing out (every token resident, or VerKV with an
epsilon that fetches all that matters) and must give the dense model's logits to twice dense's own error in that dtype,
taken over the same forward passes; in float32 dense's error is against float64. Mixtures of experts use all of theirs:
which two of four are best jumps with the rounding, for dense attention too (``test_cache.py`` has two). ``LOSSY``
presses drop tokens; they must be finite, of the right length, accounted for, and the same again with the same seed.
"""

import itertools

import pytest
import torch
import transformers
from press_helpers import SHORT, left_padded, leftovers, positions, random_ids
from sealing import CACHE, forward, full_layers, lengths, seal
from transformers import Cache, DynamicCache, Gemma2Config, Gemma2ForCausalLM

from verkv.cache import make_cache

N_CONTEXT, N_PADDED = 56, 17  # the padded row has 39 tokens
FIRST, SECOND = (5, 1, 1, 4), (6, 1)  # widths: a question, two steps, a question on top; then another from the context
RATIO, N_NEW = 0.4, 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
REFERENCE = {"fp32": torch.float64, "bf16": torch.float32, "fp16": torch.float32}
MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "beams": {"do_sample": False, "num_beams": 3},
    "prompt_lookup": {"do_sample": False, "prompt_lookup_num_tokens": 2},
}
EXACT = ("certain", "verkv_rope_pair", "verkv_exact", "verkv_kvzip", "verkv_fastkvzip")
LOSSY = ("poissoncomp", "kvzip", "fastkvzip")
FULL_PRODUCT = ("llama", "qwen3_5")
PAIRWISE = ("mistral", "ministral", "ministral3", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "gemma3", "phi3")
HYBRIDS = ("qwen3_5", "qwen3_next")
ALL_EXPERTS = {kind: {"num_experts_per_tok": 4} for kind in ("qwen3_moe", "qwen3_next")}
AXES = {
    "kind": PAIRWISE,
    "press": EXACT + LOSSY,
    "attn": ("sdpa", "eager"),
    "dtype": tuple(DTYPES),
    "batch": ("one", "padded"),
    "mode": tuple(MODES),
}


# --- cells ------------------------------------------------------------------------------------------------------------


def is_possible(cell) -> bool:
    """Whether transformers can run a cell."""
    kind, *_, batch, mode = cell
    return mode != "prompt_lookup" or (batch == "one" and kind not in HYBRIDS)


def pairwise(axes: dict, allowed) -> list[tuple]:
    """Cells in which any two values of different axes meet, if a cell exists where they do."""
    cells = [cell for cell in itertools.product(*axes.values()) if allowed(cell)]
    numbers = {}  # of a pair of (axis, value)s: the bit that stands for it
    masks = []
    for cell in cells:
        pairs = itertools.combinations(enumerate(cell), 2)
        masks.append(sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs))
    uncovered, chosen = (1 << len(numbers)) - 1, []
    while uncovered:
        best = max(range(len(cells)), key=lambda i: bin(masks[i] & uncovered).count("1"))
        chosen.append(cells[best])
        uncovered &= ~masks[best]
    return chosen


COVERING = pairwise(AXES, is_possible)
# What is done with logits does not depend on how tokens are chosen, so this part of the product is run once.
LOGITS_PRODUCT = list(
    itertools.product(FULL_PRODUCT, *(AXES[name] for name in ("press", "attn", "dtype", "batch"))),
)
GENERATION_PRODUCT = [cell for cell in itertools.product(FULL_PRODUCT, *list(AXES.values())[1:]) if is_possible(cell)]


def name_of(cell) -> str:
    return "-".join(cell)


def test_every_pair_is_covered():
    axes = list(AXES.values())
    possible = [cell for cell in itertools.product(*axes) if is_possible(cell)]
    for i, j in itertools.combinations(range(len(axes)), 2):
        wanted = {(a, b) for a, b in itertools.product(axes[i], axes[j])}
        impossible = wanted - {(cell[i], cell[j]) for cell in possible}
        assert all("prompt_lookup" in pair for pair in impossible)
        assert {(cell[i], cell[j]) for cell in COVERING} == wanted - impossible
    assert all(is_possible(cell) for cell in COVERING)
    assert len(COVERING) < 110 and len(set(COVERING)) == len(COVERING)
    assert len(GENERATION_PRODUCT) == 2 * 8 * 2 * 3 * 2 * 4 - 8 * 2 * 3 * (1 + 2)


# --- what cells are made of -------------------------------------------------------------------------------------------


class ByteTokenizer:
    """Enough of a tokenizer for KVzip's replay with a vocabulary of 256."""

    chat_template = None

    def encode(self, text, return_tensors="pt", add_special_tokens=False):
        return torch.tensor([[3 + byte % 250 for byte in text.encode()[::8]]])


def make_gates(config):
    """Random gates of Fast KVzip, one per layer, linear ones included."""
    from kvpress.presses.fastkvzip_press import FastKVzipGate

    n_heads = config.num_key_value_heads
    group = config.num_attention_heads // n_heads
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [
            FastKVzipGate(i, config.hidden_size, n_heads, group, torch.float32) for i in range(config.num_hidden_layers)
        ]


def make_press(name, config):
    """Here and not at the top: what needs no press runs without KVPress, on newer transformers."""
    from kvpress import KnormPress

    from verkv import FastKVzipPress, KVzipPress, PoissonCompPress, VerKVPress

    kvzip = lambda ratio: KVzipPress(ratio, tokenizer=ByteTokenizer(), chunk_size=30)  # noqa: E731
    fastkvzip = lambda ratio: FastKVzipPress(ratio, gates=make_gates(config))  # noqa: E731
    if name == "kvzip":
        return kvzip(RATIO)
    if name == "fastkvzip":
        return fastkvzip(RATIO)
    if name == "poissoncomp":
        return PoissonCompPress(KnormPress(), RATIO, **SHORT)
    _, variant = name.split("_", 1)
    scorer = {"kvzip": kvzip, "fastkvzip": fastkvzip}.get(variant, lambda ratio: KnormPress())(0.0)
    sketch = "exact" if variant == "exact" else "rope_pair"
    return VerKVPress(scorer, RATIO, sketch=sketch, epsilon=1e-9, shortlist=4, **SHORT)


class Inputs:
    """Ids and masks of a context and of the tokens behind it."""

    def __init__(self, batch, seed=3):
        rows = [random_ids(1, N_CONTEXT)]
        rows[0][:, -6:] = rows[0][:, 10:16]  # its end was seen before, so that prompt lookup has something to propose
        if batch == "padded":
            rows.append(random_ids(1, N_CONTEXT - N_PADDED, seed=2))
        self.context, self.mask = left_padded(rows)
        self.n_padding = N_CONTEXT - self.mask.sum(-1)
        first = random_ids(len(rows), sum(FIRST), seed=seed)
        second = random_ids(len(rows), sum(SECOND), seed=seed + 1)
        self.streams = [(first, FIRST), (second, SECOND)]

    def whole(self, tokens):
        """Context and tokens, with their mask."""
        mask = torch.cat([self.mask, torch.ones_like(tokens)], 1)
        return torch.cat([self.context, tokens], 1), mask

    def prefill(self, model, cache, n_tokens=N_CONTEXT):
        ids, mask = self.context[:, :n_tokens], self.mask[:, :n_tokens]
        forward(model, ids, cache, attention_mask=mask, position_ids=positions(mask))

    def logits(self, model, cache=None):
        """Logits of both streams behind a sealed context, which is rolled back to; or behind a dense one, made anew."""
        collected, sealed = [], cache is not None
        for tokens, widths in self.streams:
            if not sealed:
                cache = make_cache(model.config)
                self.prefill(model, cache)
            _, mask = self.whole(tokens)
            start = N_CONTEXT
            for part in tokens.split(widths, dim=1):
                stop = start + part.shape[1]
                options = {"attention_mask": mask[:, :stop], "position_ids": positions(mask)[:, start:stop]}
                collected.append(forward(model, part, cache, **options))
                start = stop
            assert lengths(cache) == [N_CONTEXT + tokens.shape[1]] * len(cache.layers)
            if sealed:
                cache.crop(N_CONTEXT)
        return torch.cat(collected, 1)

    def logits_without_a_cache(self, model):
        return torch.cat([self.logits_of(model, tokens) for tokens, _ in self.streams], 1)

    def logits_of(self, model, tokens, before=0):
        """Logits at tokens behind the context, and at some before them, in one pass."""
        ids, mask = self.whole(tokens)
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits
        return logits[:, N_CONTEXT - before :]


@pytest.fixture(scope="module")
def made(tiny_model):
    """Models, dense logits and dense generations, made when first asked for; nothing changes a model."""

    class Made(dict):
        def model(self, kind, attn, dtype):
            if kind in HYBRIDS and hasattr(Cache, "update_conv_state"):
                pytest.skip("hybrid models need transformers 5.2 to 5.4")
            return self.once(("model", kind, attn, dtype), lambda: self.build(kind, attn, dtype))

        def build(self, kind, attn, dtype):
            return tiny_model(kind, attn, **ALL_EXPERTS.get(kind, {})).to(DTYPES[dtype])

        def reference(self, kind, dtype):
            """The same weights in a wider format."""

            def compute():
                model = self.build(kind, "sdpa", dtype).to(REFERENCE[dtype])
                model.config._experts_implementation = "eager"  # others do not run in float64
                return model

            return self.once(("reference", kind, dtype), compute)

        def dense(self, kind, attn, dtype, batch):
            """Reference logits, and dense's errors over the same forward passes."""

            def compute():
                inputs, model = Inputs(batch), self.model(kind, attn, dtype)
                reference = inputs.logits_without_a_cache(self.reference(kind, dtype))
                error = (inputs.logits(model).to(reference.dtype) - reference).abs()
                assert error.isfinite().all()
                return reference, error

            return self.once(("dense", kind, attn, dtype, batch), compute)

        def generated(self, kind, attn, dtype, batch, mode):
            """Dense tokens."""

            def compute():
                model = self.model(kind, attn, dtype)
                return generate(model, Inputs(batch), empty_cache(model, mode), mode)

            return self.once(("generated", kind, attn, dtype, batch, mode), compute)

        def once(self, key, compute):
            if key not in self:
                self[key] = compute()
            return self[key]

    return Made()


def empty_cache(model, mode):
    """Prompt lookup takes tokens back out of the prefill, which a cache that forgets behind a window cannot do."""
    return DynamicCache() if mode == "prompt_lookup" else make_cache(model.config)


def generate(model, inputs, cache, mode):
    torch.manual_seed(5)
    return model.generate(
        inputs.context,
        attention_mask=inputs.mask,
        max_new_tokens=N_NEW,
        min_new_tokens=N_NEW,
        **{CACHE: cache},
        **MODES[mode],
    )


def seal_certain(model, inputs, cache, n_tokens=N_CONTEXT):
    """Seal with r = 1 for every token."""
    inputs.prefill(model, cache, n_tokens)
    n_padding = inputs.n_padding if inputs.n_padding.any() else None
    return seal(model, cache, n_padding=n_padding)


def sealed_cache(model, inputs, press_name):
    cache = make_cache(model.config)
    if press_name == "certain":
        stats = seal_certain(model, inputs, cache)
    else:
        press = make_press(press_name, model.config)
        with press(model):
            inputs.prefill(model, cache)
        stats = press.stats
    assert stats.sealed_layers == tuple(full_layers(model)) != ()
    assert leftovers(model) == []
    return cache


def assert_memory_adds_up(model, cache):
    report, config = cache.memory_report(), model.config
    sealed = [cache.layers[i].context for i in full_layers(model)]
    keys = sealed[0].rows.keys
    batch, row = sealed[0].n_contexts, 2 * config.head_dim * keys.element_size()
    unsealed = report.device.get("unsealed", 0)
    assert report.full_bytes - unsealed == len(sealed) * batch * config.num_key_value_heads * N_CONTEXT * row
    n_rows = sum(int(context.rows.offsets[-1]) for context in sealed)
    assert report.device["row_keys"] + report.device["row_values"] + report.device["row_codes"] == n_rows * (row + 1)
    parts = {"row_keys", "row_values", "row_codes", "row_offsets", "unsealed"}
    if sealed[0].fetch is None:
        assert set(report.device) <= parts
    else:
        assert report.device["token_codes"] * row == report.full_bytes - unsealed == sum(report.host.values())
    return report


# --- logits -----------------------------------------------------------------------------------------------------------


def check_logits(made, kind, press_name, attn, dtype, batch):
    model, inputs = made.model(kind, attn, dtype), Inputs(batch)
    cache = sealed_cache(model, inputs, press_name)
    report = assert_memory_adds_up(model, cache)
    logits = inputs.logits(model, cache)
    assert logits.dtype == DTYPES[dtype] and logits.isfinite().all()
    if press_name in EXACT:
        reference, dense_error = made.dense(kind, attn, dtype, batch)
        error = (logits.to(reference.dtype) - reference).abs()
        assert error.mean() <= 2 * dense_error.mean() and error.max() <= 2 * dense_error.max()
        return
    again = sealed_cache(model, inputs, press_name)
    assert again.memory_report() == report and not report.host
    assert torch.equal(inputs.logits(model, again), logits)
    if press_name != "poissoncomp":  # the sample's size varies
        sealed_bytes = sum(size for part, size in report.device.items() if part != "unsealed")
        assert sealed_bytes <= (1 - RATIO) * (report.full_bytes - report.device.get("unsealed", 0))


@pytest.mark.parametrize("cell", LOGITS_PRODUCT, ids=name_of)
def test_logits_in_the_full_product(made, cell):
    check_logits(made, *cell)


@pytest.mark.parametrize("cell", COVERING, ids=name_of)
def test_logits_in_the_covering(made, cell):
    check_logits(made, *cell[:-1])


@pytest.mark.parametrize("kind", FULL_PRODUCT)
def test_lossy_presses_lose_something(made, kind):
    """Otherwise the cells above compare dense with dense."""
    reference, dense_error = made.dense(kind, "sdpa", "fp32", "one")
    model, inputs = made.model(kind, "sdpa", "fp32"), Inputs("one")
    for press_name in LOSSY:
        logits = inputs.logits(model, sealed_cache(model, inputs, press_name))
        assert (logits - reference).abs().max() > 1000 * dense_error.max()


# --- generation -------------------------------------------------------------------------------------------------------


def skip_unless_prompt_lookup_continues(model, inputs):
    """Newer transformers (seen in 5.24) process the prompt again that a cache already holds, in their own, too."""
    plain = DynamicCache()
    inputs.prefill(model, plain, N_CONTEXT - 1)
    generate(model, inputs, plain, "prompt_lookup")
    if plain.get_seq_length() != N_CONTEXT + N_NEW - 1:
        pytest.skip(f"assisted decoding of transformers {transformers.__version__} repeats a prompt that is cached")


def generated(model, inputs, press_name, mode):
    cache = empty_cache(model, mode)
    if press_name == "certain":
        if mode == "prompt_lookup":
            skip_unless_prompt_lookup_continues(model, inputs)
        stats = seal_certain(model, inputs, cache, N_CONTEXT - 1)  # one is left for the first forward pass
        cache.batch_repeat_interleave(MODES[mode].get("num_beams", 1))
        return generate(model, inputs, cache, mode), cache, stats
    press = make_press(press_name, model.config)
    with press(model):
        tokens = generate(model, inputs, cache, mode)
    return tokens, cache, press.stats


def check_generation(made, kind, press_name, attn, dtype, batch, mode):
    model, inputs = made.model(kind, attn, dtype), Inputs(batch)
    tokens, cache, stats = generated(model, inputs, press_name, mode)
    assert tokens.shape == (len(inputs.context), N_CONTEXT + N_NEW)
    assert torch.equal(tokens[:, :N_CONTEXT], inputs.context)
    assert stats.sealed_layers == tuple(full_layers(model)) != () and stats.n_passes > 0
    assert set(lengths(cache)) == {N_CONTEXT + N_NEW - 1}
    assert leftovers(model) == []
    if press_name in LOSSY:
        assert torch.equal(generated(model, inputs, press_name, mode)[0], tokens)
    elif dtype == "fp32":
        assert torch.equal(tokens, made.generated(kind, attn, dtype, batch, mode))
    elif mode in ("greedy", "prompt_lookup"):  # near ties may fall either way, but nothing else may be chosen
        _, dense_error = made.dense(kind, attn, dtype, batch)
        reference = inputs.logits_of(made.reference(kind, dtype), tokens[:, N_CONTEXT:], before=1)[:, :-1]
        chosen = reference.gather(-1, tokens[:, N_CONTEXT:, None])[..., 0]
        best = reference.index_fill(-1, torch.tensor([model.config.eos_token_id]), -torch.inf).amax(-1)
        assert (best - chosen).max() <= 2 * 2 * 2 * dense_error.max()


@pytest.mark.parametrize("cell", GENERATION_PRODUCT, ids=name_of)
def test_generation_in_the_full_product(made, cell):
    check_generation(made, *cell)


@pytest.mark.parametrize("cell", COVERING, ids=name_of)
def test_generation_in_the_covering(made, cell):
    check_generation(made, *cell)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("press_name", [name for name in AXES["press"] if name != "certain"])
@pytest.mark.parametrize("attn", AXES["attn"])
def test_gemma2_is_refused_before_anything_runs(attn, press_name):
    config = Gemma2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=16,
        attn_implementation=attn,
    )
    press = make_press(press_name, config)
    model, cache = Gemma2ForCausalLM(config).eval(), make_cache(config)
    with pytest.raises(NotImplementedError, match="attn_logit_softcapping"), press(model):
        Inputs("one").prefill(model, cache)
    assert lengths(cache) == [0, 0] and leftovers(model) == []
    Inputs("one").prefill(model, cache)
    with pytest.raises(NotImplementedError, match="attn_logit_softcapping"):
        press.seal(model, cache, {1: torch.rand(1, 2, N_CONTEXT)})
