"""Weighted attention against a loop, and the hand-off to transformers' attention functions: what is refused."""

import pytest
import torch
from sealing import CACHE, forward, full_layers, lengths, prompt_ids, seal
from torch.testing import assert_close
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verkv.attention import SealedHandle, observe_attention, weighted_attention, wrap_attention_functions
from verkv.cache import make_cache

N_CONTEXT, N_TOTAL = 40, 48
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}


@pytest.fixture
def registry():
    """transformers' attention functions, as they were after the test."""
    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    yield ALL_ATTENTION_FUNCTIONS
    for name in set(ALL_ATTENTION_FUNCTIONS._local_mapping) - set(before):
        del ALL_ATTENTION_FUNCTIONS._local_mapping[name]
    ALL_ATTENTION_FUNCTIONS._local_mapping.update(before)


def sealed(model, ids, cache=None):
    cache = make_cache(model.config) if cache is None else cache
    forward(model, ids[:, :N_CONTEXT], cache)
    return cache, seal(model, cache)


def assert_usable(model, ids, cache, stats, n_passes=0):
    """Nothing of a failed pass is left, and a good one gives dense logits."""
    assert lengths(cache) == [N_CONTEXT] * len(cache.layers)
    assert stats.n_passes == n_passes
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, N_CONTEXT:]
    assert_close(forward(model, ids[:, N_CONTEXT:], cache), expected, **TOLERANCE)
    assert stats.n_passes == n_passes + 1


# --- weighted attention -----------------------------------------------------------------------------------------------


def test_weighted_attention_equals_a_loop():
    generator = torch.Generator().manual_seed(0)
    sizes = (5, 1, 3)
    logits = [3 * torch.randn(2, 4, n, generator=generator) for n in sizes]
    values = [torch.randn(2, n, 6, generator=generator) for n in sizes]
    log_weights = [torch.randn(2, 1, n, generator=generator) for n in sizes]
    output, lse = weighted_attention([(a + b, v) for a, b, v in zip(logits, log_weights, values, strict=True)])
    assert output.dtype == lse.dtype == torch.float32
    for unit in range(2):
        for row in range(4):
            total, weighted = 0.0, torch.zeros(6, dtype=torch.float64)
            for part, n in enumerate(sizes):
                for token in range(n):
                    weight = (
                        log_weights[part][unit, 0, token].double().exp() * logits[part][unit, row, token].double().exp()
                    )
                    total += weight
                    weighted += weight * values[part][unit, token].double()
            assert_close(lse[unit, row].double(), torch.as_tensor(total).log(), atol=1e-5, rtol=0)
            assert_close(output[unit, row].double(), weighted / total, atol=1e-5, rtol=0)


def test_weighted_attention_survives_large_logits_and_empty_parts():
    logits = torch.tensor([[1e4, 1e4 - 1.0]])
    output, lse = weighted_attention([(logits, torch.tensor([[0.0], [1.0]])), (torch.empty(1, 0), torch.empty(0, 1))])
    assert_close(output, torch.sigmoid(torch.tensor([[-1.0]])), rtol=1e-3, atol=0)  # float32 resolves 1e4 to 1e-3
    assert_close(lse, torch.tensor([1e4 + 0.31326]), rtol=1e-7, atol=0)


def test_weighted_attention_without_tokens_is_zero():
    output, lse = weighted_attention([(torch.full((1, 3), -torch.inf), torch.ones(3, 2))])
    assert torch.equal(output, torch.zeros(1, 2)) and lse.item() == -torch.inf


def test_weights_add_up_across_parts():
    """A part split in two gives the same."""
    logits, values = torch.randn(3, 7), torch.randn(7, 4)
    whole = weighted_attention([(logits, values)])
    halves = weighted_attention([(logits[:, :2], values[:2]), (logits[:, 2:], values[2:])])
    assert_close(halves, whole)


# --- foreign attention functions --------------------------------------------------------------------------------------


def foreign_sdpa(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True), None


def foreign_matmul(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    return (query @ key.mT * scaling).softmax(-1) @ value, None


def foreign_property(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    return query @ torch.cat([key.mT] * 2, 1), None


def foreign_values(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    return value.transpose(1, 2), None


@pytest.mark.parametrize("function", [foreign_sdpa, foreign_matmul, foreign_property, foreign_values])
@pytest.mark.parametrize("cache_kind", ["dynamic", "make_cache"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_foreign_function_is_refused(tiny_model, registry, kind, cache_kind, function):
    model, ids = tiny_model(kind), prompt_ids(1, N_TOTAL)
    cache, stats = sealed(model, ids, DynamicCache() if cache_kind == "dynamic" else None)
    registry["foreign"] = function
    full_only = {full_layers(model)[-1]}

    def only_last(module, *args, **kwargs):  # the layers before it have been through
        return (function if module.layer_idx in full_only else registry["sdpa"])(module, *args, **kwargs)

    for attention in (function, only_last) if kind == "llama" else (only_last,):
        registry["foreign"] = attention
        model.set_attn_implementation("foreign")
        with pytest.raises(NotImplementedError, match=r"does not wrap.*attn_implementation='sdpa'"):
            forward(model, ids[:, N_CONTEXT:], cache)
        model.set_attn_implementation("sdpa")
        assert lengths(cache) == [N_CONTEXT] * len(cache.layers)
        assert stats.n_passes == 0
    assert_usable(model, ids, cache, stats)


def test_function_registered_before_sealing_is_wrapped(tiny_model, registry):
    model, ids = tiny_model("llama"), prompt_ids(1, N_TOTAL)

    def own(*args, **kwargs):
        return registry["sdpa"](*args, **kwargs)

    registry["own"] = own
    cache, stats = sealed(model, ids)
    model.set_attn_implementation("own")
    assert forward(model, ids[:, N_CONTEXT:], cache).isfinite().all()
    assert stats.n_passes == 1


class Layer:
    undone = 0

    def undo_update(self):
        self.undone += 1


READING = {
    "shape": lambda h: h.shape,
    "size": lambda h: h.size(2),
    "dim": lambda h: h.dim(),
    "dtype": lambda h: h.dtype,
    "device": lambda h: h.device,
    "stride": lambda h: h.stride(),
    "contiguity": lambda h: h.is_contiguous(),
    "repr": repr,
    "base": lambda h: h._base is None or True,  # torch.compile asks for it
    "gradient": lambda h: h.requires_grad,
}
COMPUTING = {
    "transpose": lambda h: h.transpose(1, 2),
    "mT": lambda h: h.mT,
    "permute": lambda h: h.permute(0, 2, 1, 3),
    "movedim": lambda h: torch.movedim(h, 1, 2),
    "index": lambda h: h[:, :1],
    "select": lambda h: h.select(1, 0),
    "unbind": lambda h: h.unbind(1),
    "chunk": lambda h: h.chunk(2, 1),
    "cast": lambda h: h.half(),
    "to": lambda h: h.to(torch.float64),
    "type": lambda h: h.type(torch.float16),
    "detach": lambda h: h.detach(),
    "scale": lambda h: h * 0.5,
    "subtract": lambda h: h - 1,
    "matmul": lambda h: h @ torch.ones(16, 16),
    "rmatmul": lambda h: torch.ones(3, 3) @ h,
    "einsum": lambda h: torch.einsum("bhtd,bhsd->bhts", h, h),
    "cat": lambda h: torch.cat([torch.zeros(1, 2, 3, 16), h], 2),
    "stack": lambda h: torch.stack([h, h]),
    "sdpa": lambda h: torch.nn.functional.scaled_dot_product_attention(torch.ones(1, 2, 3, 16), h, h),
    "operator": lambda h: torch.ops.aten.transpose.int(h, 1, 2),
    "keyword": lambda h: torch.mul(input=h, other=2.0),
    "in_place": lambda h: h.__setitem__(0, 0.0),
}


@pytest.mark.parametrize("read", READING.values(), ids=READING)
def test_reading_a_handle_works(read):
    tail, layer = torch.randn(1, 2, 3, 16), Layer()
    assert read(SealedHandle.wrap(tail, layer)) == (
        repr(SealedHandle.wrap(tail, layer)) if read is repr else read(tail)
    )
    assert layer.undone == 0


@pytest.mark.parametrize("compute", COMPUTING.values(), ids=COMPUTING)
def test_computing_with_a_handle_is_refused_and_undone(compute):
    layer = Layer()
    with pytest.raises(NotImplementedError, match="attn_implementation='sdpa', 'eager' or 'flash_attention_2'"):
        compute(SealedHandle.wrap(torch.randn(1, 2, 3, 16), layer))
    assert layer.undone > 0


# --- what wrapped functions refuse ------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_output_attentions_is_refused(tiny_model, kind, attn):
    model, ids = tiny_model(kind, attn), prompt_ids(1, N_TOTAL)
    cache, stats = sealed(model, ids)
    for n_new in (3, 1):
        with pytest.raises(NotImplementedError, match="pass output_attentions=False"):
            forward(model, ids[:, N_CONTEXT : N_CONTEXT + n_new], cache, output_attentions=True)
        assert lengths(cache) == [N_CONTEXT] * len(cache.layers)
    assert_usable(model, ids, cache, stats)


def test_output_attentions_of_generate_and_config_is_refused(tiny_model):
    model, ids = tiny_model("llama", "eager"), prompt_ids(1, N_TOTAL)
    cache, stats = sealed(model, ids)
    with pytest.raises(NotImplementedError, match="output_attentions"):
        model.generate(ids, **{CACHE: cache}, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
    model.config.output_attentions = True
    with pytest.raises(NotImplementedError, match="output_attentions"):
        forward(model, ids[:, N_CONTEXT:], cache)
    model.config.output_attentions = False
    assert_usable(model, ids, cache, stats)


@pytest.mark.parametrize("keyword", ["softcap", "s_aux"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_soft_caps_and_learned_sinks_are_refused(tiny_model, kind, keyword):
    model, ids = tiny_model(kind), prompt_ids(1, N_TOTAL)
    cache, stats = sealed(model, ids)
    forward(model, ids[:, N_CONTEXT : N_CONTEXT + 2], cache)
    cache.crop(N_CONTEXT)
    sealed_layer = model.model.layers[full_layers(model)[-1]].self_attn

    def add_keyword(module, args, kwargs):
        return args, {**kwargs, keyword: torch.tensor(30.0)}

    handle = sealed_layer.register_forward_pre_hook(add_keyword, with_kwargs=True)
    with pytest.raises(NotImplementedError, match=keyword):
        forward(model, ids[:, N_CONTEXT:], cache)
    handle.remove()
    assert_usable(model, ids, cache, stats, n_passes=1)


def test_gemma2_soft_cap_is_refused():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=16,
        attn_implementation="eager",
    )
    model, ids = Gemma2ForCausalLM(config).eval(), prompt_ids(1, N_TOTAL)
    cache, _ = sealed(model, ids)
    with pytest.raises(NotImplementedError, match="softcap"):
        forward(model, ids[:, N_CONTEXT:], cache)
    assert lengths(cache) == [N_CONTEXT] * 2


# --- masks ------------------------------------------------------------------------------------------------------------


def test_mask_that_hides_context_tokens_is_refused(tiny_model):
    model, ids = tiny_model("llama"), prompt_ids(1, N_TOTAL)
    cache, stats = sealed(model, ids)
    mask = torch.ones(1, N_TOTAL, dtype=torch.long)
    mask[:, 5] = 0
    with pytest.raises(NotImplementedError, match="hides sealed context tokens"):
        forward(model, ids[:, N_CONTEXT:], cache, attention_mask=mask)
    assert_usable(model, ids, cache, stats)


def test_mask_that_shows_padding_is_refused(tiny_model):
    model, ids = tiny_model("llama"), prompt_ids(1, N_TOTAL)
    cache = make_cache(model.config)
    mask = (torch.arange(N_TOTAL) >= 4).long()[None]
    forward(model, ids[:, :N_CONTEXT], cache, attention_mask=mask[:, :N_CONTEXT])
    seal(model, cache, n_padding=torch.tensor([4]))
    with pytest.raises(NotImplementedError, match="shows padding"):
        forward(model, ids[:, N_CONTEXT:], cache, attention_mask=torch.ones_like(mask))
    forward(model, ids[:, N_CONTEXT:], cache, attention_mask=mask)
    assert lengths(cache) == [N_TOTAL] * 4


# --- wrapping ---------------------------------------------------------------------------------------------------------


def test_wrapping_is_idempotent_and_keeps_names():
    wrap_attention_functions()
    before = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS}
    wrap_attention_functions()
    assert {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS} == before
    assert {"sdpa", "eager", "flash_attention_2", "flex_attention"} <= set(before)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3", "ministral3"])
def test_wrapping_changes_nothing_for_plain_caches(tiny_model, kind, attn):
    model, ids = tiny_model(kind, attn), prompt_ids(1, N_TOTAL)
    wrap_attention_functions()
    with torch.no_grad():
        wrapped = model(ids).logits
        ALL_ATTENTION_FUNCTIONS._local_mapping, local = {}, ALL_ATTENTION_FUNCTIONS._local_mapping
        try:
            plain = model(ids).logits
        finally:
            ALL_ATTENTION_FUNCTIONS._local_mapping = local
    assert torch.equal(wrapped, plain)


def test_observer_sees_queries_keys_and_scaling_inside_the_block_only(tiny_model):
    model, ids = tiny_model("gemma3"), prompt_ids(1, N_TOTAL)
    seen = []

    def observe(module, query, key, scaling):
        seen.append((module.layer_idx, tuple(query.shape), tuple(key.shape), scaling))

    with observe_attention(observe):
        model(ids)
    model(ids)
    assert seen == [(i, (1, 4, N_TOTAL, 16), (1, 2, N_TOTAL, 16), 24**-0.5) for i in range(6)]


def test_observer_is_removed_after_an_exception(tiny_model):
    model, ids, seen = tiny_model("llama"), prompt_ids(1, 5), []
    with pytest.raises(ZeroDivisionError), observe_attention(lambda *a: 1 // 0):
        model(ids)
    with observe_attention(lambda *a: seen.append(a)):
        pass
    model(ids)
    assert not seen
