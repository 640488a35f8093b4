"""Imported by each Python process with this folder on its PYTHONPATH: an engine or a batcher takes stated
times, and the disk of a process's log is as slow as the file of faults says."""

import os
import sys
from importlib import import_module

PACED = {
    "services.worker.engine.process": "tests.support.paced_engine",
    "services.worker.batcher.process": "tests.support.paced_batcher",
}

for module, paced in PACED.items():
    if module in sys.orig_argv:
        code = import_module(paced).main(sys.orig_argv[sys.orig_argv.index(module) + 1 :])
        os._exit(code)

if "services" in sys.orig_argv and "CHAOS_NAME" in os.environ:
    import_module("tests.support.live_faults").slow_log_disk()
