"""Contexts saved and loaded: identical answers, also in another process; damaged, foreign and foreign-model files."""

import copy
import json
import os
import random
import subprocess
import sys
import textwrap
import zlib

import pytest
import torch

from verkv import make_cache
from verkv.codecs import (
    CodecError,
    Container,
    CorruptFileError,
    FormatError,
    MismatchError,
    VersionError,
    container,
    is_prefix,
    load_context,
    open_context,
    save_context,
)
from verkv.codecs.object_state import load_state
from verkv.codecs.tensor_store import TensorReader

pytestmark = pytest.mark.filterwarnings("ignore:residuals are larger")

N = 120
SKETCHES = ["rope_pair", "exact", "transform", "query_pca", "page_minmax"]


@torch.no_grad()
def answer(model, cache, n=4, seed=3):
    """Logits of a question and of two more tokens, on a copy of a cache of one sequence."""
    ids = torch.randint(3, 256, (1, n), generator=torch.Generator().manual_seed(seed))
    cache = copy.deepcopy(cache)
    logits = [model(input_ids=ids, past_key_values=cache).logits]
    logits += [model(input_ids=ids[:, i : i + 1], past_key_values=cache).logits for i in range(2)]
    return torch.cat(logits, 1)


def sealed(model, ids, mask=None, **options):
    """A cache sealed by VerKV's press (or by PoissonComp, with ``sketch=None``)."""
    from kvpress import KnormPress

    from verkv import PoissonCompPress, VerKVPress

    common = {"compression_ratio": 0.6, "n_sink": 6, "n_local": 6, "seed": 4}
    sketch = options.pop("sketch", "rope_pair")
    if sketch is None:
        press = PoissonCompPress(KnormPress(), **common, **options)
    else:
        press = VerKVPress(KnormPress(), sketch=sketch, shortlist=4, epsilon=0.1, **common, **options)
    cache = make_cache(model.config)
    with torch.no_grad(), press(model):
        model(input_ids=ids, past_key_values=cache, attention_mask=mask)
    assert press.stats.sealed_layers, press.stats.notes
    return cache, press


@pytest.mark.parametrize("kind", ["llama", "gemma3", "ministral", "qwen3_5", "qwen3_next"])
def test_a_plain_cache_comes_back_bit_by_bit(tiny_model, prefill, tmp_path, kind):
    model = tiny_model(kind)
    ids, cache = prefill(model, N)
    n_bytes = save_context(tmp_path / "c", cache, model, token_ids=ids)
    assert n_bytes == (tmp_path / "c").stat().st_size
    loaded = load_context(tmp_path / "c", model)
    assert torch.equal(answer(model, loaded), answer(model, cache))
    assert is_prefix(tmp_path / "c", torch.cat([ids[0], ids[0]]))
    assert not is_prefix(tmp_path / "c", ids[0][:-1]) and not is_prefix(tmp_path / "c", ids[0].flip(0))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5"])
def test_a_coded_cache_is_the_restored_one(codec_of, prefill, tmp_path, kind):
    model, codec = codec_of(kind, None, ratio=4.0)
    _, cache = prefill(model, N)
    save_context(tmp_path / "c", cache, model, codec)
    loaded = load_context(tmp_path / "c", model, codec.artefact)
    restored = codec.compress(cache).restore()
    assert torch.equal(answer(model, loaded), answer(model, restored))
    codec.compress(cache).save(tmp_path / "d")
    assert torch.equal(answer(model, load_context(tmp_path / "d", model, codec.artefact)), answer(model, restored))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("sketch", [*SKETCHES, None])
def test_a_sealed_cache_answers_as_before(tiny_model, prefill, tmp_path, kind, sketch):
    model = tiny_model(kind)
    ids, _ = prefill(model, N)
    cache, press = sealed(model, ids, sketch=sketch)
    with torch.no_grad():  # a tail
        model(input_ids=ids[:, :5], past_key_values=cache)
    save_context(tmp_path / "c", cache, model, press=press)
    loaded = load_context(tmp_path / "c", model)
    assert torch.equal(answer(model, loaded), answer(model, cache))
    for restored in (loaded, cache):  # back to the end of the context, for another question
        restored.crop(N)
    assert torch.equal(answer(model, loaded, seed=8), answer(model, cache, seed=8))
    assert loaded.stats.sealed_layers == cache.stats.sealed_layers
    assert loaded.stats.full_bytes == cache.stats.full_bytes and "loaded from a file" in loaded.stats.notes[-1]
    assert loaded.memory_report().__dict__.keys() == cache.memory_report().__dict__.keys()
    with Container(tmp_path / "c") as file:
        assert file.header["press"]["seed"] == 4 and len(file.header["segments"]) == 1


@pytest.mark.parametrize("options", [{"target": "output"}, {"calibrate": "layer"}, {"paper": True}], ids=str)
def test_other_ways_to_verify_answer_as_before(codec_of, prefill, tmp_path, options):
    model, codec = codec_of("llama", None, ratio=2.0)
    ids, _ = prefill(model, N)
    cache, _ = sealed(model, ids, **options)
    save_context(tmp_path / "c", cache, model)
    assert torch.equal(answer(model, load_context(tmp_path / "c", model)), answer(model, cache))
    save_context(tmp_path / "c", cache, model, codec)
    loaded = load_context(tmp_path / "c", model, codec.artefact)
    if options.get("target") == "output":
        context = loaded.layers[0].context
        distances = (context.host.values.flatten(0, 1) - context.value_norms.centre[:, None]).norm(dim=-1)
        assert (context.value_norms.decode() >= distances * (1 - 1e-5)).all()


def test_audited_batches_with_padding_and_beams_answer_as_before(tiny_model, prefill, tmp_path):
    model = tiny_model("llama")
    ids, _ = prefill(model, N)
    ids = torch.cat([ids, ids.flip(1)])
    mask = torch.ones_like(ids)
    mask[0, :17] = 0
    cache, _ = sealed(model, ids, mask, audit=True)
    save_context(tmp_path / "c", cache, model)
    loaded = load_context(tmp_path / "c", model)
    question = torch.full((2, 3), 9)
    full = torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], 1)
    logits = []
    for restored in (cache, loaded):
        with torch.no_grad():
            logits.append(model(input_ids=question, past_key_values=restored, attention_mask=full).logits)
    assert torch.equal(*logits)
    assert loaded.stats.violation_rate(0.1) == cache.stats.violation_rate(0.1)


@pytest.mark.parametrize("sketch", ["rope_pair", "exact"])
def test_rows_and_host_tier_of_a_coded_sealed_cache_are_the_restored_ones(codec_of, prefill, tmp_path, sketch):
    model, codec = codec_of("llama", None, ratio=2.0, sinks=6, window=6)
    ids, _ = prefill(model, N)
    cache, _ = sealed(model, ids, sketch=sketch)
    save_context(tmp_path / "c", cache, model, codec)
    loaded = load_context(tmp_path / "c", model, codec.artefact)
    for layer, before in zip(loaded.layers, cache.layers, strict=True):
        context = layer.context
        assert torch.equal(context.codes, before.context.codes)
        host = context.host.keys.flatten(0, 1)
        units, positions = ((context.codes & 0x80) != 0).nonzero(as_tuple=True)
        assert torch.equal(context.rows.keys, host[units, positions])
        error = (context.host.keys - before.context.host.keys).norm() / before.context.host.keys.norm()
        assert 0 < float(error) < 0.05
        assert torch.equal(context.host.keys[:, :, :6], before.context.host.keys[:, :, :6])
    assert torch.allclose(answer(model, loaded), answer(model, cache), atol=1.5)


def test_sealed_caches_without_a_full_copy_cannot_be_coded(codec_of, prefill, tmp_path):
    model, codec = codec_of("llama", None, ratio=2.0)
    ids, _ = prefill(model, N)
    cache, _ = sealed(model, ids, sketch=None)
    with pytest.raises(CodecError, match="no full copy"):
        save_context(tmp_path / "c", cache, model, codec)
    audited, _ = sealed(model, ids, sketch=None, audit=True)
    with pytest.raises(CodecError, match="without fetching"):
        save_context(tmp_path / "c", audited, model, codec)
    assert not list(tmp_path.iterdir())


def test_compress_first_then_sample(codec_of, prefill):
    from kvpress import KnormPress

    from verkv import VerKVPress

    model, codec = codec_of("llama", None, ratio=2.0)
    _, cache = prefill(model, N)
    restored = codec.compress(cache).restore()
    scores = {i: layer.keys.norm(dim=-1) for i, layer in enumerate(restored.layers)}
    press = VerKVPress(KnormPress(), compression_ratio=0.6, n_sink=6, n_local=6, shortlist=4)
    press.seal(model, restored, scores)
    assert restored.layers[0].sealed and torch.isfinite(answer(model, restored)).all()


def test_another_process_gives_the_same_answer(tiny_model, prefill, tmp_path):
    model = tiny_model("llama")
    ids, _ = prefill(model, N)
    cache, _ = sealed(model, ids, sketch="transform")
    save_context(tmp_path / "c", cache, model)
    model.save_pretrained(tmp_path / "model")
    code = f"""
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM
        from verkv.codecs import load_context

        model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}, dtype=torch.float32).eval()
        cache = load_context({str(tmp_path / "c")!r}, model)
        with torch.no_grad():
            first = model(input_ids=torch.arange(3, 9)[None], past_key_values=cache).logits
            second = model(input_ids=torch.tensor([[7]]), past_key_values=cache).logits
        save_file({{"logits": torch.cat([first, second], 1)}}, {str(tmp_path / "logits")!r})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    from safetensors.torch import load_file

    with torch.no_grad():
        first = model(input_ids=torch.arange(3, 9)[None], past_key_values=cache).logits
        second = model(input_ids=torch.tensor([[7]]), past_key_values=cache).logits
    assert torch.equal(load_file(tmp_path / "logits")["logits"], torch.cat([first, second], 1))


# --- files that are not as they should be -------------------------------------------------------------------------


@pytest.fixture(params=["raw", "coded", "sealed", "sealed and coded"])
def stored(request, codec_of, prefill, tmp_path):
    """Path, and a function that loads it whole."""
    model, codec = codec_of("gemma3", None, ratio=4.0)
    ids, cache = prefill(model, 60)
    if "sealed" in request.param:
        cache, _ = sealed(model, ids)
    save_context(tmp_path / "c", cache, model, codec if "coded" in request.param else None)
    return tmp_path / "c", lambda path: load_context(path, model, codec.artefact)


def test_every_truncation_is_one_clear_error(stored):
    path, load = stored
    load(path)
    for length in range(path.stat().st_size - 1, -1, -101):
        os.truncate(path, length)
        with pytest.raises(CodecError):
            load(path)


def test_every_flipped_byte_is_one_clear_error(stored):
    path, load = stored
    data = bytearray(path.read_bytes())
    generator = random.Random(0)
    for position in [*range(40), *(generator.randrange(len(data)) for _ in range(60))]:
        bit = 1 << generator.randrange(8)
        data[position] ^= bit
        path.write_bytes(data)
        with pytest.raises(CodecError):
            load(path)
        data[position] ^= bit
    path.write_bytes(data)
    load(path)


def edit_header(path, edit):
    """Change a file's header, with lengths and checksum made right again: what checksums cannot notice."""
    with Container(path) as file:
        header, sections = file.header, [(key, file.stored(key)) for key in file]
        edit(header)
        container.write_container(path, header, sections)


HUGE = 2**60


@pytest.mark.parametrize(
    "edit",
    [
        lambda s: s.update(n_tokens=HUGE),
        lambda s: s.update(n_tokens=HUGE, blocks=[HUGE - s["n_exact"]]),
        lambda s: s.update(n_tokens=HUGE, n_exact=HUGE - sum(s["blocks"])),
        lambda s: s.update(blocks=[0, *s["blocks"]]),
        lambda s: s.update(blocks=[-1, s["blocks"][0] + 1]),
        lambda s: s.update(n_exact=-5),
        lambda s: s.update(dtype="complex64"),
        lambda s: s.pop("blocks"),
        lambda s: s.update(blocks="many"),
        lambda s: s["config"].update(ratio=-1),
        lambda s: s["config"].update(unknown=1),
        lambda s: s["config"].update(ratio=8.0),
        lambda s: s["config"].update(block_tokens=1),
        lambda s: next(iter(s["tensors"].values())).__setitem__(2, [HUGE]),
        lambda s: next(iter(s["tensors"].values())).__setitem__(2, [-1, -1]),
        lambda s: next(iter(s["tensors"].values())).__setitem__(1, "float1"),
        lambda s: s.update(tensors={}),
        lambda s: s.update(raw_layers={"99": {"kind": "sliding"}}),
        lambda s: s["raw_layers"]["0"].update(kind="linear"),
        lambda s: s["raw_layers"]["0"].pop("length"),
        lambda s: s.update(kind="video"),
        lambda s: s.update(layout=[]),
    ],
)
def test_headers_that_lie_are_one_clear_error(codec_of, prefill, tmp_path, edit):
    model, codec = codec_of("gemma3", None, ratio=4.0)
    _, cache = prefill(model, 60)
    save_context(tmp_path / "c", cache, model, codec)
    edit_header(tmp_path / "c", lambda header: edit(header["segments"][0]))
    with pytest.raises(CodecError):
        load_context(tmp_path / "c", model, codec.artefact)


@pytest.mark.parametrize(
    "edit",
    [
        lambda h: h.update(segments=[]),
        lambda h: h.update(segments=h["segments"] * 2),
        lambda h: h.update(segments="none"),
        lambda h: h.update(format="other"),
        lambda h: h.update(kind="soup"),
        lambda h: h["sealed"].update(layers={}),
        lambda h: h["sealed"].pop("stats"),
        lambda h: h["sealed"]["stats"].update(sealed_layers=[0]),
        lambda h: h["sealed"]["layers"]["5"]["context"].update(object="os:system"),
        lambda h: h["sealed"]["layers"]["5"]["context"].update(object="verkv.context:torch"),
        lambda h: h["sealed"]["layers"]["5"]["context"].update(object="verkv.tiers:HostTier"),
        lambda h: h["sealed"]["layers"]["5"]["context"]["attributes"].pop("codes"),
        lambda h: h["sealed"]["layers"]["5"]["context"]["attributes"].update(n_contexts=HUGE),
    ],
)
def test_sealings_that_lie_are_one_clear_error(tiny_model, prefill, tmp_path, edit):
    model = tiny_model("gemma3")
    ids, _ = prefill(model, 60)
    cache, _ = sealed(model, ids)
    save_context(tmp_path / "c", cache, model)
    edit_header(tmp_path / "c", edit)
    with pytest.raises(CodecError):
        load_context(tmp_path / "c", model)


def test_a_bomb_in_a_coded_file_is_not_inflated(codec_of, prefill, tmp_path):
    model, codec = codec_of("llama", None, ratio=4.0)
    _, cache = prefill(model, 60)
    save_context(tmp_path / "c", cache, model, codec)
    with Container(tmp_path / "c") as file:
        header, sections = file.header, [(key, file.stored(key)) for key in file]
    bombs = [
        (key, container.Section(zlib.compress(bytes(2**26)), section.raw_length, 1) if key.kind == 4 else section)
        for key, section in sections
    ]
    container.write_container(tmp_path / "c", header, bombs)
    with pytest.raises(CorruptFileError, match="another number of bytes"):
        load_context(tmp_path / "c", model, codec.artefact)


def test_files_of_another_kind_model_or_calibration_are_named_as_such(codec_of, tiny_model, prefill, tmp_path):
    model, codec = codec_of("llama", None, ratio=4.0)
    _, other_codec = codec_of("llama", {"seed": 1}, ratio=4.0)
    _, cache = prefill(model, 60)
    save_context(tmp_path / "c", cache, model, codec)
    with pytest.raises(MismatchError, match="pass the calibration"):
        load_context(tmp_path / "c", model)
    with pytest.raises(MismatchError, match="another calibration"):
        load_context(tmp_path / "c", model, other_codec.artefact)
    for other in (tiny_model("llama", seed=1), tiny_model("qwen2")):
        with pytest.raises(MismatchError, match="saved for a model"):
            load_context(tmp_path / "c", other, codec.artefact)
    with pytest.raises(FormatError):
        load_context(codec.artefact.path, model)
    with pytest.raises(FormatError):
        load_context(tmp_path / "nothing", model)
    save_context(tmp_path / "raw", cache, model)
    with pytest.raises(FormatError, match="not coded"):
        open_context(tmp_path / "raw", model, codec.artefact)
    data = bytearray((tmp_path / "c").read_bytes())
    data[4] = 2
    (tmp_path / "c").write_bytes(data)
    with pytest.raises(VersionError):
        load_context(tmp_path / "c", model, codec.artefact)


def test_only_what_is_asked_for_is_read_from_a_file(codec_of, prefill, tmp_path):
    model, codec = codec_of("llama", {"layers_per_group": 2}, ratio=4.0)
    _, cache = prefill(model, N)
    save_context(tmp_path / "c", cache, model, codec)
    opened = open_context(tmp_path / "c", model, codec.artefact)
    tokens = torch.tensor([10, 20])  # of the first block
    expected = codec.compress(cache).decode_layer(3, tokens)
    for key in list(opened.sections):
        if key.kind == 4 and (key.group == 0 or key.block > 0):
            offset, length, *_ = opened.sections._entries[key]
            data = bytearray((tmp_path / "c").read_bytes())
            data[offset + length // 2] ^= 1
            (tmp_path / "c").write_bytes(data)
    opened.sections.close()
    opened = open_context(tmp_path / "c", model, codec.artefact)
    assert all(torch.equal(a, b) for a, b in zip(opened.decode_layer(3, tokens), expected, strict=True))
    with pytest.raises(CorruptFileError):
        opened.restore()


def test_a_header_with_infinities_is_still_json(tiny_model, prefill, tmp_path):
    model = tiny_model("llama")
    ids, _ = prefill(model, N)
    cache, _ = sealed(model, ids)
    cache.stats.notes.append("ünïcode")
    save_context(tmp_path / "c", cache, model)
    with Container(tmp_path / "c") as file:
        json.dumps(file.header)
    assert "ünïcode" in load_context(tmp_path / "c", model).stats.notes


def test_no_class_outside_the_library_is_made():
    reader = TensorReader({}, container.MemorySections())
    for path in ("builtins:dict", "verkv.stats:FetchStats", "verkv.sketches.base:Protocol", "verkv:context", "os"):
        with pytest.raises(CorruptFileError):
            load_state({"object": path, "attributes": {}}, reader, torch.device("cpu"))
