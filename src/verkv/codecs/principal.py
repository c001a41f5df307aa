"""Principal components of rows that arrive in chunks: exact from their covariance, or by block power iteration."""

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Chunks = Callable[[], Iterable[Tensor]]


@dataclass(frozen=True)
class Principal:
    """Mean and leading principal axes of rows.

    Attributes
    ----------
    mean : Tensor, shape (p,), float32
    basis : Tensor, shape (p, r), float32
        Orthonormal columns, strongest first.
    variance : Tensor, shape (r,), float32
        Along each axis.
    tail : Tensor, shape (p,), float32
        Mean squared residual of every feature outside the basis.
    """

    mean: Tensor
    basis: Tensor
    variance: Tensor
    tail: Tensor


class StreamingCovariance:
    """Mean and covariance of rows, chunk by chunk, in memory for one p x p matrix.

    Rows are shifted by the first chunk's mean before they are squared, so that float32 loses nothing where the mean
    carries most of the energy, as it does for keys.

    Parameters
    ----------
    n_features : int
        p.

    Examples
    --------
    >>> import torch
    >>> rows = torch.randn(100, 3)
    >>> covariance = StreamingCovariance(3)
    >>> covariance.add(rows[:40]); covariance.add(rows[40:])
    >>> bool(torch.allclose(covariance.covariance(), rows.T.cov(correction=0), atol=1e-5))
    True
    """

    def __init__(self, n_features: int):
        self.n_rows = 0
        self._shift: Tensor | None = None
        self._sum = torch.zeros(n_features, dtype=torch.float64)
        self._products = torch.zeros(n_features, n_features)

    def add(self, rows: Tensor) -> None:
        """Count rows (n, p)."""
        if not len(rows):
            return
        rows = rows.float()
        if self._shift is None:
            self._shift = rows.mean(0)
        shifted = rows - self._shift
        self.n_rows += len(rows)
        self._sum += shifted.double().sum(0)
        self._products.addmm_(shifted.T, shifted)

    def mean(self) -> Tensor:
        """(p,), float32."""
        return (self._shift.double() + self._sum / self.n_rows).float()

    def covariance(self) -> Tensor:
        """(p, p), float32, divided by the number of rows."""
        mean = (self._sum / self.n_rows).float()
        return self._products / self.n_rows - torch.outer(mean, mean)

    def principal(self, rank: int) -> Principal:
        """The leading axes, exactly."""
        covariance = self.covariance()
        total = covariance.diagonal().clone()
        values, vectors = torch.linalg.eigh(covariance)
        values, basis = values.flip(0)[:rank].clamp_min(0), vectors.flip(1)[:, :rank].contiguous()
        tail = (total - basis.square() @ values).clamp_min(0)
        return Principal(self.mean(), basis, values, tail)


def power_iteration(chunks: Chunks, rank: int, n_iterations: int = 8, seed: int = 0) -> Principal:
    """Leading axes by randomised block power iteration on rows that do not fit in memory [1]_.

    Parameters
    ----------
    chunks : callable returning an iterable of Tensor, shape (n, p)
        Called once per pass; every pass must give the same rows.
    rank : int
        Axes to return; 10 % more are iterated.
    n_iterations : int
        Passes over the rows, each followed by a QR decomposition.
    seed : int
        Of the starting block.

    Returns
    -------
    Principal

    References
    ----------
    .. [1] Halko, Martinsson, Tropp, "Finding structure with randomness", SIAM Review 53 (2011), algorithm 4.4.
    """
    mean, total = _mean_and_variance(chunks)
    n_features = len(mean)
    width = min(n_features, rank + max(16, rank // 10))
    block = torch.randn(n_features, width, generator=torch.Generator().manual_seed(seed))
    for _ in range(n_iterations):
        block = torch.linalg.qr(_covariance_times(chunks, mean, block))[0]
    # Rayleigh-Ritz: within the block, the axes are those of the small covariance.
    values, rotation = torch.linalg.eigh(block.T @ _covariance_times(chunks, mean, block))
    values, basis = values.flip(0)[:rank].clamp_min(0), (block @ rotation.flip(1))[:, :rank].contiguous()
    tail = (total - basis.square() @ values).clamp_min(0)
    return Principal(mean, basis, values, tail)


def _mean_and_variance(chunks: Chunks) -> tuple[Tensor, Tensor]:
    n_rows, total, squares = 0, 0.0, 0.0
    for rows in chunks():
        n_rows += len(rows)
        total = total + rows.double().sum(0)
        squares = squares + rows.double().square().sum(0)
    mean = total / n_rows
    return mean.float(), (squares / n_rows - mean.square()).clamp_min(0).float()


def _covariance_times(chunks: Chunks, mean: Tensor, block: Tensor) -> Tensor:
    product, n_rows = torch.zeros_like(block), 0
    for rows in chunks():
        centred = rows.float() - mean
        product.addmm_(centred.T, centred @ block)
        n_rows += len(rows)
    return product / n_rows


class RowSpool:
    """Rows on disk in bfloat16, for the passes of :func:`power_iteration`; the file goes with the object.

    Parameters
    ----------
    n_features : int
    folder : str, optional
        For the temporary file; it grows by 2 p bytes per row.
    """

    def __init__(self, n_features: int, folder: str | None = None):
        self.n_features, self.n_rows = n_features, 0
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed with the object)

    def add(self, rows: Tensor) -> None:
        """Append rows (n, p)."""
        self._file.write(rows.bfloat16().contiguous().view(torch.int16).numpy().tobytes())
        self.n_rows += len(rows)

    def chunks(self, n_rows: int = 4096) -> Iterable[Tensor]:
        """All rows in float32, some at a time."""
        self._file.flush()
        stored = np.memmap(self._file, dtype=np.int16, mode="r", shape=(self.n_rows, self.n_features))
        for start in range(0, self.n_rows, n_rows):
            yield torch.from_numpy(np.array(stored[start : start + n_rows])).view(torch.bfloat16).float()
