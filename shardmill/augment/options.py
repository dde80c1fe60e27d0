"""Options of augmentation, which the library shares with the config, and the presets that set several of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shardmill.errors import UsageError
from shardmill.section import Section

Preset = Literal["default", "imagenet", "cifar", "none"]
Share = Annotated[float, Field(ge=0, le=1)]

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # The fields' own defaults.
    "default": {},
    "imagenet": {"images": "photographs", "random_crop_padding": 0, "random_resized_crop": True},
    "cifar": {"images": "photographs", "random_crop_padding": 4},
    "none": {"random_crop_padding": 0, "random_flip": False},
}

_FURTHER = (
    *("random_vertical_flip", "brightness", "contrast", "saturation", "hue", "rand_augment_operations"),
    *("random_erasing", "mixup_alpha", "cutmix_alpha"),
)


class AugmentOptions(Section):
    """Random changes to training images; each only depends on (seed, epoch, sample id, occurrence)."""

    preset: Preset = "default"
    """Stands for other options: `imagenet` (random resized crop and mirroring), `cifar` (padded crop and mirroring),
    `none`, or `default` (padded crop). Options that are given as well replace those of the preset."""
    images: Literal["any", "photographs"] = "any"
    """Content of the images: `photographs` declares natural photographs, whose class does not change when mirrored."""
    size: int = Field(default=0, ge=0, le=8192)
    """Height and width in pixels of the images in a batch, if smaller than stored; evaluation takes the centre of this
    size. 0: as stored."""
    random_crop_padding: int = Field(default=4, ge=0)
    """Pad by this many pixels (edges repeated), then crop at a random offset; 0 switches it off."""
    random_resized_crop: bool = False
    """Instead of the padded crop, resize a random rectangle (aspect ratio 3:4 to 4:3) to the size of the batch."""
    min_crop_area: float = Field(default=0.08, gt=0, le=1)
    """Smallest share of an image's area in the random resized crop; the largest is all of it."""
    random_flip: bool | Literal["auto"] = "auto"
    """Mirror half of the images left to right; `auto`: only if `images = "photographs"`. Do not use it for digits or
    text. Labels that are numbers (positions, angles) do not follow this or any other change."""

    random_vertical_flip: bool = False
    """Turn half of the images upside down: for images without a top, as from above."""
    brightness: Share = 0.0
    """Multiply the brightness by a random number between 1 - this and 1 + this; 0 switches it off, as with the next
    three. 0.4 is usual."""
    contrast: Share = 0.0
    """The same for the distance of each pixel from the image's mean."""
    saturation: Share = 0.0
    """The same for the distance of each pixel from its grey; no effect on grey images."""
    hue: float = Field(default=0.0, ge=0, le=0.5)
    """Turn the hue by at most this part of the colour circle, to either side; 0.1 is usual."""
    rand_augment_operations: int = Field(default=0, ge=0, le=8)
    """RandAugment (arXiv:1909.13719): so many random operations for each image, among them rotations, shears and
    changes of colours, but no mirroring; 2 is usual. 0 switches it off."""
    rand_augment_magnitude: int = Field(default=9, ge=0, le=30)
    """Strength of the operations of RandAugment."""
    random_erasing: Share = 0.0
    """Probability with which a rectangle of the image (2 % to 33 %) becomes noise (arXiv:1708.04896)."""
    mixup_alpha: float = Field(default=0.0, ge=0, le=10)
    """Blend each image and its label with another one (arXiv:1710.09412); the share is drawn from Beta(alpha, alpha),
    and 0.2 is usual. 0 switches it off."""
    cutmix_alpha: float = Field(default=0.0, ge=0, le=10)
    """Paste a rectangle of another image, and mix the labels by area (arXiv:1905.04899); 1 is usual. 0 switches it
    off. With mixup as well, each image gets one of both."""

    @property
    def moves(self) -> tuple[str, ...]:
        """Names of the options in use that change where in an image something is, by more than some pixels."""
        used = {
            "random_flip": self.flips,
            "random_vertical_flip": self.random_vertical_flip,
            "random_resized_crop": self.random_resized_crop,
            "rand_augment_operations": self.rand_augment_operations > 0,
        }
        return tuple(name for name, is_used in used.items() if is_used)

    @property
    def unfollowed(self) -> tuple[str, ...]:
        """Names of the options in use that boxes and masks cannot follow: rotations and shears, images made of two."""
        used = {
            "rand_augment_operations": self.rand_augment_operations > 0,
            "mixup_alpha": self.mixup_alpha > 0,
            "cutmix_alpha": self.cutmix_alpha > 0,
        }
        return tuple(name for name, is_used in used.items() if is_used)

    @property
    def mixes(self) -> bool:
        """Whether labels become shares of several classes."""
        return self.mixup_alpha > 0 or self.cutmix_alpha > 0

    @property
    def flips(self) -> bool:
        """Whether images are mirrored."""
        return self.images == "photographs" if self.random_flip == "auto" else self.random_flip

    @property
    def in_words(self) -> str:
        """How images are changed at random: `shift by up to 4 pixels, no mirroring`."""
        shift = f"shift by up to {self.random_crop_padding} pixels" if self.random_crop_padding else "no crop"
        crop = "random resized crop" if self.random_resized_crop else shift
        used = [name for name in _FURTHER if getattr(self, name)]
        return ", ".join([crop, "mirroring" if self.flips else "no mirroring", *used])

    def size_of(self, stored_HW: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the images in a batch. Raises UsageError if the stored ones are smaller."""
        if not self.size:
            return stored_HW
        if self.size > min(stored_HW):
            raise UsageError(
                f"augment.size = {self.size}, but the stored images have {stored_HW[0]} x {stored_HW[1]} pixels",
                f"expected at most {min(stored_HW)}, or 0 for the stored size",
                f"set it to {min(stored_HW)}, or build the dataset with a larger etl.image_size",
            )
        return (self.size, self.size)

    def shape_of(self, stored_HWC: tuple[int, int, int]) -> tuple[int, int, int]:
        """The shape of the images in a batch."""
        height, width, num_channels = stored_HWC
        return (*self.size_of((height, width)), num_channels)

    @property
    def unchanged(self) -> AugmentOptions:
        """The options with which evaluation reads: no random change, and images of the same size."""
        return AugmentOptions(preset="none", size=self.size)

    @model_validator(mode="before")
    @classmethod
    def _expand_the_preset(cls, given: Any) -> Any:
        """The options themselves are kept, as what a config leaves out would mean something else beside a preset."""
        preset = given.get("preset") if isinstance(given, dict) else None
        if not isinstance(preset, str) or preset not in PRESETS:
            return given
        return {**PRESETS[preset], **given, "preset": "default"}


NO_CHANGES = AugmentOptions(preset="none")


def augment_options(augment: AugmentOptions | str | None) -> AugmentOptions:
    """The options that a loader's `augment` means: a preset by its name, and none by default. Raises UsageError."""
    if augment is None:
        return NO_CHANGES
    if isinstance(augment, AugmentOptions):
        return augment
    if not isinstance(augment, str) or augment not in PRESETS:
        raise UsageError(
            f"augment = {augment!r}",
            f"expected AugmentOptions or one of {', '.join(PRESETS)}",
            'pass, for example, "imagenet"',
        )
    return AugmentOptions(preset=augment)  # pyright: ignore[reportArgumentType]
