"""Detection of secrets by name and by value, and values that are not secrets."""

from __future__ import annotations

import json

import pytest

from shardmill.errors import StorageError
from shardmill.jobs.ending import report_error
from shardmill.jobs.redact import HIDDEN, is_secret_name, redacted, redacted_text
from tests.canaries import PEM, PLAIN_SETTINGS, SECRET_SETTINGS

SECRET_NAMES = (
    "password",
    "db.passwd",
    "DB_PASSWD",
    "MYSQL_PWD",
    "secret",
    "clientSecret",
    "aws_secret_access_key",
    "AWS_ACCESS_KEY_ID",
    "fs.azure.account.key",
    "fs.azure.account.key.acme.blob.core.windows.net",
    "api_key",
    "MY_API_KEY",
    "apiKey",
    "apikey",
    "x.auth",
    "BASIC_AUTH",
    "sas",
    "fs.azure.sas.x",
    "SENTRY_DSN",
    "dsn",
    "token",
    "SESSION_TOKEN",
    "sessionToken",
    "oauth.credential",
    "GOOGLE_CREDENTIALS",
    "privateKey",
    "private.key",
    "id_private",
    "keyStorePassword",
    "encryption.key",
    "accountKey",
    "passphrase",
    "DB_PASS",
    "SMTP_PASS",
    "authtoken",
    "mytoken",
    "GITHUB_PAT",
)
PLAIN_NAMES = (
    "keep",
    "key_sum",
    "key",
    "monkey",
    "turkey.count",
    "passage",
    "sasl",
    "author",
    "authority",
    "authenticate",
    "tokenizer",
    "keyboard",
    "keyStore",
    "sort_key_sum",
    "spark.authenticate",
    "dsnail",
    "learning_rate",
    "uri",
    "weights_sha256",
    "content_digest",
    "bypass",
    "compass",
    "path",
    "PATH",
    "extraClassPath",
    "passed",
)


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
        "password: hunter2-canary",
        "X-Auth-Token:canary",
        "mysql --password canary --user x",
        "postgres://u:p@canary@host/db",
        "postgres://u:pa/canary@host/db",
        "https://canary@host/x",
        "password=abc,canary;canary",
        '{"password": 12345, "api_key": {"canary": 1}}',
        '{"api_key": {"a": {"canary": [1]}}}',
        "cloned with ghp_canarycanarycanarycanary0123456789",
        "hf_canarycanarycanarycanary0123",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJjYW5hcnkifQ.canary",
    ],
)
def test_a_secret_in_text_is_hidden_however_it_is_written(text: str):
    hidden = redacted_text(text)
    assert "canary" not in hidden and "12345" not in hidden and HIDDEN in hidden
    assert redacted_text(hidden) == hidden


def test_numbers_and_nested_values_under_a_secret_name():
    record = {"password": 12345, "api_key": {"a": 1, "b": [2.5, "x"]}, "token": True, "num_tokens": 3}
    assert redacted(record) == {
        "password": HIDDEN,
        "api_key": {"a": HIDDEN, "b": [HIDDEN, HIDDEN]},
        "token": True,
        "num_tokens": 3,
    }


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
