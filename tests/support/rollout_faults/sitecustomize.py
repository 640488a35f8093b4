"""Imported by each Python process with this folder on its PYTHONPATH: an engine takes its version's fault."""

import os
import sys

ENGINE = "services.worker.engine.process"

if ENGINE in sys.orig_argv:
    from tests.support.faulty_versions import main

    code = main(sys.orig_argv[sys.orig_argv.index(ENGINE) + 1 :])
    os._exit(code)
