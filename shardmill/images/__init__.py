"""From the bytes of one source image to normalized pixels and back: everything here is pure and needs no Spark."""
