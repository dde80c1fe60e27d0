"""Settings on their way to Spark's JVM: what the file holds is what Java reads, for its owner alone."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from shardmill.jobs.spark import REDACTION, protection_warning
from shardmill.jobs.spark_settings import properties_file

HARD = {
    "spark.x.plain": "2g",
    "spark.x.text": " a=b:c #d !e \\f\tg\nh ",
    "spark.x.more = than:a name": "äöü 漢字",
    "spark.x.empty": "",
    "spark.x.path": r"C:\u0041\n",
}


def test_the_file_is_private_and_gone_afterwards():
    before = os.umask(0)
    try:
        with properties_file(HARD) as path:
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    finally:
        os.umask(before)
    assert not Path(path).exists()


def test_java_reads_what_was_written():
    # Our own reading of java.util.Properties' rules (load, in its documentation), for lines as we write them.
    def read(text: str) -> dict[str, str]:
        found, special = {}, {"n": "\n", "r": "\r", "t": "\t"}
        for line in text.splitlines():
            parts, escaped = [""], False
            for character in line:
                if escaped:
                    parts[-1] += special.get(character, character)
                elif character == "=" and len(parts) == 1:
                    parts.append("")
                elif character != "\\":
                    parts[-1] += character
                escaped = character == "\\" and not escaped
            found[parts[0]] = parts[1]
        return found

    with properties_file(HARD) as path:
        assert read(Path(path).read_text(encoding="utf-8")) == HARD


@pytest.mark.parametrize(
    ("master", "settings", "is_warned"),
    [
        ("local[2]", {}, False),
        ("spark://host:7077", {}, True),
        ("k8s://https://host", {"spark.authenticate": "false"}, True),
        ("yarn", {"spark.authenticate": "true"}, False),
    ],
)
def test_an_open_application_is_warned_about(master: str, settings: dict[str, str], is_warned: bool):
    assert (
        "spark.authenticate" in protection_warning(master, lambda name, default: settings.get(name, default))
    ) is is_warned


def test_the_shipped_settings_hide_what_a_run_hides():
    secure = Path(__file__).parents[2] / "examples" / "spark" / "secure.properties"
    lines = [line for line in secure.read_text().splitlines() if line and not line.startswith("#")]
    shipped = dict(line.split("=", 1) if "redaction" in line else line.split() for line in lines)
    # As java.util.Properties reads it.
    assert {name: re.sub(r"\\(.)", r"\1", shipped[name]) for name in REDACTION} == REDACTION
    assert {shipped[f"spark.{name}"] for name in ("authenticate", "network.crypto.enabled", "acls.enable")} == {"true"}
