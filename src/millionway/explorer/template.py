"""The page itself: a template, our scripts, and deck.gl as the Python package pydeck brings it."""

from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from jinja2 import Environment

SCRIPTS = ("data.js", "map.js", "panels.js", "app.js")
STYLE = "page.css"


def web_file(name: str) -> bytes:
    """One of our own files."""
    return (files("millionway.explorer") / "web" / name).read_bytes()


@cache
def library() -> bytes:
    """deck.gl: WebGL layers for hundreds of thousands of points and pictures. Read as a file, nothing is imported."""
    spec = find_spec("pydeck")
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / "nbextension/static/index.js"
    if path is None or not path.is_file():
        raise ValueError("the page draws with deck.gl, which the package pydeck brings: pip install pydeck")
    # Its map of sources is not served; asking for it would only be an error in the browser's log.
    return path.read_bytes().replace(b"//# sourceMappingURL=index.js.map", b"")


def index_html(name: str, static: bool, embedded: bool = False) -> str:
    """static: files that nobody answers for; embedded: the data stands in a script beside them."""
    text = (files("millionway.explorer") / "templates" / "index.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True).from_string(text)
    return template.render(name=name, static=static, embedded=embedded, scripts=SCRIPTS, style=STYLE)
