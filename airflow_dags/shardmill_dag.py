"""Airflow DAGs for each TOML file of SHARDMILL_CONFIG_DIR; to be copied into a DAG folder (docs/airflow.md).

A file of your own that calls `dags_of` has one config, and what this one takes from the environment for all of them.
"""

from airflow_dags.factory import dags_of_folder
from airflow_dags.settings import dag_settings

# Airflow finds DAGs among a module's globals.
if (settings := dag_settings()).config_dir:
    globals().update(dags_of_folder(settings))
