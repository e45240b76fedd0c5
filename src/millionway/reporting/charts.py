"""Numbers -> pictures, as data addresses that a page can hold. Axes begin at zero; shares end at 100 %."""

import base64
import io
from collections.abc import Sequence
from typing import Any

BLUE, ORANGE, GRAY = "#2f6fed", "#d97706", "#808a99"
INK = "#123457"  # stands for the reader's own color of text, light or dark
DARK_MODE = "svg{color:#1f2937}@media(prefers-color-scheme:dark){svg{color:#d6dbe4}}"


def line_chart(
    title: str,
    lines: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    x_label: str,
    percent: bool = False,
    level: tuple[str, float] | None = None,
) -> str:
    """Lines of (name, x, y), and a level to compare with; the title says what is up. Returns an <img> address."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(4.6, 2.9), layout="constrained", facecolor="none")
    axes = figure.subplots()
    axes.set_facecolor("none")
    for (name, x, y), color in zip(lines, (BLUE, ORANGE, GRAY)):
        axes.plot(x, y, color=color, linewidth=1.8, marker="o" if len(x) <= 15 else "", markersize=3.5, label=name)
    if level is not None:
        axes.axhline(level[1], color=GRAY, linewidth=1.2, linestyle="--", label=level[0])
    axes.set_title(title, fontsize=10, loc="left", fontweight="bold", color=INK)
    axes.set_xlabel(x_label, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, color=INK, labelcolor=INK)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(INK)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if _below_zero(lines) else 0.0)
    if percent:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if len(lines) > 1 or level is not None:
        axes.legend(fontsize=8, frameon=False, labelcolor=INK)
    return _svg(figure)


def _below_zero(lines: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> bool:
    return any(value < 0 for _, _, values in lines for value in values)


def _svg(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue().decode().replace(INK, "currentColor")
    text = text.replace("<defs>", f"<style>{DARK_MODE}</style><defs>", 1)
    return "data:image/svg+xml;base64," + base64.b64encode(text.encode()).decode()
