"""Which score source belongs to which press."""

from kvpress import AdaKVPress, ScorerPress
from kvpress import FastKVzipPress as KVPressFastKVzip
from kvpress import KVzipPress as KVPressKVzip

from verkv.presses.fastkvzip_press import FastKVzipPress, GateSource
from verkv.presses.kvzip_press import KVzipPress, ReplaySource
from verkv.presses.scores import ScorerSource, ScoreSource


def resolve_source(press: object) -> tuple[ScoreSource, str]:
    """The score source of a press, and the budget scope that goes with it.

    Parameters
    ----------
    press : object
        VerKV's ``KVzipPress`` or ``FastKVzipPress``, a KVPress ``ScorerPress``, KVPress' own KVzip or Fast KVzip, or
        AdaKV around a scorer (whose budget is shared by a layer's heads).

    Returns
    -------
    source : ScoreSource
    scope : {"head", "layer"}

    Raises
    ------
    NotImplementedError
        For presses that give no score per token.
    """
    if isinstance(press, AdaKVPress):
        return ScorerSource(press.press), "layer"
    if isinstance(press, (KVzipPress, FastKVzipPress)):
        return press.source(), "head"
    if isinstance(press, KVPressKVzip):
        if press.kvzip_plus_normalization:
            raise NotImplementedError(
                "press=KVzipPress(kvzip_plus_normalization=True) is not supported; set it to False"
            )
        return ReplaySource(n_sink=press.n_sink, chunk_size=press.chunk_size), "head"
    if isinstance(press, KVPressFastKVzip):
        return GateSource.from_kvpress(press), "head"
    if isinstance(press, ScorerPress):
        return ScorerSource(press), "head"
    raise NotImplementedError(
        f"press={type(press).__name__} gives no score per token; pass KVzipPress(), FastKVzipPress(), a KVPress "
        f"ScorerPress such as SnapKVPress(), or AdaKVPress around one"
    )
