"""The section `gate` of the config: settings about publishing, not about training."""

from __future__ import annotations

from pydantic import Field

from shardmill.section import Section
from train.settings.written_forms import ModelAlias, ModelName, ServerUri


class RegistryConfig(Section):
    """The model registry in which a promotion registers the current model."""

    name: ModelName = ""
    """Name of the registered model in MLflow's registry; empty: nothing is registered."""
    alias: ModelAlias = "champion"
    """Alias that names the current model: `models:/NAME@ALIAS`."""
    uri: ServerUri = ""
    """The MLflow server, for example `http://HOST:5000`, or a database, `sqlite:////FOLDER/mlflow.db`; empty:
    MLFLOW_TRACKING_URI."""


class GateConfig(Section):
    """Conditions under which a new model becomes the current one."""

    min_accuracy: float = Field(default=0.0, ge=0, le=1)
    """Minimum top-1 accuracy on the evaluation split, for labels of one class per image."""
    metric_limit: float = Field(default=0.0, ge=0)
    """Limit for the metric of the kind of labels: minimum accuracy, minimum mean average precision (several classes per
    image), or maximum mean absolute error (numbers). 0: no limit."""
    max_regression: float = Field(default=0.01, ge=0, le=1)
    """How much worse that metric may be than the current model's on the same split; for an error, relative to it."""
    registry: RegistryConfig = RegistryConfig()
    """Registration of the current model (docs/promotion.md)."""
