"""What can be set for a report."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Report:
    """Draw the page of a run, RUN/report.html, from its files."""

    run: Path
    """the run folder"""
