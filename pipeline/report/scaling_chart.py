"""The report's chart of scaling: a predicted curve over numbers of ranks, and published measurements beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from pipeline.report.charts import BLUE, GREEN, MUTED, ORANGE, RULE, svg, text

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 150, 16, 42
RANK_TICKS = (1, 8, 64, 512, 4096)


def scaling_chart(document: Mapping[str, Any]) -> Markup:
    """`document`: `train.planning.scaling_table.ScalingTable.document`, with `this_run` if it has trained."""
    most = max(step["num_ranks"] for step in document["steps"])

    def place(num_ranks: float, efficiency: float) -> tuple[float, float]:
        x = LEFT + math.log2(num_ranks) / math.log2(max(2, most)) * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - efficiency * (HEIGHT - TOP - BOTTOM)

    parts: list[Markup] = []
    rule = Markup('<line x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}" stroke="{}"/>')
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        _, y = place(1, tick)
        parts.append(rule.format(LEFT, WIDTH - RIGHT, y, y, RULE))
        parts.append(text(LEFT - 8, y + 4, f"{tick:.1f}", anchor="end", fill=MUTED))
    for tick in (each for each in RANK_TICKS if each <= most):
        x, y = place(tick, 0)
        parts.append(text(x, y + 18, f"{tick:,}", anchor="middle", fill=MUTED))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "ranks", anchor="middle", fill=MUTED))

    places = [place(step["num_ranks"], step["efficiency"]) for step in document["steps"]]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts.append(
        Markup('<polyline points="{}" fill="none" stroke="{}" stroke-width="2.2" stroke-linejoin="round"/>').format(
            path, BLUE
        )
    )
    for step, (x, y) in zip(document["steps"], places, strict=True):
        rate = f"{step['images_per_second']:,.0f} images/s"
        parts.append(_point(x, y, BLUE, f"{step['num_ranks']:,} ranks: efficiency {step['efficiency']:.2f}, {rate}"))
    parts.append(text(places[-1][0] + 8, places[-1][1] + 4, document["strategy"], fill=BLUE, weight=600))
    for each in document["published"]:
        x, y = place(each["num_ranks"], each["efficiency"])
        parts.append(_point(x, y, ORANGE, f"{each['name']}: {each['efficiency']:.2f} {each['kind']}, {each['source']}"))
        is_followed = any(
            other["num_ranks"] > each["num_ranks"] and abs(other["efficiency"] - each["efficiency"]) < 0.05
            for other in document["published"]
        )
        anchor = "end" if is_followed else "start"
        name = each["name"].partition(",")[0]
        parts.append(text(x - 7 if is_followed else x + 7, y - 5, name, anchor=anchor, fill=ORANGE))
    if here := document.get("this_run"):
        x, y = place(here["num_ranks"], here["efficiency"])
        parts.append(_point(x, y, GREEN, f"this run: {here['num_ranks']:,} ranks, {here['efficiency']:.2f}"))
        parts.append(text(x + 7, y + 14, "this run", fill=GREEN, weight=600))
    return svg(WIDTH, HEIGHT, parts, "predicted efficiency by number of ranks")


def _point(x: float, y: float, color: str, tip: str) -> Markup:
    shape = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="3.6" fill="{}"><title>{}</title></circle>')
    return shape.format(x, y, color, tip)
