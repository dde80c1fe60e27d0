"""Builds the optional kernel, one file for all Pythons: `pip install ./native` (scripts/setup.sh does it)."""

from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path(__file__).parent

setup(
    ext_modules=[
        Extension(
            "shardmill_native",
            sources=sorted(path.name for path in FOLDER.glob("*.c")),
            depends=sorted(path.name for path in FOLDER.glob("*.h")),
            libraries=["jpeg"],
            # Buffers are in the limited API since 3.11.
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            # A portable build: the platform's baseline; wider variants are chosen when it is loaded (dispatch.h).
            extra_compile_args=["-std=gnu11", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden"],
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
