"""``verkv kvtc calibrate | compress | inspect | verify``."""

import argparse
import json
import sys
from pathlib import Path

from verkv.codecs.errors import CodecError

_MAGIC = b"VKVC"


def add_parser(commands) -> None:
    """Add ``kvtc`` and its subcommands to the sub-parsers of ``verkv``."""
    parser = commands.add_parser("kvtc", help="calibrate the cache codec for a model; compress and inspect contexts")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    defaults = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}

    calibrate = actions.add_parser("calibrate", help="fit the codec to a model, once", **defaults)
    calibrate.add_argument("model", help="name or folder of a causal language model")
    calibrate.add_argument("--text", type=Path, nargs="+", required=True, help="text files like those to come")
    calibrate.add_argument("--out", type=Path, required=True, help="the calibration, a .safetensors file")
    calibrate.add_argument("--tokens", type=int, default=160_000, help="how many tokens to use at most")
    calibrate.add_argument("--length", type=int, default=8192, help="tokens prefilled together")
    calibrate.add_argument("--min-ratio", type=float, default=8.0, help="smallest ratio the calibration shall serve")
    calibrate.add_argument("--layers-per-group", type=_layers, default="all", help="layers that share a basis, or all")
    calibrate.add_argument("--rank", type=int, help="axes to keep (default: as the smallest ratio needs)")
    calibrate.add_argument("--seed", type=int, default=0, help="of the choice of held-out rows")
    _add_model_options(calibrate)

    compress = actions.add_parser("compress", help="prefill a text and store its cache", **defaults)
    compress.add_argument("model", help="name or folder of the model")
    compress.add_argument("--calibration", type=Path, required=True, help="made by `verkv kvtc calibrate`")
    compress.add_argument("--text", type=Path, required=True, help="the context")
    compress.add_argument("--out", type=Path, required=True, help="the stored context")
    compress.add_argument("--ratio", type=float, default=16.0, help="nominal ratio against 16 bit")
    compress.add_argument("--k-ratio", type=float, help="of the keys, if another")
    compress.add_argument("--v-ratio", type=float, help="of the values, if another")
    compress.add_argument("--mode", choices=["dynamic", "static"], default="dynamic", help="kind of quantiser")
    compress.add_argument("--lossless", help="deflate, huffman, isal, zstd or none (default: deflate)")
    compress.add_argument("--sinks", type=int, default=4, help="leading tokens kept as they are")
    compress.add_argument("--window", type=int, default=128, help="trailing tokens kept as they are")
    _add_model_options(compress)

    inspect = actions.add_parser("inspect", help="say what a stored context or a calibration holds")
    inspect.add_argument("file", type=Path)

    verify = actions.add_parser("verify", help="compare all checksums of a stored context or a calibration")
    verify.add_argument("file", type=Path)


def run(options: argparse.Namespace) -> int:
    """Run a subcommand; returns the exit status."""
    actions = {"calibrate": _calibrate, "compress": _compress, "inspect": _inspect, "verify": _verify}
    try:
        actions[options.action](options)
    except (ValueError, NotImplementedError, OSError) as error:  # CodecError is a ValueError
        print(f"verkv kvtc {options.action}: {error}", file=sys.stderr)
        return 1
    return 0


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda, ... (default: cuda where there is one)")
    parser.add_argument("--dtype", default="auto", help="of the model: auto, float32, bfloat16, float16")


def _layers(text: str) -> int | str:
    return text if text == "all" else int(text)


def _load_model(options: argparse.Namespace):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype, None)
    if dtype is None:
        raise ValueError(f"--dtype {options.dtype} is not a type of torch")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(options.model)


def _calibrate(options: argparse.Namespace) -> None:
    import torch
    from tqdm import tqdm

    from verkv.codecs.calibration import CalibrationConfig, calibrate

    settings = CalibrationConfig(
        layers_per_group=options.layers_per_group, min_ratio=options.min_ratio, rank=options.rank, seed=options.seed
    )
    texts = [path.read_text() for path in options.text]
    model, tokenizer = _load_model(options)
    sequences, left = [], options.tokens
    for text in texts:
        ids = tokenizer(text).input_ids[:left]
        left -= len(ids)
        sequences += [torch.tensor(ids[i : i + options.length]) for i in range(0, len(ids), options.length)]
    with tqdm(total=1, unit="step", file=sys.stderr) as bar:

        def progress(stage: str, done: int, total: int) -> None:
            bar.set_description(stage)
            bar.total, bar.n = total, done
            bar.refresh()

        artefact = calibrate(model, sequences, options.out, settings, ", ".join(map(str, options.text)), progress)
    print(_describe_calibration(artefact))


def _compress(options: argparse.Namespace) -> None:
    import torch

    from verkv.codecs.cache_access import dense_cache
    from verkv.codecs.config import KvtcConfig
    from verkv.codecs.context_file import save_context
    from verkv.codecs.kvtc import KVTC

    config = KvtcConfig(
        ratio=options.ratio,
        k_ratio=options.k_ratio,
        v_ratio=options.v_ratio,
        mode=options.mode,
        lossless=options.lossless,
        sinks=options.sinks,
        window=options.window,
    )
    text = options.text.read_text()
    model, tokenizer = _load_model(options)
    codec = KVTC(options.calibration, model, config)
    ids = tokenizer(text, return_tensors="pt").input_ids.to(model.device)
    cache = dense_cache(model.config)
    with torch.inference_mode():
        (getattr(model, "model", None) or model.base_model)(input_ids=ids, past_key_values=cache)
    save_context(options.out, cache, model, codec, token_ids=ids[0])
    print(describe_context(options.out))


def _inspect(options: argparse.Namespace) -> None:
    if _is_context(options.file):
        print(describe_context(options.file))
    else:
        from verkv.codecs.artefact import Artefact

        print(_describe_calibration(Artefact(options.file)))


def _verify(options: argparse.Namespace) -> None:
    if _is_context(options.file):
        from verkv.codecs.container import Container

        with Container(options.file) as file:
            file.verify()
            print(f"{options.file}: all {len(list(file))} sections match their checksums")
    else:
        from verkv.codecs.artefact import Artefact

        Artefact(options.file).verify()
        print(f"{options.file}: all tensors match their hash")


def _is_context(path: Path) -> bool:
    if not path.is_file():
        raise CodecError(f"there is no file {path}")
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def describe_context(path: Path) -> str:
    """What a stored context holds, in words; only its head is read.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    str
        Of several lines.

    Raises
    ------
    CodecError
        If the file is damaged or something else.
    """
    from verkv.codecs.container import Container, section_bytes

    with Container(path) as file:
        header, sizes, n_bytes = file.header, section_bytes(file), file.n_bytes
    lines = [f"{path}: {n_bytes:,} bytes, {header.get('kind')}, written by verkv {header.get('verkv')}"]
    for number, segment in enumerate(header.get("segments", [])):
        lines.append(f"segment {number}: {segment.get('kind')}, {segment.get('n_tokens')} tokens")
        if segment.get("kind") == "kvtc":
            lines += _describe_coded(segment, sizes, n_bytes)
    if header.get("sealed"):
        stats = header["sealed"].get("stats", {})
        lines.append(f"sealed by {stats.get('method')}: {len(stats.get('sealed_layers', []))} layers, {stats}")
    if header.get("press"):
        lines.append(f"press: {json.dumps(header['press'], sort_keys=True)}")
    lines.append("bytes: " + ", ".join(f"{name} {count:,}" for name, count in sizes.items()))
    return "\n".join(lines)


def _describe_coded(segment: dict, sizes: dict[str, int], n_bytes: int) -> list[str]:
    from verkv.codecs.layout import CacheLayout
    from verkv.codecs.ratios import header_ratios

    config, blocks = segment["config"], segment["blocks"]
    layout = CacheLayout.from_json(segment["layout"])
    ratios = header_ratios(segment, sizes, n_bytes)
    return [
        f"  mode {config['mode']}, layout {config['layout']}, lossless {config['lossless']}, calibration "
        f"{segment['artefact_sha256'][:12]}",
        f"  {len(layout.layers)} layers in {len(layout.groups)} group(s); {sum(blocks)} tokens coded in {len(blocks)} "
        f"block(s), {segment['n_exact']} kept as they are ({segment['n_outliers']} of them outliers)",
        f"  bits a token: K {segment['k_bits']}, V {segment['v_bits']}; ratios against 16 bit: nominal "
        f"{ratios['nominal_ratio']:.2f}, as the paper counts {ratios['paper_ratio']:.2f}, all bytes "
        f"{ratios['stored_ratio']:.2f}; lossless gain {ratios['deflate_gain']:.3f}",
    ]


def _describe_calibration(artefact) -> str:
    facts, lines = artefact.metadata, []
    lines.append(f"{artefact.path}: calibration of {facts['model']} on {facts['n_tokens']} tokens ({facts['sources']})")
    lines.append(f"ratios from {artefact.min_ratio:g} on; {len(artefact.layout.groups)} group(s) of layers")
    for name, modes in list(facts["held_out_error"].items())[:4]:
        for mode, errors in modes.items():
            found = ", ".join(f"{ratio}x {error:.4f}" for ratio, error in errors.items())
            lines.append(f"held-out relative error, {name}, {mode}: {found}")
    return "\n".join(lines)
