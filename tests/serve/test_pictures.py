"""Pictures in a chat: answers with speculation equal those without, and what is no picture is refused by name."""

import asyncio
import os
from pathlib import Path

import pytest
from PIL import Image

from serve.engine import Engine
from serve.pictures import PictureLimits
from serve.server import make_service
from serve.service import Settings
from serve.tree import TreeConfig
from target_model.images import VisionProcessor
from tests.serve.drafts import random_draft
from tests.serve.fake_engine import saying, service
from tests.serve.http_client import ask, client
from tests.serve.pictures import IMAGE, data_url, encoded, picture, seeing, user

CHAT = "/v1/chat/completions"
WHERE = "messages[0].content[1].image_url"


@pytest.fixture(scope="module")
def processor() -> VisionProcessor:
    return seeing()[2].pictures


def post_all(made, bodies: list[dict]) -> list[dict]:
    async def run():
        async with client(made) as http:
            return await asyncio.gather(*[http.post(CHAT, json=body) for body in bodies])

    responses = asyncio.run(run())
    assert [response.status_code for response in responses] == [200] * len(bodies), responses[0].text
    return [response.json() for response in responses]


@pytest.mark.parametrize("tree", [TreeConfig.chain(3), TreeConfig(4, 3, 14)], ids=str)
def test_speculation_changes_nothing(tree: TreeConfig):
    """Through the server, greedy and sampled; prompts are cut into chunks that end inside images."""
    target, tokenizer, description = seeing()
    common = {"max_tokens": 24, "ignore_eos": True, "logprobs": True}
    bodies = [
        {"messages": user(data_url(picture())), "temperature": 0, **common},
        {"messages": user(data_url(picture(seed=1))), "temperature": 0, **common},
        {"messages": user(data_url(picture()), data_url(picture(60, 90, 2))), "temperature": 0, **common},
        {"messages": user(data_url(picture(seed=3))), "seed": 5, **common},
        {"messages": user(), "temperature": 0, **common},
    ]
    plain = [post_all(make_service(Engine(target, pages=64), tokenizer, description), [body])[0] for body in bodies]
    engine = Engine(target, random_draft(target), tree, pages=128, prefill_tokens=13)
    together = post_all(make_service(engine, tokenizer, description), bodies)
    for alone, speculated in zip(plain, together, strict=True):
        assert alone["choices"][0]["message"] == speculated["choices"][0]["message"]
        for one, other in zip(
            alone["choices"][0]["logprobs"]["content"], speculated["choices"][0]["logprobs"]["content"], strict=True
        ):
            assert one["token"] == other["token"] and one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        assert alone["usage"]["prompt_tokens"] == speculated["usage"]["prompt_tokens"]
    # Each picture shows in the very first token's distribution; 20 rows and two marks came with it.
    first = [body["choices"][0]["logprobs"]["content"][0]["logprob"] for body in plain]
    assert min(abs(first[0] - first[other]) for other in (1, 2, 4)) > 1e-3
    assert plain[0]["usage"]["prompt_tokens"] == plain[4]["usage"]["prompt_tokens"] + 22
    assert engine.runner.image_rows.encoded == 4


def sees(processor: VisionProcessor, limits: PictureLimits | None = None):
    """A service without a model that reads pictures."""
    made = service(saying("ok"), settings=Settings(pictures=limits or PictureLimits()))
    made.pictures, made.image_token_id = processor, IMAGE
    return made


def refusal(made, messages: list[dict]) -> tuple[str, str]:
    """(field, message) of a 400."""
    response = ask(made, CHAT, messages=messages)
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"], response.json()["error"]["message"]


def truncated() -> bytes:
    return encoded(picture(300, 300))[:-5000]


def animation() -> bytes:
    return encoded(picture(), "GIF", save_all=True, append_images=[picture(seed=1)])


def huge() -> bytes:
    return encoded(Image.new("1", (9000, 9000)))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://example.org/a.png", "nothing is fetched from the network"),
        ("https://example.org/a.png", "nothing is fetched from the network"),
        ("ftp://example.org/a.png", "unknown kind of URL"),
        ("", "unknown kind of URL"),
        ("/etc/passwd", "unknown kind of URL"),
        ("file:///etc/passwd", "reads no local files"),
        ("data:image/png,abc", "data:image/TYPE;base64,DATA"),
        ("data:text/plain;base64,aGk=", "data:image/TYPE;base64,DATA"),
        ("data:image/png;base64,a*b=", "not valid base64"),
        ("data:image/png;base64,\u00e9", "not valid base64"),
        (data_url(b"no picture"), "no picture in one of the formats"),
        (data_url(b""), "no picture in one of the formats"),
        (data_url(encoded(picture(), "TIFF")), "no picture in one of the formats"),
        (data_url(truncated()), "cannot be decoded"),
        (data_url(animation()), "an animation of 2 frames"),
        (data_url(huge()), "9000 x 9000 pixels"),
        (data_url(picture(2010, 10)), "aspect ratio"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bad_pictures(processor: VisionProcessor, url: str, words: str):
    param, message = refusal(sees(processor), user(url))
    assert param == f"{WHERE}.url" and message.startswith(f"{WHERE}.url: ") and words in message
    assert "\n" not in message


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_every_format(processor: VisionProcessor, kind: str):
    made = sees(processor)
    assert ask(made, CHAT, messages=user(data_url(encoded(picture(), kind)))).status_code == 200
    (request,) = made.engine.engine.seen
    (span,) = request.images
    assert request.prompt_ids[span.start : span.end] == [IMAGE] * 20
    assert (request.prompt_ids[span.start - 1], request.prompt_ids[span.end]) == (6, 7)


def test_limits(processor: VisionProcessor):
    url = data_url(picture())
    assert (
        refusal(sees(processor, PictureLimits(count=2)), user(url, url, url))[0] == "messages[0].content[3].image_url"
    )
    assert "this server takes 300" in refusal(sees(processor, PictureLimits(size=300)), user(url))[1]
    # More rows than the context has are noticed before all pictures are read.
    small = sees(processor)
    small.context = 50
    param, message = refusal(small, user(url, url, url, data_url(b"never read")))
    assert param == "messages" and "at least 60 tokens" in message
    assert refusal(service(saying("ok")), user(url)) == (WHERE, f"{WHERE}: the model served here sees no pictures")


def test_parts_are_strict(processor: VisionProcessor):
    url = {"url": data_url(picture())}
    for part, param in (
        ({"type": "image_url"}, "messages[0].content[0].image_url"),
        ({"type": "text"}, "messages[0].content[0].text"),
        ({"type": "text", "text": "a", "image_url": url}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "text": "a", "image_url": url}, "messages[0].content[0].text"),
        ({"type": "image_url", "image_url": {**url, "detail": "low"}}, "messages[0].content[0].image_url.detail"),
        ({"type": "image_url", "image_url": url["url"]}, "messages[0].content[0].image_url"),
        ({"type": "video_url", "image_url": url}, "messages[0].content[0].video_url"),
        ({"type": "audio"}, "messages[0].content[0].type"),
    ):
        assert refusal(sees(processor), [{"role": "user", "content": [part]}])[0] == param
    shown = [{"type": "image_url", "image_url": url}]
    for role in ("system", "developer", "assistant", "root"):
        messages = [{"role": role, "content": shown}, {"role": "user", "content": "a"}]
        param, message = refusal(sees(processor), messages)
        assert param == "messages[0].content" and "only with the roles user and tool" in message


def test_local_files(processor: VisionProcessor, tmp_path: Path):
    directory, other = tmp_path / "with space", tmp_path / "other"
    directory.mkdir(), other.mkdir()
    for place in (directory / "a.png", other / "a.png"):
        place.write_bytes(encoded(picture()))
    (directory / "link.png").symlink_to(other / "a.png")
    os.mkfifo(directory / "pipe")
    limits = PictureLimits(directory, size=200_000)
    good = directory.as_uri() + "/a.png"
    for url in (good, good.replace("file://", "file://localhost")):
        assert ask(sees(processor, limits), CHAT, messages=user(url)).status_code == 200
    (directory / "long.png").write_bytes(b"\0" * 300_000)
    for name, words in (
        ("../other/a.png", "no such file"),
        ("%2e%2e/other/a.png", "no such file"),
        ("link.png", "no such file"),
        ("gone.png", "no such file"),
        ("pipe", "no such file"),
        ("", "no such file"),
        ("%00", "cannot be read"),
        ("long.png", "this server takes 200000"),
    ):
        param, message = refusal(sees(processor, limits), user(f"{directory.as_uri()}/{name}"))
        assert param == f"{WHERE}.url" and words in message, name
    assert "no such file" in refusal(sees(processor, limits), user(good.replace("file://", "file://elsewhere")))[1]


def test_tokenize_counts_rows(processor: VisionProcessor):
    body = {"messages": user(data_url(picture()))}
    tokens = ask(sees(processor), "/tokenize", **body).json()["tokens"]
    assert tokens.count(IMAGE) == 20
    assert ask(sees(processor), CHAT, **body).json()["usage"]["prompt_tokens"] == len(tokens)


def test_tool_results_keep_their_pictures(processor: VisionProcessor):
    """Results are put into the order of their calls; the pictures in them move along."""
    small, large = data_url(picture(56, 56)), data_url(picture(112, 56))

    def call(name: str) -> dict:
        return {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}

    def result(name: str, url: str) -> dict:
        return {"role": "tool", "tool_call_id": name} | {
            k: v for k, v in user(url, text=name)[0].items() if k != "role"
        }

    made = sees(processor)
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": None, "tool_calls": [call("one"), call("two")]},
        result("two", large),
        result("one", small),
    ]
    assert ask(made, CHAT, messages=messages).status_code == 200
    assert [span.image.rows for span in made.engine.engine.seen[0].images] == [4, 8]


def test_text_that_looks_like_a_placeholder_is_text(processor: VisionProcessor):
    made = sees(processor)
    text = "]<]image[>[ and ]<]start of image[>["
    assert ask(made, CHAT, messages=user(data_url(picture()), text=text)).status_code == 200
    assert made.engine.engine.seen[0].prompt_ids.count(IMAGE) == 20


def test_choices_share_the_picture():
    target, tokenizer, description = seeing()
    engine = Engine(target, pages=128)
    (body,) = post_all(
        make_service(engine, tokenizer, description),
        [{"messages": user(data_url(picture())), "n": 3, "seed": 1, "max_tokens": 8}],
    )
    assert len({choice["message"]["content"] for choice in body["choices"]}) > 1
    assert engine.runner.image_rows.encoded == 1
