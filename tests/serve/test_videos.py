"""Videos in a chat: what is shown of them stands in the prompt; answers with speculation equal those without."""

import asyncio
import base64
import io

import pytest

from serve.engine import Engine
from serve.pictures import PictureLimits
from serve.server import make_service
from serve.service import Settings
from serve.shown import Shown, place_shown
from serve.tree import TreeConfig
from target_model.images import VisionInput, sample_frames
from tests.serve.drafts import random_draft
from tests.serve.fake_engine import saying, service, tokenizer
from tests.serve.http_client import ask, client
from tests.serve.pictures import IMAGE, VIDEO, data_url, encoded, picture, seeing

CHAT = "/v1/chat/completions"
WHERE = "messages[0].content[1].video_url"
TOKENIZER = tokenizer()


def animation(frames=6, kind="GIF", milliseconds=500, size=(112, 84)):
    pictures = [picture(*size, seed=seed) for seed in range(frames)]
    return encoded(pictures[0], kind, save_all=True, append_images=pictures[1:], duration=milliseconds)


def film(frames=12, rate=4):
    av = pytest.importorskip("av", reason="av is not installed: pip install -e '.[video]'")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 112, 84, "yuv420p"
        for seed in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_image(picture(112, 84, seed))))
        container.mux(stream.encode())
    return file.getvalue()


def part(data, kind="video"):
    url = data if isinstance(data, str) else f"data:video/x;base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def user(*parts):
    return [{"role": "user", "content": [{"type": "text", "text": "What happens?"}, *parts]}]


def sees(limits=None):
    """A service without a model that reads pictures and videos."""
    made = service(saying("ok"), settings=Settings(pictures=limits or PictureLimits()))
    made.pictures, made.image_token_id, made.video_token_id = seeing()[2].pictures, IMAGE, VIDEO
    return made


@pytest.mark.parametrize(("data", "seconds"), [(animation, 3.0), (lambda: animation(kind="WEBP"), 3.0), (film, 3.0)])
def test_one_frame_a_second_stands_in_the_prompt(data, seconds):
    made = sees()
    response = ask(made, CHAT, messages=user(part(data()), part(data_url(picture()), "image")))
    assert response.status_code == 200, response.text
    (request,) = made.engine.engine.seen
    first, second, still = request.images
    assert first.image is second.image and (first.image.kind, still.image.kind) == ("video", "image")
    # Three frames make two temporal patches of 4 x 3 rows; the second begins with the third frame.
    assert [(span.first_row, span.end - span.start) for span in request.images] == [(0, 12), (12, 12), (0, 20)]
    for span, token in ((first, VIDEO), (second, VIDEO), (still, IMAGE)):
        assert set(request.prompt_ids[span.start : span.end]) == {token}
        assert (request.prompt_ids[span.start - 1], request.prompt_ids[span.end]) == (6, 7)
    assert request.prompt_ids.count(VIDEO) == 24
    text = TOKENIZER.decode(request.prompt_ids[: second.start])
    assert "What happens?]<]0.0 seconds[>[" in text and "]<]2.0 seconds[>[" in text
    assert len(sample_frames(round(seconds * 4), 4.0)) == 3


@pytest.mark.parametrize("tree", [TreeConfig.chain(3), TreeConfig(4, 3, 14)], ids=str)
def test_speculation_changes_nothing(tree):
    """Prompts are cut into chunks that end inside a video."""
    target, made, description = seeing()
    common = {"max_tokens": 16, "ignore_eos": True}
    bodies = [
        {"messages": user(part(animation())), "temperature": 0, **common},
        {"messages": user(part(animation(4))), "temperature": 0, **common},
        {"messages": user(part(animation()), part(data_url(picture()), "image")), "seed": 5, **common},
        {"messages": user(), "temperature": 0, **common},
    ]

    def post_all(running):
        async def run():
            async with client(running) as http:
                return await asyncio.gather(*[http.post(CHAT, json=body) for body in bodies])

        return [response.json()["choices"][0]["message"] for response in asyncio.run(run())]

    plain = post_all(make_service(Engine(target, pages=64), made, description))
    engine = Engine(target, random_draft(target), tree, pages=128, prefill_tokens=13)
    assert post_all(make_service(engine, made, description)) == plain
    assert len({message["content"] for message in plain}) == 4
    assert engine.runner.image_rows.encoded == 3


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.org/a.mp4", "nothing is fetched from the network"),
        ("file:///etc/passwd", "reads no local files"),
        (data_url(picture()), "data:video/TYPE;base64,DATA"),
        ("data:video/mp4;base64,a*b=", "not valid base64"),
        (b"no video", ""),
        (b"", ""),
        (animation()[:900], "cannot be decoded"),
        (animation(2, size=(1, 300)), "aspect ratio"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bad_videos(url, words):
    error = refusal(sees(), user(part(url)))
    assert error["param"] == f"{WHERE}.url" and error["message"].startswith(f"{WHERE}.url: ")
    assert words in error["message"] and "\n" not in error["message"]


def refusal(made, messages):
    response = ask(made, CHAT, messages=messages)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_a_film_cut_short():
    error = refusal(sees(), user(part(film()[:-2000])))
    assert error["param"] == f"{WHERE}.url" and "cannot be decoded" in error["message"]


def test_limits():
    assert "bytes" in refusal(sees(PictureLimits(size=100)), user(part(animation())))["message"]
    assert "pixels" in refusal(sees(PictureLimits(pixels=9000)), user(part(animation())))["message"]
    assert "pictures in a request" in refusal(sees(PictureLimits(count=1)), user(*[part(animation())] * 2))["message"]
    made = sees()
    made.context = 90
    assert "the context holds 90" in refusal(made, user(part(animation(14, milliseconds=1000))))["message"]


def test_a_model_that_sees_no_videos():
    error = refusal(service(saying("ok")), user(part(animation())))
    assert (error["param"], error["code"]) == (WHERE, "unsupported_field") and "sees no videos" in error["message"]


def test_placing():
    def shown(kind, rows, placeholder, ids):
        return Shown(VisionInput(kind, None, (), rows, b""), placeholder, ids)

    coming = [shown("image", 3, 9, [9] * 3), shown("video", 4, 8, [5, 8, 8, 6, 8, 8]), shown("image", 1, 9, [9])]
    ids, spans = place_shown([1, 9, 2, 8, 9], coming)
    assert ids == [1, 9, 9, 9, 2, 5, 8, 8, 6, 8, 8, 9]
    assert [(span.start, span.end, span.first_row) for span in spans] == [(1, 4, 0), (6, 8, 0), (9, 11, 2), (11, 12, 0)]
