"""Compression ratios of what is stored."""

from verkv.codecs.layout import CacheLayout


def header_ratios(segment: dict, sizes: dict[str, int], file_bytes: int) -> dict[str, float]:
    """Compression ratios of a coded segment against 16 bit, from its header and the bytes that are stored.

    Parameters
    ----------
    segment : dict
        From the header.
    sizes : dict
        Of :func:`~verkv.codecs.container.section_bytes`.
    file_bytes : int
        Of the whole file.

    Returns
    -------
    dict
        "nominal_ratio": of the bit plans, before lossless compression. "paper_ratio": as [1]_ counts, after lossless
        compression, sinks and outliers counted as 16-bit numbers, the window left out on both sides. "stored_ratio": of
        all tokens to all bytes of the file, in whatever type rows are kept; tensors of layers that are not coded are
        left out. "deflate_gain": of the coded rows alone.

    References
    ----------
    .. [1] arXiv:2511.01815v1, section 4.
    """
    n_coded = sum(segment["blocks"])
    full_row = 2 * CacheLayout.from_json(segment["layout"]).elements_per_token()  # bytes of a token at 16 bit
    planned = n_coded * (segment["k_bits"] + segment["v_bits"]) // 8
    n_kept = segment["n_exact"] - segment["n_window"]
    stored = file_bytes - sizes["tensors"]
    return {
        "nominal_ratio": n_coded * full_row / max(1, planned),
        "paper_ratio": (n_coded + n_kept) * full_row / max(1, sizes["coded_rows"] + n_kept * full_row),
        "stored_ratio": segment["n_tokens"] * full_row / max(1, stored),
        "deflate_gain": planned / max(1, sizes["coded_rows"]),
    }
