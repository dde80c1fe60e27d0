"""What follows a promotion: the model card, and the registry. Neither can undo it; each promotion does both again."""

from __future__ import annotations

from dataclasses import replace

from shardmill.checksummed import verified_body, with_checksum
from shardmill.errors import IntegrityError
from shardmill.jobs.observer import WARNING, Observer
from shardmill.storage import Store, join_uri
from shardmill.stores import open_store
from train.contracts.values import from_json
from train.published.card import card_of, refresh_model_card
from train.published.current import CURRENT
from train.published.decision import Promotion
from train.published.mlflow_registry import register_current
from train.settings.gate import GateConfig, RegistryConfig

REGISTRY = f"{CURRENT}/registry.json"
"""The registry that follows these models, for commands whose config names none: a rollback, an export by its number."""


def announce(promotion: Promotion, gate: GateConfig, observer: Observer) -> Promotion:
    """Tell what is current now, also if this run has changed nothing: an earlier one may not have come to this.

    A store or a server that fails is a warning.
    """
    if promotion.current is None:
        return promotion
    store = open_store(promotion.models_uri)
    for problem in refresh_model_card(store):
        observer.event("promote.warning", {WARNING: problem})
    try:
        registry = _followed(store, gate.registry)
    except (IntegrityError, ValueError) as error:
        problem = f"it is unknown which registry follows {promotion.models_uri}: {error}"
        observer.event("promote.warning", {WARNING: f"{problem}; promote with gate.registry.name to record it again"})
        return replace(promotion, registered="")
    if not registry.name:
        return promotion
    try:
        _record(store, registry)
        registered = register_current(promotion.models_uri, registry, lambda export: card_of(store, export))
    except Exception as error:  # whatever the client raises: the export is current
        named = f"{promotion.models_uri}@{promotion.current}"
        problem = f"export {promotion.current} was not registered as models:/{registry.name}: {error}"
        again = f"it is current, and `shardmill promote {named}` tries again to register it"
        observer.event("promote.warning", {WARNING: f"{problem}; {again}"})
        return replace(promotion, registered="")
    return replace(promotion, registered=registered)


def _followed(store: Store, given: RegistryConfig) -> RegistryConfig:
    """The config's registry; if it names none, that of an earlier promotion of these models.

    Raises IntegrityError or ValueError if its record cannot be read.
    """
    if given.name:
        return given
    try:
        return from_json(RegistryConfig, verified_body(store.read(REGISTRY), join_uri(store.uri, REGISTRY)))
    except FileNotFoundError:
        return given


def _record(store: Store, registry: RegistryConfig) -> None:
    data = with_checksum(registry.model_dump_json().encode())
    try:
        is_recorded = store.read(REGISTRY) == data
    except FileNotFoundError:
        is_recorded = False
    if not is_recorded:
        store.put(REGISTRY, data)
