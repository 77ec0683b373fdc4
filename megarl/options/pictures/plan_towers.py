"""What a vision tower keeps of every patch for the backward pass, operation by operation.

It is transformers' own module (`options/pictures/tower.py`) whatever the layer spec, in the model's type, with PyTorch's
attention;
the lists are what autograd saves in it (tests/planning/test_tower_memory.py). Full recomputation keeps the inputs of its
layers; selective recomputation computes nothing of it anew.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.models.vision import Vision
from megarl.options.pictures.hearing import CHUNK_TOKENS, Hearing
from megarl.planning.activations import STATISTICS, Precision
from megarl.planning.schedules import first_chunk_in_flight

if TYPE_CHECKING:
    from megarl.planning.memory import Workload
    from megarl.planning.roles import PlannedRole

FLOAT32, INT64 = 4, 8
WIDTHS_OF_FFN = {"silu": 4, "quick_gelu": 3}
"""By activation, how many tensors of the feed-forward width a layer keeps; 2 of the others: before the activation and after it.
SiLU gates: gate, activated gate, up and their product. QuickGELU is x * sigmoid(1.702 x) by two operations."""


@dataclass(frozen=True)
class TowerActivations:
    """Bytes per patch on each rank that has the tower; neither tensor parallelism nor context parallelism divides them.

    `outside` is what embedding of patches and projectors keep, `layer` one layer of `depth`, `checkpoint` its input; `anew` is
    what the last layer has in the backward pass beyond that under full recomputation, when the projector behind it is freed.
    """

    outside: float
    layer: float
    checkpoint: float
    anew: float
    depth: int

    def kept(self, recompute: str) -> float:
        """What stays from the forward to the backward pass."""
        return self.outside + self.depth * (self.checkpoint if recompute == "full" else self.layer)

    def recomputed(self, recompute: str) -> float:
        """What there is more of in the backward pass."""
        return max(0.0, self.anew) if recompute == "full" else 0.0


def tower_activations(vision: Vision, itemsize: int, freeze: Collection[str] = ()) -> TowerActivations:
    """The activations of a tower that computes in `itemsize` bytes; of what `freeze` names nothing has a gradient."""
    if isinstance(vision, Hearing):
        return _of_hearing(vision, itemsize, freeze)
    row, is_rms = vision.hidden * itemsize, not any(name.endswith(".0.norm1.bias") for name in vision.shapes)
    layers, projector = "vision" not in freeze, "projector" not in freeze
    if not layers and not projector:
        return TowerActivations(0.0, 0.0, 0.0, 0.0, 0)
    matrices = _projector_matrices(vision, itemsize, trained=projector)
    # The norm behind the last layer is the projector's own, or one of the layers'.
    norm_trained = layers if vision.projector_ffn else projector  # of LayerNorms the same is kept either way
    last = matrices + _norm(vision.hidden, itemsize, is_rms=is_rms, input_has_gradient=layers, trained=norm_trained)
    if vision.projector is not None:  # a norm of its own, behind the tower's, and the order in which it gets patches
        last += (_norm(vision.hidden, itemsize, is_rms=is_rms) + INT64) * layers
    deeper = matrices + 2 * STATISTICS / vision.merge**2
    # Its norm reads what the layer behind it also does, if that keeps it.
    deeper += 0 if layers else row
    projectors = last + len(vision.deepstack) * deeper
    projectors += 2 * INT64 / vision.merge**2  # which token shows which feature, and where
    if not layers:
        return TowerActivations(projectors, 0.0, 0.0, 0.0, 0)
    embedding = vision.patch_width * itemsize + 2 * FLOAT32 * vision.hidden / vision.heads  # pixels, cosines and sines
    norm = _norm(vision.hidden, itemsize, is_rms=is_rms)
    embedding += vision.position_bytes + norm * vision.embedding_norms
    # Input, qkv (of which v alone is kept where they are not one tensor), turned q and k, what its parts give and all.
    attention = row * (1 + (1 if vision.qkv else 3) + 2 + 2) + STATISTICS * vision.heads
    ffn = row + WIDTHS_OF_FFN.get(vision.activation, 2) * vision.ffn * itemsize
    layer = 2 * norm + attention + ffn
    own_input = row if is_rms and itemsize < FLOAT32 else 0  # whose float32 copy is kept, not the layer's input itself
    return TowerActivations(embedding + projectors, layer, row, layer + own_input - row - last, vision.depth)


def _of_hearing(tower: Hearing, itemsize: int, freeze: Collection[str]) -> TowerActivations:
    """Per token of a sound. Before and behind each convolution's GELU there is a tensor, and of the last one another order."""
    layers, projector = "vision" not in freeze, "projector" not in freeze
    if not layers and not projector:
        return TowerActivations(0.0, 0.0, 0.0, 0.0, 0)
    row, norm = tower.hidden * itemsize, _norm(tower.hidden, itemsize, is_rms=False)
    behind = norm + row * (3 if projector else 1) + 2 * INT64
    if not layers:
        return TowerActivations(behind, 0.0, 0.0, 0.0, 0)
    numbers = 2 * sum(tower.convolved) + tower.convolved[-1]
    stem = (tower.channels * numbers / CHUNK_TOKENS + tower.patch_width) * itemsize + 2 * INT64
    layer = 2 * norm + 5 * row + STATISTICS * tower.heads + row + 2 * tower.ffn * itemsize
    return TowerActivations(stem + behind, layer, row, layer - row - behind, tower.depth)


def tower_bytes(role: PlannedRole, precision: Precision, work: Workload, freed: float) -> float:
    """Bytes that a tower adds to the activations of the first stage; of a role that only answers, those of one layer.

    Under context parallelism a rank is counted all pictures of the micro-batch: its tokens are of the whole of it. `freed`:
    bytes of the decoder's part of a micro-batch, which are free when the tower's backward pass begins.
    """
    shape, layout = role.shape, role.layout
    assert shape.vision is not None, "pictures are counted of models that see alone"
    if role.trained is None:
        return work.patches * tower_activations(shape.vision, precision.itemsize).layer
    of_patch = tower_activations(shape.vision, precision.itemsize, role.freeze)
    passes = first_chunk_in_flight(layout.pp, layout.vpp or 1, work.micro_batches)
    kept_bytes = work.patches * of_patch.kept(precision.recompute)
    if precision.recompute == "full":  # of what deepstack adds, which its layers are given
        rows = work.tokens / layout.cp / (layout.tp if layout.sequence_parallel else 1)
        kept_bytes += len(shape.vision.deepstack) * rows * shape.hidden * precision.itemsize
    return passes * kept_bytes + max(0.0, work.patches * of_patch.recomputed(precision.recompute) - freed)


def _projector_matrices(vision: Vision, itemsize: int, *, trained: bool) -> float:
    """Bytes per patch of a projector without the norm behind the last layer."""
    row = vision.hidden * itemsize
    if not vision.projector_ffn:  # its rows are as wide as those of the patches that it merges together
        return row * (3 if trained else 1)  # both inputs, for gradients of the weights, and what the activation gets
    # A convolution keeps its input even if it is frozen. What LayerNorm and GELU get; before and after SiLU, and up.
    of_token = (2 * vision.out + 3 * vision.projector_ffn) * itemsize + 2 * STATISTICS
    if trained:  # inputs of the matrices, gate and up sharing theirs
        of_token += (2 * vision.out + vision.projector_ffn) * itemsize
    return row + of_token / vision.merge**2


def _norm(width: int, itemsize: int, *, is_rms: bool, input_has_gradient: bool = True, trained: bool = True) -> float:
    """Bytes per row without what the norm gives out. An RMSNorm computes in float32, and keeps that and the normalised row."""
    if not is_rms:
        return width * itemsize + 2 * STATISTICS
    return (width * FLOAT32 + STATISTICS) * input_has_gradient + width * itemsize * trained
