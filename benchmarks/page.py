"""How long until the page shows its first map, with 10,000 and with 100,000 images?

    python benchmarks/page.py --cifar10 FOLDER       # FOLDER/test/CLASS/*.png

The images are those of CIFAR-10, again and again with other crops and brightness. Places are their principal
components. A new browser each time, so that nothing is kept; from the request to the first drawn map, by the browser's
own clock. Needs chromium and chromedriver.
"""

import argparse
import io
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
import uvicorn
from PIL import Image, ImageEnhance

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "explorer"))

from browser import chromium, opened  # noqa: E402

from millionway.collection import table as tables  # noqa: E402
from millionway.collection.neighbors import NUM_NEIGHBORS, Neighbors  # noqa: E402
from millionway.collection.places import principal  # noqa: E402
from millionway.explorer.pack import Pack  # noqa: E402
from millionway.explorer.server import Explorer, address, application, listen  # noqa: E402
from millionway.machine import describe_environment  # noqa: E402

FEW, MANY = 10_000, 100_000
TURNS = 3


def pictures(files: list[Path], num: int) -> list[Image.Image]:
    draw, found = np.random.default_rng(0), []
    originals = [Image.open(path).convert("RGB") for path in files[:num]]
    for number in range(num):
        image = originals[number % len(originals)]
        if number >= len(originals):
            left, top = draw.integers(4, size=2).tolist()
            image = ImageEnhance.Brightness(image.crop((left, top, left + 28, top + 28))).enhance(
                draw.uniform(0.7, 1.3)
            )
        found.append(image)
    return found


def table_of(files: list[Path], num: int) -> pa.Table:
    images = pictures(files, num)
    small = np.stack([np.asarray(image.resize((8, 8), Image.Resampling.BOX)) for image in images])
    flat = principal(F.normalize(torch.tensor(small).float().flatten(1)))
    near = torch.arange(num)[:, None] + torch.arange(1, NUM_NEIGHBORS + 1)
    paths = pa.array([f"/photos/{number:06d}.png" for number in range(num)])
    columns = {
        "id": np.arange(num),
        "path": paths,
        "label": pa.array([files[number % len(files)].parent.name for number in range(num)]),
        "x": (flat[:, 0] / np.abs(flat).max()).astype(np.float32),
        "y": (flat[:, 1] / np.abs(flat).max()).astype(np.float32),
        "cluster": np.arange(num, dtype=np.int32) % 20,
        "neighbors": tables.neighbors_column(Neighbors((near % num).int(), torch.rand(num, NUM_NEIGHBORS))),
        "outlier_score": np.linspace(0, 1, num, dtype=np.float32),
        "outlier_reason": pa.array([""] * num),
        "duplicate_group": pa.nulls(num, pa.int32()),
        "keep": np.ones(num, bool),
        "width": np.full(num, 32),
        "height": np.full(num, 32),
        "modified": pa.nulls(num, pa.timestamp("us", "UTC")),
        "thumbnail": pa.StructArray.from_arrays([pa.array(map(png, images), pa.binary()), paths], ["bytes", "path"]),
    }
    return pa.table(columns, schema=tables.SCHEMA)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def first_map_seconds(table: pa.Table) -> float:
    """A new server and a new browser."""
    explorer = Explorer(Pack(table, {"central": []}, "photos", False, False), lambda place: b"", None, None)
    listener = listen("127.0.0.1", 0)
    where = application(explorer, "127.0.0.1", listener.getsockname()[1])
    server = uvicorn.Server(uvicorn.Config(where, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    with chromium() as browser:
        opened(browser, address(explorer, listener))
        seconds = float(browser.execute_script("return document.body.dataset.drawn")) / 1000
    server.should_exit = True
    thread.join()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path, required=True)
    asked = parser.parse_args()
    files = sorted((asked.cifar10 / "test").glob("*/*.png"))[:FEW]
    found: dict[int, list[float]] = {num: [] for num in (FEW, MANY)}
    all_images = table_of(files, MANY)
    for turn in range(TURNS + 1):
        for num, seconds in found.items():
            took = first_map_seconds(all_images.slice(0, num))
            if turn:  # the first one warms the machine's own caches
                seconds.append(took)
    numbers: dict[str, Any] = {f"seconds_{num}": seconds for num, seconds in found.items()}
    numbers["ratio"] = statistics.median(found[MANY]) / statistics.median(found[FEW])
    written = ROOT / "benchmarks" / "results" / "page.json"
    environment = json.loads(describe_environment(torch.device("cpu")))
    written.write_text(json.dumps({"numbers": numbers, "environment": environment}, indent=2) + "\n")
    print(json.dumps(numbers, indent=1), f"\nwritten  {written}")


if __name__ == "__main__":
    main()
