"""Pictures and videos of a conversation: read, and put into the prompt where the template left their places."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from serve.api_errors import ApiError, refusal
from serve.openai_types import ContentPart, Message
from serve.pictures import load_picture
from serve.request import ImageSpan
from serve.service import Service
from serve.videos import load_video
from target_model.images import VisionInput, video_text


@dataclass(frozen=True)
class Shown:
    """One picture or video, and the tokens that stand for it: placeholders, of a video with words between them."""

    input: VisionInput
    placeholder: int
    token_ids: list[int]

    def spans(self, first: int) -> Iterator[ImageSpan]:
        """Where it is shown when its tokens begin at position `first`."""
        place, row, image = first, 0, self.input
        for is_placeholder, group in groupby(self.token_ids, self.placeholder.__eq__):
            count = len(list(group))
            if is_placeholder:
                yield ImageSpan(place, place + count, image.digest, image, row)
                row += count
            place += count


def read_shown(messages: list[Message], service: Service) -> dict[int, list[Shown]]:
    """What each message shows, by the message's identity. Reading stops at the first that fails, or where they cannot
    fit the context any more.
    """
    found: dict[int, list[Shown]] = {}
    count = tokens = 0
    for index, message in enumerate(messages):
        for place, part in enumerate(message.parts):
            if part.type == "text":
                continue
            where = f"messages[{index}].content[{place}].{part.type}"
            count += 1
            limit = service.settings.pictures.count
            if count > limit:
                raise refusal(f"more than {limit} pictures in a request", where)
            shown = _read(part, where, service)
            tokens += len(shown.token_ids)
            if tokens >= service.context:
                raise too_long(f"at least {tokens}", service, "messages")
            found.setdefault(id(message), []).append(shown)
    return found


def _read(part: ContentPart, where: str, service: Service) -> Shown:
    processor, limits = service.pictures, service.settings.pictures
    placeholder = service.image_token_id if part.type == "image_url" else service.video_token_id
    if processor is None or placeholder is None:
        kind = "pictures" if part.type == "image_url" else "videos"
        raise ApiError(400, f"{where}: the model served here sees no {kind}", where, "unsupported_field")
    if part.image_url is not None:
        image = load_picture(part.image_url.url, processor, limits, f"{where}.url")
        return Shown(image, placeholder, [placeholder] * image.rows)
    video = load_video(part.video_url.url, processor, limits, f"{where}.url")
    words = video_text(video.input, video.seconds, processor.vision.spatial_merge_size)
    return Shown(video.input, placeholder, service.tokenizer.encode(words, allow_special=True))


def place_shown(token_ids: list[int], shown: list[Shown]) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """The prompt with the single placeholder of each replaced by its tokens, and where they are."""
    coming = iter(shown)
    placeholders = {each.placeholder for each in shown}
    placed: list[int] = []
    spans: list[ImageSpan] = []
    for token in token_ids:
        if token in placeholders:
            each = next(coming)
            spans += each.spans(len(placed))
            placed += each.token_ids
        else:
            placed.append(token)
    return placed, tuple(spans)


def too_long(tokens: str, service: Service, param: str) -> ApiError:
    message = f"{param}: the prompt has {tokens} tokens, but the context holds {service.context}, answer included"
    return ApiError(400, message, param, "context_length_exceeded")
