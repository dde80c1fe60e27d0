"""Small pieces of HTML with which values show themselves in a notebook."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shardmill.words import printable

if TYPE_CHECKING:
    from PIL.Image import Image

_CELL = ' style="text-align: left; vertical-align: top"'


def text(words: object) -> str:
    """Words as HTML shows them: names of files and classes come from strangers."""
    return html.escape(printable(str(words)))


def table(rows: Iterable[Sequence[object]], head: Sequence[object] = ()) -> str:
    """A table of texts; without `head`, the first column names the rows."""
    lines = [f"<tr>{''.join(f'<th{_CELL}>{text(cell)}</th>' for cell in head)}</tr>"] if head else []
    for first, *others in rows:
        kind = "td" if head else "th"
        cells = "".join(f"<td{_CELL}>{text(cell)}</td>" for cell in others)
        lines.append(f"<tr><{kind}{_CELL}>{text(first)}</{kind}>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def picture(image: Image, about: str) -> str:
    """A picture that needs no file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{text(about)}">'
