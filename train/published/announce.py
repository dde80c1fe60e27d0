"""What follows a promotion: the model card, and the registry. Neither can undo it; each promotion does both again."""

from __future__ import annotations

from dataclasses import replace

from shardmill.jobs.observer import WARNING, Observer
from shardmill.stores import open_store
from train.published.card import card_of, refresh_model_card
from train.published.decision import Promotion
from train.published.mlflow_registry import register_current
from train.settings.gate import GateConfig


def announce(promotion: Promotion, gate: GateConfig, observer: Observer) -> Promotion:
    """Tell what is current now, also if this run has changed nothing: an earlier one may not have come to this.

    A store or a server that fails is a warning.
    """
    if promotion.current is None:
        return promotion
    store = open_store(promotion.models_uri)
    for problem in refresh_model_card(store):
        observer.event("promote.warning", {WARNING: problem})
    if not gate.registry.name:
        return promotion
    try:
        registered = register_current(promotion.models_uri, gate.registry, lambda export: card_of(store, export))
    except Exception as error:  # whatever the client raises: the export is current
        problem = f"export {promotion.current} was not registered as models:/{gate.registry.name}: {error}"
        observer.event("promote.warning", {WARNING: f"{problem}; it is current, and the next `promote` tries again"})
        return replace(promotion, registered="")
    return replace(promotion, registered=registered)
