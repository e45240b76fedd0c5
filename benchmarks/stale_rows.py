"""Is it the age of the rows that holds instance classification back? Two changes that are no options, one seed.

    python benchmarks/stale_rows.py --data cifar10/train --test-data cifar10/test

A row meets its image once an epoch, so it says where the image was hundreds of steps ago.
"rewritten": before every epoch all rows become what the network says of their images then, as the prior does it before
the first. "length 1": rows are brought back to length 1 after every step; else they grow, and turn less each time.
"""

import argparse
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import tuning
from presets import write_between_marks
from torch import Tensor

from millionway.data.batches import plain_batches
from millionway.machine import num_cores
from millionway.model.prior import PriorProgress, write_prior
from millionway.studies.cell_process import run_cell
from millionway.train.loop import Loop
from millionway.train.step import StepResult

RESULTS = Path(__file__).parent / "results" / "stale_rows"
DOCUMENT = Path(__file__).parent.parent / "docs" / "experiments.md"
usual_step = Loop._step


def rewritten(loop: Loop, views: Tensor, instance_ids: Tensor) -> StepResult:
    if loop.state.step and loop.state.step % loop.plan.steps_per_epoch == 0:
        batches = loop.plan.sampler.pass_over_all()
        size = loop.plan.sampler.batch_size
        images = plain_batches(loop.dataset.store, torch.cat(batches), loop.spec.image_size, size, loop.device)
        write_prior("batch-bn", loop.state.network, loop.state.classifier, images, 1.0, PriorProgress())
    return usual_step(loop, views, instance_ids)


def length_1(loop: Loop, views: Tensor, instance_ids: Tensor) -> StepResult:
    result = usual_step(loop, views, instance_ids)
    loop.state.classifier.weight.copy_(F.normalize(loop.state.classifier.weight))
    return result


CHANGES: dict[str, Callable[[Loop, Tensor, Tensor], StepResult]] = {"rewritten": rewritten, "length 1": length_1}


def path_of(name: str) -> Path:
    return RESULTS / f"{name.replace(' ', '_')}.json"


def measure(name: str, settings: dict) -> None:
    result = path_of(name)
    if not result.exists():
        Loop._step = CHANGES[name]
        run_cell(result.with_suffix(""), result, settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--test-data")
    chosen = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    usual = tuning.job(tuning.CHOSEN, 5, 0)
    settings = tuning.common(chosen.data, chosen.test_data) | usual.cell.settings
    settings |= {"seed": 0, "threads": max(1, num_cores() // 2)}
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(partial(measure, settings=settings), CHANGES))
    lines = ["| rows | k-NN | linear | instance top-1 |", "|---|---|---|---|"]
    for name, path in {"as usual": usual.result, **{name: path_of(name) for name in CHANGES}}.items():
        result = json.loads(path.read_text())
        values = [f"{100 * result[key]:.1f}" for key in ("knn_200", "linear_top1", "instance_top1")]
        lines.append(f"| {' | '.join([name, *values])} |")
    write_between_marks(DOCUMENT, "stale rows", "\n".join(lines))


if __name__ == "__main__":
    main()
