"""Imported by each Python process with this folder on its PYTHONPATH: an engine, or a batcher, becomes a
poisoned one."""

import os
import sys
from importlib import import_module

POISONED = {
    "services.worker.engine.process": "tests.support.poisoned_engine",
    "services.worker.batcher.process": "tests.support.poisoned_batcher",
}

for module, poisoned in POISONED.items():
    if module in sys.orig_argv:
        code = import_module(poisoned).main(sys.orig_argv[sys.orig_argv.index(module) + 1 :])
        os._exit(code)
