"""KVzip: the replay's scores against KVPress', an untouched cache, and eviction of the lowest scores."""

import kvpress
import pytest
import torch
from press_helpers import full_layers, left_padded, positions, prefill, random_ids, resident_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from verkv import KVzipPress, make_cache
from verkv.demo_model import demo_model_path

TEXT = "The lighthouse keeper counted the ships that passed before dawn and wrote each name in a narrow book. " * 8


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_model, tokenizer):
    """``saved(kind, template)``: a tiny model that was loaded from a folder with its tokenizer, and the tokenizer."""
    models = {}

    def load(kind, template=True):
        if (kind, template) not in models:
            folder = tmp_path_factory.mktemp(kind)
            tiny_model(kind, vocab_size=49152).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            own = AutoTokenizer.from_pretrained(folder)
            if not template:
                own.chat_template = None
                own.save_pretrained(folder)
                (folder / "chat_template.jinja").unlink()
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            models[kind, template] = model, AutoTokenizer.from_pretrained(folder)
        return models[kind, template]

    return load


def prompt(tokenizer, text=TEXT):
    """Ids of a context as KVPress' pipeline makes them."""
    if tokenizer.chat_template is not None:
        message = [{"role": "user", "content": text + "####"}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False).split("####")[0]
    return tokenizer.encode(text, return_tensors="pt", add_special_tokens=False)


@torch.no_grad()
def our_scores(model, ids, mask=None, cache=None, tokenizer=None, **options):
    """Scores by replay, (L, B, Hkv, T) of the full-attention layers."""
    source = KVzipPress(tokenizer=tokenizer, **options).source()
    source.prepare(model)
    if cache is None:
        kwargs = {} if mask is None else {"attention_mask": mask, "position_ids": positions(mask)}
        cache = prefill(model, ids, **kwargs)
    scores = source.after_prefill(model, cache, ids, mask)
    return torch.stack([scores[i] for i in sorted(scores)])


@torch.no_grad()
def kvpress_scores(model, ids, **options):
    """KVPress' scores, taken before it evicts, (L, 1, Hkv, T)."""
    press = kvpress.KVzipPress(compression_ratio=0.5, **options)
    taken = []
    press.compress_post = lambda model: taken.append(press.score_val.clone())
    with press(model):
        model.model(input_ids=ids, past_key_values=DynamicCache())
    return taken[0]


def keys_and_values(cache):
    return [(layer.keys, layer.values, layer.get_seq_length()) for layer in cache.layers]


def assert_unchanged(cache, before):
    for layer, (keys, values, length) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
        assert layer.get_seq_length() == length


# --- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [2048, 50, 7], ids=lambda n: f"chunk{n}")
@pytest.mark.parametrize("template", [True, False], ids=["template", "no_template"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_scores_equal_kvpress(saved, kind, template, chunk_size):
    model, tokenizer = saved(kind, template)
    ids = prompt(tokenizer)
    if chunk_size == 7:
        ids = ids[:, :60]  # one replay per chunk
    expected = kvpress_scores(model, ids, chunk_size=chunk_size)
    scores = our_scores(model, ids, chunk_size=chunk_size)
    assert expected.max() > 0.1 and scores.max() <= 1.0
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=0)
    prefix_length = 24 if template else 0  # KVzip says nothing about the template's prefix
    assert (scores[..., :prefix_length] == 0).all() and (scores[..., prefix_length:] > 0).all()


@pytest.mark.parametrize("n_sink", [0, 16])
def test_scores_equal_kvpress_for_other_sinks(saved, n_sink):
    model, tokenizer = saved("llama")
    ids = prompt(tokenizer)
    scores = our_scores(model, ids, chunk_size=64, n_sink=n_sink)
    torch.testing.assert_close(scores, kvpress_scores(model, ids, chunk_size=64, n_sink=n_sink), atol=1e-6, rtol=0)


@pytest.mark.real_model
def test_scores_equal_kvpress_on_the_demo_model(demo_model):
    model, tokenizer = demo_model
    ids = prompt(tokenizer)[:, :150]
    scores = our_scores(model, ids, chunk_size=100)
    torch.testing.assert_close(scores, kvpress_scores(model, ids, chunk_size=100), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        ("llama", (120, 120)),
        ("llama", (70, 120)),
        ("llama", (120, 28)),
        ("gemma3", (70, 120)),
        ("gemma3", (120, 28)),
        ("ministral3", (120, 120)),  # padded, transformers' own query scale differs from that of the row alone
    ],
)
def test_batch_scores_equal_those_of_each_row_alone(tiny_model, tokenizer, kind, lengths):
    model = tiny_model(kind, vocab_size=49152)
    whole = prompt(tokenizer)
    rows = [whole[:, : lengths[0]], whole.flip(1)[:, : lengths[1]]]
    ids, mask = left_padded(rows)
    scores = our_scores(model, ids, mask, tokenizer=tokenizer, chunk_size=40)
    for i, row in enumerate(rows):
        pad = ids.shape[1] - row.shape[1]
        alone = our_scores(model, row, tokenizer=tokenizer, chunk_size=40)
        torch.testing.assert_close(scores[:, i : i + 1, :, pad:], alone, atol=1e-5, rtol=0)
        assert (scores[:, i, :, :pad] == 0).all()


def test_prompt_shorter_than_the_templates_prefix_is_scored(saved):
    model, tokenizer = saved("llama")
    ids = prompt(tokenizer)[:, 30:45]
    assert (our_scores(model, ids) > 0).all()


# --- the cache is only borrowed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("make", [lambda config: DynamicCache(config=config), make_cache], ids=["dynamic", "verkv"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_replay_leaves_the_cache_as_it_was(tiny_model, tokenizer, kind, make, padded):
    model = tiny_model(kind, vocab_size=49152)
    ids, mask = left_padded([random_ids(1, 60 if padded else 90), random_ids(1, 90, seed=2)])
    cache = prefill(model, ids, cache=make(model.config), attention_mask=mask, position_ids=positions(mask))
    before = keys_and_values(cache)
    our_scores(model, ids, mask, cache=cache, tokenizer=tokenizer, chunk_size=32)
    assert_unchanged(cache, before)


@pytest.mark.parametrize("failing_pass", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_failing_replay_leaves_the_cache_as_it_was(tiny_model, tokenizer, kind, failing_pass):
    model = tiny_model(kind, vocab_size=49152)
    ids = random_ids(1, 90)
    cache = prefill(model, ids)
    before = keys_and_values(cache)
    passes = []

    def fail(*args):
        passes.append(1)
        if len(passes) == failing_pass:
            raise RuntimeError("in the middle of a replay")

    handle = model.model.layers[2].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        our_scores(model, ids, cache=cache, tokenizer=tokenizer, chunk_size=32)
    handle.remove()
    assert_unchanged(cache, before)
    question = random_ids(1, 5, seed=3)
    with torch.no_grad():
        logits = model(input_ids=question, past_key_values=cache).logits
        expected = model(input_ids=torch.cat([ids, question], 1)).logits[:, -5:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_replay_is_not_observed_afterwards(tiny_model, tokenizer):
    """The tap on attention is gone when the replay has ended, also with an error."""
    from verkv.attention import _observer

    model = tiny_model("llama", vocab_size=49152)
    our_scores(model, random_ids(1, 40), tokenizer=tokenizer)
    assert _observer.get() is None


# --- what cannot be scored --------------------------------------------------------------------------------------------


def test_without_a_tokenizer_the_remedy_is_named(tiny_model):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"KVzipPress\(tokenizer=\.\.\.\)"), KVzipPress(0.5)(model):
        pass


def test_embeddings_cannot_be_replayed(tiny_model, tokenizer):
    model = tiny_model("llama")
    cache = DynamicCache()
    embeddings = model.get_input_embeddings()(random_ids(1, 60)).detach()
    press = KVzipPress(0.5, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="input_ids"), torch.no_grad(), press(model):
        model.model(inputs_embeds=embeddings, past_key_values=cache)
    assert cache.get_seq_length() == 60 and not full_layers(cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 0}, "chunk_size"),
        ({"n_sink": -1}, "n_sink"),
        ({"budget_scope": "token"}, "budget_scope"),
        ({"compression_ratio": 8}, "compression_ratio.*0.9375"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        KVzipPress(**options)


# --- eviction ---------------------------------------------------------------------------------------------------------


def expected_kept(scores, n_sink, n_kept, scope):
    """Brute force: (L, H, T) bool of the sinks and the best-scored others; ``n_kept`` tokens per KV head on average."""
    n_layers, n_heads, n_tokens = scores.shape
    groups = {"head": n_layers * n_heads, "layer": n_layers, "model": 1}[scope]
    kept = torch.zeros(groups, n_layers * n_heads // groups * n_tokens, dtype=torch.bool)
    ranked = scores.clone()
    ranked[..., :n_sink] = 2.0
    for group, row in enumerate(ranked.reshape(groups, -1)):
        order = sorted(range(len(row)), key=lambda i: -row[i].item())
        kept[group, order[: int(n_kept * n_layers * n_heads / groups)]] = True
    return kept.reshape(scores.shape)


@pytest.mark.parametrize("ratio", [0.5, 0.8])
@pytest.mark.parametrize("scope", ["head", "layer", "model"])
def test_eviction_keeps_exactly_the_highest_scores(tiny_model, tokenizer, scope, ratio):
    model = tiny_model("llama", vocab_size=49152)
    ids = prompt(tokenizer)[:, :100]
    plain = prefill(model, ids)
    scores = our_scores(model, ids, cache=plain, tokenizer=tokenizer)[:, 0]
    press = KVzipPress(ratio, budget_scope=scope, tokenizer=tokenizer)
    cache = prefill(model, ids, press)

    full_bytes = plain.layers[0].keys.nbytes + plain.layers[0].values.nbytes  # of one layer, 2 KV heads
    row_bytes = 2 * 16 * 4 + 1  # key and value in float32, and the byte of r
    n_kept = ((1 - ratio) * full_bytes - 8 * 3) / row_bytes / 2  # less the row offsets
    kept = expected_kept(scores, 4, n_kept, scope)
    assert kept[..., :4].all()
    for i, layer in enumerate(cache.layers):
        assert resident_rows(layer).tolist() == kept[i].sum(-1).tolist()
        assert torch.equal(layer.context.rows.keys, plain.layers[i].keys[0][kept[i]])
        assert torch.equal(layer.context.rows.values, plain.layers[i].values[0][kept[i]])

    memory = press.memory_report()
    assert memory.host == {}
    assert memory.full_bytes == 4 * full_bytes
    assert 0 < sum(memory.device.values()) <= (1 - ratio) * memory.full_bytes
    assert any("gone" in note for note in press.stats.notes)


def test_eviction_of_a_padded_batch_equals_each_row_alone(tiny_model, tokenizer):
    model = tiny_model("llama", vocab_size=49152)
    whole = prompt(tokenizer)
    rows, question = [whole[:, :80], whole[:, :120]], random_ids(2, 6, seed=9)
    ids, mask = left_padded(rows)
    press = KVzipPress(0.5, budget_scope="head", tokenizer=tokenizer)
    cache = prefill(model, ids, press, attention_mask=mask, position_ids=positions(mask))
    longer = torch.cat([mask, torch.ones(2, 6, dtype=torch.long)], 1)
    with torch.no_grad():
        logits = model(
            input_ids=question,
            past_key_values=cache,
            attention_mask=longer,
            position_ids=positions(longer)[:, -6:],
        ).logits
        for i, row in enumerate(rows):
            alone = model(input_ids=question[i : i + 1], past_key_values=prefill(model, row, press)).logits
            torch.testing.assert_close(logits[i : i + 1], alone, atol=2e-4, rtol=1e-4)


def test_evicted_tokens_have_no_influence(tiny_model, tokenizer):
    """Attention over the kept rows alone, computed by hand with the others masked out."""
    model = tiny_model("llama", "eager", vocab_size=49152, num_hidden_layers=1)
    ids, token = prompt(tokenizer)[:, :100], random_ids(1, 1, seed=4)
    cache = prefill(model, ids, KVzipPress(0.6, tokenizer=tokenizer))
    plain = prefill(model, ids)
    row_keys = cache.layers[0].context.rows.keys
    kept = (plain.layers[0].keys[0][:, :, None] == row_keys.view(1, 1, *row_keys.shape)).all(-1).any(-1)  # (Hkv, T)
    assert kept.sum() == len(row_keys)
    mask = torch.where(torch.cat([kept, torch.ones(2, 1, dtype=torch.bool)], 1), 0.0, -torch.inf)
    mask = mask.repeat_interleave(2, 0)[None, :, None]  # (1, Hq, 1, T + 1)
    with torch.no_grad():
        logits = model(input_ids=token, past_key_values=cache).logits
        expected = model(input_ids=token, past_key_values=plain, attention_mask=mask).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_audit_keeps_the_host_and_measures(tiny_model, tokenizer):
    model = tiny_model("llama", vocab_size=49152)
    press = KVzipPress(0.8, audit=True, tokenizer=tokenizer)
    cache = prefill(model, prompt(tokenizer)[:, :100], press)
    with torch.no_grad():
        model(input_ids=random_ids(1, 1), past_key_values=cache)
    assert sum(press.memory_report().host.values()) == press.stats.full_bytes
    assert press.stats.relative_errors().max() > 0
