"""Layers for users' own models: `from train.layers.keras import SampleDropout`, or from `train.layers.torch`.

They import their framework, and nothing of ours that trains.
"""
