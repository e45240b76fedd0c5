"""A line of the list of what must not be possible, a test for it."""

import http.client
import json
import socket
from pathlib import Path

import numpy as np
import pytest
from pictures import NUM, Served, encoded, picture

from millionway.explorer import server
from millionway.explorer.pack import Pack
from millionway.explorer.server import is_this_machine, listen


def ask(
    served: Served, path: str, *, cookie: str | None = "right", host: str | None = None, body: bytes | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    headers = {} if host is None else {"Host": host}
    if cookie is not None:
        headers["Cookie"] = f"millionway_{served.port}={served.token if cookie == 'right' else cookie}"
    connection.request("GET" if body is None else "POST", path, body, headers)
    try:
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


PAGES = ["/", "/web/app.js", "/data/about.json", "/data/places.bin", "/data/image/0.jpg", "/data/report.html"]


@pytest.mark.parametrize("path", PAGES)
def test_without_the_token_nothing_is_answered(served: Served, path: str):
    assert ask(served, path)[0].status == 200
    for cookie in (None, "", "another", served.token[:-1]):
        answer, body = ask(served, path, cookie=cookie)
        assert answer.status == 403, cookie
        assert len(body) < 200
    assert ask(served, "/data/search", cookie=None, body=encoded(picture(1)))[0].status == 403


def test_the_token_becomes_a_cookie_that_no_other_page_can_use(served: Served):
    answer, _ = ask(served, f"/?token={served.token}", cookie=None)
    assert answer.status == 303
    assert answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert ask(served, "/?token=another", cookie=None)[0].status == 403
    assert ask(served, "/?token=%C3%A4", cookie=None)[0].status == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "8.8.8.8", "[::2]", ""])
def test_a_foreign_host_is_refused_even_with_the_token(served: Served, host: str):
    assert ask(served, "/data/about.json", host=host)[0].status == 400


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:1", "localhost:99", "[::1]:5", "LOCALHOST"])
def test_this_machine_is_known_by_its_names(served: Served, host: str):
    assert ask(served, "/data/about.json", host=host)[0].status == 200


def test_who_is_told_to_listen_to_others_is_reached_by_number_or_own_name():
    assert is_this_machine("192.168.1.7:8000", "0.0.0.0")
    assert is_this_machine(f"{socket.gethostname()}:8000", "0.0.0.0")
    assert not is_this_machine("evil.example", "0.0.0.0")


def test_it_listens_to_this_machine_alone(served: Served):
    own = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for number in own - {"127.0.0.1"}:
        if number.startswith("127."):
            continue
        with pytest.raises(OSError):
            socket.create_connection((number, served.port), timeout=5)


@pytest.mark.parametrize(
    "path",
    [
        "/data/../server.py",
        "/data/%2e%2e/%2e%2e/etc/passwd",
        "/data/image/..%2f..%2fetc%2fpasswd",
        "/data/image/-1.jpg",
        f"/data/image/{NUM}.jpg",
        "/data/image/99999999999999999999999.jpg",
        "/data/image//etc/passwd",
        "/data/sheet/999.jpg",
        "/data/sheet/1/../../x.jpg",
        "/data/column/99.bin",
        "/data/neighbors/-1.bin",
        "/data/neighbors/1e3.bin",
        "/data/neighbors/²",
        "/web/../server.py",
        "/web/..%2fserver.py",
        "/web/index.html",
        "/etc/passwd",
    ],
)
def test_no_text_from_the_browser_is_a_path(served: Served, path: str):
    answer, body = ask(served, path.replace("²", "%C2%B2"))
    assert answer.status == 404, path
    assert b"root:" not in body
    assert b"import" not in body


def test_images_come_by_number_and_are_made_anew(served: Served):
    answer, body = ask(served, "/data/image/3.jpg")
    assert answer.headers["content-type"] == "image/jpeg"
    assert body.startswith(b"\xff\xd8")  # a PNG in the collection
    answer, body = ask(served, "/data/image/11.jpg")
    assert answer.status == 410
    assert b"gone" in body


def test_a_picture_finds_what_looks_like_it(served: Served):
    answer, body = ask(served, "/data/search", body=encoded(picture(30)))
    found = json.loads(body)
    assert answer.status == 200
    assert found["places"][0] == 30
    assert found["cosines"] == sorted(found["cosines"], reverse=True)


def test_a_picture_that_is_none_is_refused_in_words(served: Served):
    for body in (b"not a picture", b"", b"<svg xmlns='http://www.w3.org/2000/svg'/>", encoded(picture(1))[:200]):
        answer, text = ask(served, "/data/search", body=body)
        assert answer.status == 415
        assert b"not a picture" in text


def test_a_picture_that_is_too_large_is_refused_before_it_is_all_there(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "MAX_UPLOAD_BYTES", 100_000)
    answer, text = ask(served, "/data/search", body=bytes(200_000))
    assert answer.status == 413
    assert b"smaller copy" in text


def test_a_bomb_is_refused_by_the_guards_of_all_images(served: Served):
    import struct
    import zlib

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    assert ask(served, "/data/search", body=bomb)[0].status == 415


def test_only_our_own_scripts_may_run(served: Served):
    for path in ("/", "/data/about.json", "/nothing"):
        policy = ask(served, path)[0].headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    answer, body = ask(served, "/")
    assert b"<script>" not in body
    assert b"onclick" not in body
    assert answer.headers["x-content-type-options"] == "nosniff"
    report = ask(served, "/data/report.html")[0].headers["content-security-policy"]
    assert "default-src 'none'" in report
    assert "script-src" not in report


def test_names_are_never_part_of_the_page(served: Served):
    _, page = ask(served, "/")
    assert b"onerror" not in page
    answer, paths = ask(served, "/data/paths.txt")
    assert answer.headers["content-type"].startswith("text/plain")
    assert b"onerror" in paths


def test_a_browser_that_closes_in_the_middle_disturbs_nobody(served: Served):
    for request in (
        f"POST /data/search HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: millionway_{served.port}={served.token}\r\n"
        "Content-Length: 1000000\r\n\r\nsome",
        f"GET /data/paths.txt HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: millionway_{served.port}={served.token}\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(request.encode())
    assert ask(served, "/data/about.json")[0].status == 200


def test_a_port_in_use_is_said(served: Served):
    with pytest.raises(ValueError, match=rf"--port {served.port} cannot be used.*free one"):
        listen("127.0.0.1", served.port)
    with pytest.raises(ValueError, match="another --host"):
        listen("8.8.8.8", 0)


def test_the_arrays_are_those_of_the_table(served: Served, table):
    about = json.loads(ask(served, "/data/about.json")[1])
    assert about["num"] == NUM
    places = np.frombuffer(ask(served, "/data/places.bin")[1], "<f4").reshape(-1, 2)
    np.testing.assert_array_equal(places[:, 0], table["x"].to_numpy())
    slots = np.frombuffer(ask(served, "/data/slots.bin")[1], "<i4")
    assert sorted(slots.tolist()) == list(range(NUM))
    body = ask(served, "/data/neighbors/0.bin")[1]
    ids, cosines = np.frombuffer(body[: len(body) // 2], "<i4"), np.frombuffer(body[len(body) // 2 :], "<f4")
    assert ids[:20].tolist() == table["neighbors"][0]["ids"].as_py()
    assert cosines[0] == pytest.approx(1, abs=1e-4)
    number = next(n for n, column in enumerate(about["columns"]) if column["name"] == "label")
    values = np.frombuffer(ask(served, f"/data/column/{number}.bin")[1], "<f4")
    words = about["columns"][number]["words"]
    assert [words[int(value)] for value in values[:4]] == table["label"].to_pylist()[:4]
    dates = next(column for column in about["columns"] if column["kind"] == "date")
    assert (dates["low"], dates["high"]) == (0, NUM - 1)
    groups = json.loads(ask(served, "/data/duplicates.json")[1])
    assert [group["places"] for group in groups] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert json.loads(ask(served, "/data/outliers.json")[1])[0]["reason"] == "far from everything"


def test_every_name_of_the_pack_is_answered_and_no_other(table, tmp_path: Path):
    pack = Pack(table, {}, "photos", False, False)
    assert all(pack.get(name) for name in pack.names())
    for name in ("", "about", "sheet/", "sheet/0", "sheet/00.jpg", "sheet/0.bin", "image/0.jpg", "paths.txt/0.bin"):
        assert pack.get(name) is None, name
