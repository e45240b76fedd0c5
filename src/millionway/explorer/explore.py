"""From a collection to its page."""

import logging
import threading
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from millionway.collection.answers import encode
from millionway.collection.collection import Collection
from millionway.collection.neighbors import most_similar
from millionway.collection.opening import open_collection
from millionway.console import track
from millionway.explorer.epochs import Epochs
from millionway.explorer.pack import Pack
from millionway.explorer.server import Explorer, address, is_loopback, listen, serve
from millionway.explorer.static_site import LARGE_IMAGES, check_folder_is_new, export
from millionway.explorer.template import library
from millionway.reporting.contents import read_contents
from millionway.reporting.page import draw
from millionway.settings.collection import Explore

log = logging.getLogger("millionway")


def open_explorer(collection: Collection, out: Path | None = None) -> Explorer:
    """out: the table, made if it is not there or not of these images."""
    run = collection.run
    path = None if out is None and run is None else collection.file(out)
    found = None if path is None else collection.read(path)
    if found is None and path is not None:
        collection.write(path)
        found = collection.read(path)
    table, about = found or (collection.table(), collection.about())
    can_search = collection.subject is not None and collection.kind == "features" and collection.features is None
    epochs = None
    if run is not None:
        place_of = {instance_id: place for place, instance_id in enumerate(table["id"].to_pylist())}
        epochs = Epochs(run, place_of, collection.num_threads)
    name = run.resolve().name if run is not None else Path(collection.dataset.source.name).name
    known = () if epochs is None else tuple(epochs.known())
    pack = Pack(table, about, name, can_search, run is not None, known)
    ids = table["id"].to_pylist()
    lock = threading.Lock()  # one picture at a time is enough work for the encoder

    def search(picture: Image.Image, num: int) -> list[tuple[int, float]]:
        with lock:
            near = most_similar(encode(collection, [picture]), collection.vectors.unit, num)
        return list(zip(near.places[0].tolist(), near.cosines[0].tolist()))

    def image_of(place: int) -> Any:
        return collection.dataset.source.read(ids[place])

    report = None if run is None else lambda: draw(read_contents(run))
    return Explorer(pack, image_of, search if can_search else None, report, epochs)


def explore(asked: Explore) -> Path | None:
    """Serve the page until Ctrl-C, or write it into a folder and return its path."""
    library()  # what is missing is said before any long work
    if asked.port >= 1 << 16:
        raise ValueError(f"--port is a number up to 65535, not {asked.port}")
    if asked.export is not None:
        check_folder_is_new(asked.export)
        explorer = open_explorer(open_collection(asked, track), asked.out)
        large = len(explorer.pack) <= LARGE_IMAGES
        explorer.pack = replace(explorer.pack, can_search=False, large=large)
        return export(explorer, asked.export, track)
    listener = listen(asked.host, asked.port)
    if not is_loopback(asked.host):
        log.warning("--host %s: whoever reaches this machine and has the address sees the images", asked.host)
    try:
        explorer = open_explorer(open_collection(asked, track), asked.out)
        where = address(explorer, listener)
        print(f"page  {where}\nCtrl-C ends it.", flush=True)
        if asked.browser:
            threading.Timer(0.5, webbrowser.open, (where,)).start()
        serve(explorer, listener, asked.host)
    finally:
        listener.close()
    return None
