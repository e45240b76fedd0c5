"""What a training step of the encoder would take with one thing done another way: CPU seconds, one thread.

    python benchmarks/encoder_step.py

The narrow ResNet learns from made-up views with an optimizer around it and nothing else: rows and real views have
benchmarks of their own. Each way runs in a process of its own, in turns, so that neighbors on the machine slow all
alike.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from presets import write_between_marks

from millionway.machine import describe_environment, keep_freed_memory
from millionway.model.encoder import EncoderSpec, build_encoder
from millionway.settings.pretrain import IMAGENET_MEAN, IMAGENET_STD
from millionway.train.muon import Muon

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "encoder_step.json"
VIEWS = {32: 128, 64: 128, 224: 32}
"""{side: how many in a step}"""
WAYS = {
    "ours": "",
    "memory": "malloc gives freed memory back, as it does by itself",
    "layout": "channels first",
    "precision": "float32",
    "compiled": "torch.compile",
}
WARM_UP, STEPS = 5, 12


def step_seconds(way: str, side: int) -> float:
    torch.set_num_threads(1)
    if way != "memory":
        keep_freed_memory()
    encoder = build_encoder(EncoderSpec("narrow-resnet", "small", side, IMAGENET_MEAN, IMAGENET_STD), 0)
    learning = encoder
    if way == "layout":  # without the change of it that comes before the backbone
        learning = encoder.to(memory_format=torch.contiguous_format).backbone
    if way == "compiled":
        learning = torch.compile(encoder)
    optimizer, spent = Muon(encoder.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4), []
    for _ in range(WARM_UP + STEPS):
        views = torch.rand(VIEWS[side], 3, side, side)
        started = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=way != "precision"):
            features = learning(views)
        features.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        spent.append(time.process_time() - started)
    return statistics.median(spent[WARM_UP:])


def table(found: dict) -> str:
    lines = ["| one thing done another way | " + " | ".join(f"{side} px" for side in VIEWS) + " |"]
    lines.append("|---" * (1 + len(VIEWS)) + "|")
    ours = " | ".join(f"{1000 * found['seconds']['ours'][str(side)]:.0f} ms" for side in VIEWS)
    lines.append(f"| nothing | {ours} |")
    for way, words in WAYS.items():
        if words:
            ratios = " | ".join(f"{found['times_ours'][way][str(side)]:.2f} times" for side in VIEWS)
            lines.append(f"| {words} | {ratios} |")
    views = ", ".join(f"{num} views of {side} px" for side, num in VIEWS.items())
    about = f"Steps have {views}; median of {found['rounds']} turns. Commit {found['environment']['commit']}."
    return "\n".join([*lines, "", about])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs=2, metavar=("WAY", "SIDE"), help="measure this in this process, and print it")
    chosen = parser.parse_args()
    if chosen.only:
        print(step_seconds(chosen.only[0], int(chosen.only[1])))
        return
    seconds = {way: {str(side): [] for side in VIEWS} for way in WAYS}
    for _ in range(chosen.rounds):
        for side in VIEWS:
            for way in WAYS:
                command = [sys.executable, __file__, "--only", way, str(side)]
                seconds[way][str(side)].append(float(subprocess.check_output(command, text=True)))
                print(side, way, seconds[way][str(side)][-1], flush=True)
    ours = seconds["ours"]
    found = {
        "rounds": chosen.rounds,
        "seconds": {way: {side: statistics.median(each) for side, each in of.items()} for way, of in seconds.items()},
        "times_ours": {
            way: {side: statistics.median(a / b for a, b in zip(each, ours[side])) for side, each in of.items()}
            for way, of in seconds.items()
        },
        "environment": json.loads(describe_environment(torch.device("cpu"))),
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    write_between_marks(ROOT / "docs" / "experiments.md", "encoder step", table(found))


if __name__ == "__main__":
    main()
