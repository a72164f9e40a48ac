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

    _losses: tuple[Tensor, ...] = ()
    _started = updated = False

    def start_step(self) -> None:
        self._started, self.updated, self._losses = True, False, ()

    def watch(self, loss: Tensor) -> None:
        """The loss of a micro batch: its gradient can be finite where it is not."""
        self._losses = (*self._losses, loss.detach())

    def step(self, closure: Callable | None = None) -> None:
        if not self._started:
            self._make_state()
        elif self._finite_everywhere():
            self._place_steps()
            super().step(closure)
            self.updated = True

    def _place_steps(self) -> None:
        """DeepSpeed's universal checkpoint leaves the count of steps on the host; a fused update wants it beside the
        weights.
        """
        if self.param_groups[0]["fused"]:
            for parameter, state in self.state.items():
                state["step"] = state["step"].to(parameter.device)

    def _make_state(self) -> None:
        """DeepSpeed steps once while it starts, with zero gradients, so that there is a state. That is no update: it
        must not decay weights, nor count where Adam corrects for its young averages.
        """
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = 0.0
        super().step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        for state in self.state.values():
            state["step"].zero_()

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
