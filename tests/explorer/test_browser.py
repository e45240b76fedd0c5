"""What a person does on the page, in a real browser."""

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import chromium, complaints, opened, until
from pictures import NUM, Served
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import millionway
from millionway.explorer.server import Explorer
from millionway.explorer.static_site import export

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(served: Served) -> Iterator[webdriver.Chrome]:
    with chromium() as browser:
        opened(browser, served.address)
        yield browser


def thumbnails(browser: webdriver.Chrome) -> int:
    return int(browser.execute_script("return document.body.dataset.thumbnails || 0"))


def press(browser: webdriver.Chrome, *keys: str) -> None:
    for key in keys:
        browser.find_element(By.TAG_NAME, "body").send_keys(key)


def tiles(browser: webdriver.Chrome, inside: str) -> list[int]:
    return [
        int(e.get_attribute("data-place") or -1)
        for e in browser.find_elements(By.CSS_SELECTOR, f"{inside} [data-place]")
    ]


def test_points_become_thumbnails_as_one_comes_nearer(page: webdriver.Chrome):
    assert thumbnails(page) == 0
    press(page, "+", "+")
    assert until(lambda: thumbnails(page)) > 5
    assert not complaints(page)


def test_a_click_opens_the_image_with_its_neighbors(page: webdriver.Chrome):
    place = page.execute_script(
        "const places = Atlas.inView().filter((p) => { const [x, y] = Atlas.toScreen(p); const [w, h] = Atlas.size();"
        "return x > 250 && x < w - 500 && y > 150 && y < h - 150; }); return Atlas.chosen(places)[0];"
    )
    x, y = page.execute_script("return Atlas.toScreen(arguments[0])", place)
    map_ = page.find_element(By.ID, "map")
    left, top = round(x - map_.size["width"] / 2), round(y - map_.size["height"] / 2)
    ActionChains(page).move_to_element_with_offset(map_, left, top).pause(1).click().perform()
    until(lambda: page.find_element(By.ID, "panel").get_attribute("data-place"))
    until(lambda: len(tiles(page, "#neighbors")) == 20)
    picture = page.find_element(By.CSS_SELECTOR, "#panel img.large")
    until(lambda: page.execute_script("return arguments[0].naturalWidth", picture))
    assert "/photos/" in page.find_element(By.CSS_SELECTOR, "#panel .facts").text
    first = tiles(page, "#neighbors")[0]
    press(page, Keys.ARROW_RIGHT)
    until(lambda: page.find_element(By.ID, "panel").get_attribute("data-place") == str(first))
    press(page, Keys.ESCAPE)
    until(lambda: not page.find_element(By.ID, "panel").is_displayed())


def test_a_lasso_gives_a_gallery_and_a_list(page: webdriver.Chrome):
    press(page, "0")
    page.find_element(By.ID, "lasso").click()
    map_ = page.find_element(By.ID, "map")
    draw = ActionChains(page, duration=20).move_to_element_with_offset(map_, -150, -150).click_and_hold()
    for x, y in ((300, 0), (0, 300), (-300, 0), (0, -250)):
        draw = draw.move_by_offset(x, y)
    draw.release().perform()
    until(lambda: page.find_element(By.ID, "panel").is_displayed())
    title = page.find_element(By.CSS_SELECTOR, "#panel h2").text
    assert title.startswith("Region: ")
    chosen = page.execute_script("return Panel.places")
    assert 5 < len(chosen) < NUM
    page.execute_script(
        "window.saved = null;"
        "URL.createObjectURL = (blob) => { blob.text().then((text) => (window.saved = text)); return 'blob:x'; }"
    )
    page.find_element(By.ID, "save").click()
    lines = until(lambda: page.execute_script("return window.saved")).splitlines()
    assert len(lines) == len(chosen)
    press(page, Keys.ESCAPE)


def test_part_of_a_path_finds_images(page: webdriver.Chrome):
    find = page.find_element(By.ID, "find")
    find.send_keys("/photos/12")
    until(lambda: len(page.execute_script("return Panel.places")) == 10)
    find.send_keys(Keys.ESCAPE)
    find.clear()


def test_a_picture_finds_what_looks_like_it(page: webdriver.Chrome, photos: Path):
    page.find_element(By.ID, "file").send_keys(str(photos / "query.png"))
    until(lambda: page.execute_script("return Panel.places[0]") == 30)
    assert page.find_elements(By.CSS_SELECTOR, "#panel .query img")
    page.find_element(By.ID, "file").send_keys(str(photos / "note.png"))
    until(lambda: page.find_elements(By.CSS_SELECTOR, "#panel [role=alert]"))
    assert "not a picture" in page.find_element(By.CSS_SELECTOR, "#panel [role=alert]").text
    press(page, Keys.ESCAPE)


def test_duplicates_stand_side_by_side_and_outliers_have_reasons(page: webdriver.Chrome):
    page.get_log("browser")
    press(page, "2")
    until(lambda: len(page.find_elements(By.CSS_SELECTOR, "#duplicates-tab .group")) == 5)
    assert tiles(page, "#duplicates-tab .group")[:2] == [0, 1]
    assert len(page.find_elements(By.CSS_SELECTOR, "#duplicates-tab .keep")) == 5
    press(page, "3")
    until(lambda: page.find_elements(By.CSS_SELECTOR, "#outliers-tab .strange"))
    assert "far from everything" in page.find_element(By.CSS_SELECTOR, "#outliers-tab .strange").text
    press(page, "4")
    frame = page.find_element(By.CSS_SELECTOR, "#run-tab iframe")
    page.switch_to.frame(frame)
    until(lambda: "a report" in page.find_element(By.TAG_NAME, "body").text)
    page.switch_to.default_content()
    press(page, "1")
    assert not complaints(page)


def test_a_name_that_would_be_script_is_text(page: webdriver.Chrome):
    page.execute_script("Panel.image(7)")
    facts = "return (document.querySelector('#panel .facts') || document.body).textContent"
    until(lambda: "onerror" in page.execute_script(facts))
    assert not page.find_elements(By.CSS_SELECTOR, "#panel .facts img")
    press(page, Keys.ESCAPE)


def test_colors_and_dark_mode(page: webdriver.Chrome):
    before = page.execute_script("return Array.from(Atlas.colors.slice(0, 40))")
    page.execute_script(
        "const s = document.getElementById('color'); s.value = '2'; s.dispatchEvent(new Event('change'))"
    )
    until(lambda: page.execute_script("return Array.from(Atlas.colors.slice(0, 40))") != before)
    theme = page.execute_script("return document.documentElement.dataset.theme")
    press(page, "d")
    assert page.execute_script("return document.documentElement.dataset.theme") != theme


def test_two_tabs_and_a_phone(served: Served):
    with chromium(width=420, height=860) as phone:
        opened(phone, served.address)
        phone.switch_to.new_window("tab")
        opened(phone, served.root)
        wide = phone.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        assert wide
        phone.execute_script("Panel.image(3)")
        until(lambda: phone.find_elements(By.CSS_SELECTOR, "#panel img.large"))
        assert not complaints(phone)


def test_a_report_fits_a_phone(digit_folder: Path, tmp_path: Path):
    run = millionway.pretrain(digit_folder, tmp_path / "run", epochs=1, batch_size=40, threads=1)
    with chromium() as browser:
        phone = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        browser.get((run / "report.html").as_uri())
        assert len(browser.find_elements(By.TAG_NAME, "figure")) > 20
        assert browser.execute_script("return document.documentElement.scrollWidth") == 390


def test_an_export_works_from_a_web_server_and_from_the_disk(explorer: Explorer, tmp_path: Path):
    from dataclasses import replace

    whole = replace(explorer, pack=replace(explorer.pack, can_search=False))
    index = export(whole, tmp_path / "page")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "page"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with chromium() as browser:
            for address in (f"http://127.0.0.1:{server.server_port}/", index.as_uri()):
                opened(browser, address)
                press(browser, "+", "+")
                assert until(lambda: thumbnails(browser)) > 5
                browser.execute_script("Panel.image(3)")
                large = "const image = document.querySelector('#panel img.large'); return image && image.naturalWidth"
                until(lambda script=large: browser.execute_script(script))
                assert not browser.find_element(By.ID, "picture").is_displayed()
    finally:
        server.shutdown()
        server.server_close()
