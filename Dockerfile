# Images with `shardmill` on PATH: `etl`, `airflow`, and `train` with every framework (docs/platforms/kubernetes.md). Not built here.
#
#   make bundle && uv build --wheel
#   docker build --target train -t REGISTRY/shardmill .
# The release of pyspark in uv.lock. A digest in its place pins it: --build-arg SPARK=apache/spark@sha256:...
ARG SPARK=apache/spark:4.0.5-scala2.13-java17-python3-ubuntu
FROM ghcr.io/astral-sh/uv:0.13.0@sha256:cdc6093146eb3ff6a40107b38f008b789e050e77ad87865e381d9917da55a168 AS uv

# Driver and executors of the ETL.
FROM ${SPARK} AS etl
USER root
COPY --from=uv /uv /usr/local/bin/uv
# The locked packages, with a Python of the locked version.
COPY pyproject.toml uv.lock .python-version README.md /opt/shardmill/
WORKDIR /opt/shardmill
ENV UV_PYTHON_INSTALL_DIR=/opt/python
ARG EXTRAS="--extra spark --extra s3 --extra gcs --extra azure --extra hdfs --extra otel --extra prometheus"
RUN uv sync --frozen --no-dev --no-install-project $EXTRAS
# The code, which changes more often: the command, and what `spark-submit` takes.
COPY dist/shardmill-*.whl /opt/shardmill/dist/
RUN uv pip install --no-deps dist/*.whl
COPY dist/shardmill.zip /opt/shardmill/
COPY etl/job.py /opt/shardmill/etl/job.py
COPY train/job.py /opt/shardmill/train/job.py
ENV PATH=/opt/shardmill/.venv/bin:$PATH
ENV PYSPARK_PYTHON=/opt/shardmill/.venv/bin/python PYSPARK_DRIVER_PYTHON=/opt/shardmill/.venv/bin/python
USER 185

# A worker of Airflow, with its own `spark-submit`.
FROM etl AS airflow
USER root
RUN uv sync --frozen --no-dev --no-install-project --inexact $EXTRAS --extra airflow
USER 185

# Ranks. The last stage, so the one that is built if no target is named.
FROM etl AS train
USER root
# What Horovod is built with, from source.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
RUN uv sync --frozen --no-dev --no-install-project --inexact $EXTRAS --extra tensorflow --extra horovod --extra torch
USER 185
