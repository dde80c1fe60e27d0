"""Texts: what is redacted, what is printable, how cells read; ids, registries, layout, config."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from etl.config import EtlTree
from pipeline.tree import PipelineTree
from shardmill import ids, storage_errors
from shardmill.dataset.index import Layout
from shardmill.errors import StorageError, UsageError
from shardmill.ids import canonical_digest
from shardmill.jobs.config import load_tree
from shardmill.jobs.process import report_error
from shardmill.jobs.redact import HIDDEN, is_secret_name, redacted, redacted_text
from shardmill.registry import Entry, OneOf, Registry
from shardmill.stores import object_stores, s3_requests
from shardmill.values import ChunkInfo, ShardInfo
from shardmill.words import FORMULA_STARTS, from_cell, printable, to_cell, without_surrogates
from tests.canaries import PEM, PLAIN_SETTINGS, SECRET_SETTINGS
from train.tree import TrainTree

SECRET_NAMES = (
    "password", "db.passwd", "DB_PASSWD", "MYSQL_PWD", "secret", "clientSecret", "aws_secret_access_key",
    "AWS_ACCESS_KEY_ID", "fs.azure.account.key", "fs.azure.account.key.acme.blob.core.windows.net", "api_key",
    "MY_API_KEY", "apiKey", "apikey", "x.auth", "BASIC_AUTH", "sas", "fs.azure.sas.x", "SENTRY_DSN", "dsn", "token",
    "SESSION_TOKEN", "sessionToken", "oauth.credential", "GOOGLE_CREDENTIALS", "privateKey", "private.key",
    "id_private", "keyStorePassword", "encryption.key", "accountKey", "passphrase", "DB_PASS", "SMTP_PASS",
    "authtoken", "mytoken", "GITHUB_PAT",
)  # fmt: skip
PLAIN_NAMES = (
    "keep", "key_sum", "key", "monkey", "turkey.count", "passage", "sasl", "author", "authority", "authenticate",
    "tokenizer", "keyboard", "keyStore", "sort_key_sum", "spark.authenticate", "dsnail", "learning_rate", "uri",
    "weights_sha256", "content_digest", "bypass", "compass", "path", "PATH", "extraClassPath", "passed",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name: str):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_names_that_only_look_alike(name: str):
    assert not is_secret_name(name)


@pytest.mark.parametrize("name", SECRET_SETTINGS)
def test_a_secret_setting_leaves_no_canary(name: str):
    value = SECRET_SETTINGS[name]
    assert "canary" not in json.dumps(redacted({"conf": {name: value}})).lower()
    # The same in running text, as errors quote it: as TOML, as JSON, on a command line.
    for text in (f"{name} = {json.dumps(value)}", json.dumps({"a": {name: value}}), f"--conf '{name}={value}'"):
        assert "canary" not in redacted_text(f"cannot start: {text}").lower(), text


def test_other_values_than_secrets_stay():
    record = {"conf": PLAIN_SETTINGS, "key_sum": "abc", "numbers": [1, 2.5, None, True], "num_tokens": 3}
    assert redacted(record) == record
    for text in (
        "s3://bucket/a:b/dataset@2 is not a committed dataset; expected one",
        "NoCredentialsError: Unable to locate credentials",
        "config key train.epochs = 0; expected greater than or equal to 1",
        "abfss://container@account.dfs.core.windows.net/x",
        "jdbc:postgresql://db:5432/images?ssl=true",
        "cannot access /data/passage=3/keys/monkey.jpg",
        "ssh://user@host/x and mail me@example.org",
        "http://minio:9000/bucket/dataset@2",
        "hdfs://name:8020/dataset@2",
        "/data/private: no such file",
        "token: true",
    ):
        assert redacted_text(text) == text


def test_the_text_around_a_secret_stays():
    assert (
        redacted_text(SECRET_SETTINGS["spark.app.jdbc"])
        == f"jdbc:postgresql://db/images?user=etl&password={HIDDEN}&ssl=true"
    )
    assert redacted_text(f"before\n{PEM}\nafter") == f"before\n{HIDDEN}\nafter"
    assert redacted_text("https://u:p@host/x") == f"https://{HIDDEN}@host/x"
    assert redacted_text(redacted_text("password=x y")) == f"password={HIDDEN} y"


@pytest.mark.parametrize(
    "text",
    [
        "password: hunter2-canary", "X-Auth-Token:canary", "mysql --password canary --user x",
        "postgres://u:p@canary@host/db", "postgres://u:pa/canary@host/db", "https://canary@host/x",
        "password=abc,canary;canary", '{"password": 12345, "api_key": {"canary": 1}}',
        '{"api_key": {"a": {"canary": [1]}}}', "cloned with ghp_canarycanarycanarycanary0123456789",
        "hf_canarycanarycanarycanary0123", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJjYW5hcnkifQ.canary",
    ],
)  # fmt: skip
def test_a_secret_in_text_is_hidden_however_it_is_written(text: str):
    hidden = redacted_text(text)
    assert "canary" not in hidden and "12345" not in hidden and HIDDEN in hidden
    assert redacted_text(hidden) == hidden


def test_numbers_and_nested_values_under_a_secret_name():
    record = {"password": 12345, "api_key": {"a": 1, "b": [2.5, "x"]}, "token": True, "num_tokens": 3}
    assert redacted(record) == {
        "password": HIDDEN, "api_key": {"a": HIDDEN, "b": [HIDDEN, HIDDEN]}, "token": True, "num_tokens": 3,
    }  # fmt: skip


def test_the_value_of_an_option_is_hidden_in_a_list_of_arguments():
    arguments = ["run", "--password", "canary", "--json", "--token=canary", "photos"]
    shown = ["run", "--password", HIDDEN, "--json", f"--token={HIDDEN}", "photos"]
    assert redacted(arguments) == shown and redacted({"command": tuple(arguments)}) == {"command": tuple(shown)}
    for text in (json.dumps(arguments), repr(arguments)):
        assert "canary" not in redacted_text(text) and "photos" in redacted_text(text)


@pytest.mark.parametrize("text", ["a={" * 3000, "a=" * 3000, "a={" * 3000 + "password=canary" + "}" * 3000, "'" * 3000])
def test_no_text_is_nested_too_deep(text: str):
    assert "canary" not in redacted_text(text)


def test_a_line_of_error_holds_none(capsys: pytest.CaptureFixture[str]):
    error = StorageError(
        f"cannot reach {SECRET_SETTINGS['spark.app.jdbc']}", "", f"see {SECRET_SETTINGS['spark.app.proxy']}"
    )
    error.add_note("password=canary-note")
    assert report_error(error, debug=True) == 4
    written = capsys.readouterr().err
    assert "canary" not in written and "ERROR 4: cannot reach jdbc:postgresql://db" in written


@pytest.mark.parametrize("name", ["cat", "größe 3", "猫", "👩‍🔬", "می‌خواهم", "a\\b", ""])
def test_real_names_are_shown_as_they_are(name: str):
    assert printable(name) == name


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"), ("a\nb\t\r", r"a\nb\t\r"), ("\x9b31m", r"\x9b31m"),
        ("gpj.\u202eexe", r"gpj.\u202eexe"), ("cat\u200b", r"cat\u200b"), ("\u2028", r"\u2028"),
        ("caf\udce9", r"caf\xe9"), ("rows.csv\x004", r"rows.csv\04"), ("\ud800", r"\ud800"),
    ],
)  # fmt: skip
def test_control_and_invisible_characters_are_escaped(name: str, shown: str):
    assert printable(name) == shown


def test_text_with_bytes_that_are_not_utf8_can_be_encoded_and_is_otherwise_kept():
    assert without_surrogates("<b>\ngröße\udcff\udc80.jpg\x1b") == "<b>\ngröße\\xff\\x80.jpg\x1b"


@given(st.text(alphabet=st.sampled_from("ab'=\\0\0+-@\t\r/.")))
def test_every_text_comes_back(text: str):
    cell = to_cell(text)
    assert from_cell(cell) == text
    assert "\0" not in cell and not cell.startswith(FORMULA_STARTS)


def test_what_somebody_types_is_taken_as_it_is():
    assert from_cell("cats/it's.png") == "cats/it's.png"
    assert from_cell("'quoted'") == "'quoted'"
    assert from_cell(r"a\b") == r"a\b"
    assert from_cell(r"photos.zip\0cats/1.png") == "photos.zip\0cats/1.png"


keys = st.lists(st.text(st.characters(exclude_categories=()), min_size=1), unique=True, max_size=20)


@given(keys)
def test_ids_are_the_first_eight_bytes_of_the_keys_sha256(names: list[str]):
    names = [name for name in names if _encodable(name)]
    for name in names:
        digest = hashlib.sha256(ids.key_bytes(name)).digest()
        sample_id = ids.sample_id_of(name)
        assert struct.pack(">q", sample_id) == digest[:8]
        assert ids.format_sample_id(sample_id) == digest[:8].hex()
        following = ids.next_sample_id(name, sample_id)
        assert struct.pack(">q", following) == digest[8:16]
        assert struct.pack(">q", ids.next_sample_id(name, following)) == digest[16:24]


def test_the_next_id_is_another_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ids, "sample_id_of", lambda key, block=0: [7, 7, 8, 9][block])
    assert ids.next_sample_id("a", 7) == 8
    assert ids.next_sample_id("a", 8) == 9


def test_row_digests_tell_rows_apart():
    digests = {
        ids.row_digest(1, "a", b"x"), ids.row_digest(2, "a", b"x"), ids.row_digest(1, "b", b"x"),
        ids.row_digest(1, None, b"x"), ids.row_digest(1, "", b"x"), ids.row_digest(1, "", b"a" + b"x"),
    }  # fmt: skip
    assert len(digests) == 6


@given(st.permutations(["a", "b", "c", "d"]))
def test_sums_do_not_depend_on_the_order(order: list[str]):
    assert ids.add_digests(*map(ids.key_hash, order)) == ids.add_digests(*map(ids.key_hash, sorted(order)))
    assert len(ids.format_digest(ids.add_digests(*map(ids.key_hash, order)))) == 64


def _encodable(name: str) -> bool:
    try:
        name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


LETTERS: Registry[Any] = Registry(
    "letters.case",
    {
        "upper": Entry("string:ascii_uppercase", "capital letters"),
        "lower": Entry("string:ascii_lowercase", "small letters"),
        "greek": Entry("no_such_alphabet:GREEK", "Greek letters", extra="greek", packages=("no_such_alphabet",)),
        "lazy": Entry("this:d", "the only test that imports `this`"),
    },
    takes_own=True,
)


class Settings(BaseModel):
    letters: Annotated[str, OneOf("tests.shardmill.test_redact:LETTERS", also=("auto",))] = "auto"


def test_an_entry_is_loaded_when_it_is_asked_for_and_not_before(capsys: pytest.CaptureFixture[str]):
    assert list(LETTERS) == ["upper", "lower", "greek", "lazy"] and "this" not in sys.modules
    assert LETTERS["upper"] == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert len(LETTERS["lazy"]) == 52 and "this" in sys.modules


def test_a_users_own_object_is_named_by_its_module():
    assert LETTERS["string:digits"] == "0123456789"
    with pytest.raises(UsageError, match=r"'string:no_such'.*expected package.module:object"):
        LETTERS["string:no_such"]


def test_an_unknown_name_is_answered_with_the_nearest_one():
    with pytest.raises(UsageError, match=r"letters.case = 'uper'; expected one of upper, .*did you mean 'upper'\?"):
        LETTERS["uper"]


def test_a_missing_package_is_answered_with_the_extra_that_brings_it():
    with pytest.raises(UsageError, match=r"needs no_such_alphabet.*pip install '\.\[greek\]'"):
        LETTERS["greek"]


def test_settings_that_no_section_would_hold_are_refused():
    entry = Entry("string:octdigits", "0 to 7", options="tests.shardmill.test_redact:Settings")
    with pytest.raises(UsageError, match=r"'octal' of letters.case declares options; expected none.*; add .*"):
        Registry[Any]("letters.case", {"octal": entry})
    assert Registry[Any]("letters.case", {"octal": entry}, options_prefix="case_").options_prefix == "case_"


def test_config_fields_take_their_choices_from_the_registry(monkeypatch: pytest.MonkeyPatch):
    assert Settings(letters="string:digits").letters == "string:digits"
    with pytest.raises(ValidationError, match=r"one of auto, upper, .*did you mean 'lower'"):
        Settings(letters="lowr")
    monkeypatch.setitem(LETTERS.entries, "octal", Entry("string:octdigits", "0 to 7"))
    assert Settings(letters="octal").letters == "octal" and LETTERS["octal"] == "01234567"


def shard(split: str, rng: random.Random) -> ShardInfo:
    digests = [
        rng.choice(["ab", 'q"uote', "\\", "\x00", "ü"]) + rng.randbytes(4).hex() for _ in range(rng.randint(1, 5))
    ]
    chunks = tuple(ChunkInfo(0, 1, rng.randrange(99), rng.randrange(99), 0, digest) for digest in digests)
    return ShardInfo(split, "parquet", "p", 1, "", 1, 0, 0, 0, "r", 1, "", chunks)


@pytest.mark.parametrize("max_in_memory", [10**6, 50])
@pytest.mark.parametrize("class_names", [["a", "b"], ["b", "ä", "a"], []])
def test_the_digest_is_that_of_the_whole_object(class_names: list[str], max_in_memory: int, monkeypatch):
    monkeypatch.setattr("shardmill.dataset.index.MAX_IN_MEMORY_BYTES", max_in_memory)
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    shards = [shard(rng.choice(["validation", "train", "test"]), rng) for _ in range(rng.randrange(40))]
    chunks: dict[str, list[str]] = {}
    for each in shards:
        texts = [f"{chunk.num_rows}:{chunk.image_bytes}:{chunk.content_sha256}" for chunk in each.chunks]
        chunks.setdefault(each.split, []).extend(texts)
    numbers = {} if class_names == sorted(class_names) else {"class_names": class_names}
    layout = Layout(shards)
    for _ in range(2):
        found = layout.digest("c", class_names, sorted(class_names))
        assert found == canonical_digest({"content": "c", "chunks": chunks, **numbers})
    assert layout.num_chunks == {split: len(texts) for split, texts in chunks.items()}
    assert layout.num_shards.total() == len(shards)


@pytest.mark.parametrize(
    ("tree", "override", "message"),
    [
        (TrainTree, "train.epoch=3", r"unknown config key train\.epoch; did you mean train\.epochs\?"),
        (TrainTree, "train.batch=3", r"unknown config key train\.batch; did you mean train\.global_batch_size\?"),
        (TrainTree, "trian.epochs=3", r"unknown config key trian; did you mean train\?"),
        (TrainTree, "sauce.uri=x", r"unknown config key sauce; did you mean source\?"),
        (EtlTree, "trian.epochs=3", r"unknown config key trian; did you mean train\?"),
        (EtlTree, "eetl.image_size=3", r"unknown config key eetl; did you mean etl\?"),
        (PipelineTree, "trian.epochs=3", r"unknown config key trian; did you mean train\?"),
        (TrainTree, "train.augment.random_flp=true", r"did you mean train\.augment\.random_flip\?"),
        (
            TrainTree,
            "train.zzzz=1",
            r"unknown config key train\.zzzz; known here: model, epochs(, \w+){3} and \d+ more;",
        ),
        (TrainTree, "train.epochs=many", r'config key train\.epochs = "many"; expected a whole number;'),
        (TrainTree, "train.epochs=1.5", r"config key train\.epochs = 1\.5; expected a whole number;"),
        (TrainTree, "train.learning_rate=fast", r'learning_rate = "fast"; expected a number;'),
        (TrainTree, "train.record_samples=often", r'record_samples = "often"; expected true or false;'),
        (TrainTree, "train.momentum=high", r'key train\.momentum = "high"; expected a number or \'auto\';'),
        (
            TrainTree,
            "train.weight_decay=-1",
            r"key train\.weight_decay = -1; expected greater than or equal to 0 or '",
        ),
        (TrainTree, "train.augment.random_flip=maybe", r'\.random_flip = "maybe"; expected true or false or \'auto\';'),
        (TrainTree, "train.augment.images=faces", r"images = \"faces\"; expected 'any' or 'photographs'"),
        (TrainTree, "train.epochs=0", r"config key train\.epochs = 0; expected greater than or equal to 1"),
        (TrainTree, "train.num_streams=30", r"global_batch_size = 64.*num_streams = 30; nearest: 60"),
        (EtlTree, 'etl.encoding="avif"', r"config key etl\.encoding = \"avif\"; expected one of jpeg, png, webp, raw"),
        (EtlTree, "etl.formats=[]", r"etl\.formats = \[\]; expected a non-empty list of different formats"),
        (EtlTree, "etl.split_fractions.train=0.5", r"expected fractions that add up to 1; these add up to 0\.7"),
        (EtlTree, "etl", r"--set 'etl'; expected SECTION\.NAME=VALUE"),
        (EtlTree, "etl.image_size.x=1", r"config key etl\.image_size"),
    ],
)
def test_a_mistake_is_answered_with_what_was_meant(tree: type, override: str, message: str):
    with pytest.raises(UsageError, match=message) as refused:
        load_tree(tree, None, (override,))
    assert "\n" not in str(refused.value)


def test_applications_agree_on_the_sections_of_the_file():
    for tree in (EtlTree, TrainTree):
        assert {*tree.model_fields, *tree.other_sections} == set(PipelineTree.model_fields)
        assert not tree.model_fields.keys() & set(tree.other_sections)


def test_file_then_overrides_then_nothing_of_other_sections(tmp_path: Path):
    file = tmp_path / "c.toml"
    file.write_text('[etl]\nimage_size = 32\nencoding = "raw"\n[train]\nepochs = 3\n')
    tree = load_tree(EtlTree, file, ("etl.image_size=48", "source.uri=/a b/c"))
    assert (tree.etl.image_size, tree.etl.encoding, tree.source.uri) == (48, "raw", "/a b/c")
    assert load_tree(TrainTree, file).train.epochs == 3


def test_defaults_lie_below_the_file(tmp_path: Path):
    file = tmp_path / "c.toml"
    file.write_text("[etl]\nimage_size = 32\n")
    tree = load_tree(EtlTree, file, defaults={"etl": {"image_size": 64, "encoding": "png"}})
    assert (tree.etl.image_size, tree.etl.encoding) == (32, "png")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"[etl\n", "is not TOML"), (b"\xff\xfe", "is not TOML"), (None, "no config file.*shardmill init")],
)
def test_a_file_that_is_no_config_is_one_line(tmp_path: Path, content: bytes | None, message: str):
    file = tmp_path / "c.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load_tree(EtlTree, file)


def test_every_refusal_says_how_to_fix_it(tmp_path: Path):
    (tmp_path / "c.toml").write_text("[etl\n")
    given = [(tmp_path, ()), (tmp_path / "c.toml", ()), (tmp_path / "absent.toml", ())]
    for file, overrides in [*given, (None, ("epochs",)), (None, ("train.epochs=3", "train.epochs.more=4"))]:
        with pytest.raises(UsageError) as caught:
            load_tree(TrainTree, file, overrides)
        assert caught.value.fix, caught.value


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path):
    (tmp_path / "file").touch()
    for file in (tmp_path / "file" / "c.toml", tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match=f"cannot read {file}: "):
            load_tree(EtlTree, file)


def test_an_error_names_the_file(tmp_path: Path):
    file = tmp_path / "c.toml"
    file.write_text("[train]\nepoch = 3\n")
    with pytest.raises(UsageError, match=rf"^{file}: unknown config key train\.epoch; did you mean"):
        load_tree(TrainTree, file)
    with pytest.raises(UsageError, match=rf"^{file} with --set: 2 errors"):
        load_tree(TrainTree, file, ("train.seeds=3",))
    with pytest.raises(UsageError, match="^unknown config key"):
        load_tree(TrainTree, None, ("train.epoch=3",))


def test_no_fixed_text_is_redacted():
    with pytest.raises(UsageError) as refused:
        load_tree(TrainTree, None, ("epochs=3",))
    for text in (
        str(refused.value),
        storage_errors.ACCESS_FIX,
        object_stores.GcsStore.advice,
        object_stores.AzureStore.advice,
        *s3_requests.ADVICE.values(),
    ):
        assert redacted_text(text) == text


def test_trees_are_frozen():
    tree = load_tree(EtlTree, None)
    with pytest.raises(ValueError, match="frozen"):
        tree.etl.image_size = 3


def test_spark_settings_pass_through_however_they_are_written(tmp_path: Path):
    file = tmp_path / "c.toml"
    file.write_text(
        '[spark.etl.conf]\nspark.executor.memory = "2g"\n"spark.executor.instances" = 2\nspark.speculation = true\n'
    )
    tree = load_tree(EtlTree, file, ("spark.etl.conf.spark.executor.cores=4",))
    assert tree.spark.etl.conf == {
        "spark.executor.memory": "2g",
        "spark.executor.instances": "2",
        "spark.speculation": "true",
        "spark.executor.cores": "4",
    }


@pytest.mark.parametrize(
    ("override", "formats"),
    [
        ("etl.formats=tfrecord", ("tfrecord",)),
        ("etl.formats='tfrecord'", ("tfrecord",)),
        ("etl.formats=parquet,tfrecord", ("parquet", "tfrecord")),
        ('etl.formats=["tfrecord"]', ("tfrecord",)),
    ],
)
def test_one_word_is_a_list_of_one(override: str, formats: tuple[str, ...]):
    assert load_tree(EtlTree, None, (override,)).etl.formats == formats
