"""The report's building blocks: values in, HTML out, everything escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape
from typing import Any

from pipeline.report.data import Picture


def facts_table(facts: Iterable[tuple[str, Any]]) -> str:
    """Names and values in two columns; what is not known is left out."""
    rows = "".join(
        f"<tr><td>{text(name)}</td><td><code>{text(value)}</code></td></tr>"
        for name, value in facts
        if value not in (None, "")
    )
    return f'<table class="facts">{rows}</table>'


def section(title: str, lead: str, body: str) -> str:
    """A headed part of the page; `lead` and `body` are HTML."""
    return f"<section><h2>{text(title)}</h2>{f'<p class=lead>{lead}</p>' if lead else ''}{body}</section>"


def figure(picture: Picture) -> str:
    """A sample with its caption."""
    return f'<figure title="{text(picture.tip)}">{image(picture, "")}{text(picture.caption)}</figure>'


def thumb(picture: Picture) -> str:
    """A small picture, or a cross if nothing could be decoded."""
    return image(picture, "thumb") if picture.png else '<div class="thumb none" title="not decodable">✕</div>'


def image(picture: Picture, style: str) -> str:
    """The picture inside the page itself."""
    encoded = base64.b64encode(picture.png).decode()
    classes = f"{style} {'small' if picture.is_small else ''}".strip()
    return f'<img class="{classes}" alt="{text(picture.tip)}" src="data:image/png;base64,{encoded}">'


def hex_loss(loss_hex: str | None) -> str | None:
    """A loss for people, and its exact bits."""
    return f"{float.fromhex(loss_hex):.6f} ({loss_hex})" if loss_hex else None


def number(value: Any) -> str:
    """With thousands separated."""
    return f"{value:,}" if isinstance(value, int) else "-"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    return f"{seconds:.1f} s" if seconds < 100 else f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


def text(value: Any) -> str:
    """Escaped for HTML."""
    # Names that are not UTF-8 travel as surrogates, which no encoder takes.
    return escape(str(value).encode("utf-8", "replace").decode(), quote=True)
