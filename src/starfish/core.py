"""The nouns. A mask says where the zeros are; a method says what the other weights become.

Read this file first, then heal.py (the one way in), then methods/ (what there is to choose from).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn

if TYPE_CHECKING:
    from starfish.cache import Cache

Masks = dict[str, Tensor]
"""Parameter name → bool tensor of the parameter's shape in the dense model; True keeps, False is a zero for ever."""

Row = dict[str, int | float | str]
"""What a method reports of one step or layer. A row with a "stage" only tells how far something has come (`done` of
`total`) and is not kept."""

T = TypeVar("T")
Long = Generator[Row, None, T]
"""Anything that may take more than a second: yields rows while it works and returns what it made. Closing it between
two rows leaves everything in order. The library never prints; whoever drives the generator may."""


def finish(work: Long[T]) -> T:
    """Drive a long thing to its end, in silence."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # StopIteration is not generic


State = dict[str, Tensor | int | float | str]
"""What a long method needs to go on. Flat, tensors and plain values only, so that it is saved without pickle."""


class Images(Protocol):
    """Inputs with random access; labels only where the user has them."""

    @property
    def labels(self) -> Tensor | None: ...

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Any:
        """The model's input for these images: a tensor, or a dict of tensors passed as keywords."""
        ...


class Targets(Protocol):
    """What the dense model answers for each image: the outputs of its modules and its logits."""

    def prepare(self, *, modules: Sequence[str], logits: bool, precision: str, keep: bool = True) -> Iterator[Row]:
        """Make ready what will be read; yields stage rows. Without `keep` every reading is of inputs never seen."""
        ...

    def of(self, images: Images) -> Targets:
        """The same for other images."""
        ...

    def read(self, indices: Sequence[int], inputs: Any) -> tuple[dict[str, Tensor], Tensor | None]:
        """Outputs as x_BPC (image, position, channel) by module, and logits, each only if prepared."""
        ...


class Layout(NamedTuple):
    """Which dimension of a block's output is which; every other one is a position."""

    batch: int
    channel: int


@dataclass(frozen=True)
class Part:
    """Where unit j lies in one parameter or buffer: index `start + j` of dimension `dim`."""

    parameter: str
    dim: int
    start: int = 0
    side: str = ""  # "q" or "k" in a query-key dimension


@dataclass(frozen=True)
class Unit:
    """A family of `count` units, each a set of rows, columns and bias entries that go together."""

    kind: str  # "neuron" (MLP), "qk" (a query-key dimension), "channel" (of convolutions); "head" where a pruner asks
    block: str  # where it is made
    count: int
    groups: int  # heads; units are numbered head by head
    parts: tuple[Part, ...]  # those of dimension 1 in a weight read the unit, all others make it
    outputs: tuple[tuple[str, int], ...] = ()  # (block, start): unit j is channel start + j of that block's output
    holder: str = ""  # of a query-key dimension: the attention

    @property
    def readers(self) -> tuple[Part, ...]:
        """The columns that read the unit; with these zero it has no effect, whatever makes it."""
        return tuple(part for part in self.parts if part.dim == 1)


@dataclass(frozen=True)
class Anatomy:
    """All that is known about an architecture, found by looking at the module."""

    blocks: tuple[str, ...]  # modules whose outputs are aligned, in the order in which they run
    layouts: dict[str, Layout]  # of the outputs of blocks and tail
    roles: dict[str, str]  # prunable parameter → q k v kv qkv out mlp_in mlp_out conv depthwise head other
    units: tuple[Unit, ...]
    untrained: tuple[
        str, ...
    ]  # prunable parameters that no block's output depends on: aligning blocks cannot train them
    tail: dict[str, str]  # of these, the ones in modules that run: parameter → module
    next_norms: dict[str, str] = field(default_factory=dict)  # block → the LayerNorm or RMSNorm that reads its output
    head_positions: tuple[
        int, ...
    ] = ()  # of the last block's output, where the logits depend on these alone: class tokens
    shifts: dict[str, tuple[str, int]] = field(default_factory=dict)  # weight → (tensor that can take up a constant
    # added to its output, sign): its bias, +1, or the running mean of the BatchNorm that follows, −1

    @property
    def attends(self) -> bool:
        """Has it attentions?"""
        return bool({"qkv", "q", "out"} & set(self.roles.values()))


@dataclass(frozen=True)
class Job:
    """One healing: everything a method may look at, and the one thing it may change."""

    model: nn.Module  # pruned, changed in place
    dense: nn.Module  # never changed
    masks: Masks
    images: Images
    anatomy: Anatomy
    targets: Targets
    seed: int = 0
    cache: Cache | None = None  # where statistics are kept for the next time; None keeps none
    state: State = field(default_factory=dict)  # empty at the start; saved with the model between rows


class Method(ABC):
    """What the surviving weights become. A frozen dataclass: its fields are its settings."""

    @abstractmethod
    def fit(self, job: Job) -> Iterator[Row]:
        """Change `job.model` in place, yielding one row of numbers per step or layer.

        A long method keeps all it needs in `job.state` and goes on from there when it is not empty.
        """

    def settle(self, job: Job) -> Method:
        """The same method with every setting that was left open made concrete for this job."""
        return self

    def needs(self) -> frozenset[str]:
        """What the job must have: "labels", "batchnorm", "units" (gone whole)."""
        return frozenset()

    def masked(self) -> bool:
        """Must it see the model in the dense model's shape, because what went matters? Others work on the small one."""
        return False

    def starts_over(self) -> bool:
        """Does it begin with the dense weights, so that what a method before it did would be lost?"""
        return False

    def also_changes(self, job: Job) -> frozenset[str]:
        """Tensors outside the masks that this method may change; all others must stay bit-identical."""
        return frozenset()


class FromDense(Method):
    """Methods that begin with the dense weights and say what those that stay become, given those that go."""

    def masked(self) -> bool:
        return True

    def starts_over(self) -> bool:
        return True


class Pruner(ABC):
    """Who makes masks. A frozen dataclass: its fields are its settings."""

    @abstractmethod
    def choosing(self, dense: nn.Module, anatomy: Anatomy, images: Images | None) -> Long[Masks]:
        """The masks, one for each parameter of the scope; yields stage rows."""

    def choose(self, dense: nn.Module, anatomy: Anatomy, images: Images | None = None) -> Masks:
        """`choosing`, in silence."""
        return finish(self.choosing(dense, anatomy, images))

    def settle(self, anatomy: Anatomy, images: Images | None) -> Pruner:
        """The same pruner with every setting that was left open made concrete for this model and these images."""
        return self

    def needs(self) -> frozenset[str]:
        """What must be given: "images", "labels"."""
        return frozenset()

    def structured(self) -> bool:
        """Does it take whole units, to be cut out, and not single weights?"""
        return False

    def sees_channels(self) -> bool:
        """Does it choose among channels of convolutions? Which go together takes a run of the model for each."""
        return False


@dataclass
class Result:
    """What a heal did, measured. Its fields are the keys of `result.json`; see docs/reference.md."""

    method: str
    settings: dict[str, Any]
    images: int
    epochs: int | None
    seed: int
    sparsity: float
    mask_intact: bool
    frozen_intact: bool
    accuracy: dict[str, float | None]  # percent; dense, pruned, healed
    accuracy_top5: dict[str, float | None]
    accuracy_standard_error: dict[str, float | None]
    fidelity: dict[str, Any]  # agreement, kl, cosine, blocks: each pruned and healed
    evaluation: dict[str, Any]  # on what all this was measured
    loss: dict[str, float | None]  # mean over the first and over the last epoch
    seconds: dict[str, float]  # targets, fit, total
    peak_rss_mb: float
    unchanged: list[str]  # masked tensors that came out as they went in
    also_changed: list[str]  # tensors outside the masks that the method was free to change
    stages: list[dict[str, Any]]  # one a method: its settings, its seconds, and what was measured after it
    cut: dict[str, Any]  # units that are gone whole, by kind; empty where there are none
    speed: dict[str, Any]  # size, operations and latency of the dense, the masked and the small model
    versions: dict[str, str]
    rows: list[Row] = field(default_factory=list, repr=False)  # rows.jsonl, not in result.json

    def facts(self) -> dict[str, Any]:
        """As in result.json."""
        return {name: value for name, value in asdict(self).items() if name != "rows"}
