"""Loaders for anyone's training loop: exact, equal-step epochs of a dataset, resumable at any step and world size."""
