"""The rows of a prefill chunk that show images: what the target reads there, computed once and kept for a while."""

from collections import OrderedDict
from dataclasses import replace

import torch
from torch import Tensor

from serve.request import Request, Sequence
from target_model.batch import Batch
from target_model.errors import UserError
from target_model.images import VisionInput
from target_model.model import TargetModel
from target_model.vision import VisionTower

KEPT_ROWS = 16_384


def check_images(request: Request, target: TargetModel) -> None:
    """Raises UserError unless every image of a request stands on placeholders of its own, and the target can see."""
    kinds = {"image": target.config.image_token_id, "video": target.config.video_token_id}
    end = 0
    for span in request.images:
        if target.vision is None:
            raise UserError("the prompt shows images, but the target was loaded without its vision tower")
        image, rows = span.image, span.first_row + span.end - span.start
        if image is None or image.digest != span.digest:
            raise UserError(f"the prompt shows nothing, or something else, from {span.start} to {span.end - 1}")
        fits = end <= span.start < span.end and 0 <= span.first_row < rows <= image.rows
        if not fits or set(request.prompt_ids[span.start : span.end]) != {kinds[image.kind]}:
            raise UserError(f"the prompt has no {image.kind} placeholders from {span.start} to {span.end - 1}")
        end = span.end


class ImageRows:
    """Runs the tower when a chunk first shows an image. The last images stay at hand, `kept` rows of them: the next
    chunk of the same image, other choices of the request, its return after a preemption and the next turn of the
    conversation find them.
    """

    def __init__(self, tower: VisionTower, kept: int = KEPT_ROWS):
        self.tower, self.kept = tower, kept
        self.encoded = 0  # images that went through the tower
        self._features: OrderedDict[bytes, Tensor] = OrderedDict()

    def place(self, batch: Batch, chunks: list[tuple[Sequence, int]]) -> Batch:
        """The batch of the next `count` tokens of each sequence, with the features of its image rows."""
        rows: list[int] = []
        features: list[Tensor] = []
        first_row = 0
        for sequence, count in chunks:
            start = sequence.computed
            for span in sequence.request.images:
                low, high = max(span.start, start), min(span.end, start + count)
                if low < high:
                    rows += range(first_row + low - start, first_row + high - start)
                    shown = span.first_row - span.start
                    features.append(self._of(span.image)[shown + low : shown + high])
            first_row += count
        if not rows:
            return batch
        device = batch.token_ids.device
        return replace(batch, image_rows=torch.tensor(rows, device=device), image_features=torch.cat(features))

    def _of(self, image: VisionInput) -> Tensor:
        found = self._features.pop(image.digest, None)
        if found is None:
            found = self.tower(image.patches, image.grids)
            self.encoded += 1
        self._features[image.digest] = found
        while len(self._features) > 1 and sum(map(len, self._features.values())) > self.kept:
            self._features.popitem(last=False)
        return found
