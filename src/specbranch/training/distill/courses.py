"""What differs between training a plain draft and one that reads features: the student, and which rows it is judged by.

Owns the choice between the two. Invariant: a course's rows depend on the batch and the weights alone.
"""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from specbranch.models.files.architecture import Architecture
from specbranch.models.files.weights import Weights
from specbranch.training.distill.features import FeatureStack, deep_rows, rooted, starting_weights
from specbranch.training.distill.material import Batch
from specbranch.training.distill.model import DeepRows, Stack, counted
from specbranch.training.distill.teacher import moved
from specbranch.training.distill.train_settings import TrainSettings

DraftKind = Literal["plain", "features"]
DRAFT_KINDS: tuple[DraftKind, ...] = ("plain", "features")


class Course(Protocol):
    """How a draft of one kind is trained."""

    @property
    def student(self) -> Stack | FeatureStack:
        """The draft."""

    def rows(self, part: Batch, here: Batch, heard: Tensor, fade: float) -> DeepRows:
        """Compare the draft with its target at the weighted positions of a batch.

        `part` is on the CPU, `here` the same on the device, `heard` what the teacher says of it. A depth counts `fade`
        to its power.
        """


class PlainCourse:
    """A draft that reads tokens alone: what it says does not depend on who wrote them."""

    def __init__(self, arch: Architecture, weights: Weights, settings: TrainSettings, head_ids: Tensor | None) -> None:
        self.student = Stack(arch, weights, settings.layers, trained=True, head_ids=head_ids)

    def rows(self, part: Batch, here: Batch, heard: Tensor, fade: float) -> DeepRows:
        """See Course."""
        return counted(heard, [self.student(here)], [part.weight])


class FeatureCourse:
    """A draft that reads the target's states, and its own when it goes on alone."""

    def __init__(self, arch: Architecture, weights: Weights, settings: TrainSettings, head_ids: Tensor | None) -> None:
        own = starting_weights(arch, weights, settings.layers, head_ids)
        self.student, self._depths = FeatureStack(arch, weights, own, trained=True), settings.depths

    def rows(self, part: Batch, here: Batch, heard: Tensor, fade: float) -> DeepRows:
        """See Course."""
        roots = moved(rooted(part), self.student)
        return deep_rows(self.student, part, roots, heard, self._depths, fade)


def course_of(arch: Architecture, weights: Weights, settings: TrainSettings, head_ids: Tensor | None) -> Course:
    """Return the course of a training."""
    kind = FeatureCourse if settings.taps else PlainCourse
    return kind(arch, weights, settings, head_ids)


def whole_weight(settings: TrainSettings) -> float:
    """Return what all depths of a position count together."""
    return sum(settings.fade**depth for depth in range(settings.depths))
