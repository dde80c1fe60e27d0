"""Passes the failpoints `list` and `decode` five times; prints a line before each time."""

from shardmill.failpoints import failpoint

for _ in range(5):
    print(flush=True)
    failpoint("list")
    failpoint("decode")
