"""The version of shardmill that all it writes for people names; `pyproject.toml` has the same."""

__version__ = "0.2.0"
