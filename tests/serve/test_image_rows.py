"""Images in the engine: their rows reach the target whatever the chunks, and their content is part of a prefix."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serve.engine import Engine
from serve.image_rows import ImageRows
from serve.load import EngineOptions, load_engine
from serve.request import Completion, ImageSpan, Request, SamplingParams, Sequence
from serve.tree import TreeConfig
from target_model.batch import Batch
from target_model.errors import UserError
from target_model.images import VisionInput, VisionProcessor
from target_model.model import TargetModel
from target_model.resolve import BUNDLED
from tests.serve.drafts import scripted_engine
from tests.serve.pictures import IMAGE, VIDEO, picture, seeing


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return seeing()[0]


@pytest.fixture(scope="module")
def processor() -> VisionProcessor:
    return seeing()[2].pictures


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


@pytest.mark.parametrize("device_step", [False, True])
def test_accepted_tokens_behind_images(target: TargetModel, processor: VisionProcessor, device_step: bool):
    """With a draft that is right most of the time, so that much is accepted."""
    prompts = [shown(processor, seed) for seed in range(3)]
    requests = [Request(str(place), ids, greedy(40), images=spans) for place, (ids, spans) in enumerate(prompts)]
    plain = [answers(Engine(target, pages=64), [request])[0] for request in requests]
    settings = {"pages": 64, "prefill_tokens": 17, "device_step": device_step}
    assert len({tuple(answer.token_ids) for answer in plain}) > 1
    # The script knows prompts by their ids, which are the same: the images alone tell these apart.
    assert len({tuple(ids) for ids, _ in prompts}) == 1
    for request, expected in zip(requests, plain, strict=True):
        script = {tuple(request.prompt_ids): expected.token_ids}
        engine = scripted_engine(target, script, TreeConfig(4, 3, 12), agreement=0.8, **settings)
        found = answers(engine, [request])[0]
        assert found.token_ids == expected.token_ids
        assert sum(step.accepted for step in found.steps) > 15


def test_the_same_ids_with_another_image_share_no_prefix(target: TargetModel, processor: VisionProcessor):
    """One engine, one request after the other: whatever it keeps of the first must not serve the second."""
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


def test_preempted_requests_see_their_image_again(target: TargetModel, processor: VisionProcessor):
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
def test_rows_of_a_chunk(target: TargetModel, processor: VisionProcessor):
    """Any cut through text, images and the frames of a video takes the right rows of the right features."""
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


def test_features_are_kept_while_there_is_room(target: TargetModel, processor: VisionProcessor):
    images = [processor.image(picture(seed=seed)) for seed in range(3)]
    rows = ImageRows(target.vision, kept=2 * images[0].rows)
    for place, encoded_so_far in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4)):
        rows._of(images[place])
        assert rows.encoded == encoded_so_far


def test_requests_whose_images_have_no_place(target: TargetModel, processor: VisionProcessor):
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
    blind, _, description = load_engine(EngineOptions(draft=None, device="cpu", pages=64))
    assert description.pictures is None
    with pytest.raises(UserError, match="without its vision tower"):
        blind.add(Request("a", ids, greedy(1), images=(span,)))


def test_a_tokenizer_without_the_placeholder(tmp_path: Path):
    """Then no prompt could show a picture: said at the start. The language model alone serves."""
    for file in (BUNDLED / "m3-tiny").iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "image_token_index": 7}))
    with pytest.raises(UserError, match="is 4 in tokenizer.json and 7 in config.json"):
        load_engine(EngineOptions(str(tmp_path), None, device="cpu", pages=64, language_only=False))
    assert load_engine(EngineOptions(str(tmp_path), None, device="cpu", pages=64))[2].pictures is None
