"""Has an image decoded in a sandbox by a decoder (argv[1]) that sleeps, until its input ends."""

import sys

from shardmill.images.sandbox import DecodeSandbox
from shardmill.options import NormalizeOptions
from shardmill.values import SourceImage

sandbox = DecodeSandbox(entry=sys.argv[1])
sandbox.start(SourceImage("sleep", 1), b"x", NormalizeOptions())
print("started", flush=True)
sys.stdin.read()
