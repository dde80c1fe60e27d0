"""Options of normalization and decoding limits, which the library shares with the config.

`NormalizeOptions` decide pixels, so they are stored in a dataset's manifest and in every export made from it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from shardmill.errors import UsageError
from shardmill.registry import Entry, ExtensionPoint, OneOf, Registry
from shardmill.section import Section

if TYPE_CHECKING:
    from shardmill.formats.encodings import StoredEncoding

# What a config without a size gets: the first if sources are large enough. Many models take nothing below the last.
IMAGE_SIZES = (64, 48, 32)
DEFAULT_IMAGE_SIZE = IMAGE_SIZES[0]

ENCODINGS: Registry[StoredEncoding] = Registry(
    "etl.encoding",
    {
        "jpeg": Entry("shardmill.formats.encodings:JPEG", "smallest; lossy, 4:4:4"),
        "png": Entry("shardmill.formats.encodings:PNG", "lossless"),
        "webp": Entry(
            "shardmill.formats.encodings:WEBP", ("smaller than jpeg at equal quality, but slower to write and read")
        ),
        "raw": Entry("shardmill.formats.encodings:RAW", "uint8 pixels; largest, fastest to read"),
    },
    point=ExtensionPoint("how a shard holds one image", "shardmill.formats.encodings:StoredEncoding"),
)


class NormalizeOptions(Section):
    """Options that convert every source image to uint8 pixels of one size. Equal options and kernels give
    equal pixels.
    """

    image_size: int = Field(default=DEFAULT_IMAGE_SIZE, ge=1, le=8192)
    """Height and width in pixels of every stored image; 64 trains in minutes on a CPU, 224 is usual for photographs."""
    resize_mode: Literal["crop", "pad", "stretch", "shorter", "longer", "none"] = "crop"
    """`crop` (centre), `pad` (on black) and `stretch` give squares; with `shorter`, `longer` (side) and `none`, sizes
    differ."""
    upscale: Literal["auto", "always", "never"] = "auto"
    """Whether small sources are enlarged. `auto`: only to squares. `never`: squares contain them unscaled, on black."""
    color: Literal["rgb", "gray"] = "rgb"
    """Channels of the stored image: three, or one."""
    encoding: Annotated[str, OneOf("shardmill.options:ENCODINGS")] = "jpeg"
    """Encoding of the stored images: `jpeg`, `png` (lossless), `webp`, or `raw` uint8 (largest, fastest to read)."""
    jpeg_quality: int = Field(default=90, ge=1, le=100)
    """Quality of the stored JPEG (4:4:4); no effect on other encodings."""
    webp_quality: int = Field(default=90, ge=1, le=100)
    """Quality of the stored WebP (lossy, 4:2:0); no effect on other encodings."""
    kernel: Literal["wheels", "native"] = "wheels"
    """Code that shrinks JPEGs: the wheels' libraries, or the faster native kernel, whose pixels differ by rounding."""
    keep_bytes: bool = False
    """If a source already has the encoding, size and colour of a stored image, store it without encoding it again."""
    max_source_bytes: int = Field(default=50_000_000, ge=1)
    """A larger source file is rejected as `too_large_bytes` before it is read."""
    min_source_bytes: int = Field(default=1, ge=1)
    """A smaller source file is rejected as `too_small`, which does not count against `max_reject_fraction`."""
    max_source_pixels: int = Field(default=64_000_000, ge=1)
    """A source that declares more pixels is rejected as `too_many_pixels` before anything is allocated."""
    max_source_side_pixels: int = Field(default=30_000, ge=1)
    """A source with a longer side is rejected as `too_many_pixels`."""
    min_source_side_pixels: int = Field(default=1, ge=1)
    """A source with a shorter side is rejected as `too_small`, which does not count against `max_reject_fraction`."""
    significant_bits: int = Field(default=16, ge=9, le=16)
    """Bits that the samples of 16-bit sources use, if a file does not declare it; 12 for most medical and scientific
    cameras."""
    more_formats: tuple[Literal["heic", "jpeg_xl"], ...] = ()
    """Formats to accept that need an extra: `heic`, `jpeg_xl` (docs/images.md)."""
    max_aspect_ratio: float = Field(default=100, ge=1)
    """A source whose longer side is more than this many times its shorter one is rejected as `aspect_ratio`."""

    @property
    def num_channels(self) -> int:
        return 3 if self.color == "rgb" else 1

    @property
    def one_shape_HWC(self) -> tuple[int, int, int] | None:
        """The shape of every stored image; None if their sizes differ."""
        if self.resize_mode in ("shorter", "longer", "none"):
            return None
        return (self.image_size, self.image_size, self.num_channels)

    @property
    def image_shape_HWC(self) -> tuple[int, int, int]:
        """The one shape that batches need. Raises UsageError if the stored sizes differ."""
        if self.one_shape_HWC is None:
            raise UsageError(
                f"etl.resize_mode = {self.resize_mode!r} stores images of different sizes",
                "batches need images of one shape",
                "build with etl.resize_mode crop, pad or stretch, or read the shards as files",
            )
        return self.one_shape_HWC

    @property
    def enlarges(self) -> bool:
        """Whether small sources become larger."""
        return self.upscale == "always" or (self.upscale == "auto" and self.one_shape_HWC is not None)

    @property
    def max_stored_pixels(self) -> int:
        """Maximum pixels of a stored image; a shard's image that declares more is not decoded."""
        if self.resize_mode == "none":
            return self.max_source_pixels
        longest = self.max_aspect_ratio if self.resize_mode == "shorter" else 1
        return math.ceil(self.image_size * (self.image_size * longest + 1))

    @model_validator(mode="after")
    def _raw_has_one_size(self) -> Self:
        if self.encoding == "raw" and self.one_shape_HWC is None:
            raise ValueError(f"encoding jpeg, png or webp with resize_mode {self.resize_mode}: raw stores no sizes")
        return self


class DecodeLimits(Section):
    """Limits of decoding one image. They decide which images are rejected, but do not affect pixels."""

    decode_timeout_seconds: float = Field(default=10.0, gt=0)
    """CPU time (and six times as much elapsed time) after which an image is rejected as `decoder_timeout`."""
    decode_memory_bytes: int = Field(default=2_000_000_000, ge=100_000_000)
    """Memory, in addition to that of an idle decoder, above which an image is rejected as `decoder_memory`."""
