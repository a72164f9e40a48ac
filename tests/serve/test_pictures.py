"""Pictures in a chat: answers with speculation equal those without, and what is no picture is refused by name."""

import asyncio
import base64
import io
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from serve.engine import Engine
from serve.image_rows import ImageRows
from serve.load import load_engine
from serve.pictures import PictureLimits
from serve.request import Completion, ImageSpan, Request, SamplingParams, Sequence
from serve.server import make_service
from serve.service import Settings
from serve.tree import TreeConfig
from target_model.batch import Batch
from target_model.errors import UserError
from target_model.images import VisionInput, VisionProcessor
from tests.serve.drafts import random_draft, scripted_engine
from tests.serve.fake_engine import saying, service
from tests.serve.http_client import ask, client

CHAT = "/v1/chat/completions"
IMAGE, VIDEO = 4, 5  # placeholders of m3-tiny
WHERE = "messages[0].content[1].image_url"


def picture(width: int = 140, height: int = 112, seed: int = 0) -> Image.Image:
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(shown: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    shown.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes | Image.Image) -> str:
    data = data if isinstance(data, bytes) else encoded(data)
    return "data:image/png;base64," + base64.b64encode(data).decode()


def user(*urls: str, text: str = "What is this?") -> list[dict]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]


@pytest.fixture(scope="module")
def parts():
    """Target with its tower, tokenizer, description."""
    engine, tokenizer, description = load_engine(draft=None, device="cpu", pages=64, language_only=False)
    return engine.runner.target, tokenizer, description


@pytest.fixture(scope="module")
def processor(parts) -> VisionProcessor:
    return parts[2].pictures


def shown(processor: VisionProcessor, seed: int, words: int = 20) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """A prompt of words around one image of 20 rows."""
    image = processor.image(picture(seed=seed))
    ids = [*range(100, 100 + words), *[IMAGE] * image.rows, *range(200, 200 + words)]
    return ids, (ImageSpan(words, words + image.rows, image.digest, image),)


def answers(engine: Engine, requests: list[Request]) -> list[Completion]:
    updates = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for update in engine.step():
            updates[update.id].append(update)
    return [Completion.of(entries) for entries in updates.values()]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def post_all(made, bodies: list[dict]) -> list[dict]:
    async def run():
        async with client(made) as http:
            return await asyncio.gather(*[http.post(CHAT, json=body) for body in bodies])

    responses = asyncio.run(run())
    assert [response.status_code for response in responses] == [200] * len(bodies), responses[0].text
    return [response.json() for response in responses]


@pytest.mark.parametrize("tree", [TreeConfig.chain(3), TreeConfig(4, 3, 14)], ids=str)
def test_speculation_changes_nothing(parts, tree: TreeConfig):
    """Through the server, greedy and sampled; prompts are cut into chunks that end inside images."""
    target, tokenizer, description = parts
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


def test_accepted_tokens_behind_images(parts, processor: VisionProcessor):
    """With a draft that is right most of the time, so that much is accepted."""
    target = parts[0]
    prompts = [shown(processor, seed) for seed in range(3)]
    requests = [Request(str(place), ids, greedy(40), images=spans) for place, (ids, spans) in enumerate(prompts)]
    plain = [answers(Engine(target, pages=64), [request])[0] for request in requests]
    assert len({tuple(answer.token_ids) for answer in plain}) > 1
    # The script knows prompts by their ids, which are the same: the images alone tell these apart.
    assert len({tuple(ids) for ids, _ in prompts}) == 1
    for request, expected in zip(requests, plain, strict=True):
        script = {tuple(request.prompt_ids): expected.token_ids}
        engine = scripted_engine(target, script, TreeConfig(4, 3, 12), agreement=0.8, pages=64, prefill_tokens=17)
        found = answers(engine, [request])[0]
        assert found.token_ids == expected.token_ids
        assert sum(step.accepted for step in found.steps) > 15


def test_the_same_ids_with_another_image_share_no_prefix(parts, processor: VisionProcessor):
    """One engine, one request after the other: whatever it keeps of the first must not serve the second."""
    target = parts[0]
    engine = Engine(target, pages=64)
    for seed in (0, 1, 0):
        ids, spans = shown(processor, seed, words=40)
        expected = answers(Engine(target, pages=64), [Request("a", ids, greedy(12), images=spans)])[0]
        found = answers(engine, [Request("a", ids, greedy(12), images=spans)])[0]
        assert found.token_ids == expected.token_ids
    without = answers(engine, [Request("a", ids, greedy(12))])[0]
    assert without.token_ids == answers(Engine(target, pages=64), [Request("a", ids, greedy(12))])[0].token_ids


class CountingRows(ImageRows):
    placed = 0

    def place(self, batch: Batch, chunks: list[tuple[Sequence, int]]) -> Batch:
        batch = super().place(batch, chunks)
        self.placed += 0 if batch.image_rows is None else len(batch.image_rows)
        return batch


def test_preempted_requests_see_their_image_again(parts, processor: VisionProcessor):
    target = parts[0]
    requests = [
        Request(str(seed), ids, greedy(60), images=spans)
        for seed, (ids, spans) in enumerate(shown(processor, seed) for seed in range(4))
    ]
    plain = [answers(Engine(target, pages=64), [request])[0].token_ids for request in requests]
    tight = Engine(target, pages=12, prefill_tokens=16)
    tight.runner.image_rows = rows = CountingRows(target.vision)
    tight.scheduler.allocator.publish = lambda page, key: None  # no page survives its sequence
    assert [answer.token_ids for answer in answers(tight, requests)] == plain
    assert tight.scheduler.preemptions > 0
    assert rows.placed > 4 * 20 and rows.encoded == 4


@torch.inference_mode()
def test_rows_of_a_chunk(parts, processor: VisionProcessor):
    """Any cut through text, images and the frames of a video takes the right rows of the right features."""
    target = parts[0]
    first, second = processor.image(picture()), processor.image(picture(60, 90, 1))
    video = processor.video([picture(56, 56, seed) for seed in range(11)])
    steps = sum(frames for frames, _, _ in video.grids)
    per_step = video.rows // steps
    ids, spans = [100, 101], []
    features = [None, None]

    def show(image: VisionInput, token: int, begin: int, end: int) -> None:
        spans.append(ImageSpan(len(ids), len(ids) + end - begin, image.digest, image, begin))
        ids.extend([token] * (end - begin))
        features.extend(target.vision(image.patches, image.grids)[begin:end])

    show(first, IMAGE, 0, first.rows)
    show(second, IMAGE, 0, second.rows)
    for step in range(steps):
        ids.append(102)
        features.append(None)
        show(video, VIDEO, step * per_step, (step + 1) * per_step)
    request = Request("a", ids, greedy(1), images=tuple(spans))
    Engine(target, pages=64).add(request)
    rows = ImageRows(target.vision)
    for start, count in [(0, len(ids)), (0, 1), (1, 5), (7, 30), (30, 12), (len(ids) - 3, 3)]:
        sequence, other = Sequence(request), Sequence(replace(request, id="b"))
        sequence.computed, other.computed = start, 3
        chunk = ids[start : start + count]
        batch = Batch.causal(16, "cpu", [chunk, ids[3:9]], [start, 3], [list(range(64))] * 2)
        batch = rows.place(batch, [(sequence, count), (other, 6)])
        expected = features[start : start + count] + features[3:9]
        wanted = [row for row, value in enumerate(expected) if value is not None]
        assert batch.image_rows.tolist() == wanted
        assert (batch.image_features - torch.stack([expected[row] for row in wanted])).abs().max() < 1e-5
    assert rows.encoded == 3


def test_features_are_kept_while_there_is_room(parts, processor: VisionProcessor):
    images = [processor.image(picture(seed=seed)) for seed in range(3)]
    rows = ImageRows(parts[0].vision, kept=2 * images[0].rows)
    for place, encoded_so_far in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4)):
        rows._of(images[place])
        assert rows.encoded == encoded_so_far


def test_requests_whose_images_have_no_place(parts, processor: VisionProcessor):
    target = parts[0]
    ids, (span,) = shown(processor, 0)
    engine = Engine(target, pages=64)
    video = processor.video([picture()])
    for wrong in (
        replace(span, start=span.start - 1, end=span.end - 1),
        replace(span, end=span.end + 1),
        replace(span, first_row=1),
        replace(span, image=None),
        replace(span, digest=b"other"),
        replace(span, image=video, digest=video.digest),
    ):
        with pytest.raises(UserError, match="the prompt"):
            engine.add(Request("a", ids, greedy(1), images=(wrong,)))
    with pytest.raises(UserError, match="the prompt"):
        engine.add(Request("a", ids, greedy(1), images=(span, span)))
    assert not engine.has_work()
    blind, _, description = load_engine(draft=None, device="cpu", pages=64)
    assert description.pictures is None
    with pytest.raises(UserError, match="without its vision tower"):
        blind.add(Request("a", ids, greedy(1), images=(span,)))


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
        ({"type": "video_url", "video_url": url}, "messages[0].content[0].type"),
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


def test_choices_share_the_picture(parts):
    target, tokenizer, description = parts
    engine = Engine(target, pages=128)
    (body,) = post_all(
        make_service(engine, tokenizer, description),
        [{"messages": user(data_url(picture())), "n": 3, "seed": 1, "max_tokens": 8}],
    )
    assert len({choice["message"]["content"] for choice in body["choices"]}) > 1
    assert engine.runner.image_rows.encoded == 1
