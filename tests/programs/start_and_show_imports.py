"""Imports argv[1], shows the help page if that is the command line, and prints which of argv[2:] are imported then."""

import atexit
import importlib
import sys

name, *heavy = sys.argv[1:]
atexit.register(lambda: print("imported:", *sorted(set(heavy) & set(sys.modules))))
sys.argv[1:] = ["--help"]
module = importlib.import_module(name)
if name == "pipeline.cli":
    module.main()
