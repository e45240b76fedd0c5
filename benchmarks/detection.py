"""Does `evaluate detect` learn? A trained Faster R-CNN against the same one untrained, on photos of blood cells.

    python benchmarks/detection.py --bccd FOLDER        # VOC layout: JPEGImages, Annotations, ImageSets/Main

ResNet-18-FPN at 240 px from a random encoder, about half an hour on 2 cores. Also scores the saved detections by
pycocotools directly.
"""

import argparse
import contextlib
import io
import json
import tempfile
import time
from pathlib import Path

import torch
from presets import write_between_marks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

import millionway
from millionway.machine import describe_environment

ROOT = Path(__file__).parent.parent
SETTINGS = {"encoder": "torchvision/resnet18", "image_size": 224, "detector": "fpn"}
SETTINGS |= {"detect_size": 240, "batch_size": 4, "lr": 0.02}


def by_hand(folder: Path) -> dict[str, float]:
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(folder / "boxes.json"))
        run = COCOeval(truth, truth.loadRes(str(folder / "detections_0.json")), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return {name: float(value) for name, value in zip(("AP", "AP50", "AP75"), run.stats)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bccd", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "detection.json")
    chosen = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, iterations, lr in (("untrained", 1, 1e-9), ("trained", chosen.iterations, SETTINGS["lr"])):
            out, started = Path(temporary) / name, time.monotonic()
            settings = SETTINGS | {"iterations": iterations, "lr": lr, "bad_boxes": "drop", "cache": False}
            scores = millionway.evaluate("detect", data=chosen.bccd, out=out, **settings)
            rows[name] = {key: scores[key] for key in ("AP", "AP50", "AP75")}
            rows[name] |= {"seconds": time.monotonic() - started, "by_hand": by_hand(out / "detect")}
            print(name, rows[name], flush=True)
    result = {
        "settings": SETTINGS | {"iterations": chosen.iterations},
        "rows": rows,
        "environment": json.loads(describe_environment(torch.device("cpu"))),
    }
    chosen.out.write_text(json.dumps(result, indent=2) + "\n")
    if chosen.out.parent == ROOT / "benchmarks" / "results":
        lines = ["| detector | AP | AP50 | AP75 | by pycocotools alone |", "|---|---|---|---|---|"]
        lines += [
            f"| {name} | {row['AP']:.1%} | {row['AP50']:.1%} | {row['AP75']:.1%} | {row['by_hand']['AP']:.1%} |"
            for name, row in rows.items()
        ]
        lines += [
            "",
            f"{chosen.iterations} steps of {SETTINGS['batch_size']} photos, {rows['trained']['seconds']:.0f} s.",
        ]
        write_between_marks(ROOT / "docs" / "experiments.md", "detection", "\n".join(lines))


if __name__ == "__main__":
    main()
