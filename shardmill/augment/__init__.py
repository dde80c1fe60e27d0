"""Random changes to training images: their windows before a batch is decoded, then its pixels, then mixed rows."""
