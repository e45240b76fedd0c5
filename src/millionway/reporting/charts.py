"""Numbers -> pictures, as data addresses that a page can hold."""

import base64
import io
from collections.abc import Sequence
from typing import Any

BLUE, ORANGE, GRAY = "#2563eb", "#d97706", "#6b7280"


def line_chart(
    title: str,
    lines: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    x_label: str,
    percent: bool = False,
) -> str:
    """Lines of (name, x, y); the title says what is up. Returns an <img> address."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(4.6, 2.9), layout="constrained")
    axes = figure.subplots()
    for (name, x, y), color in zip(lines, (BLUE, ORANGE, GRAY)):
        axes.plot(x, y, color=color, linewidth=1.8, marker="o" if len(x) <= 15 else "", markersize=3.5, label=name)
    axes.set_title(title, fontsize=10, loc="left", fontweight="bold")
    axes.set_xlabel(x_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    if len(lines) > 1:
        axes.legend(fontsize=8, frameon=False)
    return _svg(figure)


def _svg(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
