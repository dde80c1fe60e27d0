"""Strategies whose ranks hold parts of one model: weights and optimizer state are sharded over the axes of a mesh."""
