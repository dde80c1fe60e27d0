"""What pixels depend on, as one string: the rules of this package and the versions of the libraries under them.

It is part of the normalization fingerprint, and executors refuse to work beside a driver with another one. It has a
module of its own so that a driver can name the decoders without loading them.
"""

from __future__ import annotations

import hashlib
import json

import cv2
import PIL
import simplejpeg
from PIL import features

from shardmill.options import NormalizeOptions

# Increase it with every change to this package that can change a pixel or a rejection.
RULES_VERSION = 3
DECODER_ID = (
    f"rules-{RULES_VERSION}+simplejpeg-{simplejpeg.__version__}+opencv-{cv2.__version__}"
    f"+pillow-{PIL.__version__}+littlecms-{features.version('littlecms2')}+shrink-area+enlarge-linear-exact+ipp-off"
)


def normalization_fingerprint(options: NormalizeOptions) -> str:
    """SHA-256 over the options and `DECODER_ID`: equal fingerprints promise equal stored bytes for equal sources."""
    content = {"options": options.model_dump(mode="json"), "decoder_id": DECODER_ID}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
