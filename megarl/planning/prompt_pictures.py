"""Pictures that the prompts of a planned run show. How many and how large they are, the option pictures says."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from megarl.config import AnyConfig
from megarl.data.micro_batches import Grid
from megarl.errors import ConfigError
from megarl.models.flops import FlopsModel
from megarl.models.shape import ModelShape
from megarl.models.vision import vision_part


@dataclass(frozen=True)
class PromptPictures:
    """Pictures of prompts: `grids` by prompt, for means; `most` of a single prompt, for memory. `source` says where from."""

    grids: tuple[tuple[Grid, ...], ...] = ((),)
    most: tuple[Grid, ...] = ()
    source: str = "none"

    @property
    def per_prompt(self) -> float:
        """Number that a prompt shows on average; frames of a video are pictures."""
        return sum(map(len, self.grids)) / len(self.grids)

    @property
    def patches(self) -> float:
        """Patches of a prompt, on average."""
        return sum(prod(grid) for grids in self.grids for grid in grids) / len(self.grids)

    @property
    def most_patches(self) -> int:
        """Patches of the prompt that shows most."""
        return sum(map(prod, self.most))

    def flops(self, model: FlopsModel) -> float:
        """Operations of the tower in a forward pass over a prompt's pictures, on average."""
        return sum(map(model.tower, self.grids)) / len(self.grids)


NO_PICTURES = PromptPictures()


def pictures_of(
    config: AnyConfig, per_prompt: int | None = None, pixels: float | None = None, prompt: float | None = None
) -> PromptPictures:
    """The pictures of a run's prompts: as given, as the first rows of `data.train` show them, else as large as is allowed.

    `prompt`: mean tokens of a prompt, if they are known.

    Raises:
        ConfigError: pictures are given for a model that takes none, or do not fit into the longest prompt.
    """
    vision = ModelShape.read(config.model.path).vision
    if vision is not None:
        pictures: PromptPictures = vision_part("plan_pictures").pictures_shown(config, vision, per_prompt, pixels, prompt)
        return pictures
    if per_prompt is not None or pixels is not None:
        raise ConfigError(
            f"--pictures-per-prompt and --picture-pixels are for models that see, and '{config.model.path}' does not"
        )
    return NO_PICTURES
