"""Options of ``verkv bench``."""

from dataclasses import dataclass, field

import torch

from verkv.checks import check_count


class BenchSkipped(Exception):
    """A benchmark cannot run here; the message says what is missing."""


@dataclass(frozen=True)
class BenchSettings:
    """What to measure and how.

    Parameters
    ----------
    only : tuple of str
        Names of benchmarks; empty for all.
    quick : bool
        Small sizes and few rounds: to see that it runs, not for figures.
    threads : int >= 1
        Threads of torch on the CPU.
    seed : int >= 0
        Of inputs, of draws and of the order of the cases.
    device : str, optional
        Default: cuda where there is one.
    model : str, optional
        Name or folder of a causal language model (default: SmolLM2-135M-Instruct).
    tokens : int, optional
        Length of the model's context; 4,000, or 800 with ``quick``.
    rounds : int >= 1, optional
        Rounds of each comparison; every benchmark has its own default.
    compression_ratio : float
        Share of the cache removed, in the benchmarks with a model.
    epsilon : float
        Tolerance of VerKV, in all benchmarks.

    Raises
    ------
    ValueError
        If an option is out of range or the device cannot be used.
    """

    only: tuple[str, ...] = ()
    quick: bool = False
    threads: int = 1
    seed: int = 0
    device: str | None = None
    model: str | None = None
    tokens: int | None = None
    rounds: int | None = None
    compression_ratio: float = 0.9375
    epsilon: float = 0.05
    torch_device: torch.device = field(init=False, repr=False, default=None)

    def __post_init__(self):
        check_count("--threads", self.threads, least=1)
        check_count("--seed", self.seed)
        for name in ("tokens", "rounds"):
            if getattr(self, name) is not None:
                check_count(f"--{name}", getattr(self, name), least=1)
        if not 0.0 < self.compression_ratio < 1.0:
            raise ValueError(
                f"--compression-ratio must be in (0, 1), got {self.compression_ratio}: the share removed, 16x is 0.9375"
            )
        if not 0.0 < self.epsilon < float("inf"):
            raise ValueError(f"--epsilon must be > 0 and finite, got {self.epsilon}")
        name = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"--device {name!r} cannot be used: {reason}") from error
        object.__setattr__(self, "torch_device", device)

    @property
    def n_tokens(self) -> int:
        """Length of the model's context."""
        return self.tokens or (800 if self.quick else 4000)

    def n_rounds(self, usual: int) -> int:
        """Rounds of a comparison that usually has so many."""
        return self.rounds or (min(3, usual) if self.quick else usual)
