"""The command line: ``verkv demo``, ``verkv eval``, ``verkv report``, ``verkv bench`` and ``verkv kvtc``."""

import argparse
import sys
from pathlib import Path

from verkv import __version__
from verkv.codecs import cli as kvtc_cli
from verkv.evaluation import cli as eval_cli
from verkv.report import cli as report_cli


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.command == "demo":
        return _demo(options)
    if options.command == "bench":
        return _bench(options)
    if options.command == "kvtc":
        return kvtc_cli.run(options)
    if options.command == "eval":
        return eval_cli.run(options)
    if options.command == "report":
        return report_cli.run(options)
    raise AssertionError(options.command)


def _demo(options: argparse.Namespace) -> int:
    from verkv.demo import DemoSettings, run_demo

    settings = {name: getattr(options, name) for name in DemoSettings.__dataclass_fields__}
    try:
        run_demo(DemoSettings(**settings))
    except ImportError as error:
        print(f"verkv demo: {error}; the demo needs pip install 'verkv[demo]'", file=sys.stderr)
        return 1
    except (ValueError, NotImplementedError, RuntimeError) as error:
        print(f"verkv demo: {error}", file=sys.stderr)
        return 1
    return 0


def _bench(options: argparse.Namespace) -> int:
    from verkv.bench.run import run_bench
    from verkv.bench.settings import BenchSettings

    names = ("quick", "threads", "seed", "device", "model", "tokens", "rounds", "compression_ratio", "epsilon")
    try:
        settings = BenchSettings(only=tuple(options.only or ()), **{name: getattr(options, name) for name in names})
        run_bench(settings, options.json)
    except ValueError as error:
        print(f"verkv bench: {error}", file=sys.stderr)
        return 2
    except (NotImplementedError, RuntimeError) as error:
        print(f"verkv bench: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verkv", description="Verifiable KV-cache compression.")
    parser.add_argument("--version", action="version", version=f"verkv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="ask one question over a long context with dense attention, KVzip, PoissonComp and VerKV",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--model", help="name or folder of any causal language model (default: SmolLM2-135M-Instruct)")
    demo.add_argument("--tokens", type=int, default=2400, help="length of the context")
    demo.add_argument("--compression-ratio", type=float, default=0.9375, help="fraction removed: 16x is 0.9375")
    demo.add_argument("--epsilon", type=float, default=0.05, help="tolerance of the denominator's relative error")
    demo.add_argument("--delta", type=float, default=0.1, help="probability with which it may be missed")
    demo.add_argument("--alpha", type=float, help="defensive mixture of the scores; default: 0.5, 0 as published")
    demo.add_argument("--n-sink", type=int, default=32, help="leading tokens always kept")
    demo.add_argument("--n-local", type=int, default=32, help="trailing context tokens always kept")
    demo.add_argument("--shortlist", type=int, default=32, help="keys read to plan, as published")
    demo.add_argument("--max-new-tokens", type=int, default=10, help="length of an answer")
    demo.add_argument("--seed", type=int, default=0, help="of the context and of the draw")
    demo.add_argument("--device", help="cpu, cuda, ... (default: cuda where there is one)")
    demo.add_argument("--output-dir", type=Path, default=Path("outputs"), help="for the picture and the JSON line")

    bench = commands.add_parser(
        "bench",
        help="time VerKV side by side with what it replaces",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    bench.add_argument("--only", action="append", metavar="NAME", help="decide, attention, decode, replay or kernels")
    bench.add_argument("--quick", action="store_true", help="small and short: shows that it runs, gives no figures")
    bench.add_argument("--threads", type=int, default=1, help="threads of torch")
    bench.add_argument("--seed", type=int, default=0, help="of inputs, draws and the order of measurements")
    bench.add_argument("--device", help="cpu, cuda, ... (default: cuda where there is one)")
    bench.add_argument("--model", help="name or folder of a causal language model (default: SmolLM2-135M-Instruct)")
    bench.add_argument(
        "--tokens", type=int, help="length of the context (default: 4000, kernels 32768; less with --quick)"
    )
    bench.add_argument("--rounds", type=int, help="rounds of each comparison (default: by benchmark)")
    bench.add_argument("--compression-ratio", type=float, default=0.9375, help="fraction removed: 16x is 0.9375")
    bench.add_argument("--epsilon", type=float, default=0.05, help="VerKV's tolerance")
    bench.add_argument("--json", type=Path, metavar="FILE", help="also write all times here")
    kvtc_cli.add_parser(commands)
    eval_cli.add_parser(commands)
    report_cli.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
