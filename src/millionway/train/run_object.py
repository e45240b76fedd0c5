"""A run as Python sees it: its folder, and what can be had from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from millionway.reporting.contents import read_contents
from millionway.reporting.metrics import read_metrics
from millionway.reporting.page import redraw
from millionway.reporting.words import summary

if TYPE_CHECKING:
    import pyarrow as pa

    from millionway.model.encoder import Encoder


class Run(type(Path())):  # a path of this system: pathlib has one class for each
    """The folder of a run. It is a path, so everything that takes a path takes it."""

    def encoder(self) -> Encoder:
        """The trained encoder as a torch module: colors from 0 to 1 in, features out."""
        from millionway.model.encoder_file import load_encoder

        return load_encoder(self.path)

    @property
    def path(self) -> Path:
        return Path(self)

    @property
    def metrics(self) -> pa.Table:
        """The lines of metrics.jsonl; what a line does not have is null. `.to_pandas()` makes a data frame."""
        import pyarrow as pa

        lines = read_metrics(self.path / "metrics.jsonl")
        names = dict.fromkeys(name for line in lines for name in line)
        return pa.table({name: [line.get(name) for line in lines] for name in names})

    @property
    def report(self) -> Path:
        """The page with curves, scores and neighbors."""
        return self.path / "report.html"

    def evaluate(self, protocol: str, data: str | Path | None = None, **settings: Any) -> dict[str, Any]:
        """Score the encoder, as `millionway.evaluate` does; by default on the run's own images."""
        from millionway.evaluation.protocols import evaluate
        from millionway.settings.evaluate import Evaluate
        from millionway.settings.parameters import taking

        results = taking(Evaluate)(evaluate)(protocol, self.path, None if data is None else str(data), **settings)
        redraw(self.path)
        return results if protocol == "all" else results[protocol]

    def resume(self, **settings: Any) -> Run:
        """Go on with it: after an interruption, with more epochs, or with `data_changed=True`."""
        from millionway.settings.pretrain import with_settings
        from millionway.settings.stored import first_settings
        from millionway.train.run import pretrain

        return Run(pretrain(with_settings(first_settings(None, self.path), **settings)))

    def _repr_html_(self) -> str | None:
        """What a notebook shows: the sentences that the report begins with."""
        from html import escape

        if not (self.path / "config.json").is_file():
            return None  # a path below it
        sentences = "".join(f"<p>{escape(text)}</p>" for text in summary(read_contents(self.path)))
        return f"<b>run {escape(str(self))}</b>{sentences}<p>report: {escape(str(self.report))}</p>"
