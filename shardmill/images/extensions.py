"""The image format that the extension of a file's name promises; a listing takes such files for images."""

from __future__ import annotations

FORMAT_BY_EXTENSION = {
    **dict.fromkeys(("jpg", "jpeg", "jpe", "jfif"), "jpeg"),
    **dict.fromkeys(("png", "apng"), "png"),
    **dict.fromkeys(("bmp", "dib"), "bmp"),
    **dict.fromkeys(("tif", "tiff"), "tiff"),
    "gif": "gif",
    "webp": "webp",
    "avif": "avif",
    **dict.fromkeys(("heic", "heif", "hif"), "heic"),
    "jxl": "jpeg_xl",
    "mpo": "jpeg",
}
"""In lower case, without a dot -> a name of `sniff_format`."""


def has_other_extension(key: str, format_name: str) -> bool:
    """True if the name ends like one image format and the content is another."""
    extension = key.rpartition("/")[2].rpartition(".")[2].lower()
    return FORMAT_BY_EXTENSION.get(extension, format_name) != format_name
