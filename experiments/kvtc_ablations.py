"""kvtc's ablations in the small: Figures 2 and 6 and Tables 5, 6, 7, 12, 13, 14 and 15 of its paper, on a small model.

The paper asks tasks; here, what is compressed is a text of 1,791 tokens, and what is compared are the distributions of
the next token along the 256 tokens that follow, with those over the uncompressed cache. Each measurement is one JSON
line; one that is there is not repeated, and points that several tables share are measured once. At the end the tables
are printed, our figures beside the paper's.

    python experiments/kvtc_ablations.py table6 table12 --output experiments/results/kvtc_ablations.jsonl
"""

import argparse
import dataclasses
import itertools
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import kvtc_ablation_tables
import kvtc_fits
import kvtc_latency
import torch
from kvtc_common import DEFAULT_ARTEFACT, Lines, Setting, Text, judge, open_setting, say, split_text, test_texts
from kvtc_lossless import lossless_lines
from kvtc_table import prefill
from torch import Tensor

from verkv.codecs import KVTC, KvtcConfig, token_errors
from verkv.codecs.packing import RowCoder
from verkv.codecs.quantiser import RAW_BITS, Run

RATIOS = (8, 16, 32, 64)
LAYERS = (1, 2, 5, 10)  # of SmolLM2's 30 that share a basis, besides all
EXPERIMENTS = (
    "figure2",
    "figure6",
    "table5",
    "table6",
    "table7",
    "table12",
    "table13",
    "table14",
    "table15",
)
SMALL_WINDOW = 16  # of Tables 14 and 15
FIGURE6_RANK = 10_000 / 32_768  # of the paper's decomposition, over the number of features


@dataclass(frozen=True)
class Point:
    """One way to code.

    Attributes
    ----------
    k_ratio, v_ratio : float
    sinks, window : int
    plan : {"dp", "pca"}
        Bits by dynamic programming, or the first axes at 16 bit and no quantiser.
    layers : int or "all"
        That share a basis.
    outliers : bool
        Keep tokens that are coded badly as they are, as the library does and the paper does not.
    """

    k_ratio: float
    v_ratio: float
    sinks: int = 4
    window: int = 128
    plan: str = "dp"
    layers: int | str = "all"
    outliers: bool = False

    @classmethod
    def at(cls, ratio: float, **others) -> "Point":
        """With the same ratio for keys and values."""
        return cls(ratio, ratio, **others)


def points(experiment: str) -> list[Point]:
    """What an experiment needs; some need nothing of this kind."""
    if experiment == "figure2":
        return [Point.at(ratio) for ratio in RATIOS]
    if experiment == "table6":
        kept = [Point.at(ratio, sinks=sinks) for ratio in (16, 64) for sinks in (0, 4)]
        return kept + [Point.at(ratio, sinks=0, outliers=True) for ratio in (16, 64)]
    if experiment == "table7":
        return [Point(64, 64), Point(256, 32), Point(32, 256)]
    if experiment == "table12":
        return [Point.at(64, window=window) for window in (1, 16, 64, 128)]
    if experiment == "table14":
        windows, plans = (SMALL_WINDOW, 128), ("dp", "pca")
        return [Point.at(r, window=w, plan=plan) for w in windows for r in RATIOS for plan in plans]
    if experiment == "table15":
        groups, plans = (*LAYERS, "all"), ("pca", "dp")
        found = [Point.at(r, window=SMALL_WINDOW, plan=p, layers=n) for p in plans for n in groups for r in RATIOS]
        # The 48 bits of one layer hold no group with its shift and scale.
        return [point for point in found if (point.layers, point.k_ratio, point.plan) != (1, 64, "dp")]
    return []


# --- codecs -----------------------------------------------------------------------------------------------------------


def make_codec(artefact, config, point: Point) -> KVTC:
    """The codec of a point from a calibration with its number of layers."""
    options = dataclasses.asdict(point)
    layers, plan = options.pop("layers"), options.pop("plan")
    fraction = {} if options.pop("outliers") else {"outlier_fraction": 0.0}
    if plan == "pca":  # its plans are replaced; some ratios have none
        options |= dict.fromkeys(("k_ratio", "v_ratio"), artefact.min_ratio)
    codec = KVTC(artefact, config, KvtcConfig(ratio=artefact.min_ratio, **options, **fraction))
    assert layers == "all" or max(len(group.layers) for group in codec.layout.groups) == layers
    if plan == "pca":
        for (_, side), part in codec.sides.items():
            keep_first_axes(part, round(part.width / (point.k_ratio if side == "k" else point.v_ratio)))
    return codec


def keep_first_axes(part, n_axes: int) -> None:
    """Let a side's codec keep its first axes at 16 bit, and nothing else."""
    part.coder = RowCoder((Run(0, n_axes, RAW_BITS),), "dynamic", part.artefact.side(part.group, part.side).steps)


def kept_share(codec: KVTC, side: str) -> float:
    """Coordinates with bits over features."""
    parts = [part for (_, s), part in codec.sides.items() if s == side]
    return sum(run.size for part in parts for run in part.coder.plan) / sum(part.width for part in parts)


# --- measuring --------------------------------------------------------------------------------------------------------


def coded_errors(cache, restored, coded: Tensor) -> dict[str, float]:
    """Relative Frobenius errors of keys and values of coded tokens; RoPE is an isometry and need not be undone."""
    errors = {}
    for side, name in (("k", "keys"), ("v", "values")):
        squared = energy = 0.0
        for layer, other in zip(cache.layers, restored.layers, strict=True):
            exact = getattr(layer, name)[:, :, coded]
            squared += float((getattr(other, name)[:, :, coded] - exact).square().sum(dtype=torch.float64))
            energy += float(exact.square().sum(dtype=torch.float64))
        errors[f"{side}_error"] = (squared / energy) ** 0.5
    return errors


def measure_point(model, codec: KVTC, text: Text) -> dict:
    """One line: predictions, errors and ratios."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # bare axes leave residuals that no plan was calibrated to
        compressed = codec.compress(text.cache)
    restored = compressed.restore()
    return {
        **judge(model, text, restored),
        **coded_errors(text.cache, restored, compressed.coded_index),
        **compressed.ratios(),
        "n_context": compressed.n_tokens,
        "fitted_tokens": codec.artefact.metadata["n_tokens"],
        "n_outliers": compressed.n_outliers,
        "k_kept": kept_share(codec, "k"),
        "v_kept": kept_share(codec, "v"),
        "k_bits": codec.bits_per_token("k"),
        "v_bits": codec.bits_per_token("v"),
    }


def measure_points(setting: Setting, wanted: list[Point], artefacts, n_texts: int, lines: Lines) -> None:
    """Measure points on every text, where they are missing."""
    for number, ids in enumerate(test_texts(setting.tokenizer, n_texts)):
        missing = [p for p in wanted if not lines.has(kind="point", text=number, **dataclasses.asdict(p))]
        if not missing:
            continue
        text = split_text(setting.model, ids)
        for point in missing:
            codec = make_codec(artefacts(point.layers), setting.model.config, point)
            found = measure_point(setting.model, codec, text)
            lines.add({"kind": "point", "text": number, **dataclasses.asdict(point), **found})
        say(f"text {number + 1}: {len(missing)} points")


def position_lines(setting: Setting, n_texts: int) -> Iterator[dict]:
    """Figure 6, middle: error by position of the rank-limited, unquantised decomposition, sinks coded, too.

    At last its point on the left for the calibration itself: the error of all positions behind the sinks.
    """
    codec = make_codec(setting.artefact, setting.model.config, Point.at(8, sinks=0))
    for part in codec.sides.values():
        keep_first_axes(part, round(FIGURE6_RANK * part.width))
    sums: dict[str, Tensor] = {}
    for ids in test_texts(setting.tokenizer, n_texts):
        for name, values in token_errors(codec, prefill(setting.model, ids), skip=0).items():
            sums[name] = sums.get(name, 0.0) + values
    n_tokens = len(sums["k_energy"])
    for start, stop in itertools.pairwise((0, 1, 2, 3, 4, 16, 64, 256, 1024, n_tokens)):
        fields = {"kind": "position", "start": start, "stop": stop, "n_texts": n_texts}
        yield fields | {f"{side}_error": _error(sums, side, start, stop) for side in ("k", "v")}
    calibrated = setting.artefact.metadata["n_tokens"], setting.artefact.metadata["n_held_out"]
    fields = {"kind": "fit", "n_tokens": calibrated[0], "n_rows": calibrated[0] - calibrated[1], "n_texts": n_texts}
    yield fields | {f"{side}_error": _error(sums, side, 4, n_tokens) for side in ("k", "v")}


def _error(sums: dict[str, Tensor], side: str, start: int, stop: int) -> float:
    squared, energy = (sums[f"{side}_{name}"][start:stop].sum() for name in ("squared_error", "energy"))
    return float((squared / energy).sqrt())


def plan_lines(setting: Setting) -> Iterator[dict]:
    """Figure 6, right: bits of every coordinate at 16x, shift and scale counted in."""
    codec = make_codec(setting.artefact, setting.model.config, Point.at(16))
    for (_, side), part in codec.sides.items():
        for run in part.coder.plan:
            bits = run.cost("dynamic") / run.size
            yield {"kind": "plan", "side": side, "start": run.start, "size": run.size, "bits": run.bits, "cost": bits}


# --- all of them ------------------------------------------------------------------------------------------------------


def run(setting: Setting, names: list[str], options: argparse.Namespace, lines: Lines) -> None:
    """Measure what is missing for some experiments."""
    wanted = list(dict.fromkeys(point for name in names for point in points(name)))
    folder = options.artefact.parent
    artefacts = kvtc_fits.Artefacts(setting, folder, options.calibration_tokens)
    artefacts.prepare({point.layers for point in wanted})
    measure_points(setting, wanted, artefacts, options.n_texts, lines)
    once = {"position": lambda: position_lines(setting, options.n_texts), "plan": lambda: plan_lines(setting)}
    sizes = options.fit_tokens
    if "figure6" in names:
        for kind, make in once.items():
            if not lines.has(kind=kind):
                for line in list(make()):
                    lines.add(line)
        missing = [size for size in sizes if not lines.has(kind="fit", n_tokens=size)]
        for line in kvtc_fits.fit_lines(setting, missing, FIGURE6_RANK, options.n_texts) if missing else ():
            lines.add(line)
    if "table13" in names:
        for line in lossless_lines(setting, options.n_texts, lambda key: lines.has(kind="lossless", **key)):
            lines.add({"kind": "lossless"} | line)
    if "table5" in names and not options.latency.exists():
        measure_latency(options)


def measure_latency(options: argparse.Namespace) -> None:
    """Run ``kvtc_latency.py``, 8x and 16x."""
    given = sys.argv
    for ratio in (8, 16):
        fields = {"calibration": options.artefact, "tokens": options.latency_tokens, "ratio": ratio}
        fields |= {"output": options.latency}
        sys.argv = ["kvtc_latency.py", *(str(x) for name, value in fields.items() for x in (f"--{name}", value))]
        try:
            kvtc_latency.main()
        finally:
            sys.argv = given


def main() -> None:
    """Run what is missing, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "experiments", nargs="*", metavar="EXPERIMENT", help=f"of {', '.join(EXPERIMENTS)}; all by default"
    )
    parser.add_argument("--output", type=Path, default=Path("experiments/results/kvtc_ablations.jsonl"))
    parser.add_argument("--artefact", type=Path, default=DEFAULT_ARTEFACT, help="the calibration, made if missing")
    parser.add_argument("--calibration-tokens", type=int, default=40_000, help="of calibrations that are made")
    parser.add_argument("--n-texts", type=int, default=4)
    parser.add_argument("--fit-tokens", type=int, nargs="*", default=[5_000, 10_000, 20_000], help="of Figure 6")
    parser.add_argument("--latency", type=Path, default=Path("docs/results/kvtc_latency_smollm2.jsonl"))
    parser.add_argument("--latency-tokens", type=int, default=4000)
    parser.add_argument("--no-run", action="store_true", help="print the tables of what is there")
    options = parser.parse_args()
    names = options.experiments or list(EXPERIMENTS)
    if set(names) - set(EXPERIMENTS):
        parser.error(f"experiments must be of {', '.join(EXPERIMENTS)}; got {' '.join(names)}")
    lines = Lines(options.output)
    if not options.no_run:
        setting = open_setting(options.artefact, options.calibration_tokens)
        lines.common = setting.common()
        run(setting, names, options, lines)
    print(kvtc_ablation_tables.render(names, lines, Lines(options.latency)))


if __name__ == "__main__":
    main()
