"""A figure as bytes: for a page, as the address of an image; for scripts, as files."""

import base64
import io
from pathlib import Path


def svg(figure) -> bytes:
    """The figure as SVG, without date and without addresses of its maker.

    Parameters
    ----------
    figure : matplotlib.figure.Figure

    Returns
    -------
    bytes
        The same for the same figure.
    """
    import matplotlib

    file = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": "verkv", "svg.fonttype": "path"}):
        figure.savefig(file, format="svg", metadata=nothing, dpi=150)  # of what is drawn as pixels: many points
    return file.getvalue()


def data_address(figure) -> str:
    """The figure as an address that holds it: nothing is fetched, and no script in it is run.

    Parameters
    ----------
    figure : matplotlib.figure.Figure

    Returns
    -------
    str
    """
    return "data:image/svg+xml;base64," + base64.b64encode(svg(figure)).decode("ascii")


def save(figure, path: Path) -> list[Path]:
    """Write the figure beside ``path`` as .svg and .png.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
    path : Path
        Its suffix is replaced.

    Returns
    -------
    list of Path
        What was written.
    """
    written = [path.with_suffix(".svg"), path.with_suffix(".png")]
    written[0].write_bytes(svg(figure))
    figure.savefig(written[1], dpi=150)
    return written
