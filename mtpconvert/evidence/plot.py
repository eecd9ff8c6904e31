"""A plot of acceptance by position and bucket as SVG, written by hand: nothing to install, readable everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from mtpconvert.evidence.acceptance import MODES

WIDTH, HEIGHT, BAR, GAP, LEFT, TOP = 900, 270, 26, 40, 60, 64
_COLOURS = {  # distinguishable without colour vision (P. Tol, "bright")
    "forced_greedy": "#4477aa",
    "forced_sampled": "#66ccee",
    "free_greedy": "#ee6677",
    "free_sampled": "#ccbb44",
}
_PANEL = 180  # height of the axis in pixels

Bar = tuple[str, float, Sequence[float] | None]  # mode, share, interval


def acceptance_svg(result: Mapping[str, Any]) -> str:
    """The plot of one ``acceptance_report.document``: by position, by kind of prompt, by length of output."""
    modes = result["modes"]
    positions = {
        f"position {k + 1}": [_bar(mode, modes[mode]["by_position"][k]) for mode in MODES]
        for k in range(result["draft_length"])
    }
    kinds = {
        kind: [_bar(mode, modes[mode]["by_kind"][kind]) for mode in MODES] for kind in modes["free_greedy"]["by_kind"]
    }
    free = [mode for mode in MODES if mode.startswith("free")]
    lengths = {
        f"tokens {bucket}": [_bar(mode, modes[mode]["by_output_length"][bucket]) for mode in free]
        for bucket in modes["free_greedy"]["by_output_length"]
    }
    panels = [
        ("by position in the draft", positions),
        ("by kind of prompt", kinds),
        ("by place in the output", lengths),
    ]
    body: list[str] = []
    width = WIDTH
    for row, (heading, groups) in enumerate(panels):
        drawn, right = _panel(heading, groups, TOP + row * HEIGHT)
        body += drawn
        width = max(width, right)
    height = TOP + len(panels) * HEIGHT
    title = f"Draft acceptance of {result['path']}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="12" role="img">'
        f"<title>{escape(title)}</title>"
        f'<rect width="{width}" height="{height}" fill="white"/>'
        f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>'
        f'<text x="{LEFT}" y="36">{escape(result["exercised"])}, {escape(result["dtype"])}; bars: 95 % intervals</text>'
    )
    return "\n".join([head, *_legend(), *body, "</svg>"]) + "\n"


def _bar(mode: str, cell: Mapping[str, Any]) -> Bar | None:
    return None if cell["rate"] is None else (mode, cell["rate"], cell["interval"])


def _legend() -> Iterator[str]:
    for number, (mode, name) in enumerate(MODES.items()):
        x = LEFT + number * 200
        yield f'<rect x="{x}" y="46" width="12" height="12" fill="{_COLOURS[mode]}"/>'
        yield f'<text x="{x + 18}" y="57">{name}</text>'


def _panel(title: str, groups: Mapping[str, Sequence[Bar | None]], top: int) -> tuple[list[str], int]:
    """One row of grouped bars with 95 % whiskers; (elements, right edge)."""
    base = top + 40 + _PANEL
    out = [f'<text x="{LEFT}" y="{top + 26}" font-size="13" font-weight="bold">{escape(title)}</text>']
    x = LEFT + GAP
    for name, cells in groups.items():
        start = x
        bars = [bar for bar in cells if bar is not None]
        if not bars:
            continue  # nothing was drafted there
        for mode, share, interval in bars:
            y = base - share * _PANEL
            hint = f"{MODES[mode]}, {name}: {share:.1%}"
            out.append(
                f'<rect x="{x}" y="{y:.1f}" width="{BAR}" height="{base - y:.1f}" fill="{_COLOURS[mode]}">'
                f"<title>{escape(hint)}</title></rect>"
            )
            tip = y
            if interval is not None:
                low, high = (base - bound * _PANEL for bound in interval)
                middle, tip = x + BAR / 2, min(y, high)
                out.append(f'<path d="M{middle} {low:.1f}V{high:.1f}" stroke="black" fill="none"/>')
            out.append(
                f'<text x="{x + BAR / 2}" y="{tip - 4:.1f}" font-size="9" text-anchor="middle">{share:.0%}</text>'
            )
            x += BAR
        out.append(f'<text x="{(start + x) / 2}" y="{base + 18}" text-anchor="middle">{escape(name)}</text>')
        x += GAP
    return [*_axis(base, max(x, WIDTH - GAP)), *out], x + GAP


def _axis(base: float, right: float) -> Iterator[str]:
    for tick in range(0, 101, 25):
        y = base - tick / 100 * _PANEL
        yield f'<path d="M{LEFT} {y}H{right}" stroke="#bbb" stroke-width="0.5"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{tick} %</text>'
