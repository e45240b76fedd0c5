"""The paper's ablations as grids: which settings are compared, and what the paper found."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from millionway.settings.pretrain import Classifier
from millionway.settings.resolve import num_hardest

PAPER_INSTANCES = 1_281_167
SAMPLED = (2**10, 2**12, 2**14, 2**16)
VARIED = {"epochs", "head", "prior", "smoothing", "hardest", "classes_per_step"}
NUM_VIEWS = (1, 2, 4)
WARMUP = 0.1  # of the run, where its length is counted in views
PRIORS = ("random", "fixed-bn", "batch-bn", "running-bn")


@dataclass(frozen=True)
class Cell:
    """One row of a table: settings that are run with every seed."""

    name: str
    settings: dict[str, Any]
    paper: float | None = None
    """the paper's ImageNet-1K linear top-1, percent"""

    @property
    def label(self) -> str:
        """The same settings have the same label in every study, so that a finished run is not run again."""
        s = self.settings
        smoothing = f"k{s['hardest']}-a{s['smoothing']:g}" if s["smoothing"] else "plain"
        classes = f"m{s['classes_per_step']}" if s["classes_per_step"] else "full"
        others = "".join(f"_{name}{s[name]}" for name in sorted(s.keys() - VARIED))
        return f"e{s['epochs']}_{s['head']}_{s['prior']}_{smoothing}_{classes}{others}"


@dataclass(frozen=True)
class Setting:
    """What a grid depends on."""

    num_images: int
    epochs: tuple[int, ...]
    prior: str = Classifier().prior
    """the one that stands for the prior where kinds are not compared"""
    batch_size: int = 256
    """images of a step with two views"""

    @property
    def hardest(self) -> int:
        """K for so many images, as a run would choose it."""
        return max(1, num_hardest(self.num_images))


@dataclass(frozen=True)
class Study:
    question: str
    cells: Callable[[Setting], list[Cell]]
    reference: str = ""
    """the row that others are compared with"""
    pairs: tuple[tuple[str, str], ...] = ()
    """rows that are compared, the second is the reference; without them all with `reference`"""
    paper_epochs: str = "200 epochs"


def cell(name: str, epochs: int, paper: float | None = None, **changes: Any) -> Cell:
    """Without changes: MLP head, random rows, no smoothing, all classes."""
    settings = {"head": "mlp", "prior": "random", "smoothing": 0.0, "hardest": 0, "classes_per_step": None}
    return Cell(name, {"epochs": epochs, **settings, **changes}, paper)


def _components(at: Setting) -> list[Cell]:
    smoothed = {"smoothing": 0.2, "hardest": at.hardest}
    epochs = max(at.epochs)
    return [
        cell("linear head + prior + smoothing", epochs, 58.6, head="linear", prior=at.prior, **smoothed),
        cell("MLP head", epochs, 67.3),
        cell("MLP head + prior", epochs, 67.6, prior=at.prior),
        cell("MLP head + prior + smoothing", epochs, 68.2, prior=at.prior, **smoothed),
    ]


def _initialization(at: Setting) -> list[Cell]:
    papers = {"random": 12.4, "fixed-bn": 22.7, "running-bn": 27.4}
    cells = []
    for epochs in at.epochs:
        for prior in PRIORS:
            name = prior if len(at.epochs) == 1 else f"{prior}, {epochs} epochs"
            cells.append(cell(name, epochs, papers.get(prior) if epochs == max(at.epochs) else None, prior=prior))
    return cells


def _sampling(at: Setting) -> list[Cell]:
    """The number of sampled classes is the paper's share of all."""
    papers = (64.8, 65.3, 65.4, 65.5)
    numbers = [max(1, round(num * at.num_images / PAPER_INSTANCES)) for num in SAMPLED]
    epochs = max(at.epochs)
    cells = [
        cell(f"{num} classes (2^{power})", epochs, paper, classes_per_step=num)
        for num, paper, power, fewer in zip(numbers, papers, (10, 12, 14, 16), (0, *numbers))
        if num > fewer  # with few images several are one
    ]
    return [*cells, cell("all classes", epochs, 67.3)]


def _smoothing(at: Setting) -> list[Cell]:
    k, epochs = at.hardest, max(at.epochs)

    def smoothed(hardest: int, alpha: float, paper: float | None = None) -> Cell:
        name = f"K = {hardest}, alpha = {alpha:g}"
        return cell(name, epochs, paper, prior=at.prior, hardest=hardest, smoothing=alpha)

    cells = [cell("none", epochs, 67.6, prior=at.prior)]
    cells += [smoothed(k, 0.1, 67.7), smoothed(k, 0.2, 68.2), smoothed(k, 0.3, 67.5)]
    if k >= 2:
        cells.append(smoothed(k // 2, 0.2, 68.0))
    cells.append(smoothed(2 * k, 0.2, 67.9))
    if k >= 10:
        cells.append(smoothed(k // 10, 0.2))
    return cells


def _views(at: Setting) -> list[Cell]:
    """As many views in all and in a step, so as many steps: only how many of them are of one image differs."""
    views_of_image, views_of_step = 2 * max(at.epochs), 2 * at.batch_size
    cells = []
    for num in NUM_VIEWS:
        epochs, rest = divmod(views_of_image, num)
        batch_size, rest_of_step = divmod(views_of_step, num)
        if rest == rest_of_step == 0 and batch_size <= at.num_images:
            changes = {"views": num, "batch_size": batch_size, "warmup_epochs": round(WARMUP * epochs)}
            cells.append(cell("1 view" if num == 1 else f"{num} views", epochs, prior=at.prior, **changes))
    return cells


def _instance_vs_semantic(at: Setting) -> list[Cell]:
    """The second and the last row of `components`: the same runs, read at every evaluation."""
    return [_components(at)[1], _components(at)[3]]


STUDIES: dict[str, Study] = {
    "components": Study(
        "Which parts of the method help?",
        _components,
        pairs=(
            ("MLP head + prior", "MLP head"),
            ("MLP head + prior + smoothing", "MLP head + prior"),
            ("MLP head + prior + smoothing", "linear head + prior + smoothing"),
            ("MLP head + prior + smoothing", "MLP head"),
        ),
    ),
    "initialization": Study(
        "Does the contrastive prior help, and which?",
        _initialization,
        pairs=(
            *((prior, "random") for prior in PRIORS[1:]),
            *((prior, "fixed-bn") for prior in PRIORS[2:]),
        ),
        paper_epochs="10 epochs",
    ),
    "sampling": Study("Does the softmax over all classes beat sampled ones?", _sampling, reference="all classes"),
    "smoothing": Study(
        "Does smoothing over the hardest classes help, and with which K and alpha?", _smoothing, reference="none"
    ),
    "views": Study("How many views of an image should a step take, at equal views in all?", _views, "2 views"),
    "instance-vs-semantic": Study("Do instance accuracy and semantic accuracy rise together?", _instance_vs_semantic),
    "prior-similarity": Study("What do the rows know before any training?", lambda at: []),
}
