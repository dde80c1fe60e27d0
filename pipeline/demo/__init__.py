"""The data of `shardmill demo` and `make demo`: images of its own, and the folder in which they work."""

WORKDIR = "demo-work"
