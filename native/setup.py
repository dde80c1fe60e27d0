"""Builds the optional kernel, one file for all Pythons: `pip install ./native` (scripts/setup.sh does it)."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "shardmill_native",
            sources=[
                "module.c",
                "decode.c",
                "example.c",
                "gather.c",
                "jpeg.c",
                "look.c",
                "huffman.c",
                "area.c",
                "sums.c",
                "colours.c",
            ],
            depends=[
                "decode.h",
                "example.h",
                "gather.h",
                "jpeg.h",
                "look.h",
                "huffman.h",
                "area.h",
                "sums.h",
                "colours.h",
                "dispatch.h",
            ],
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
