"""The page as files: for a plain web server, and for small collections for the disk as well."""

import base64
import json
import shutil
from pathlib import Path

from millionway.data.images import UnreadableImage
from millionway.data.readers import Progress
from millionway.explorer.server import Explorer, shown
from millionway.explorer.template import SCRIPTS, STYLE, index_html, library, web_file

EMBEDDED_BYTES = 64 << 20  # a page from the disk may fetch nothing, so the data of a small one stands in a script
LARGE_IMAGES = 5000  # up to so many the images themselves are written too


def export(explorer: Explorer, folder: Path, progress: Progress | None = None) -> Path:
    """Write into a new folder; returns the page."""
    check_folder_is_new(folder)
    folder.mkdir(exist_ok=True)
    try:
        return _write(explorer, folder, progress)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # half a page is none
        raise


def check_folder_is_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--export {folder} exists already; choose another name")
    if not folder.absolute().parent.is_dir():
        raise ValueError(f"--export {folder}: there is no folder {folder.absolute().parent}")


def _write(explorer: Explorer, folder: Path, progress: Progress | None) -> Path:
    pack, files = explorer.pack, {}
    names = pack.names()
    images = [f"image/{place}.jpg" for place in range(len(pack))] if pack.large else []
    epochs = [f"epoch/{epoch}.bin" for epoch in pack.epochs]
    everything, total = [*names, *images, *epochs], 0
    for name in progress(everything, len(everything), "writing the page") if progress else everything:
        data = _get(explorer, name)
        if data is None:
            continue
        _put(folder / "data" / name, data)
        total += len(data)
        if total <= EMBEDDED_BYTES:
            files[name] = base64.b64encode(data).decode()
    embedded = total <= EMBEDDED_BYTES
    if embedded:
        _put(folder / "data" / "all.js", f"window.MILLIONWAY_FILES = {json.dumps(files)};\n".encode())
    for name in (*SCRIPTS, STYLE):
        _put(folder / "web" / name, web_file(name))
    _put(folder / "web" / "deck.js", library())
    if explorer.report is not None:
        _put(folder / "report.html", explorer.report().encode())
    _put(folder / "index.html", index_html(pack.name, static=True, embedded=embedded).encode())
    return folder / "index.html"


def _get(explorer: Explorer, name: str) -> bytes | None:
    kind, _, rest = name.partition("/")
    if kind == "epoch":
        return None if explorer.epochs is None else explorer.epochs.get(int(rest.removesuffix(".bin")))
    if kind != "image":
        return explorer.pack.get(name)
    try:
        return shown(explorer.image_of(int(rest.removesuffix(".jpg"))))
    except UnreadableImage:
        return None


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
