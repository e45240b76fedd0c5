"""The pictures of the page in the documents, taken from a real browser.

    python benchmarks/pictures.py --run RUN --data DATA --out collection.parquet

Needs chromium and chromedriver. Writes docs/pictures/map.png, neighbors.png and duplicates.png.
"""

import sys
import threading
import time
from pathlib import Path

import tyro
import uvicorn
from selenium.common.exceptions import TimeoutException

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "explorer"))

from browser import chromium, opened, until  # noqa: E402

from millionway.collection.opening import open_collection  # noqa: E402
from millionway.console import track  # noqa: E402
from millionway.explorer.explore import open_explorer  # noqa: E402
from millionway.explorer.server import address, application, listen  # noqa: E402
from millionway.settings.collection import Map  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
SHOWN = "return Array.from(document.querySelectorAll(arguments[0])).slice(0, 12).every((t) => t.style.backgroundImage)"


def main(asked: Map) -> None:
    explorer = open_explorer(open_collection(asked, track), asked.out)
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(application(explorer, "127.0.0.1", port), log_level="error"))
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    FOLDER.mkdir(exist_ok=True)
    with chromium(width=1200, height=800) as browser:
        opened(browser, address(explorer, listener))

        def take(name: str) -> None:
            for _ in range(10):
                time.sleep(3)  # textures are uploaded
                try:
                    browser.save_screenshot(str(FOLDER / f"{name}.png"))
                    return
                except TimeoutException:  # a busy machine: chromedriver waits ten seconds for a picture
                    continue
            raise SystemExit("chromium is too slow to take a picture")

        browser.execute_script("Atlas.look({...Atlas.view, target: [0.2, 0.1, 0], zoom: Atlas.view.zoom + 2.2})")
        until(lambda: int(browser.execute_script("return document.body.dataset.thumbnails || 0")))
        take("map")
        in_view = browser.execute_script("return Atlas.chosen(Atlas.inView())")
        near = explorer.pack.table["neighbors"].take(in_view).to_pylist()
        place = in_view[min(range(len(near)), key=lambda n: near[n]["distances"][8])]  # one with company
        browser.execute_script("Panel.image(arguments[0])", place)
        until(lambda: browser.execute_script("return document.querySelectorAll('#neighbors [data-place]').length"))
        until(lambda: browser.execute_script(SHOWN, "#neighbors .tile"))
        take("neighbors")
        browser.execute_script("Panel.close(); App.tab('duplicates')")
        until(lambda: browser.execute_script("return document.querySelectorAll('#duplicates-tab .group').length"))
        until(lambda: browser.execute_script(SHOWN, "#duplicates-tab .tile"))
        take("duplicates")
    server.should_exit = True


if __name__ == "__main__":
    main(tyro.cli(Map, config=(tyro.conf.OmitArgPrefixes,)))
