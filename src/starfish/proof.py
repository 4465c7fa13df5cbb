"""The proof that a healing moved nothing but what it may."""

from __future__ import annotations

from starfish import masks as masks_module
from starfish.core import Job
from starfish.digests import fingerprints
from starfish.errors import listed


class Proof:
    """Fingerprints from before the healing, to show afterwards that nothing moved but what may."""

    def __init__(self, job: Job, free: frozenset[str]) -> None:
        self.job, self.free = job, free
        self.masked = fingerprints(job.model, job.masks)
        self.frozen = fingerprints(job.model, self._frozen_names())

    def _frozen_names(self) -> list[str]:
        """All but the masked tensors, other names for them (tied weights), and what the method declared."""
        state = self.job.model.state_dict()
        masked = {state[name].data_ptr() for name in self.job.masks}
        return [
            name for name, tensor in state.items() if name not in self.free and tensor.data_ptr() not in masked
        ]  # fmt: skip

    def check(self) -> tuple[bool, bool]:
        """Are the pruned weights zero, and all frozen tensors as they were?"""
        now = fingerprints(self.job.model, self.frozen)
        moved = [name for name in self.frozen if now[name] != self.frozen[name]]
        assert not moved, f"the method changed {listed(moved)}, which are none of its masks"
        mask_intact = masks_module.zeros_intact(self.job.model, self.job.masks)
        assert mask_intact, "the method revived pruned weights"
        return mask_intact, not moved

    def unchanged(self) -> list[str]:
        """Masked tensors that came out as they went in."""
        now = fingerprints(self.job.model, self.masked)
        return [name for name in self.masked if now[name] == self.masked[name]]
