"""The page of a collection, on this machine alone: who has the address with its token sees the images.

- Only the machine itself is listened to, unless told otherwise; a Host that is not this machine is refused.
- The token becomes a cookie that no other page can use. Without it nothing is answered.
- Images are asked for by their place in the collection. No text from the browser is ever a path.
- A picture to search with is bounded in size and decoded with the guards of all images. Nothing is written.
- No script but our own runs (Content-Security-Policy).
"""

import io
import ipaddress
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from millionway.data.images import UnreadableImage, decode
from millionway.explorer.epochs import Epochs
from millionway.explorer.pack import Pack
from millionway.explorer.template import SCRIPTS, STYLE, index_html, library, web_file

log = logging.getLogger("millionway")

MAX_UPLOAD_BYTES = 32 << 20
LARGE_SIDE = 1600
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; frame-ancestors 'self'"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
KINDS = {".json": "application/json", ".bin": "application/octet-stream", ".jpg": "image/jpeg", ".txt": "text/plain"}


@dataclass
class Explorer:
    """What the page asks for."""

    pack: Pack
    image_of: Callable[[int], bytes]
    """the encoded image at a place; raises UnreadableImage"""
    search: Callable[[Any, int], list[tuple[int, float]]] | None = None
    """(a picture, how many) -> (place, cosine), most similar first"""
    report: Callable[[], str] | None = None
    """the run's report as it is now"""
    epochs: Epochs | None = None
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    # --- answers ------------------------------------------------------------------------------------------------------

    def index(self, request: Request) -> Response:
        return Response(index_html(self.pack.name, static=False), media_type="text/html")

    def web(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name == "deck.js":
            return Response(library(), media_type="text/javascript", headers={"Cache-Control": "max-age=3600"})
        if name not in (*SCRIPTS, STYLE):
            return _missing()
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(web_file(name), media_type=kind)

    def data(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = self.pack.get(name)
        if found is None:
            return _missing()
        return Response(found, media_type=KINDS[name[name.rindex(".") :]])

    def image(self, request: Request) -> Response:
        place = request.path_params["place"]
        if not 0 <= place < len(self.pack):
            return _missing()
        try:
            return Response(shown(self.image_of(place)), media_type="image/jpeg")
        except UnreadableImage as error:
            return PlainTextResponse(f"the image cannot be read any more: {error}", 410)

    async def look_up(self, request: Request) -> Response:
        if self.search is None:
            return PlainTextResponse("there is no encoder for new images here", 404)
        body = await _bounded(request)
        if body is None:
            limit = MAX_UPLOAD_BYTES >> 20
            return PlainTextResponse(f"the picture has more than {limit} MB; use a smaller copy", 413)
        return await run_in_threadpool(self._answer, body)

    def _answer(self, body: bytes) -> Response:
        assert self.search is not None
        try:
            picture = decode(body)
        except UnreadableImage as error:
            return PlainTextResponse(f"not a picture that can be read: {error}", 415)
        found = self.search(picture, 60)
        return JSONResponse({"places": [place for place, _ in found], "cosines": [cosine for _, cosine in found]})

    def run_report(self, request: Request) -> Response:
        if self.report is None:
            return _missing()
        return Response(self.report(), media_type="text/html", headers={"Content-Security-Policy": REPORT_POLICY})

    def epoch_list(self, request: Request) -> Response:
        """Again and again while a run trains."""
        return JSONResponse([] if self.epochs is None else self.epochs.known())

    def epoch(self, request: Request) -> Response:
        found = None if self.epochs is None else self.epochs.get(request.path_params["number"])
        return _missing() if found is None else Response(found, media_type=KINDS[".bin"])


def _missing() -> Response:
    return PlainTextResponse("there is nothing here", 404)


async def _bounded(request: Request) -> bytes | None:
    """The body, or None as soon as it is too large."""
    parts, num = [], 0
    async for part in request.stream():
        num += len(part)
        if num > MAX_UPLOAD_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)


def shown(data: bytes | Any) -> bytes:
    """As a JPEG of at most LARGE_SIDE pixels a side: what the browser gets is always made by us."""
    image = decode(data, shrink_to=LARGE_SIDE)
    image.thumbnail((LARGE_SIDE, LARGE_SIDE))
    if max(image.size) < 256:
        scale = 256 // max(image.size)
        image = image.resize((image.width * scale, image.height * scale), 0)  # small pixels stay squares
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


class Guard:
    """Every request: Host, token, and the headers of every answer."""

    def __init__(self, app: Any, token: str, host: str, cookie: str) -> None:
        self.app, self.token, self.host, self.cookie = app, token, host, cookie

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request = Request(scope, receive)

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                for name, value in {"Content-Security-Policy": POLICY, **HEADERS}.items():
                    if name.lower().encode() not in present:
                        message["headers"].append((name.lower().encode(), value.encode()))
            await send(message)

        answer = self._refusal(request)
        if answer is not None:
            return await answer(scope, receive, with_headers)
        try:
            return await self.app(scope, receive, with_headers)
        except ClientDisconnect:  # a tab that was closed
            return None

    def _refusal(self, request: Request) -> Response | None:
        """None if the request may pass."""
        if not is_this_machine(request.headers.get("host", ""), self.host):
            return PlainTextResponse("this address is not one of this page", 400)
        given = request.query_params.get("token")
        if given is not None and request.method == "GET":
            if not secrets.compare_digest(given.encode(), self.token.encode()):
                return PlainTextResponse("the token is another one; use the address that explore printed", 403)
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
            return answer
        if not secrets.compare_digest(request.cookies.get(self.cookie, "").encode(), self.token.encode()):
            return PlainTextResponse("the token is missing; use the address that explore printed", 403)
        return None


def is_this_machine(host: str, listens_on: str) -> bool:
    """Whether a Host header names us: a number, localhost or our own name. A foreign name that leads here does not."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]").lower()
    try:
        number = ipaddress.ip_address(name)
        return number.is_loopback or not ipaddress.ip_address(listens_on).is_loopback
    except ValueError:
        names = {"localhost"} if is_loopback(listens_on) else {"localhost", _own_name(), listens_on.lower()}
        return name in names


@cache
def _own_name() -> str:
    return socket.gethostname().lower()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def application(explorer: Explorer, host: str = "127.0.0.1", port: int = 0) -> Starlette:
    return Starlette(
        routes=[
            Route("/", explorer.index),
            Route("/web/{name}", explorer.web),
            Route("/data/image/{place:int}.jpg", explorer.image),
            Route("/data/epochs.json", explorer.epoch_list),
            Route("/data/epoch/{number:int}.bin", explorer.epoch),
            Route("/data/search", explorer.look_up, methods=["POST"]),
            Route("/data/report.html", explorer.run_report),
            Route("/data/{name:path}", explorer.data),
        ],
        # Cookies do not know ports: two explorers on one machine have two names.
        middleware=[
            Middleware(Guard, token=explorer.token, host=host, cookie=f"millionway_{port}"),
            Middleware(GZipMiddleware, minimum_size=4096, compresslevel=3),
        ],
    )


def listen(host: str, port: int) -> socket.socket:
    """A free port if 0 is asked for."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        remedy = "another one, or leave out --port for a free one" if port else "another --host"
        raise ValueError(f"--host {host} --port {port} cannot be used ({error.strerror}); choose {remedy}") from None
    return listener


def serve(explorer: Explorer, listener: socket.socket, host: str) -> None:
    """Until Ctrl-C."""
    import uvicorn

    port = listener.getsockname()[1]
    config = uvicorn.Config(
        application(explorer, host, port), log_level="warning", access_log=False, timeout_graceful_shutdown=2
    )
    uvicorn.Server(config).run(sockets=[listener])


def address(explorer: Explorer, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={explorer.token}"
