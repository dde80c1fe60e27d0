"""LZW as GIF and TIFF use it, strict and with a bounded output: OpenCV reads neither format strictly."""

from __future__ import annotations

from dataclasses import dataclass

from shardmill.images.pixels import Refused
from shardmill.values import RejectReason

MAX_ENTRIES = 4096


@dataclass(frozen=True, slots=True)
class LzwFlavor:
    """What differs between the two formats."""

    root_bits: int
    first_bit_is_highest: bool
    widens_early_by: int
    """TIFF's first writer widened its codes one entry too early, and so does everybody since."""


TIFF_LZW = LzwFlavor(root_bits=8, first_bit_is_highest=True, widens_early_by=1)


def gif_lzw(root_bits: int) -> LzwFlavor:
    return LzwFlavor(root_bits=root_bits, first_bit_is_highest=False, widens_early_by=0)


def decode_lzw(data: bytes, flavor: LzwFlavor, num_bytes: int) -> bytes:
    """Exactly `num_bytes`; refuses data that ends before them (`truncated`) or makes no sense (`corrupt_scan`)."""
    clear_code = 1 << flavor.root_bits
    end_code = clear_code + 1
    roots = [bytes((value,)) for value in range(clear_code)] + [b"", b""]
    table, code_bits, previous = roots.copy(), flavor.root_bits + 1, b""
    output: list[bytes] = []
    num_decoded = num_clears = 0
    buffer = num_buffered_bits = 0
    for byte in data:
        if flavor.first_bit_is_highest:
            buffer = buffer << 8 | byte
        else:
            buffer |= byte << num_buffered_bits
        num_buffered_bits += 8
        # A code of the smallest GIFs has 3 bits, so one byte may complete two.
        while num_buffered_bits >= code_bits:
            num_buffered_bits -= code_bits
            if flavor.first_bit_is_highest:
                code = buffer >> num_buffered_bits
                buffer &= (1 << num_buffered_bits) - 1
            else:
                code = buffer & ((1 << code_bits) - 1)
                buffer >>= code_bits

            if code == clear_code:
                num_clears += 1
                if num_clears > num_decoded + 8:  # an honest stream clears after it has filled its table
                    raise Refused(RejectReason.CORRUPT_SCAN, "LZW data that clears its table without end")
                table, code_bits, previous = roots.copy(), flavor.root_bits + 1, b""
                continue
            if code == end_code:
                raise Refused(RejectReason.CORRUPT_SCAN, f"LZW data ends after {num_decoded} of {num_bytes} bytes")
            entry = _expand(table, code, previous)
            if previous and len(table) < MAX_ENTRIES:
                table.append(previous + entry[:1])
                if len(table) + flavor.widens_early_by == 1 << code_bits and code_bits < 12:
                    code_bits += 1
            output.append(entry)
            previous = entry
            num_decoded += len(entry)
            if num_decoded >= num_bytes:
                return b"".join(output)[:num_bytes]
    raise Refused(RejectReason.TRUNCATED, f"LZW data is cut after {num_decoded} of {num_bytes} bytes")


def _expand(table: list[bytes], code: int, previous: bytes) -> bytes:
    if code < len(table):
        return table[code]
    if code == len(table) and previous:  # the one code that a writer may use before we know it
        return previous + previous[:1]
    raise Refused(RejectReason.CORRUPT_SCAN, f"LZW code {code} before it was defined")
