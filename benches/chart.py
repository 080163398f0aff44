"""A chart of horizontal bars as SVG: one panel a row of the benchmark, each with a scale of its own."""

from dataclasses import dataclass
from html import escape

WIDTH, NAMES, RIGHT, BAR, GAP = 1000, 430, 130, 20, 6
OURS, RIVAL, INK, FAINT = "#c2410c", "#94a3b8", "#0f172a", "#64748b"


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    label: str
    ours: bool


def text(x, y, content, size=13, color=INK, anchor="start", weight="normal"):
    style = f'font-size="{size}" fill="{color}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(content)}</text>'


def panel(title, bars, top):
    """The lines of one panel that begins at `top`, and where it ends."""
    out = [text(20, top + 16, title, 15, weight="bold")]
    y, most = top + 28, max((bar.value for bar in bars), default=1) or 1
    for bar in bars:
        width = max(bar.value / most * (WIDTH - NAMES - RIGHT), 1)
        weight = "bold" if bar.ours else "normal"
        out.append(text(NAMES - 10, y + BAR - 6, bar.name, 12, anchor="end", weight=weight))
        color = OURS if bar.ours else RIVAL
        out.append(f'<rect x="{NAMES}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{color}"/>')
        out.append(text(f"{NAMES + width + 6:.1f}", y + BAR - 6, bar.label, 12, weight=weight))
        y += BAR + GAP
    return out, y + 14


def svg(title, subtitle, note, panels):
    """`panels`: (title, bars) of each."""
    out = [text(20, 34, title, 20, weight="bold"), text(20, 56, subtitle, 13, FAINT), text(20, 76, note, 13, FAINT)]
    y = 96
    for name, bars in panels:
        lines, y = panel(name, bars, y)
        out += lines
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" font-family="system-ui, sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y}" fill="white"/>', *out, "</svg>"]) + "\n"
