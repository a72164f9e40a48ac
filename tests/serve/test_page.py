"""The page at /, in headless Chromium driven through ChromeDriver (Debian: chromium, chromium-driver)."""

import asyncio
import base64
import contextlib
import os
import shutil
import subprocess
import time

import httpx
import pytest

from serve.service import Settings
from tests.serve.fake_engine import DRAFTED, FakeEngine, saying, service, tokenizer
from tests.serve.http_client import ask, client, serving

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --no-proxy-server --disable-dev-shm-usage --window-size=1000,700"
).split()
WORDS = "Words <b>of</b> one answer & 🦙 " * 3

needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium and chromedriver here: the page is not looked at in a browser"
)


class Browser:
    """One tab. `run` returns the value of a JavaScript function body."""

    def __init__(self, http: httpx.Client, session: str):
        self._http, self._session = http, session

    def command(self, name: str, **body):
        response = self._http.post(f"/session/{self._session}/{name}", json=body)
        value = response.json()["value"]
        assert response.status_code == 200, value
        return value

    def open(self, url: str) -> None:
        self.command("url", url=url)

    def run(self, script: str, *arguments):
        return self.command("execute/sync", script=script, args=list(arguments))

    def until(self, script: str, seconds: float = 30.0):
        deadline = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, (
                f"never happened: {script}\n{self.run('return document.body.innerText')}"
            )
            time.sleep(0.05)
        return value

    def ask(self, text: str) -> None:
        script = "prompt.value = arguments[0]; form.requestSubmit()"
        self.run(
            f"const prompt = document.getElementById('prompt'), form = document.getElementById('form'); {script}", text
        )

    def picture(self, path: str) -> None:
        response = self._http.get(f"/session/{self._session}/screenshot")
        with open(path, "wb") as file:
            file.write(base64.b64decode(response.json()["value"]))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    home = tmp_path_factory.mktemp("browser")
    log = home / "driver.log"
    with open(log, "w") as output:
        driver = subprocess.Popen(
            [DRIVER, "--port=0"], stdout=output, stderr=output, env={**os.environ, "HOME": str(home)}
        )
    try:
        deadline = time.monotonic() + 30
        while "started successfully on port" not in (text := log.read_text()):
            assert time.monotonic() < deadline and driver.poll() is None, text
            time.sleep(0.05)
        port = int(text.rpartition("on port ")[2].split(".")[0])
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={home / 'profile'}"]}
        wanted = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            started = http.post("/session", json={"capabilities": wanted})
            assert started.status_code == 200, started.text
            session = started.json()["value"]["sessionId"]
            yield Browser(http, session)
            with contextlib.suppress(httpx.HTTPError):
                http.delete(f"/session/{session}")
    finally:
        driver.terminate()
        driver.wait(30)


DONE = "return document.getElementById('send').textContent === 'Send'"
SPANS = "return [...document.querySelectorAll('.content span')].map(e => [e.textContent, Number(e.className.slice(1))])"


@needs_browser
def test_an_answer_is_shaded_by_depth(browser):
    made = service(saying(WORDS))
    ids = tokenizer().encode(WORDS)
    with serving(made) as url:
        browser.open(url)
        browser.until("return document.title === 'fake'")
        browser.ask("Hello <i>there</i>")
        browser.until("return document.querySelectorAll('.figures').length === 1")
        browser.until(DONE)
        spans = browser.run(SPANS)
        assert "".join(text for text, _ in spans) == WORDS
        assert len({depth for _, depth in spans}) == 4 and spans[0][1] == 0
        assert [depth for _, depth in spans][:9] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
        colours = {
            browser.run(f"return getComputedStyle(document.querySelector('.content .d{depth}')).backgroundColor")
            for depth in (1, 2, 3)
        }
        assert len(colours) == 3
        figures = browser.run("return document.querySelector('.figures').textContent")
        steps = made.metrics.totals.steps
        assert f"{len(ids)} tokens" in figures and "tokens/s" in figures
        own = (len(ids) - 1) // 4  # the last token of each run of four
        assert f"acceptance length {(len(ids) - 1) / own:.2f}" in figures
        assert f"{made.metrics.totals.accepted} of {steps * DRAFTED} drafted tokens accepted" in figures
        assert browser.run("return document.querySelector('.user').textContent") == "Hello <i>there</i>"
        assert browser.run("return document.querySelectorAll('main b, main i').length") == 0  # text stays text
        browser.ask("And then?")
        browser.until("return document.querySelectorAll('.figures').length === 2")
        browser.until(DONE)
        if path := os.environ.get("PAGE_PICTURE"):
            browser.picture(path)
    first, second = made.engine.engine.seen
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids  # the conversation goes on
    assert WORDS.strip() in tokenizer().decode(second.prompt_ids)


TREE = """return [...document.querySelectorAll('#tree g')].map(g => ({
    text: g.querySelector('text').textContent, title: g.querySelector('title').textContent,
    classes: g.className.baseVal, x: Number(g.querySelector('rect').getAttribute('x')),
    y: Number(g.querySelector('rect').getAttribute('y')), fill: getComputedStyle(g.querySelector('rect')).fill}))"""


@needs_browser
def test_the_current_tree_is_drawn(browser):
    """A chain of three kept tokens and six wrong guesses beside the first; the slider goes back to earlier steps."""
    words = "One two three four five six seven eight nine ten"
    ids = tokenizer().encode(words)
    made = service(saying(words))
    with serving(made) as url:
        browser.open(url)
        assert browser.run("return document.getElementById('live').textContent") == "no tree yet"
        browser.ask("Count")
        browser.until(DONE)
        browser.until("return document.querySelectorAll('.figures').length === 1")
        steps = made.metrics.totals.steps
        live = browser.run("return document.getElementById('live').textContent")
        assert live.startswith(f"verify step {steps} of {steps}: {DRAFTED} drafted, ")
        assert "acceptance length" in live and "tokens/s" in live
        browser.run("const s = document.getElementById('step'); s.value = 1; s.dispatchEvent(new Event('input'))")
        assert "step 1 of" in browser.run("return document.getElementById('live').textContent")
        nodes = browser.run(TREE)
        assert len(nodes) == DRAFTED + 1
        shown = [tokenizer().decode([token]).replace(" ", "\u00b7") for token in ids[:4]]
        assert [node["text"] for node in nodes[:4]] == shown
        assert [node["classes"] for node in nodes[:4]] == ["root", "kept d1", "kept d2", "kept d3"]
        assert "accepted" in nodes[1]["title"] and "accepted" not in nodes[5]["title"]
        assert len({node["fill"] for node in nodes}) == 4  # three shades, and none
        assert len({(node["x"], node["y"]) for node in nodes}) == len(nodes)  # nothing is hidden by another
        assert [node["x"] for node in nodes[:4]] == sorted({node["x"] for node in nodes})
        assert browser.run("return document.querySelectorAll('#tree path').length") == DRAFTED
        assert browser.run("return document.querySelectorAll('#tree path.kept').length") == 3
        if path := os.environ.get("TREE_PICTURE"):
            browser.picture(path)
        browser.run("document.getElementById('new').click()")
        assert browser.run(TREE) == []


@needs_browser
def test_no_text_becomes_markup(browser):
    """Neither what the user says, nor the model, in its answer or in a tree, nor an error."""
    attack = "<img src=x onerror=window.bad=1><script>window.bad=1</script><svg/onload=window.bad=1>"
    with serving(service(saying(attack + " </article>", context=300))) as url:
        browser.open(url)
        browser.ask(attack)
        browser.until("return document.querySelectorAll('.figures').length === 1")
        browser.until(DONE)
        browser.ask(attack * 40)
        browser.until("return document.querySelector('.error') !== null")
        assert attack in browser.run("return document.querySelector('.content').textContent")
        assert browser.run("return document.querySelector('.user').textContent") == attack
        # Tokens are cut smaller than this by the tokenizer at hand; another may have larger ones.
        browser.run("latest.show({ text: arguments[0], depth: 1 }, latest.content); latest.fail(arguments[0])", attack)
        browser.run("draw({ tokens: [arguments[0], arguments[0]], parents: [-1, 0], accepted: [1] })", attack)
        assert all("onerror" in node["title"] and node["text"].startswith("<img") for node in browser.run(TREE))
        assert browser.run("return document.querySelectorAll('main img, main script, main svg, #tree img').length") == 0
        assert browser.run("return document.querySelectorAll('script').length") == 1
        assert browser.run("return window.bad === undefined")


@needs_browser
def test_stopping_ends_the_request(browser):
    made = service(FakeEngine(lambda request: [50], seconds=0.01, context=100_000))
    with serving(made) as url:
        browser.open(url)
        browser.run("document.getElementById('tokens').value = 50000")
        browser.ask("Go on")
        browser.until("return document.querySelectorAll('.content span').length > 5")
        browser.run("document.getElementById('form').requestSubmit()")
        browser.until(DONE)
        assert browser.run("return document.querySelector('.error').textContent") == "stopped"
        deadline = time.monotonic() + 20
        while made.engine.engine.requests:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@needs_browser
def test_a_key_is_asked_for(browser):
    with serving(service(saying("Words"), settings=Settings(api_keys=("secret",)))) as url:
        browser.open(url)
        browser.until("return !document.getElementById('keylabel').hidden")
        browser.ask("Hello")
        browser.until(DONE)
        assert "API key" in browser.run("return document.querySelector('.error').textContent")
        browser.run("document.getElementById('key').value = 'secret'")
        browser.ask("Hello")
        browser.until("return [...document.querySelectorAll('.content')].some(e => e.textContent === 'Words')")


@needs_browser
def test_a_refusal_is_shown(browser):
    with serving(service(saying("x", context=40))) as url:
        browser.open(url)
        browser.ask("word " * 200)
        browser.until("return document.querySelector('.error') !== null")
        assert "context holds 40" in browser.run("return document.querySelector('.error').textContent")


def test_nothing_comes_from_elsewhere():
    async def get():
        async with client(service(saying("x"))) as http:
            return await http.get("/")

    response = asyncio.run(get())
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "connect-src 'self'" in policy and "unsafe" not in policy
    assert "http://" not in response.text and "https://" not in response.text and " src=" not in response.text
    assert ask(service(saying("x")), "/").status_code == 405
