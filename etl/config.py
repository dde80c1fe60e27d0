"""The ETL's settings: the sections `source` and `etl`, and the tree that `etl/job.py` reads."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from shardmill.formats.rows import OWN_COLUMNS, OWN_FEATURES, OWN_NAMES
from shardmill.jobs.config import ConfigTree, DatasetConfig, SparkConfig
from shardmill.kernel import resolve_kernel
from shardmill.options import DEFAULT_IMAGE_SIZE, DecodeLimits, NormalizeOptions
from shardmill.registry import OneOf
from shardmill.section import Section, SettingKind
from shardmill.typed_columns import BOX_COLUMNS, MASK, names_coordinates, parse_extra
from shardmill.values import SourceLabelKind

REBUILDS_NOTHING = SettingKind("changing it alone does not build stored images again")
EQUAL_IN_APPENDS = SettingKind("an append needs the value that the dataset was built with")
_KINDS_WITHOUT_FIELDS = ("folders", "idx", "cifar", "zip", "coco", "several")


class BoxesConfig(Section):
    """The boxes of objects in each image, which move with its pixels (docs/boxes.md)."""

    field: str = ""
    """A column with a list of boxes in each row, four numbers each, in pixels of the upright source; empty: no boxes.
    `objects.bbox` is a field of a struct, `json.boxes` one of a tar's JSON members, and `image/object/bbox` the
    beginning of the names of four TFRecord features."""
    labels_field: str = ""
    """A column, field or feature with the class name of each box; empty: boxes without classes. An image then has the
    classes of its boxes as labels."""
    format: Literal["xyxy", "xywh"] = "xyxy"
    """The four numbers: two corners, or a corner with width and height. Stored boxes are `xyxy`, as TFRecords have
    them."""

    @model_validator(mode="after")
    def _labels_are_of_boxes(self) -> BoxesConfig:
        if self.labels_field and not self.field:
            raise ValueError("boxes.field beside boxes.labels_field: the column of the boxes")
        return self


class DownloadConfig(Section):
    """How a task downloads images that a table names by `http://` or `https://`."""

    timeout_seconds: float = Field(default=20.0, gt=0)
    """Time limit of one attempt, including redirects."""
    num_retries: int = Field(default=2, ge=0, le=20)
    """Retries after a transient failure, with growing delays."""
    num_parallel: int = Field(default=16, ge=1, le=256)
    """Images that a task downloads at once; also applies to files and objects that a table names."""
    num_parallel_per_host: int = Field(default=4, ge=1)
    """Maximum number of simultaneous downloads from one host."""
    allow_private_addresses: bool = False
    """Also download from private networks and this machine; otherwise such URLs are rejected."""
    allow_networks: tuple[str, ...] = ()
    """Private networks that are allowed in any case, such as `10.1.0.0/16`."""

    @field_validator("allow_networks")
    @classmethod
    def _are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            ipaddress.ip_network(network)
        return networks


class SourceConfig(Section):
    """Where the images come from."""

    uri: str = ""
    """The source images: a local folder, or a URI of a bucket (`s3://`, `gs://`, `az://`) or of HDFS.

    For kinds other than `folders` also one file or a pattern.
    """
    kind: Annotated[str, OneOf("etl.sources:SOURCES")] = "folders"
    """How the images are stored and listed."""
    label_level: int = Field(default=0, ge=0, le=32)
    """Level of folders (under a split folder) that names the class; 0: the first one, if that is unambiguous."""
    follow_symlinks: bool = False
    """Read links to folders, and links that leave the source; otherwise they are rejected. Loops are always
    rejected."""
    image_field: str = ""
    """Name of the image in a container's row, record or sample, if it is not a usual one (docs/sources.md)."""
    uri_field: str = ""
    """A table's column of URIs; empty: `uri`, `url`, `path`, `file_name` or `filename`."""
    label_field: str = ""
    """Name of the label, if it is not a usual one (docs/sources.md)."""
    split_field: str = ""
    """A table's column that names the split; empty: `split`."""
    group_field: str = ""
    """A column of groups (patients, videos); all images of a group are in one split. Empty: `group`."""
    mask_field: str = ""
    """A column, feature or tar member with each image's mask, a PNG of class numbers, or a column with its file
    (docs/boxes.md); empty: no masks."""
    key_field: str = ""
    """A column or feature with a permanent name for each image, whatever file holds its row; empty: a table's `key`.
    Without one, the name is the URI, or the file and the row's number."""
    label_kind: SourceLabelKind = "class"
    """Kind of the labels: one class, several classes (`multi_label`), a number, a vector of numbers, or `none`."""
    extra_columns: tuple[str, ...] = ()
    """Additional columns, fields or features to store with each image: `NAME`, or `NAME:TYPE` (docs/sources.md)."""
    boxes: BoxesConfig = BoxesConfig()
    """Boxes of objects, beside the images; the kind `coco` has its own."""
    coco_images: str = ""
    """Of kind `coco`: the folder or URI of the images; empty: beside the annotation file, or in a usual folder."""
    coco_masks: bool = False
    """Of kind `coco`: also make a mask of each image from its segmentations, of ids of categories (docs/boxes.md)."""
    download: DownloadConfig = DownloadConfig()
    """Downloads of URLs in a table."""
    parts: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")], SourceConfig] = Field(default_factory=dict)
    """The sources of kind `several`: name -> keys of this section. The keys of a part's images begin with its name."""

    @model_validator(mode="after")
    def _parts_belong_to_several(self) -> SourceConfig:
        if self.parts and (self.kind != "several" or self.uri):
            raise ValueError("parts only with kind = 'several' and without a uri of their own")
        nested = next((name for name, part in self.parts.items() if part.kind == "several"), None)
        if nested is not None:
            raise ValueError(f"parts of other kinds, and the part {nested} has parts itself")
        return self

    @model_validator(mode="after")
    def _annotations_are_readable(self) -> SourceConfig:
        if (self.boxes.field or self.mask_field) and self.kind in _KINDS_WITHOUT_FIELDS:
            name = "boxes" if self.boxes.field else "mask_field"
            raise ValueError(f"{name} with a kind whose rows have fields, such as table or parquet, not {self.kind}")
        if (self.coco_images or self.coco_masks) and self.kind != "coco":
            name = "coco_images" if self.coco_images else "coco_masks"
            raise ValueError(f"{name} with the kind coco, not {self.kind}")
        if self.kind == "tfrecord" and self.boxes.format != "xyxy":
            raise ValueError("no boxes.format: the features of a TFRecord are named by the sides of a box")
        ours = {
            *(BOX_COLUMNS if self.boxes.field or self.labels_are_of_boxes else ()),
            *([MASK] if self.mask_field or self.coco_masks else ()),
        }
        clash = next((name for name, _ in map(parse_extra, self.extra_columns) if name in ours), None)
        if clash is not None:
            raise ValueError(f"no extra column {clash!r}, which is the name of what moves with the pixels")
        is_labelled = self.label_field or self.label_level or self.label_kind not in ("class", "multi_label")
        if self.labels_are_of_boxes and is_labelled:
            raise ValueError("no label_field, label_level and label_kind: the classes of the boxes are the labels")
        return self

    @property
    def labels_are_of_boxes(self) -> bool:
        """Whether an image has the classes of its boxes as labels, and no others."""
        return self.boxes.labels_field != "" or (self.kind == "coco" and self.label_kind != "none")

    @property
    def without_box_labels(self) -> SourceConfig:
        """As it is listed: labels that are those of the boxes are in no place of their own."""
        return self.model_copy(update={"label_kind": "none"}) if self.labels_are_of_boxes else self

    def uris(self) -> dict[str, str]:
        """Every URI that must be set, by its config key."""
        if self.kind != "several":
            return {"source.uri": self.uri}
        return {f"source.parts.{name}.uri": part.uri for name, part in self.parts.items()}

    def at(self, uris: Mapping[str, str]) -> SourceConfig:
        """The same source with its URIs, by their config keys, in another form."""
        if self.kind != "several":
            return self.model_copy(update={"uri": uris["source.uri"]})
        parts = {
            name: part.model_copy(update={"uri": uris[f"source.parts.{name}.uri"]}) for name, part in self.parts.items()
        }
        return self.model_copy(update={"parts": parts})

    def image_fields(self) -> str:
        """The settings that select the image field of a row: the only source settings that a listing does not show."""
        named = {name: part.image_field for name, part in self.parts.items() if part.image_field}
        return json.dumps(named, sort_keys=True) if named else self.image_field

    def has_key_fields(self) -> bool:
        """Whether columns name the images, whatever file holds their rows."""
        return any(part.key_field for part in (self, *self.parts.values()))

    def label_kinds(self) -> frozenset[SourceLabelKind]:
        """Label kinds of all parts; a dataset has one."""
        parts = self.parts.values() or [self]
        return frozenset("multi_label" if part.labels_are_of_boxes else part.label_kind for part in parts)

    def extra_entries(self) -> tuple[str, ...]:
        """The entries of `extra_columns`, those of all parts included."""
        return (*self.extra_columns, *(entry for part in self.parts.values() for entry in part.extra_columns))

    @field_validator("extra_columns")
    @classmethod
    def _extra_columns_have_names(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        types = dict(map(parse_extra, entries))
        unmoved = next((name for name, kind in types.items() if kind != "string" and names_coordinates(name)), None)
        if unmoved is not None:
            raise ValueError(
                f"no {unmoved!r}, whose numbers would stay places in the source while its pixels are cropped and "
                f"resized: name it as source.boxes.field, which moves boxes with the pixels; "
                f'"{unmoved}:string" keeps a text'
            )
        names = [parse_extra(entry)[0] for entry in entries]
        ours = [name for name in names if name in (*OWN_COLUMNS, *OWN_FEATURES, *OWN_NAMES)]
        if ours or len(set(names)) < len(names):
            clash = f"; every dataset, its metadata or its batches have their own {ours[0]!r}" if ours else ""
            raise ValueError(f"names without duplicates{clash}")
        return entries


class SplitFractions(Section):
    """Shares of the splits; a hash of each image's content decides its split. They must add up to 1."""

    train: float = Field(default=0.8, ge=0, le=1)
    validation: float = Field(default=0.1, ge=0, le=1)
    test: float = Field(default=0.1, ge=0, le=1)


class EtlConfig(DecodeLimits, NormalizeOptions):
    """How images become shards."""

    image_size: int = Field(default=0, ge=0, le=8192)
    """Height and width in pixels of every stored image; 0: as in the latest version, or 64, less for small sources."""
    kernel: Literal["auto", "wheels", "native"] = "auto"
    """Code that shrinks JPEGs: `native` or `wheels` (docs/images.md). `auto`: `native` if the driver has it; then all
    executors need it."""
    engine: Annotated[str, OneOf("etl.engines:ENGINES"), REBUILDS_NOTHING] = "auto"
    """The engine that runs the work units."""
    num_workers: Annotated[int, REBUILDS_NOTHING] = Field(default=0, ge=0)
    """Work units that the engine `local` decodes at once; 0: one per core."""
    formats: tuple[Annotated[str, OneOf("shardmill.formats:SHARD_FORMATS")], ...] = ("parquet",)
    """One or several shard formats to write."""
    split_fractions: Annotated[SplitFractions, EQUAL_IN_APPENDS] = SplitFractions()
    """Shares of the splits, for images whose split the source does not name."""
    stratified_splits: Annotated[bool, REBUILDS_NOTHING] = False
    """Give every class the shares of `split_fractions`, to within two images, instead of splitting by content hash."""
    label_map: Annotated[tuple[str, ...] | str, REBUILDS_NOTHING] = ()
    """Class names in the order of their numbers: a list, or a file (docs/etl.md); empty: the classes found, sorted."""
    unknown_class: Annotated[Literal["reject", "error"], REBUILDS_NOTHING] = "reject"
    """If the class of an image is not in `label_map`: reject the image, or end with exit 7."""
    corrections: Annotated[str, REBUILDS_NOTHING] = ""
    """A table of labels in place of those of the source, with columns `source` and `label` (docs/mislabels.md)."""
    max_reject_fraction: Annotated[float, REBUILDS_NOTHING] = Field(default=0.05, ge=0, le=1)
    """If more than this share of the images is rejected, the run ends with exit 7 and publishes nothing.

    Files without an image suffix count neither as rejected nor as images (docs/rejects.md).
    """
    max_unreadable_fraction: Annotated[float, REBUILDS_NOTHING] = Field(default=0.0, ge=0, le=1)
    """If access to more than this share of the images is denied (`unreadable`), the run ends with exit 4."""
    max_changed_fraction: Annotated[float, REBUILDS_NOTHING] = Field(default=0.01, ge=0, le=1)
    """If more than this share of the images vanish or change (`missing`, `source_changed`), the run ends with exit
    4."""
    max_vanished_fraction: Annotated[float, REBUILDS_NOTHING] = Field(default=0.5, ge=0, le=1)
    """If the source lacks more than this share of the latest version's images, the run ends with exit 4."""
    max_redecoded_fraction: Annotated[float, REBUILDS_NOTHING] = Field(default=1.0, ge=0, le=1)
    """If more than this share of the latest version's images would be decoded again although they are unchanged, as
    with another setting or another version of a decoder, the run ends with exit 7 before any work."""
    max_drift: Annotated[float, REBUILDS_NOTHING] = Field(default=1.0, ge=0, le=1)
    """If the new version differs by more than this from `drift_baseline`, the run ends with exit 7; 1: no limit
    (docs/drift.md)."""
    drift_baseline: Annotated[int, REBUILDS_NOTHING] = Field(default=0, ge=0)
    """Version with which the new one is compared; 0: the latest."""
    write_mode: Annotated[Literal["overwrite", "append"], REBUILDS_NOTHING] = "overwrite"
    """Whether the next version contains only the source's images, or also those of the latest version."""
    detect_changes: Annotated[Literal["stat", "content"], REBUILDS_NOTHING] = "stat"
    """`stat`: an input has changed if its size, time or etag has. `content`: such an input is read and its bytes
    compared."""
    duplicates: Annotated[Literal["report", "drop", "error"], EQUAL_IN_APPENDS] = "report"
    """Inputs with equal bytes: count them, keep only the one with the smallest key, or end with exit 7."""
    seed: int = 0
    """Seed of the assignment of samples to work units."""
    shard_max_bytes: int = Field(default=128_000_000, ge=1)
    """Maximum size of a shard."""
    chunk_bytes: int = Field(default=4_000_000, ge=1)
    """Size of the stored images at which a chunk, the unit of reading, is closed."""
    unit_min_images: int = Field(default=256, ge=1)
    """Minimum number of images in a work unit (or 64 MB of them), so that small datasets do not get tiny shards."""
    scratch_dir: Annotated[str, REBUILDS_NOTHING] = ""
    """Local folder for temporary files of group-bys and of large units of archives; empty: the system's temporary
    folder."""

    @field_validator("formats")
    @classmethod
    def _formats_once(cls, formats: tuple[str, ...]) -> tuple[str, ...]:
        if not formats or len(set(formats)) != len(formats):
            raise ValueError("a non-empty list of different formats")
        return formats

    @model_validator(mode="after")
    def _strata_are_of_one_source(self) -> EtlConfig:
        if self.stratified_splits and self.write_mode == "append":
            raise ValueError(
                "stratified_splits or write_mode = 'append', not both: stratified shares are computed for one listing"
            )
        return self

    @field_validator("split_fractions")
    @classmethod
    def _fractions_add_up(cls, fractions: SplitFractions) -> SplitFractions:
        total = fractions.train + fractions.validation + fractions.test
        if abs(total - 1) > 1e-6:
            raise ValueError(f"fractions that add up to 1; these add up to {total:g}")
        return fractions

    @property
    def described_size(self) -> str:
        """Before a listing is there to choose by."""
        return (
            f"{self.image_size} pixels" if self.image_size else f"{DEFAULT_IMAGE_SIZE} pixels, less for small sources"
        )

    def decode_limits(self) -> DecodeLimits:
        """The part that bounds what decoding one image may cost."""
        return DecodeLimits(**{name: getattr(self, name) for name in DecodeLimits.model_fields})

    def normalize_options(self) -> NormalizeOptions:
        """The part that decides pixels, and so is written into the dataset's manifest.

        Raises UsageError if the kernel that it names is not installed here.
        """
        deciding = {name: getattr(self, name) for name in NormalizeOptions.model_fields}
        size = self.image_size or DEFAULT_IMAGE_SIZE
        return NormalizeOptions(**{**deciding, "image_size": size, "kernel": resolve_kernel(self.kernel)})


def etl_settings_of(kind: SettingKind) -> tuple[str, ...]:
    """The settings of section `etl` that are declared so."""
    return tuple(name for name, field in EtlConfig.model_fields.items() if kind in field.metadata)


class EtlTree(ConfigTree):
    """The sections that `etl/job.py` takes from the config file."""

    other_sections = ("models", "train", "gate")

    source: SourceConfig = SourceConfig()
    dataset: DatasetConfig = DatasetConfig()
    etl: EtlConfig = EtlConfig()
    spark: SparkConfig = SparkConfig()
