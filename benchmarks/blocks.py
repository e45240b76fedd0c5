"""In how large blocks should small batches go over the rows? CPU milliseconds of a classifier's step, one thread.

    python benchmarks/blocks.py

All sizes take turns, so that neighbors on the machine slow them alike. `results/blocks.json` keeps the medians.
"""

import json
import statistics
import time
from pathlib import Path
from unittest import mock

import torch

from millionway.machine import describe_environment
from millionway.model import classifier as classifier_module
from millionway.model.classifier import InstanceClassifier

RESULT = Path(__file__).parent / "results" / "blocks.json"
CASES = [(10_000, 64, 128), (50_000, 64, 128), (50_000, 128, 128)]  # instances, views, dimensions
BLOCKS = (256, 512, 1024, 2048, 4096, 8192)
TURNS, WARM_UP = 20, 5


def medians(num: int, batch: int, dim: int) -> dict[int, float]:
    classifiers = {block: InstanceClassifier(num, dim, 0.1) for block in BLOCKS}
    x, ids = torch.randn(batch, dim, requires_grad=True), torch.randperm(num)[:batch]
    spent: dict[int, list[float]] = {block: [] for block in BLOCKS}
    for _ in range(TURNS + WARM_UP):
        for block, classifier in classifiers.items():
            with mock.patch.object(classifier_module, "rows_per_block", lambda batch, device, block=block: block):
                started = time.process_time()
                classifier(x, ids).backward()
                classifier.update(0.6)
                spent[block].append(1000 * (time.process_time() - started))
    return {block: statistics.median(times[WARM_UP:]) for block, times in spent.items()}


def main() -> None:
    torch.set_num_threads(1)
    results = []
    for num, batch, dim in CASES:
        results.append({"num_instances": num, "views": batch, "dim": dim, "cpu_ms_by_rows": medians(num, batch, dim)})
        print(results[-1], flush=True)
    environment = json.loads(describe_environment(torch.device("cpu")))
    RESULT.write_text(json.dumps({"cases": results, "environment": environment}, indent=1) + "\n")


if __name__ == "__main__":
    main()
