"""AdamW that leaves out an update whose loss or gradient is not finite, on all ranks together.

One NaN would spread to every weight and moment. In some ZeRO stages DeepSpeed leaves such an update out by itself, then
`step` is not called at all; in the others its gradients, averaged and clipped, arrive here. No stage looks at the loss.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class FiniteAdamW(torch.optim.AdamW):
    """`start_step()` begins an optimizer step, `watch(loss)` adds a micro batch; afterwards `updated` tells whether the
    weights changed, the same on every rank.
    """

    # DeepSpeed also steps while it starts, before there is a batch, to make the state.
    _losses: tuple[Tensor, ...] = ()
    updated = False

    def start_step(self) -> None:
        self.updated, self._losses = False, ()

    def watch(self, loss: Tensor) -> None:
        """The loss of a micro batch: its gradient can be finite where it is not."""
        self._losses = (*self._losses, loss.detach())

    def step(self, closure: Callable | None = None) -> None:
        if self._finite_everywhere():
            super().step(closure)
            self.updated = True

    @torch.no_grad()
    def _finite_everywhere(self) -> bool:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        # A norm needs no memory of the gradient's size, and is not finite if any number is not.
        values = [*self._losses, *(torch.linalg.vector_norm(gradient) for gradient in gradients)]
        if not values:
            return True
        # Offloaded gradients lie in host memory; ranks talk where the losses are.
        place = values[0].device
        finite = torch.stack([value.to(place).float() for value in values]).isfinite().all().int()
        torch.distributed.all_reduce(finite, torch.distributed.ReduceOp.MIN)
        return bool(finite)
