"""A small collection with everything in it: copies, a strange image, labels, and names that would be script in HTML."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import uvicorn
from pictures import NUM, Served, encoded, picture, vector
from PIL import Image

from millionway.collection import table as tables
from millionway.collection.neighbors import most_similar, nearest
from millionway.data.images import UnreadableImage
from millionway.explorer.pack import Pack
from millionway.explorer.server import Explorer, address, application, listen


@pytest.fixture(scope="session")
def table() -> pa.Table:
    images = [picture(number) for number in range(NUM)]
    near = nearest(torch.stack([vector(image) for image in images]))
    draw = np.random.default_rng(0)
    names = [f"/photos/{number:03d}.png" for number in range(NUM)]
    names[7] = "/photos/<img src=x onerror=alert(1)>.png"
    groups = np.where(np.arange(NUM) < 10, np.arange(NUM) // 2, -1)
    paths = pa.array(names)
    columns = {
        "id": np.arange(NUM) + 5,
        "path": paths,
        "label": pa.array(["cat" if number % 3 else "<b>dog</b>" for number in range(NUM)]),
        "x": draw.uniform(-1, 1, NUM).astype(np.float32),
        "y": draw.uniform(-1, 1, NUM).astype(np.float32),
        "cluster": tables.or_null(np.arange(NUM) % 4, pa.int32(), np.arange(NUM) % 4 < 3),
        "neighbors": tables.neighbors_column(near),
        "outlier_score": np.linspace(0, 1, NUM).astype(np.float32),
        "outlier_reason": pa.array(["" if number < NUM - 3 else "far from everything" for number in range(NUM)]),
        "duplicate_group": tables.or_null(groups, pa.int32(), groups >= 0),
        "keep": np.arange(NUM) % 2 == 0,
        "width": np.full(NUM, 64),
        "height": np.full(NUM, 48),
        "modified": pa.array(np.arange(NUM) * 86_400_000_000, pa.timestamp("us", "UTC")),
        "thumbnail": pa.StructArray.from_arrays([pa.array(map(encoded, images)), paths], ["bytes", "path"]),
    }
    return pa.table(columns, schema=tables.SCHEMA)


@pytest.fixture(scope="session")
def explorer(table: pa.Table) -> Explorer:
    unit = torch.stack([vector(picture(number)) for number in range(NUM)])

    def image_of(place: int) -> bytes:
        if place == 11:
            raise UnreadableImage("the image is gone")
        return encoded(picture(place))

    def search(image: Image.Image, num: int) -> list[tuple[int, float]]:
        near = most_similar(vector(image)[None], unit, num)
        return list(zip(near.places[0].tolist(), near.cosines[0].tolist()))

    return Explorer(Pack(table, {"central": []}, "photos", True, True), image_of, search, lambda: "<p>a report</p>")


@pytest.fixture(scope="session")
def served(explorer: Explorer) -> Iterator[Served]:
    """A real server on a real port."""
    listener: socket.socket = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(application(explorer, "127.0.0.1", port), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield Served(address(explorer, listener), port, explorer.token)
    server.should_exit = True
    thread.join()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    picture(30).save(tmp_path / "query.png")
    (tmp_path / "note.png").write_text("not a picture")
    return tmp_path
