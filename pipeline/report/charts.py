"""The report's charts: numbers in, inline SVG out. No script and no network, so that a report opens anywhere."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from markupsafe import Markup

INK, MUTED, RULE = "#1d2733", "#6b7785", "#e6eaef"
BLUE, ORANGE, GREEN, VIOLET, RED, GREY = "#2f6fde", "#e8833a", "#2a9d76", "#8660c9", "#cf4b4b", "#b9c2cd"
SERIES_COLORS = (BLUE, ORANGE, GREEN, VIOLET, RED, GREY)
CHARACTER_WIDTH = 6.6
LABEL_HEIGHT = 28.0
"""Of a curve's name and its last value, below each other."""
MAX_BARS = 40


@dataclass(frozen=True, slots=True)
class Line:
    """One curve; a gap is a NaN."""

    name: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a bar chart: a label and one or more stacked parts."""

    label: str
    parts: tuple[float, ...]


def line_chart(
    lines: Sequence[Line], *, y_label: str, x_label: str, y_format: str = "{:.3g}", from_zero: bool = False
) -> Markup:
    """Curves over a shared x axis, the last value written at each curve's end."""
    lines = [line for line in lines if any(math.isfinite(y) for y in line.ys)]
    if not lines:
        return empty("nothing was recorded")
    width, height, left, right, top, bottom = 560, 260, 58, 96, 16, 42
    all_y = [y for line in lines for y in line.ys if math.isfinite(y)]
    all_x = [x for line in lines for x in line.xs]
    ticks = nice_ticks(0.0 if from_zero else min(all_y), max(all_y))
    x_low, x_high = min(all_x), max(all_x)

    def place_x(x: float) -> float:
        return left + (x - x_low) / ((x_high - x_low) or 1) * (width - left - right)

    def place_y(y: float) -> float:
        return height - bottom - (y - ticks[0]) / ((ticks[-1] - ticks[0]) or 1) * (height - top - bottom)

    rule = Markup('<line x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}" stroke="{}"/>')
    parts = [
        rule.format(left, width - right, place_y(tick), place_y(tick), RULE)
        + text(left - 8, place_y(tick) + 4, y_format.format(tick), anchor="end", fill=MUTED)
        for tick in ticks
    ]
    step = max(1, round(len(set(all_x)) / 8))
    for x in sorted(set(all_x))[::step]:
        parts.append(text(place_x(x), height - bottom + 18, f"{x:g}", anchor="middle", fill=MUTED))
    parts.append(text((left + width - right) / 2, height - 6, x_label, anchor="middle", fill=MUTED))

    ends: list[tuple[float, float]] = []
    for number, line in enumerate(lines):
        color = SERIES_COLORS[number % len(SERIES_COLORS)]
        points = [(place_x(x), place_y(y), x, y) for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(y)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in points)
        curve = Markup('<polyline points="{}" fill="none" stroke="{}" stroke-width="2.2" stroke-linejoin="round"/>')
        parts.append(curve.format(path, color))
        for px, py, x, y in points:
            tip = f"{line.name}, {x_label} {x:g}: {y_format.format(y)}"
            point = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2.8" fill="{}"><title>{}</title></circle>')
            parts.append(point.format(px, py, color, tip))
        ends.append((points[-1][0] + 8, points[-1][1]))
    heights = spread([y for _, y in ends], LABEL_HEIGHT, top, height - bottom)
    for number, (line, (x, _), y) in enumerate(zip(lines, ends, heights, strict=True)):
        color, last = SERIES_COLORS[number % len(SERIES_COLORS)], [y for y in line.ys if math.isfinite(y)][-1]
        parts.append(text(x, y - 2, line.name, fill=color, weight=600))
        parts.append(text(x, y + 11, y_format.format(last), fill=color))
    return svg(width, height, parts, y_label)


def bar_chart(
    bars: Sequence[Bar], *, part_names: Sequence[str], title: str, limit: int = MAX_BARS, num_last: int = 0
) -> Markup:
    """Horizontal stacked bars with their totals; past `limit` rows, those before the `num_last` ones are one of words:
    beside a bar of them all, the others would be too short to compare.
    """
    if not bars:
        return empty("none")
    is_cut = len(bars) > limit
    num_first = limit - 1 - num_last if is_cut else len(bars)
    last = bars[len(bars) - num_last :] if is_cut else []
    shown = [*bars[:num_first], *last]
    totals = [sum(bar.parts) for bar in bars[num_first : len(bars) - len(last)]]
    words = f"{len(totals):,} more"
    width, row, top = 560, 22, 4
    left = 16 + int(max(text_width(name) for name in (*(shorten(bar.label) for bar in shown), words if is_cut else "")))
    longest = max(sum(bar.parts) for bar in shown) or 1
    scale = (width - left - 64) / longest
    parts: list[Markup] = []
    for number, bar in enumerate(shown):
        y, x = top + (number + (is_cut and number >= num_first)) * row, float(left)
        parts.append(text(left - 8, y + 14, shorten(bar.label), anchor="end", fill=INK, tip=bar.label))
        for index, value in enumerate(bar.parts):
            color = SERIES_COLORS[index % len(SERIES_COLORS)]
            tip = f"{bar.label}, {part_names[index]}: {value:,.0f}"
            parts.append(rect(x, y + 2, value * scale, row - 6, color, tip))
            x += value * scale
        parts.append(text(x + 6, y + 14, f"{sum(bar.parts):,.0f}", fill=MUTED))
    if is_cut:
        y = top + num_first * row + 14
        each = f"{min(totals):,.0f} to {max(totals):,.0f} each, {sum(totals):,.0f} in all"
        parts += [text(left - 8, y, words, anchor="end", fill=MUTED), text(left, y, each, fill=MUTED)]
    keys = legend(part_names) if len(part_names) > 1 else Markup()
    return keys + svg(width, top * 2 + row * (len(shown) + is_cut), parts, title)


def side_by_side_chart(bars: Sequence[Bar], *, part_names: Sequence[str], title: str) -> Markup:
    """Horizontal bars, for each row one thin bar below the other for each part, with its value."""
    if not bars:
        return empty("none")
    width, thin, gap, top = 560, 12, 8, 4
    row = thin * len(part_names) + gap
    left = 16 + int(max(text_width(shorten(bar.label)) for bar in bars))
    scale = (width - left - 64) / (max(value for bar in bars for value in bar.parts) or 1)
    parts: list[Markup] = []
    for number, bar in enumerate(bars):
        y = top + number * row
        parts.append(text(left - 8, y + (row - gap) / 2 + 4, shorten(bar.label), anchor="end", fill=INK, tip=bar.label))
        for index, value in enumerate(bar.parts):
            color = SERIES_COLORS[index % len(SERIES_COLORS)]
            tip = f"{bar.label}, {part_names[index]}: {value:,.0f}"
            parts.append(rect(left, y + index * thin, value * scale, thin - 1, color, tip))
            if value:
                parts.append(text(left + value * scale + 6, y + index * thin + 10, f"{value:,.0f}", fill=MUTED))
    return legend(part_names) + svg(width, top * 2 + row * len(bars) - gap, parts, title)


def share_bar(shares: Sequence[tuple[str, float]], *, title: str) -> Markup:
    """One bar cut into shares of 1, with a legend that says each in percent."""
    width, height, x = 1160, 34, 0.0
    total = sum(share for _, share in shares) or 1
    parts: list[Markup] = []
    for number, (name, share) in enumerate(shares):
        length = share / total * width
        color = SERIES_COLORS[number % len(SERIES_COLORS)]
        parts.append(rect(x, 0, length, height, color, f"{name}: {share / total:.1%}"))
        if length > 60:
            parts.append(text(x + length / 2, 22, f"{share / total:.0%}", anchor="middle", fill="#fff", weight=600))
        x += length
    return svg(width, height, parts, title) + legend([f"{name} {share / total:.1%}" for name, share in shares])


def confusion_chart(names: Sequence[str], counts_true_predicted: Sequence[Sequence[int]]) -> Markup:
    """Rows are the true class, columns the predicted one. The diagonal is blue, mistakes are orange."""
    if not names:
        return empty("no classes")
    num_classes = len(names)
    cell = max(9, min(40, 460 // num_classes))
    longest = max(text_width(shorten(name, 18)) for name in names)
    # The names of the rows, and beside them, upright, the name of their axis.
    left = 40 + int(longest)
    is_tilted = longest > cell
    top = 34 if not is_tilted else 34 + int(longest * 0.75)
    size = cell * num_classes
    middle = top + size / 2
    parts = [
        text(left + size / 2, 12, "predicted", anchor="middle", fill=MUTED),
        turned(text(12, middle, "true", anchor="middle", fill=MUTED), -90, 12, middle),
    ]
    for row, (name, counts) in enumerate(zip(names, counts_true_predicted, strict=True)):
        total = sum(counts) or 1
        y = top + row * cell
        if cell >= 12:
            parts.append(text(left - 8, y + cell / 2 + 4, shorten(name, 18), anchor="end", fill=INK, tip=name))
        if cell >= 12:
            x = left + (row + 0.5) * cell
            label = text(x, top - 6, shorten(name, 18), anchor="start" if is_tilted else "middle", fill=INK, tip=name)
            parts.append(turned(label, -45, x, top - 6) if is_tilted else label)
        for column, count in enumerate(counts):
            x, share = left + column * cell, count / total
            color = BLUE if row == column else ORANGE
            # A single mistake must stay visible beside a diagonal near 1.
            opacity = 0.0 if not count else 0.12 + 0.88 * (share if row == column else min(1.0, share * 4))
            tip = f"true {name}, predicted {names[column]}: {count} of {total}"
            look = Markup(' rx="2" fill-opacity="{:.3f}" stroke="{}"').format(opacity, RULE)
            parts.append(rect(x, y, cell - 1, cell - 1, color, tip, look))
            if count and cell >= 20:
                ink = "#fff" if opacity > 0.55 else INK
                parts.append(text(x + cell / 2, y + cell / 2 + 4, str(count), anchor="middle", fill=ink))
    return svg(
        left + size + (int(longest * 0.75) if is_tilted else 8),
        top + size + 8,
        parts,
        "confusion matrix, rows are the true class",
    )


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places nearest to the wanted ones that are `gap` apart, in the same order, and between `low` and `high`."""
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    # Those that would be too close move together, around the mean of where they would be.
    groups: list[list[float]] = []
    for place, number in enumerate(order):
        groups.append([wanted[number] - place * gap])
        while len(groups) > 1 and fmean(groups[-2]) >= fmean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    last = max(low, high - gap * (len(wanted) - 1))
    first_of_each = [min(max(fmean(group), low), last) for group in groups for _ in group]
    placed = dict(zip(order, (start + place * gap for place, start in enumerate(first_of_each)), strict=True))
    return [placed[number] for number in range(len(wanted))]


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that enclose [low, high]."""
    if high <= low:
        low, high = low - (abs(low) or 1) * 0.5, high + (abs(high) or 1) * 0.5
    raw = (high - low) / about
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, last + 1)]


def legend(names: Sequence[str]) -> Markup:
    """Colour keys in the order of the series."""
    key = Markup('<span><i style="background:{}"></i>{}</span>')
    keys = [key.format(SERIES_COLORS[number % len(SERIES_COLORS)], name) for number, name in enumerate(names)]
    return Markup('<div class="legend">{}</div>').format(Markup().join(keys))


def text(
    x: float, y: float, words: str, *, anchor: str = "start", fill: str, weight: int = 400, tip: str = ""
) -> Markup:
    """Text at a position."""
    title = Markup("<title>{}</title>").format(tip) if tip else ""
    shown = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}" fill="{}" font-weight="{}">{}{}</text>')
    return shown.format(x, y, anchor, fill, weight, words, title)


def rect(x: float, y: float, width: float, height: float, fill: str, tip: str, look: Markup | str = "") -> Markup:
    """A box at a position; its tip shows when one points at it. `look`: further attributes."""
    box = Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="{}"{}><title>{}</title></rect>')
    return box.format(x, y, width, height, fill, look, tip)


def turned(part: Markup, degrees: int, x: float, y: float) -> Markup:
    """A part rotated around a position."""
    return Markup('<g transform="rotate({} {:.1f} {:.1f})">{}</g>').format(degrees, x, y, part)


def text_width(words: str) -> float:
    """About how wide `words` are: Chinese, Japanese and Korean characters and emoji take the room of two."""
    return sum(CHARACTER_WIDTH * (2 if unicodedata.east_asian_width(each) in "WF" else 1) for each in words)


def svg(width: float, height: float, parts: Sequence[Markup], title: str) -> Markup:
    """The picture; it shrinks with the page and never grows past its own size."""
    picture = Markup('<svg viewBox="0 0 {} {}" style="max-width:{}px" role="img" aria-label="{}">{}</svg>')
    return picture.format(width, height, width, title, Markup().join(parts))


def empty(words: str) -> Markup:
    """Placeholder for a chart without data."""
    return Markup('<p class="empty">{}</p>').format(words)


def shorten(words: str, limit: int = 30) -> str:
    """Long names lose their middle."""
    return words if len(words) <= limit else f"{words[: limit // 2 - 1]}…{words[-(limit - limit // 2) :]}"
