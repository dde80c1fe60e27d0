"""The folder that holds runs and what they make, if a person names none."""

DEFAULT_WORKDIR = "./shardmill-work"
