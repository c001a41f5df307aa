"""HTML from Python values. Text is escaped unless it is :class:`Html`, so nothing in the results can become markup."""

import html
from collections.abc import Sequence, Set


class Html(str):
    """Text that is markup already."""


def escape(value: object) -> Html:
    """A value as markup that shows it as it is.

    Parameters
    ----------
    value : object
        :class:`Html` is left alone.

    Returns
    -------
    Html
    """
    return value if isinstance(value, Html) else Html(html.escape(str(value), quote=True))


def element(name: str, *children: object, **attributes: object) -> Html:
    """One element. ``class_`` gives ``class``, other underscores hyphens; an attribute of None is left out.

    Parameters
    ----------
    name : str
    *children : object
        Escaped unless Html.
    **attributes : object
        Escaped.

    Returns
    -------
    Html

    Examples
    --------
    >>> element("p", "1 < 2", class_="note")
    '<p class="note">1 &lt; 2</p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Sequence[object], separator: str = "") -> Html:
    """Parts one after the other, each escaped unless Html."""
    return Html(separator.join(map(escape, parts)))


def table(
    caption: object, header: Sequence[object], rows: Sequence[Sequence[object]], text: Set[int] = frozenset({0})
) -> Html:
    """A table in a box of its own that scrolls sideways where it is wider than the screen.

    Parameters
    ----------
    caption : str
    header : sequence of object
    rows : sequence of sequence of object
        As long as the header. The first cell names the row.
    text : set of int
        Columns that hold text and are set to the left.

    Returns
    -------
    Html
    """
    kind = lambda i: "text" if i in text else "number"  # noqa: E731
    head = element("tr", *(element("th", cell, scope="col", class_=kind(i)) for i, cell in enumerate(header)))
    body = []
    for row in rows:
        cells = [element("th", row[0], scope="row", class_="text")]
        cells += [element("td", cell, class_=kind(i)) for i, cell in enumerate(row[1:], 1)]
        body.append(element("tr", *cells))
    made = element("table", element("thead", head), element("tbody", *body))
    box = element("div", made, class_="scroll", tabindex="0", role="region", aria_label=f"Table: {caption}")
    return element("div", element("p", caption, class_="caption"), box, class_="table")


def picture(address: str, alternative: str, caption: str) -> Html:
    """A figure with its caption; ``alternative`` says in words what it shows. Line breaks in both are spaces.

    Parameters
    ----------
    address : str
        A ``data:`` address.
    alternative : str
    caption : str

    Returns
    -------
    Html
    """
    alternative, caption = (" ".join(text.split()) for text in (alternative, caption))
    image = Html(f'<img src="{escape(address)}" alt="{escape(alternative)}">')
    return element("figure", image, element("figcaption", caption))


STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: #1a1a1a;
  background: #fff; margin: 0 auto; max-width: 76rem; padding: 1rem clamp(0.75rem, 3vw, 2rem) 3rem;
  overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0.5rem 0; }
h2 { font-size: 1.3rem; margin: 2.2rem 0 0.5rem; border-top: 1px solid #ccc; padding-top: 1.2rem; }
h3 { font-size: 1.05rem; margin: 1.5rem 0 0.3rem; }
p, ul, dl { max-width: 46rem; }
nav ul { padding: 0; list-style: none; display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; max-width: none; }
nav a { display: inline-block; padding: 0.3rem 0; }
a { color: #00508a; }
.table { margin: 1rem 0; max-width: 100%; min-width: 0; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: separate; border-spacing: 0; font-size: 0.92rem; font-variant-numeric: tabular-nums;
  overflow-wrap: normal; }
.caption { font-weight: 600; font-size: 0.95rem; margin: 0 0 0.4rem; max-width: 38rem; }
th, td { padding: 0.3rem 0.7rem; text-align: right; vertical-align: top; border-bottom: 1px solid #ddd; }
thead th { border-bottom: 2px solid #1a1a1a; vertical-align: bottom; }
.text { text-align: left; }
tbody th { font-weight: 500; position: sticky; left: 0; background: #fff; min-width: 7rem; max-width: 15rem; }
td small, th small { color: #555; white-space: nowrap; display: block; font-weight: 400; }
.flow { display: flex; flex-wrap: wrap; gap: 0 3rem; align-items: flex-start; }
.flow figure { flex: 1 1 min(100%, 24rem); max-width: 36rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); gap: 1rem 2rem; }
figure { margin: 0.5rem 0; }
img { width: 100%; max-width: 36rem; height: auto; display: block; }
figcaption { font-size: 0.92rem; color: #333; max-width: 36rem; }
.missing { border-left: 4px solid #8a6d00; padding: 0.4rem 0.9rem; background: #fff8e1; max-width: 46rem; }
code, pre { font: 0.9rem/1.45 ui-monospace, "DejaVu Sans Mono", monospace; background: #f3f3f3; }
code { padding: 0.05rem 0.25rem; }
pre { padding: 0.7rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
td.text { min-width: 9rem; }
.wide { min-width: 20rem; }
.answer { min-width: 11rem; max-width: 20rem; white-space: pre-wrap; }
@media print { body { max-width: none; font-size: 11pt; } nav { display: none; } .scroll { overflow: visible; }
  tbody th { position: static; } figure, tr { break-inside: avoid; } a { color: inherit; } }
"""


def document(title: str, *body: object) -> str:
    """A whole page that needs no network and no scripts, and forbids both.

    Parameters
    ----------
    title : str
    *body : object

    Returns
    -------
    str
    """
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = join(
        [
            Html('<meta charset="utf-8">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'),
            element("title", title),
            element("style", Html(STYLE)),
        ],
        "\n",
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{join(body, chr(10))}\n</body>\n</html>\n'
    )
