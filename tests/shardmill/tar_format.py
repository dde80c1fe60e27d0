"""A shard format that tests add: tar files as WebDataset reads them, a chunk is a run of members."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from typing import IO

import numpy as np

from shardmill.errors import IntegrityError
from shardmill.formats.rows import ByteRange, ChunkRows, RowSchema, ShardFormat, StoredRow, WrittenShard


def write_shard(file: IO[bytes], chunks: Sequence[Sequence[StoredRow]], schema: RowSchema) -> WrittenShard:
    """An image and its facts for each row; the two empty blocks that end an archive are the footer."""
    places: list[ByteRange] = []
    for chunk in chunks:
        start = file.tell()
        for row in chunk:
            facts = {"source": row.source.key, "sample_id": row.source.sample_id, "label": row.label_id}
            for name, data in ((schema.encoding, row.sample.image), ("json", json.dumps(facts).encode())):
                info = tarfile.TarInfo(f"{row.source.sample_id & (1 << 64) - 1:016x}.{name}")
                info.size = len(data)
                file.write(info.tobuf(tarfile.USTAR_FORMAT))
                file.write(data + b"\0" * (-len(data) % 512))
        places.append(ByteRange(start, file.tell() - start))
    end = file.tell()
    file.write(b"\0" * 1024)
    return WrittenShard(tuple(places), ByteRange(end, 1024))


def open_footer(footer: ByteRange, data: bytes) -> object:
    return None


def read_chunk(footer: object, chunk_in_shard: int, place: ByteRange, data: bytes, schema: RowSchema) -> ChunkRows:
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            files = [tar.extractfile(member) for member in tar]
            parts = [file.read() for file in files if file is not None]
    except tarfile.TarError as error:
        raise IntegrityError(f"tar chunk {chunk_in_shard} does not parse: {error}") from None
    facts = [json.loads(part) for part in parts[1::2]]
    return ChunkRows(
        images=parts[::2],
        labels_N=np.array([-1 if each["label"] is None else each["label"] for each in facts], dtype=np.int64),
        sample_ids_N=np.array([each["sample_id"] for each in facts], dtype=np.int64),
        sources=[each["source"] for each in facts],
    )


TAR = ShardFormat("tar", write_shard, open_footer, read_chunk)
