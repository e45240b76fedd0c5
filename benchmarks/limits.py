"""What bounds a step of the classifier on GPUs, by their published peaks: the table of docs/parallelism.md.

    python benchmarks/limits.py

Nothing is measured: it asks `millionway plan --limits`.
"""

from pathlib import Path

from presets import write_between_marks  # beside this file

import millionway
from millionway.train.limits import GIGA, TERA, time_and_limit

INSTANCES, DEVICES = (1_281_167, 14_200_000, 100_000_000), (1, 8, 64)
SHOWN = ("float32", "bfloat16")
BATCH, STORAGE = 4096, "bfloat16"


def table() -> str:
    lines = []
    for num in INSTANCES:
        for devices in DEVICES:
            options = {"batch_size": BATCH, "storage": STORAGE, "encoder": "resnet18", "image_size": 32}
            answer = millionway.plan(instances=num, devices=devices, limits=True, **options)["hybrid"]
            assert answer.work is not None
            shown = [bound for bound in answer.bounds if bound.precision in SHOWN]
            if not lines:
                heads = [f"{bound.gpu}, {bound.precision}" for bound in shown]
                lines += [
                    "| N | GPUs | products, TFLOP | exponentials, G | memory, GB | sent, MB | "
                    + " | ".join(heads)
                    + " |"
                ]
                lines += ["|---" * (6 + len(heads)) + "|"]
            work = answer.work
            amounts = [work.products / TERA, work.exponentials / GIGA, work.memory_bytes / GIGA]
            cells = [f"{num:,}", str(devices), *(f"{each:.3g}" for each in (*amounts, 1e3 * work.network_bytes / GIGA))]
            cells += [", ".join(filter(None, time_and_limit(bound))) for bound in shown]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    text = table()
    write_between_marks(Path(__file__).parent.parent / "docs" / "parallelism.md", "limits", text)
    print(text)
