"""`python -m tests.programs.read_with_cache URI CACHE LIMIT EPOCHS`: the sample ids of each batch, a digest of all
pixels, and what the cache gave, as JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict

from shardmill import open_dataset
from shardmill.stores import STORES
from tests.far_store import ENTRY, SCHEME

uri, cache, limit, epochs = sys.argv[1:]
STORES.entries[SCHEME] = ENTRY
loader = open_dataset(uri).batches(
    "train", global_batch_size=16, seed=3, cache_dir=cache, cache_limit_bytes=int(limit) or None
)
ids, pixels = [], hashlib.sha256()
for _ in range(int(epochs)):
    for batch in loader:
        ids.append(batch.sample_ids.tolist())
        pixels.update(batch.images.tobytes())
print(json.dumps({"ids": ids, "pixels": pixels.hexdigest(), "cache": asdict(loader.report().cache)}))
