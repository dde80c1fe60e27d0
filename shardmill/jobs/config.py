"""Reads a TOML file and `--set` overrides into a frozen, typed tree; the error for a wrong key suggests the nearest.

Settings of Spark become a file for the JVM. Light, because Airflow imports it whenever it parses a DAG.
"""

from __future__ import annotations

import copy
import difflib
import ipaddress
import json
import os
import re
import socket
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError, field_validator

from shardmill.errors import StorageError, UsageError
from shardmill.section import Section, section_of
from shardmill.words import name_some

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


CONNECT = "sc://"
"""How `spark.master` begins if it is a server of Spark Connect."""
CONNECT_PORT = 15002
"""Where it listens if `spark.master` names no port."""
_CALL_SECONDS = 5.0


def is_under_spark_submit() -> bool:
    """Whether `spark-submit` started this process, so that its master and settings hold."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def is_local_master(master: str) -> bool:
    """Whether Spark's driver runs the tasks, without executors."""
    return master.partition("[")[0] == "local"


def is_on_this_machine(master: str) -> bool:
    """Whether Spark runs here alone: its driver does all, or starts executors beside it (`local-cluster`)."""
    return master.startswith("local")


def may_have_other_hosts(master: str) -> bool:
    """Whether executors may be on other hosts; a standalone master that only this one reaches has none."""
    return not (is_on_this_machine(master) or is_loopback(master.removeprefix("spark://").rpartition(":")[0]))


def check_master(master: str) -> None:
    """Raises UsageError for YARN without the settings that say where it is, which Spark refuses as its JVM starts."""
    if master != "yarn" or is_under_spark_submit():
        return
    # Spark's start script sets what this one says.
    conf = os.environ.get("SPARK_CONF_DIR") or os.path.join(os.environ.get("SPARK_HOME", os.devnull), "conf")
    is_set = os.environ.get("HADOOP_CONF_DIR") or os.environ.get("YARN_CONF_DIR")
    if is_set or os.path.isfile(os.path.join(conf, "spark-env.sh")):
        return
    raise UsageError(
        "spark.master = 'yarn', but neither HADOOP_CONF_DIR nor YARN_CONF_DIR is set",
        "expected the folder of core-site.xml and yarn-site.xml in one of them",
        "export HADOOP_CONF_DIR=/etc/hadoop/conf",
    )


def call_master(master: str) -> str:
    """The first address of a standalone cluster's master, or of a server of Spark Connect, that takes connections.

    Raises UsageError for no such address, StorageError if none of them does: Spark would try for minutes, and then tell
    what a task has come to without a master.
    """
    scheme, _, rest = master.partition("://")
    is_server = f"{scheme}://" == CONNECT
    # Without what follows the address, which may hold a token.
    addresses, refusals = rest.partition("/")[0], list[str]()
    for address in addresses.split(","):
        has_port = not is_server or re.search(r":\w*\Z", address)
        place = re.fullmatch(r"\[?(.+?)\]?:(\d{1,5})", address if has_port else f"{address}:{CONNECT_PORT}")
        if place is None or int(place[2]) > 65535:
            given, expected = f"spark.master = '{scheme}://{addresses}'", f"expected {scheme}://HOST:PORT"
            raise UsageError(given, expected, "correct the address")
        try:
            socket.create_connection((place[1], int(place[2])), _CALL_SECONDS).close()
        except OSError as error:
            refusals.append(error.strerror or str(error))
        else:
            return address
    name = "server of Spark Connect" if is_server else "Spark master"
    found = f"no {name} answers at {addresses}: {'; '.join(dict.fromkeys(refusals))}"
    raise StorageError(found, "", "start it, make it reachable from this host, or correct spark.master")


def flat_settings(table: dict[str, Any]) -> dict[str, str]:
    """TOML reads `spark.executor.memory = "2g"` as nested tables; Spark wants flat names, and every value as text."""
    return dict(_flat("", table))


def _flat(prefix: str, table: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", str(value).lower() if isinstance(value, bool) else str(value)


@contextmanager
def properties_file(settings: Mapping[str, str]) -> Iterator[str]:
    """The path of a file for `spark-submit --properties-file`: its owner alone can read it, and it is removed after."""
    descriptor, path = tempfile.mkstemp(prefix="shardmill-", suffix=".properties")
    try:
        # mkstemp makes it 0600, whatever the umask is.
        with open(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{_escaped(name)}={_escaped(value)}\n" for name, value in settings.items())
        yield path
    finally:
        os.unlink(path)


def _escaped(text: str) -> str:
    # java.util.Properties would otherwise read these as separators, comments, line ends or blanks to strip.
    ends = {"\n": "n", "\r": "r", "\f": "f"}
    return re.sub(r"[\\\s=:#!]", lambda found: "\\" + ends.get(found[0], found[0]), text)


class ConfigTree(Section):
    """The sections that one application takes from the config file; several applications share the file."""

    other_sections: ClassVar[tuple[str, ...]] = ()
    """Sections of the same file that other applications take."""

    def part(self, kind: type[Tree]) -> Tree:
        """The tree of one application, whose sections are all among those of this one."""
        return kind(**{name: getattr(self, name) for name in kind.model_fields})


Tree = TypeVar("Tree", bound=ConfigTree)

_KEYS_FIX = "`shardmill config show` prints every key"
# For people, by how pydantic's names of its errors begin (`int_parsing`, `int_from_float`).
_EXPECTED_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false"}

_TYPES_OF_VALUES = ("bool", "float", "constrained-float")
"""Types shown in place of a key, if a value may also be a word: `true` or `"auto"`."""


class DatasetConfig(Section):
    """Location of the committed dataset."""

    uri: str = ""
    """Root of the dataset: a local path, or a URI of a bucket (`s3://`, `gs://`, `az://`) or of HDFS."""


class ModelsConfig(Section):
    """Location of checkpoints, exports and the current model."""

    uri: str = ""
    """Root of the models: a local path, or a URI of a bucket (`s3://`, `gs://`, `az://`) or of HDFS."""


class SparkApplicationConfig(Section):
    """Settings of one Spark application."""

    conf: dict[str, str] = Field(default_factory=dict)
    """Any Spark settings, passed on unchanged; `spark.executor.memory = "2g"` needs no quotes around the key."""

    @field_validator("conf", mode="before")
    @classmethod
    def _flatten(cls, conf: Any) -> Any:
        return flat_settings(conf) if isinstance(conf, dict) else conf


class SparkConfig(Section):
    """Settings with which the two Spark applications start. Under `spark-submit`, its `--master` takes precedence."""

    master: str = "local[*]"
    """Spark master URL; `local[*]` uses all cores of this machine, `sc://HOST:PORT` a server of Spark Connect."""
    etl: SparkApplicationConfig = SparkApplicationConfig()
    """Settings of the ETL's application."""
    train: SparkApplicationConfig = SparkApplicationConfig()
    """Settings of the application that starts the training's ranks."""


def is_connect(spark: SparkConfig) -> bool:
    """Whether the section names a server of Spark Connect; under `spark-submit` its own master holds."""
    return spark.master.startswith(CONNECT) and not is_under_spark_submit()


def require_uri(name: str, uri: str) -> str:
    """`uri` itself, the value of the config key `name`. Raises UsageError if it is empty."""
    if not uri:
        raise UsageError(
            f"{name} is not set",
            "expected a local path, or a URI (s3://bucket/prefix, gs://, az://, hdfs://)",
            f"set {name}",
        )
    return uri


def load_tree(
    tree: type[Tree], file: str | Path | None, overrides: tuple[str, ...] = (), defaults: dict[str, Any] | None = None
) -> Tree:
    """Read `file` (TOML; None for no file), lay it over `defaults`, apply `section.key=value` overrides, validate.

    Sections of other applications are skipped; any other unknown key raises UsageError with the nearest known one.
    The error names the file.
    """
    values = _merged(copy.deepcopy(defaults or {}), _read_toml(Path(file)) if file is not None else {})
    for override in overrides:
        _apply_override(values, override, tree)
    mine = {name: value for name, value in values.items() if name not in tree.other_sections}
    try:
        return tree.model_validate(mine)
    except ValidationError as error:
        origin = f"{file}{' with --set' if overrides else ''}: " if file is not None else ""
        raise UsageError(f"{origin}{_explain(tree, error)}", fix=_KEYS_FIX) from None


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no config file {file}", "expected a TOML file", "`shardmill init` writes one") from None
    except IsADirectoryError:
        raise UsageError(f"{file} is a folder", "expected a TOML file", "give the path of the file in it") from None
    except OSError as error:
        raise UsageError(
            f"cannot read {file}: {error.strerror}",
            "expected a TOML file that this user can read",
            "check the path and its permissions",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{file} is not TOML: {error}", "expected lines like `epochs = 3`", "correct it; `shardmill init` shows how"
        ) from None


def _apply_override(values: dict[str, Any], override: str, tree: type[BaseModel]) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or len(keys) < 2:
        raise UsageError(f"--set {override!r}", "expected SECTION.NAME=VALUE, such as --set train.epochs=3", _KEYS_FIX)
    section = values
    for key in keys[:-1]:
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise UsageError(f"--set {override!r}", f"but {key!r} is a key, not a section", _KEYS_FIX)
    value = _toml_value(text)
    owner = _model_at(tree, keys[:-1])
    field = owner.model_fields.get(keys[-1]) if owner is not None else None
    if isinstance(value, str) and field is not None and get_origin(field.annotation) is tuple:
        # Nobody types a list in a shell: one word is a list of one, and commas divide more.
        value = [part.strip() for part in value.split(",")]
    section[keys[-1]] = value


def _toml_value(text: str) -> Any:
    # A bare word is a string: nobody types quotes inside quotes in a shell.
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _merged(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _explain(tree: type[ConfigTree], error: ValidationError) -> str:
    """All complaints in one line: each with the key, what was given, what was expected."""
    complaints: list[str] = []
    for each in _of_the_type_that_was_meant(error.errors(include_url=False)):
        given, expected = _complaint(tree, each)
        # A key that takes several types fails for each of them.
        if complaints and complaints[-1].startswith(f"{given}; expected ") and expected.startswith("expected "):
            complaints[-1] += f" or {expected.removeprefix('expected ')}"
        else:
            complaints.append(f"{given}; {expected}" if given else expected)
    if len(complaints) == 1:
        return complaints[0]
    numbered = "; ".join(f"({number}) {complaint}" for number, complaint in enumerate(complaints, start=1))
    return f"{len(complaints)} errors in the config: {numbered}"


def _of_the_type_that_was_meant(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Without what the other types of a key say of a value that one of them has looked into, and without the defaults
    that would follow from a key that is wrong."""
    errors = [each for each in errors if each["type"] != "default_factory_not_called"]
    keys = [_keys(each) for each in errors]
    return [
        each for each, mine in zip(errors, keys, strict=True)
        if not any(len(other) > len(mine) and other[: len(mine)] == mine for other in keys)
    ]  # fmt: skip


def _keys(error: ErrorDetails) -> list[str]:
    """Pydantic names each type that a key may have like a key: `literal['balanced']`, `dict[str,float]`, `bool`."""
    parts = [str(part) for part in error["loc"]]
    # Behind a `dict[...]` such a word is a name in the table.
    if len(parts) > 1 and parts[-1] in _TYPES_OF_VALUES and "[" not in parts[-2]:
        parts.pop()
    return [part for part in parts if "[" not in part]


def _complaint(tree: type[ConfigTree], error: ErrorDetails) -> tuple[str, str]:
    """Return the given and the expected value."""
    keys = _keys(error)
    name = ".".join(keys)
    if error["type"] == "extra_forbidden":
        owner = _model_at(tree, keys[:-1])
        fields = owner.model_fields if owner is not None else {}
        # Sections last: the first keys are those that people change most.
        known = sorted(fields, key=lambda key: section_of(fields[key]) is not None)
        known += tree.other_sections if len(keys) == 1 else ()
        near = (
            difflib.get_close_matches(keys[-1], known, n=1, cutoff=0.85)
            # `batch` means `global_batch_size` sooner than `watch`.
            or [key for key in known if keys[-1] in key.split("_")]
            or difflib.get_close_matches(keys[-1], known, n=1, cutoff=0.5)
        )
        hint = f"did you mean {'.'.join([*keys[:-1], near[0]])}?" if near else f"known here: {name_some(known)}"
        return f"unknown config key {name}", hint
    if isinstance(error["input"], dict) and error["type"] == "value_error":
        return "", f"config section {name}: expected {error['msg'].removeprefix('Value error, ')}"
    given = json.dumps(error["input"], default=str)
    if error["type"] == "model_type":
        return f"config key {name} = {given}", f"expected a section, [{name}], with its own keys"
    if error["type"] == "dict_type":
        return f"config key {name} = {given}", "expected a table, NAME = VALUE"
    pydantics = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    expected = _EXPECTED_TYPES.get(error["type"].partition("_")[0], pydantics)
    return f"config key {name or 'config'} = {given}", f"expected {expected}"


def _model_at(tree: type[BaseModel], keys: list[str]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = tree
    waiting = iter(keys)
    for key in waiting:
        if model is None or key not in model.model_fields:
            return None
        field = model.model_fields[key]
        if get_origin(field.annotation) is dict:
            next(waiting, None)  # the name that the user gave the section
        inner = (kind for kind in get_args(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel))
        model = section_of(field) or next(inner, None)
    return model


def addresses_of(host: str) -> list[str]:
    """The addresses that a name has on this host. Raises OSError if it has none."""
    return sorted({str(each[4][0]) for each in socket.getaddrinfo(host, None)})


def is_loopback(host: str) -> bool:
    """Whether all that a name or an address leads to is this host alone; False for a name that is unknown here."""
    try:
        return all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in addresses_of(host))
    except (OSError, UnicodeError):
        return False
