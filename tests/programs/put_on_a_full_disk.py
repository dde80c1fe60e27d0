"""Puts 5,000 bytes into the store argv[1] under a file size limit: write() then fails as on a full disk."""

import resource
import sys

from shardmill.errors import StorageError
from shardmill.stores import open_store

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    open_store(sys.argv[1]).put("shard", b"x" * 5000)
except StorageError as error:
    print(error)
